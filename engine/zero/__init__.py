"""All code that depends on DeepSpeed's internals: where it keeps shards, AGVM's second gradient, sums over layers.

Nothing here depends on the update rule. Nothing outside this package touches DeepSpeed's internals.

DeepSpeed is imported inside functions: it takes seconds, and configs are checked and help is shown without it.
"""
