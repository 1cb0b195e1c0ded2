"""The zoo: mmdet configs by name. A file `NAME.py` here defines `model = dict(...)`; shared parts are in `_base_`."""

from __future__ import annotations

from pathlib import Path


def zoo_configs() -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if path.stem != "__init__"}
