"""Training on more than one host: network namespaces of this machine, made and removed by benchmarks/hosts.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forking import environment
from tiny_run import difference, merged, saved_weights, train_tiny

ROOT = Path(__file__).parents[2]
HOSTS = [sys.executable, str(ROOT / "benchmarks" / "hosts.py")]
CHANGES = {"zero_optimization": {"stage": 2}, "schedule": {"steps": 2}, "run": {"checkpoint_interval": None}}


def of_hosts(*command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HOSTS, *command], env=environment(), capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module", autouse=True)
def namespaces_are_allowed():
    done = of_hosts("check", timeout=60)
    if done.returncode:
        pytest.skip(done.stderr.strip())


def left_behind() -> list[str]:
    return [str(path) for folder in ("/run/netns", "/etc/netns") for path in Path(folder).glob("gigadet*")]


def test_two_hosts_reach_the_weights_of_one(ranks, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(merged(CHANGES)))
    before, work = left_behind(), tmp_path / "work"
    arguments = ("--", "--config", str(tmp_path / "run.json"), "--work-dir", str(work))
    done = of_hosts("train", "--hosts", "2", "--limit", "200", *arguments, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    weights, _ = saved_weights(work)
    one_host = ranks.run(train_tiny, 2, CHANGES)[0]["weights"]
    assert difference({name: one_host[name] for name in weights}, weights) <= 1e-6
    assert set(left_behind()) <= set(before)


@pytest.mark.exhaustive
def test_a_host_that_is_cut_off_ends_the_run_on_both_sides(tmp_path):
    """By the heartbeat, within a minute, with the hosts' names; the run is resumed when the link is back."""
    done = of_hosts("cut", "--hosts", "2", "--victim", "2", timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| torchrun"))
    assert max(float(cell) for cell in re.findall(r"\| (\d+\.\d) ", row)[:2]) < 60
    assert "rank 1 on node2" in row and "rank 0 on node1" in row
