"""A checkpoint as a run saved it: DeepSpeed's files of every rank, read by parameter, state and range.

Next to DeepSpeed's files there is a table of where the run's ranks kept every parameter (`saved_geometry.py`), and a
file of each rank with what it alone has. So any range can be read from the files that hold it, on any number of ranks
and at any stage, without a conversion, without opening other files, and without more memory than the range needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.manifest import Manifest
from engine.checkpoints.saved_geometry import NAME as GEOMETRY
from engine.checkpoints.saved_geometry import from_table
from engine.errors import CheckpointError, first_line, short
from engine.zero.checked_files import read_file
from engine.zero.geometry import Geometry, Place
from engine.zero.stored import WEIGHTS, StoredShard, common_state, is_elementwise, stored_shards, stored_states
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
            held = self._numbers_held(name)
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
        if self._table is not None:
            own, averaged = tuple(str(key) for key in self._table["states"]), bool(self._table["ema"])
        else:
            place = self._places_by_rank[self._names[0]][0]
            shard = self._shard(place.rank, place.shard)
            own, averaged = tuple(stored_states(shard.state, shard.weights)), EMA in self._rank(0)
        return (*own, EMA) if averaged else own

    @as_described
    def read(self, name: str, state: str, start: int, stop: int) -> Tensor:
        """A range of a flattened parameter, or of one of its states. Do not write to it: it may be a mapped file."""
        parts = []
        for rank, shard, offset, low, high in self._places(name, start, stop):
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
        places = self._places(name, 0, math.prod(self.parameters[name]))
        # All keepers of a parameter have the same ones: take those of a file that is open already.
        place = next((place for place in places if place.rank in self._shards), places[0])
        found = self._shard(place.rank, place.shard)
        return {
            key: value
            for key, value in found.state.items()
            if value is not None and not is_elementwise(value, found.weights)
        }

    @as_described
    def untrained(self, *, frozen_parts: bool = True) -> list[tuple[str, Tensor]]:
        """Frozen parameters and buffers by name. Batch-norm statistics that differ between ranks are averaged.

        ZeRO-3 saves a part of each frozen parameter in every rank's file. Without `frozen_parts` these files are not
        opened, and such a parameter comes as an empty tensor.
        """
        return list(self._untrained(frozen_parts))

    def _untrained(self, frozen_parts: bool) -> Iterator[tuple[str, Tensor]]:
        states = self._model_states(0)
        shapes = states.get("frozen_param_shapes") or {}
        joined = self._joined_statistics()
        known = {*self.parameters, *self.aliases}
        frozen = {} if self.manifest.stage < 3 else shapes
        for name, value in states["module"].items():
            if name not in known and name not in frozen:
                yield name, joined[name].to(value.dtype) if name in joined else value
        for name, shape in frozen.items():
            if not frozen_parts:
                yield name, torch.empty(0)
                continue
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
        if self._table is not None:
            return dict(self._table["statistics"])
        world = self.manifest.world
        return {
            name: torch.stack([self.statistics(rank)[name].double() for rank in range(world)]).mean(0)
            for name in self.statistics(0)
        }

    @cached_property
    def _table(self) -> dict[str, Any] | None:
        return self._content(GEOMETRY) if GEOMETRY in self.manifest.files else None

    @cached_property
    def _geometry(self) -> Geometry | None:
        return None if self._table is None else from_table(self._table, self.manifest.world)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The place of each parameter among those of the saving run."""
        return {name: i for i, name in enumerate(self._names)}

    def _places(self, name: str, start: int, stop: int) -> Sequence[Place]:
        """Where a range of a parameter is, ascending; there may be more than the range."""
        if self._geometry is None:
            return self._places_by_rank[name]
        return self._geometry.places(self._numbers[name], start, stop)

    def _numbers_held(self, name: str) -> int:
        if self._geometry is None:
            return sum(place.stop - place.start for place in self._places_by_rank[name])
        return self._geometry.numels[self._numbers[name]]

    @cached_property
    def _places_by_rank(self) -> dict[str, list[Place]]:
        """Where each parameter is, as the file of every rank says: for checkpoints without a table."""
        places: dict[str, list[Place]] = {name: [] for name in self._names}
        for rank in range(self.manifest.world):
            for param, start, stop, shard, offset in self._rank(rank)["fragments"].tolist():
                places[self._names[param]].append(Place(rank, shard, offset, start, stop))
        for found in places.values():
            found.sort(key=lambda place: place.start)
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
                {} if file else self._model_states(rank),  # of use only where there are no files of shards
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
