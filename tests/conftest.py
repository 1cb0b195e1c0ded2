import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(function, world, *args)` runs a module-level function on `world` real gloo ranks."""
    pool = Ranks()
    yield pool
    pool.stop()
