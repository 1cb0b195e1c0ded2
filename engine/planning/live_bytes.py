"""Bytes of live tensors: a dispatch mode that follows every storage from the operator that made it to its end.

It sees real, fake and meta tensors alike, so the planner's trace and a measured step are counted by the same rule. What a
kernel allocates inside itself and gives back before it returns (a convolution's workspace) is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`live` is now, `peak` since the last `restart_peak`. Storages handed to `ignore` do not count."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._references: dict[int, weakref.ref] = {}
        for tensor in ignored:
            self._follow(tensor, counts=False)

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor that no operator made while the mode was on."""
        self._follow(tensor, counts=True)

    def follow_all(self) -> None:
        """Count every tensor that the garbage collector knows now."""
        gc.collect()
        for item in gc.get_objects():
            if (
                issubclass(type(item), Tensor) and item.device.type != "meta"
            ):  # some proxies warn when asked what they are
                self.follow(item)

    def restart_peak(self) -> int:
        """The peak so far; from here on it is that of what follows."""
        peak, self.peak = self.peak, self.live
        return peak

    def _follow(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            del self._references[key]
            self.live -= size

        self._references[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(function, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor, counts=True)
        return result

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)
