"""The device of a rank, and the timeout of every process group."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from engine import distributed
from engine.errors import UserError
from engine.zero import processes


class Accelerator:
    """As many devices as a rank sees."""

    def __init__(self, devices):
        self.devices, self.chosen = devices, None

    def device_count(self):
        return self.devices

    def set_device(self, index):
        self.chosen = index


@pytest.fixture
def local_rank_as_before():
    yield
    distributed.set_local_rank(None)


@pytest.mark.parametrize(
    "variables, devices, chosen",
    [
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, 8, 3),
        ({"LOCAL_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 1, 0),  # --gpus-per-task=1
        ({"LOCAL_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4, 3),
        ({"LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 0),
        ({"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "CROSS_SIZE": "1"}, 1, 0),
    ],
)
def test_the_device_is_apart_from_the_place_on_the_node(variables, devices, chosen, monkeypatch, local_rank_as_before):
    monkeypatch.setattr(os, "environ", dict(variables))
    accelerator = Accelerator(devices)
    processes.choose_device(accelerator)
    assert accelerator.chosen == chosen
    assert os.environ["LOCAL_RANK"] == str(chosen)  # where DeepSpeed looks for the device's number
    assert os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", str(chosen)) == str(chosen)
    assert distributed.local_rank() == int(variables["LOCAL_RANK"])


@pytest.mark.parametrize(
    "variables, devices",
    [
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, 1),
        ({"LOCAL_RANK": "4", "SLURM_PROCID": "4"}, 4),
        ({"LOCAL_RANK": "0", "LOCAL_SIZE": "8", "CROSS_SIZE": "1"}, 4),
    ],
)
def test_more_ranks_than_devices_are_refused_on_all_of_them(variables, devices, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(variables))
    with pytest.raises(UserError, match=f"the same {devices} devices: start at most {devices} there"):
        processes.choose_device(Accelerator(devices))


def timeouts():
    from deepspeed import comm

    before = comm.new_group([0, 1])
    processes.set_timeout(45)
    groups = [None, distributed.control_group(), processes.new_group([0, 1]), comm.new_group([0, 1]), before]
    try:
        return [timeout_of(group) for group in groups]
    finally:
        processes.set_timeout(30)


def timeout_of(group):
    backend = (group or dist.group.WORLD)._get_backend(__import__("torch").device("cpu"))
    return backend.options._timeout.total_seconds() / 60


def test_all_groups_have_the_timeout_of_the_run(ranks):
    assert ranks.run(timeouts, 2) == [[45, 45, 45, 45, 30]] * 2
    assert processes._timeout == timedelta(minutes=30)
