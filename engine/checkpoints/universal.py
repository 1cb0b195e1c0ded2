"""DeepSpeed's universal format: a folder per parameter, a file per state. Any checkpoint of ours can be converted.

Our own runs do not need it to change the number of ranks or the stage. It is for DeepSpeed's own loader, and for tools
that read one parameter at a time.

    zero/NAME/fp32.pt, exp_avg.pt, ...   {"param": whole tensor}
    zero/NAME/step.pt                    scalars, each in a file of its own
    zero/optimizer_state.pt              param groups and what belongs to no parameter
    mp_rank_00_model_states.pt           the model's state dict, counters, and what the run noted
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoints.manifest import NAME as MANIFEST
from engine.checkpoints.manifest import Manifest
from engine.checkpoints.zero_folder import AGVM_KEY, CLIENT_KEY, CheckpointFolder, ZeroFolder, as_described
from engine.errors import CheckpointError
from engine.zero.checked_files import FileRecord, read_file, sync_folder, write_file
from engine.zero.stored import WEIGHTS

MODEL_STATES = "mp_rank_00_model_states.pt"
LAYOUT = "Universal"


class UniversalFolder(CheckpointFolder):
    """A universal folder with our manifest. It has the same methods for reading as `ZeroFolder`."""

    @property
    def describe(self) -> str:
        return f"universal, {self.manifest.precision}"

    @cached_property
    def _model_states(self) -> dict[str, Any]:
        return self._content(MODEL_STATES)

    @property
    @as_described
    def meta(self) -> dict[str, Any]:
        return dict(self._model_states[CLIENT_KEY])

    @as_described
    def check_shapes(self) -> None:
        """CheckpointError if the manifest gives a parameter another shape than the files."""
        self._check_shapes({name: value.shape for name, value in self._model_states["module"].items()})

    @property
    def agvm(self) -> dict[str, Any] | None:
        return self._model_states.get(AGVM_KEY)

    @cached_property
    @as_described
    def states(self) -> tuple[str, ...]:
        first = self._contents(next(iter(self.parameters)))
        return tuple(sorted(key for key, value in first.items() if isinstance(value, dict) and key != WEIGHTS))

    def _contents(self, name: str) -> dict[str, Any]:
        prefix = f"zero/{name}/"
        files = [file for file in self.manifest.files if file.startswith(prefix) and "/" not in file[len(prefix) :]]
        return {Path(file).stem: self._content(file) for file in files}

    @as_described
    def read(self, name: str, state: str, start: int, stop: int) -> Tensor:
        return self._content(f"zero/{name}/{state}.pt")["param"].reshape(-1)[start:stop]

    @as_described
    def scalars(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in self._contents(name).items() if not isinstance(value, dict)}

    @as_described
    def untrained(self, *, frozen_parts: bool = True) -> list[tuple[str, Tensor]]:
        known = {*self.parameters, *self.aliases}
        return [(name, value) for name, value in self._model_states["module"].items() if name not in known]

    def counters(self) -> dict[str, Any]:
        return {key: value for key, value in self._model_states.items() if key != "module"}

    def statistics(self, rank: int) -> dict[str, Tensor]:
        return {}  # the ranks' statistics were averaged when the folder was written


def write_universal(source: ZeroFolder, folder: Path, progress: Callable[[int], None]) -> None:
    """Write a checkpoint in the universal format, one parameter's state at a time."""
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"folder {folder} is not empty: choose another")
    files: dict[str, FileRecord] = {}

    def write(name: str, content: Any) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files[name] = write_file(path, content)

    try:
        source.check_shapes()
        for name, shape in source.parameters.items():
            count = math.prod(shape)
            for state in (WEIGHTS, *source.states):
                values = source.read(name, state, 0, count).view(shape)
                # A clone, because torch.save writes the whole storage of a view.
                write(f"zero/{name}/{state}.pt", {"param": values.clone()})
            for key, value in source.scalars(name).items():
                write(f"zero/{name}/{key}.pt", value)
            progress(count)
        write("zero/optimizer_state.pt", source.common_optimizer_state())
        # The files just written are memory-mapped, so that the whole state dict is never in memory.
        module = {name: read_file(folder / "zero" / name / f"{WEIGHTS}.pt")["param"] for name in source.parameters}
        module.update(source.untrained())
        module.update({alias: module[name] for alias, name in source.aliases.items()})
        write(MODEL_STATES, {"module": module, **source.counters()})
        manifest = source.manifest
        Manifest(
            step=manifest.step,
            world=manifest.world,
            stage=manifest.stage,
            layout=LAYOUT,
            precision=manifest.precision,
            parameters=manifest.parameters,
            aliases=manifest.aliases,
            files=files,
        ).write(folder)
        sync_folder(folder)
    except OSError as error:
        (folder / MANIFEST).unlink(missing_ok=True)
        raise CheckpointError(f"folder {folder} cannot be written ({error.strerror})") from None
