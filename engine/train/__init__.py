"""A training run: built from its config, trained, evaluated and reported."""
