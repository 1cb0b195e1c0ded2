"""All code that depends on DeepSpeed's internals: where it keeps shards, AGVM's second gradient, sums over layers.

Nothing here depends on the update rule. Nothing outside this package touches DeepSpeed's internals.
"""
