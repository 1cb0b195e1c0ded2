"""What users import from `engine` itself."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

import engine


def test_every_public_name_loads():
    assert all(getattr(engine, name) is not None for name in engine.__all__)
    assert engine.load_config.__module__ == "engine.recipes.load"
    with pytest.raises(AttributeError, match="has no attribute 'load_confg'"):
        engine.load_confg("quickstart")


def test_importing_the_package_loads_no_library():
    code = "import sys, engine; print([name for name in ('torch', 'pydantic', 'numpy') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_version_is_that_of_the_distribution():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    assert setup["metadata"]["version"] == engine.__version__
