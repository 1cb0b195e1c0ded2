"""A checkpoint as a run saved it: DeepSpeed's files of every rank, read by parameter, state and range.

Next to DeepSpeed's files, each rank writes one that says which range of which parameter is where in its shards. So any
range can be read from the files that hold it, on any number of ranks and at any stage, without a conversion and without
more memory than the range needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.manifest import Manifest
from engine.errors import CheckpointError, first_line, short
from engine.zero.checked_files import read_file
from engine.zero.stored import WEIGHTS, StoredShard, common_state, is_elementwise, stored_shards
from engine.zero.window import CLIENT_STATE_KEY as AGVM_KEY

CLIENT_KEY = "gigadet"
EMA = "ema"


def as_described(method: Callable[..., Any]) -> Callable[..., Any]:
    """Whoever made a folder's files can put anything into them: what does not fit is a damaged checkpoint."""

    @functools.wraps(method)
    def reading(self: CheckpointFolder, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise CheckpointError(
                f"checkpoint {self.folder} does not hold what its manifest says ({reason})"
            ) from error

    return reading


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


class CheckpointFolder:
    """A checkpoint folder, its manifest already checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self.step = folder, manifest, manifest.step
        self.parameters = {name: tuple(shape) for name, shape in manifest.parameters.items()}
        self.aliases = dict(manifest.aliases)

    def _content(self, name: str) -> Any:
        """A file of the folder. One that the manifest does not list was not checked, and is not read."""
        if name not in self.manifest.files:
            raise CheckpointError(f"checkpoint {self.folder} has no {short(name)} in its manifest")
        return read_file(self.folder / name)

    def _check_shapes(self, stored: Mapping[str, Any]) -> None:
        """Compare the manifest's shapes with those in the files; a scalar has one dimension in DeepSpeed's."""
        for name, shape in self.parameters.items():
            own = tuple(stored.get(name, shape))
            if (own or (1,)) != (shape or (1,)):
                raise CheckpointError(
                    f"checkpoint {self.folder} is damaged: {short(name)} is {shape} in its manifest and {own} in its "
                    "files"
                )


class ZeroFolder(CheckpointFolder):
    """One folder `step-N`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self._names = list(self.parameters)
        self._shards: dict[int, list[StoredShard]] = {}
        self._ranks: dict[int, dict[str, Any]] = {}
        self._model: dict[int, Mapping[str, Any]] = {}

    @property
    def describe(self) -> str:
        return f"ZeRO-{self.manifest.stage}, {self.manifest.world} ranks, {self.manifest.precision}"

    @cached_property
    @as_described
    def meta(self) -> dict[str, Any]:
        """What the run stored: step, config, classes, loss scale."""
        return dict(self._model_states(0)[CLIENT_KEY])

    @as_described
    def check_shapes(self) -> None:
        """CheckpointError if the manifest gives a parameter another shape than the files."""
        states = self._model_states(0)
        stored = {name: shape for group in states.get("param_shapes") or () for name, shape in group.items()}
        if self.manifest.stage < 3:
            stored.update({name: value.shape for name, value in states["module"].items()})
        self._check_shapes(stored)
        for name, shape in self.parameters.items():
            held = sum(stop - start for *_, start, stop in self._places[name])
            if held != math.prod(shape):
                raise CheckpointError(
                    f"checkpoint {self.folder} is damaged: {short(name)} is {shape} in its manifest, but its files "
                    f"hold {held} numbers of it"
                )

    @property
    def agvm(self) -> dict[str, Any] | None:
        return self._model_states(0).get(AGVM_KEY)

    @cached_property
    @as_described
    def states(self) -> tuple[str, ...]:
        """The states that every parameter has besides its master weights, such as exp_avg, and EMA if it was on."""
        shard = self._shard(*self._places[self._names[0]][0][:2])
        own = tuple(sorted(key for key, value in shard.state.items() if is_elementwise(value, shard.weights)))
        return (*own, EMA) if EMA in self._rank(0) else own

    @as_described
    def read(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """A range of a flattened parameter, or of one of its states. Do not write to it: it may be a mapped file."""
        parts = []
        for rank, shard, offset, low, high in self._places[name]:
            first, last = max(low, start), min(high, stop)
            if first < last:
                values = self._flat(rank, shard, state)
                parts.append(values[offset + first - low : offset + last - low])
        if sum(part.numel() for part in parts) != stop - start:
            raise CheckpointError(f"checkpoint {self.folder} does not hold all of {state} of {name}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @as_described
    def scalars(self, name: str) -> dict[str, Any]:
        """States with one value for the whole parameter, such as step."""
        rank, shard, *_ = self._places[name][0]
        found = self._shard(rank, shard)
        return {
            key: value
            for key, value in found.state.items()
            if value is not None and not is_elementwise(value, found.weights)
        }

    @as_described
    def untrained(self) -> list[tuple[str, Tensor]]:
        """Frozen parameters and buffers by name. Batch-norm statistics that differ between ranks are averaged."""
        return list(self._untrained())

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        states = self._model_states(0)
        shapes = states.get("frozen_param_shapes") or {}
        joined = self._joined_statistics()
        known = {*self.parameters, *self.aliases}
        frozen = {} if self.manifest.stage < 3 else shapes
        for name, value in states["module"].items():
            if name not in known and name not in frozen:
                yield name, joined.get(name, value)
        for name, shape in frozen.items():
            parts = [
                self._model_states(rank)["frozen_param_fragments"][name].flatten()
                for rank in range(self.manifest.world)
            ]
            yield name, torch.cat(parts)[: shape.numel()].view(shape)

    @as_described
    def counters(self) -> dict[str, Any]:
        """What DeepSpeed and the run stored, without tensors of the model's size."""
        return {
            **{
                key: value
                for key, value in self._model_states(0).items()
                if key not in ("module", "optimizer", "frozen_param_fragments")
            },
            "optimizer": None,
        }

    @as_described
    def common_optimizer_state(self) -> dict[str, Any]:
        """The optimizer's param groups, and what DeepSpeed keeps once for all parameters."""
        file = self._file(0, "_optim_states.pt")
        content = self._content(file)["optimizer_state_dict"] if file else self._model_states(0)["optimizer"]
        return common_state(content)

    @as_described
    def statistics(self, rank: int) -> dict[str, Tensor]:
        """Batch-norm statistics of one rank; empty if all ranks had the same."""
        return self._rank(rank)["statistics"]

    def _joined_statistics(self) -> dict[str, Tensor]:
        world = self.manifest.world
        return {
            name: torch.stack([self.statistics(rank)[name].double() for rank in range(world)]).mean(0).to(value.dtype)
            for name, value in self.statistics(0).items()
        }

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, int, int, int, int]]]:
        """Where each parameter is: (rank, shard, offset in the shard, start and stop in the parameter), ascending."""
        places: dict[str, list] = {name: [] for name in self._names}
        for rank in range(self.manifest.world):
            for param, start, stop, shard, offset in self._rank(rank)["fragments"].tolist():
                places[self._names[param]].append((rank, shard, offset, start, stop))
        for found in places.values():
            found.sort(key=lambda place: place[3])
        return places

    def _flat(self, rank: int, shard: int, state: str) -> Tensor:
        if state == EMA:
            return self._rank(rank)[EMA][shard].reshape(-1)
        found = self._shard(rank, shard)
        return (found.weights if state == WEIGHTS else found.state[state]).reshape(-1)

    def _shard(self, rank: int, shard: int) -> StoredShard:
        if rank not in self._shards:
            file = self._file(rank, "_optim_states.pt")
            self._shards[rank] = stored_shards(
                self.manifest.layout,
                self._names,
                self._model_states(rank),
                self._content(file) if file else {},
            )
        return self._shards[rank][shard]

    def _rank(self, rank: int) -> dict[str, Any]:
        if rank not in self._ranks:
            self._ranks[rank] = self._content(rank_file(rank))
        return self._ranks[rank]

    def _model_states(self, rank: int) -> Mapping[str, Any]:
        """DeepSpeed's model states. Only ZeRO-3 has a file for each rank."""
        rank = rank if self.manifest.stage == 3 else 0
        if rank not in self._model:
            file = self._file(rank, "_model_states.pt")
            if file is None:
                raise CheckpointError(f"checkpoint {self.folder} has no model states of rank {rank}")
            self._model[rank] = self._content(file)
        return self._model[rank]

    def _file(self, rank: int, ending: str) -> str | None:
        """DeepSpeed's file of a rank, with any prefix before the rank's number; None if there is none."""
        names = [name for name in self.manifest.files if name.endswith(ending)]
        own = [name for name in names if f"zero_pp_rank_{rank}_mp" in name]
        return own[0] if own else (names[0] if names and ending == "_model_states.pt" else None)
