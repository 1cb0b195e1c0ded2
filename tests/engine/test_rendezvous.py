"""Ranks find each other under every launcher, on an interface that others can reach."""

import os
import resource
import socket
from types import SimpleNamespace

import psutil
import pytest

from engine import rendezvous
from engine.errors import UserError
from engine.rendezvous import adopt_launcher_environment

SLURM = {
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4242",
    "SLURM_NODELIST": "gpu[003-010,015]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1234567",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def adopted(monkeypatch, variables):
    monkeypatch.setattr(os, "environ", dict(variables))
    adopt_launcher_environment()
    return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]


def test_slurm_variables_become_a_rendezvous(monkeypatch):
    assert adopted(monkeypatch, SLURM) == ["9", "16", "1", "gpu003"]
    assert os.environ["MASTER_PORT"] == "24242"


def test_a_plain_process_is_a_world_of_one(monkeypatch):
    assert adopted(monkeypatch, {})[:2] == ["0", "1"]


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["openmpi", "mpich"])
def test_mpi_variables_become_a_rendezvous(variables, monkeypatch):
    assert adopted(monkeypatch, {**variables, "MASTER_ADDR": "gpu1"}) == ["3", "4", "1", "gpu1"]
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536


def test_an_mpirun_inside_a_slurm_job_counts_its_own_ranks(monkeypatch):
    job = {**SLURM, "SLURM_PROCID": "0", "MASTER_ADDR": "gpu1"}
    for variables in (OPEN_MPI, HYDRA):
        assert adopted(monkeypatch, {**job, **variables})[:3] == ["3", "4", "1"]
    # srun sets PMI_RANK too, with --mpi=pmi2.
    assert adopted(monkeypatch, {**SLURM, "PMI_RANK": "9", "PMI_SIZE": "16"})[:3] == ["9", "16", "1"]


def test_mpi_on_one_host_needs_no_address(monkeypatch):
    local = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert adopted(monkeypatch, local) == ["3", "4", "3", "127.0.0.1"]
    port = os.environ["MASTER_PORT"]
    adopted(monkeypatch, {**local, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert os.environ["MASTER_PORT"] == port


@pytest.mark.parametrize(
    "variables, words",
    [
        (OPEN_MPI, "several hosts and MASTER_ADDR is not set: give mpirun -x MASTER_ADDR=HOST"),
        (HYDRA, "give mpirun -genv MASTER_ADDR HOST"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "half set: OMPI_COMM_WORLD_SIZE is missing"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "half set: OMPI_COMM_WORLD_RANK is missing"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4 and OMPI_COMM_WORLD_SIZE is 4"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "did not set MPI_LOCALRANKID: set LOCAL_RANK"),
        ({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535"),
    ],
)
def test_what_cannot_be_derived_is_refused(variables, words, monkeypatch):
    with pytest.raises(UserError, match=words):
        adopted(monkeypatch, variables)


def hosts(monkeypatch, resolved, interfaces):
    """A machine with these interfaces, where names resolve so. A host's way to itself has its own address."""
    monkeypatch.setattr(rendezvous, "_address_towards", lambda host: resolved.get(host))
    entries = {
        name: [SimpleNamespace(address=a, family=socket.AF_INET) for a in own] for name, own in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in entries})


TWO_NODES = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
CARDS = {"lo": ["127.0.0.1"], "eth0": ["192.168.0.5"], "ib0": ["10.0.0.5"]}


@pytest.mark.parametrize(
    "changed, resolved, interfaces, chosen",
    [
        ({}, {"gpu1": "10.0.0.5"}, CARDS, "ib0"),
        # On rank 0's host the name may mean 127.0.1.1: the way out, or the only card.
        ({}, {"gpu1": "127.0.1.1", "192.0.2.1": "192.168.0.5"}, CARDS, "eth0"),
        ({}, {"gpu1": "127.0.1.1"}, {"lo": ["127.0.0.1"], "ib0": ["10.0.0.5"]}, "ib0"),
        ({}, {"gpu1": "127.0.1.1"}, CARDS, None),
        ({"GLOO_SOCKET_IFNAME": "mine"}, {"gpu1": "10.0.0.5"}, CARDS, "mine"),
        ({"MASTER_ADDR": "127.0.0.1"}, {"127.0.0.1": "127.0.0.1", "192.0.2.1": "192.168.0.5"}, CARDS, None),
        ({"LOCAL_WORLD_SIZE": "4"}, {"gpu1": "10.0.0.5"}, CARDS, None),  # one host: nothing to choose
    ],
)
def test_gloo_uses_the_interface_that_leads_to_the_master(changed, resolved, interfaces, chosen, monkeypatch):
    hosts(monkeypatch, resolved, interfaces)
    adopted(monkeypatch, {**TWO_NODES, **changed})
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_the_way_to_an_own_address_is_found_without_a_packet():
    assert rendezvous._address_towards("127.0.0.1") == "127.0.0.1"
    assert rendezvous._address_towards("no-such-host.invalid") is None
    own = [e.address for name, es in psutil.net_if_addrs().items() for e in es if e.family == socket.AF_INET]
    for address in own:
        assert rendezvous._address_towards(address) == address


def test_the_order_of_nccls_kernels_is_set_once(monkeypatch):
    adopted(monkeypatch, {})
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    adopted(monkeypatch, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"})
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0"


def test_the_limit_of_open_files_is_raised(monkeypatch):
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(slice(None), pair))
    rendezvous.raise_file_limit()
    assert limits == [4096, 4096]
    limits[:] = 1024, resource.RLIM_INFINITY
    rendezvous.raise_file_limit()
    assert limits == [1 << 20, resource.RLIM_INFINITY]


@pytest.mark.parametrize(
    "variables, ranks",
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8,4"}, None),
        ({}, None),
    ],
)
def test_ranks_on_this_node(variables, ranks, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    assert rendezvous.ranks_on_this_node() == ranks
