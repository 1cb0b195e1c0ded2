"""Facts about ranks, what is said about them, and what of the environment is written down."""

import pytest

from engine.doctor import facts, place
from engine.doctor.examination import _together
from engine.doctor.finding import FAIL, PASS, SKIP, Finding, Skipped, compared, memory


def rank(number, **changes):
    return {
        "rank": number,
        "host": f"node{number}",
        "versions": {"torch": "2.15.0", "mmcv ops": "ours"},
        "code": "abc",
        "accelerator": {"name": "npu", "device": "npu:0", "uuid": f"device-{number}", "backend": "hccl"},
        "open_files": {"soft": 65536, "hard": 65536},
        "shared_memory": 64e9,
        "network": {"own_address": "10.0.0.2", "master": "10.0.0.1"},
        "environment": {},
        **changes,
    }


def test_of_the_environment_only_the_list_is_written_down(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "do not tell")
    monkeypatch.setenv("SLURM_JWT", "do not tell")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    found = facts.variables()
    assert found["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "do not tell" not in str(found)


def test_ranks_with_other_software_fail():
    assert place.alike([rank(0), rank(1)]).passed
    old = place.alike([rank(0), rank(1, versions={"torch": "2.14.0", "mmcv ops": "ours"})])
    assert not old.passed and "rank 1 on node1 has torch 2.14.0, rank 0 has 2.15.0" in old.text
    copy = place.alike([rank(0), rank(1), rank(2, code="abd")])
    assert not copy.passed and "rank 2 on node2 has code abd" in copy.text


def test_two_ranks_on_one_device_fail():
    assert place.own_devices([rank(0), rank(1)]).passed
    shared = {**rank(0)["accelerator"]}
    both = [rank(0), rank(1, accelerator=shared, host="node0")]
    assert place.own_devices(both).text == "ranks 0 and 1 use the same device on node0"
    assert not place.own_devices(both).passed
    with pytest.raises(Skipped):
        place.own_devices([rank(0, accelerator={"name": "cpu"})])


def test_notes_name_the_ranks_they_concern():
    assert place.notes([rank(0), rank(1)]) == []
    few, little = {"soft": 1024, "hard": 4096}, 64e6
    found = place.notes([rank(0, open_files=few), rank(1, open_files=few, shared_memory=little)])
    assert found[0].startswith("1024 open files are few") and "(rank" not in found[0]
    assert found[1].startswith("/dev/shm has 64 MB") and found[1].endswith("(rank 1)")
    (differs,) = place.notes([rank(0), rank(1, environment={"NCCL_DEBUG": "INFO"})])
    assert differs == "NCCL_DEBUG differ from rank 0's (rank 1)"
    (loops,) = place.notes([rank(0), rank(1, network={"own_address": "127.0.1.1", "master": "node0"})])
    assert "loopback" in loops


def test_a_check_fails_if_it_fails_on_one_rank():
    fine, bad = (PASS, Finding("fine")), (FAIL, Finding("bad", False))
    assert _together("x", [fine, fine], 1.0).status == PASS
    assert (_together("x", [fine, bad], 1.0).status, _together("x", [fine, bad], 1.0).text) == (FAIL, "rank 1: bad")
    assert _together("x", [bad, bad], 1.0).text == "bad"
    assert _together("x", [(SKIP, Finding("none"))], 1.0).line() == f"SKIP  {'x':<22} none  (1.0 s)"


def test_what_is_not_a_number_is_no_pass():
    assert compared({"phi": 1e-7}, 1e-6).passed
    assert not compared({"phi": 2e-6}, 1e-6).passed
    assert not compared({"phi": 1e-7, "mu": float("nan")}, 1e-6).passed
    assert not compared({"phi": float("inf")}, 1e-6).passed


def test_sizes_as_people_say_them():
    assert [memory(size) for size in (4, 64e6, 25.3e9, 3e15)] == ["4 B", "64 MB", "25.3 GB", "3e+03 TB"]


def test_the_address_towards_a_host():
    assert facts.address_towards("127.0.0.1") == "127.0.0.1"
    assert facts.address_towards("no.such.host.invalid") is None
