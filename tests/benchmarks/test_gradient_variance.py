"""The benchmark that trains side by side leaves nothing running behind a run that fails."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_failed_run_takes_the_other_one_along(tmp_path, monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "gradient_variance.py"
    spec = importlib.util.spec_from_file_location("gradient_variance", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    started = []

    def start(folder, pipeline, settings):
        body = "import time; time.sleep(60)" if not started else "raise SystemExit(3)"
        started.append(subprocess.Popen([sys.executable, "-c", body]))
        return started[-1]

    monkeypatch.setattr(benchmark, "_start", start)
    monkeypatch.setattr(sys, "argv", ["gradient_variance", "--out", str(tmp_path)])
    try:
        with pytest.raises(SystemExit, match="ended with 3: see "):
            benchmark.main()
        assert [process.poll() for process in started] == [-15, 3]
    finally:
        for process in started:
            process.kill()
