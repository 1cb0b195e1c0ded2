import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# The folders of the tests mirror the packages: without this, `tests/engine` would pass for a namespace package `engine`.
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

# Whatever a test, rank or script of this session writes goes away with it. All share one cache of generated data, and
# leave the user's alone.
FOLDER = tempfile.mkdtemp(prefix="gigadet-tests-")
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
os.environ["GIGADET_CACHE"] = os.path.join(FOLDER, "cache")

from ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(function, world, *args)` runs a module-level function on `world` real gloo ranks."""
    pool = Ranks()
    yield pool
    pool.stop()


def pytest_sessionfinish() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
