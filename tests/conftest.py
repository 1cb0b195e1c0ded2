import sys
from pathlib import Path

import pytest

# The folders of the tests mirror the packages: without this, `tests/engine` would pass for a namespace package `engine`.
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(function, world, *args)` runs a module-level function on `world` real gloo ranks."""
    pool = Ranks()
    yield pool
    pool.stop()
