"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Finding:
    """What one rank found. `details` go into the file only; `table` is printed below the line."""

    text: str
    passed: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)
    table: tuple[str, ...] = ()


class Skipped(Exception):
    """There is nothing to check here; the text says why. All ranks must come to the same result."""


@dataclass(frozen=True)
class Outcome:
    """What all ranks found together."""

    name: str
    status: str
    text: str
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)
    table: tuple[str, ...] = ()

    def line(self) -> str:
        return f"{self.status}  {self.name:<22} {self.text}  ({self.seconds:.1f} s)"


def compared(measured: Mapping[str, float], tolerance: float, **details: Any) -> Finding:
    """Pass if no number exceeds the tolerance. NaN does."""
    numbers = ", ".join(f"{name} {value:.1e}" if value else f"{name} 0" for name, value in measured.items())
    passed = all(value <= tolerance for value in measured.values())
    return Finding(
        f"{numbers} (at most {tolerance:.0e})",
        passed,
        {"measured": dict(measured), "tolerance": tolerance, **details},
    )


def memory(size: float) -> str:
    """Bytes as a person says them."""
    unit = 0
    while size >= 1000 and unit < 4:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[unit]}"
