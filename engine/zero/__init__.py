"""Where DeepSpeed keeps the shards, a second gradient beside its own, and sums over whole layers.

No update rule is known here. Nothing outside this package touches DeepSpeed's insides.
"""
