import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# The folders of the tests mirror the packages: without this, `tests/engine` would pass for a namespace package `engine`.
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

# Every test, rank and script of this session shares one cache of generated data, and leaves the user's alone.
os.environ["GIGADET_CACHE"] = tempfile.mkdtemp(prefix="gigadet-tests-")

from ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(function, world, *args)` runs a module-level function on `world` real gloo ranks."""
    pool = Ranks()
    yield pool
    pool.stop()


def pytest_sessionfinish() -> None:
    shutil.rmtree(os.environ["GIGADET_CACHE"], ignore_errors=True)
