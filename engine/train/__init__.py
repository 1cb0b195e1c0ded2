"""A training run: built from its config, looped to its end, evaluated and reported."""
