"""Where DeepSpeed keeps the shards, and a second gradient beside its own. No update rule is known here."""

from typing import Any


def attach(engine: Any, optimizer: Any, *, bucket_size: int) -> Any:
    """Let `optimizer` measure the gradients of a DeepSpeed engine; see `engine.zero.window.Attachment`."""
    from engine.zero.window import Attachment

    return Attachment(engine, optimizer, bucket_size=bucket_size)
