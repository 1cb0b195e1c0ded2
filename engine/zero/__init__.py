"""Where DeepSpeed keeps the shards, a second gradient beside its own, and sums over whole layers.

No update rule is known here.
"""

from typing import Any


def attach(engine: Any, optimizer: Any, *, bucket_size: int) -> Any:
    """Let `optimizer` measure the gradients of a DeepSpeed engine; see `engine.zero.window.Attachment`."""
    from engine.zero.window import Attachment

    return Attachment(engine, optimizer, bucket_size=bucket_size)


def attach_layers(engine: Any, optimizer: Any) -> Any:
    """Let `optimizer` know norms over whole layers before each step; see `engine.zero.layer_norms.LayerNorms`."""
    from engine.zero.layer_norms import LayerNorms

    return LayerNorms(engine, optimizer)
