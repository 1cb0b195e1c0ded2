import gc
import os
import shutil
import sys
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Test folders mirror the packages: without this, `tests/engine` would pass for a namespace package `engine`.
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

# Whatever a test, rank or script of this session writes is removed with it. All workers of pytest-xdist share one cache
# of generated data, and leave the user's alone. First let multiprocessing make its own temporary folder elsewhere: it
# removes that itself.
get_temp_dir()
OWN = "GIGADET_TESTS" not in os.environ
FOLDER = os.environ.setdefault("GIGADET_TESTS", tempfile.mkdtemp(prefix="gigadet-tests-") if OWN else "")
os.environ["TMPDIR"] = tempfile.tempdir = FOLDER
os.environ["GIGADET_CACHE"] = os.path.join(FOLDER, "cache")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(function, world, *args)` runs a module-level function on `world` real gloo ranks."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether matrices are run in full, and comparisons over many steps."""
    return request.config.getoption("--exhaustive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run the full matrices marked `exhaustive`")
    parser.addoption("--fuzz", type=int, default=150, metavar="N", help="how many mutants of each kind are tried")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive: part of a full matrix; runs with --exhaustive only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # Files that start whole processes take longest: first, so that no worker is left alone with one at the end.
    items.sort(key=lambda item: "launch" not in item.path.parts)


def pytest_collection_finish() -> None:
    """All is imported now: let no garbage collection look at it, for mmengine collects with every data set."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    if OWN:
        shutil.rmtree(FOLDER, ignore_errors=True)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or triton's bindings report at the end what was not collected
