"""A real Slurm on two hosts of this machine: `srun` starts the ranks, and a requeued job goes on where it was.

  python benchmarks/slurm.py            # about two minutes
  python benchmarks/slurm.py --verbose  # with what the job printed

Debian's slurm-wlm and munge are needed, and what benchmarks/hosts.py needs. munged, slurmctld and one slurmd per host
run with a configuration, keys and spool folders of their own; nothing of an installed Slurm is touched. The job script
is the one of docs/running.md. It is requeued twice: by `scontrol requeue` (Slurm then sends SIGTERM), and by SIGUSR1,
as `#SBATCH --signal` sends it before the time limit, after which the script itself asks for it.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hosts import ROOT, folder_of, last_step, read_weights, records, settings
from network_hosts import NetworkHosts

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
# `cred_expire`: Slurm lets a requeued job wait that long (120 s unless told otherwise), until its old credentials are
# invalid.
CONFIG = """
ClusterName=tried
SlurmctldHost=node1({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=30
JobRequeue=1
SelectType=select/cons_tres
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output={log}
#SBATCH --signal=SIGUSR1@120
srun --export=ALL {python} {repo}/launch/train.py --deepspeed_config {config} --work-dir {work} --resume
code=$?
[ $code -eq 75 ] && scontrol requeue $SLURM_JOB_ID  # stopped by a signal, and saved
exit $code
"""


class Slurm:
    def __init__(self, hosts: NetworkHosts) -> None:
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        self.folder.mkdir()
        self.folder.chmod(0o755)
        hosts.folder.chmod(0o755)  # munged's clients must reach its socket
        for name in ("state", *(f"spool-{host}" for host in hosts.names)):
            (self.folder / name).mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for name, address in zip(hosts.names, hosts.addresses)
        )
        self.config = self.folder / "slurm.conf"
        self.config.write_text(CONFIG.format(address=hosts.addresses[0], folder=self.folder, nodes=nodes))
        # It is not used, but looked for unless named, and a network namespace has a /sys without it.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.environment = {**hosts.environment(), "SLURM_CONF": str(self.config)}
        for name in [name for name in self.environment if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.environment[name]

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        own = {"key-file": key, **{f"{kind}-file": self.folder / f"munge.{kind}" for kind in ("pid", "log", "seed")}}
        options = [f"--{name}={path}" for name, path in own.items()]
        self._daemon(0, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *options)
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon(0, "slurmctld", "-D", "-f", str(self.config))
        for host, name in enumerate(self.hosts.names):
            self._daemon(host, "slurmd", "-D", "-N", name, "-f", str(self.config))
        self._until(lambda: self("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "two idle nodes")

    def __call__(self, *command: str) -> str:
        """The output of a Slurm command on the first host."""
        inside = self.hosts.inside(0, command)
        return subprocess.run(inside, env=self.environment, capture_output=True, text=True, cwd=self.folder).stdout

    def state(self, job: str) -> str:
        return self("squeue", "-h", "-j", job, "-o", "%T").strip()

    def _daemon(self, host: int, *command: str) -> None:
        with (self.folder / "daemons.log").open("a") as log:
            self.hosts.start(host, command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def _until(self, ready: Any, what: str, limit: float = 30) -> None:
        deadline = time.monotonic() + limit
        while not ready():
            if time.monotonic() > deadline:
                logs = [path for path in self.folder.glob("*.log") if path.name != "munge.log"]
                texts = [f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in logs]
                raise SystemExit("\n".join([*texts, f"error: Slurm did not get ready: no {what}"]))
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, default=ROOT, help="the checkout to run; default: this one")
    parser.add_argument("--verbose", action="store_true", help="show what the job printed")
    options = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"error: not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)")
    given = settings(steps=1_000_000)
    given["run"]["checkpoint_interval"] = 1000  # never by itself; 0 would also mean not when stopped
    with folder_of(given) as (config, work), NetworkHosts(2) as hosts:
        slurm = Slurm(hosts)
        slurm.start()
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(options.repo), "PYTHONUNBUFFERED": "1"}
        slurm.environment.update(more)
        print(slurm("sinfo").strip())
        log = slurm.folder / "job.log"
        try:
            requeue(slurm, options, config, work, log)
        except BaseException:
            options.verbose = True
            raise
        finally:
            with contextlib.suppress(OSError):
                if options.verbose:
                    print(log.read_text(), flush=True)
        compare(hosts, slurm, options, config, work)


def requeue(slurm: Slurm, options: argparse.Namespace, config: Path, work: Path, log: Path) -> None:
    script = slurm.folder / "job.sh"
    names = dict(log=log, python=sys.executable, repo=options.repo, config=config, work=work)
    script.write_text(SCRIPT.format(**names))
    job = slurm("sbatch", "--parsable", str(script)).strip()
    if not job.isdigit():
        raise SystemExit("error: the job was not accepted")
    wait_for(slurm, job, work, 10)
    print(f"job {job}: {slurm('squeue', '-h', '-j', job, '-o', '%T on %N').strip()}, step {last_step(work)}")
    for name, command in (
        ("scontrol requeue", ["scontrol", "requeue", job]),
        ("SIGUSR1", ["scancel", "--signal=USR1", job]),
    ):
        slurm(*command)
        began = time.monotonic()
        while runs(slurm.hosts, work) and time.monotonic() - began < 60:
            time.sleep(0.1)
        stopped, reached = time.monotonic() - began, last_step(work)
        saved = newest_checkpoint(work)
        slurm._until(lambda: slurm.state(job) == "RUNNING", "second start of the job", 180)
        again = time.monotonic() - began
        wait_for(slurm, job, work, reached + 10)
        print(
            f"{name}: stopped after {stopped:.1f} s at step {reached}, saved step {saved}; started again after "
            f"{again:.1f} s, resumed, and reached step {last_step(work)}",
            flush=True,
        )
        if saved != reached:
            raise SystemExit("error: the last step was not saved")
    slurm("scancel", "--signal=KILL", "--full", job)
    steps = [int(record["step"]) for record in records(work)]
    if steps != list(range(1, len(steps) + 1)):
        raise SystemExit("error: the records have gaps")


def runs(hosts: NetworkHosts, work: Path) -> bool:
    """Whether a process of the job is there: all have its work dir in their command lines."""
    for host in range(len(hosts.names)):
        for pid in hosts.pids(host):
            with contextlib.suppress(OSError):
                if str(work).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
    return False


def newest_checkpoint(work: Path) -> int:
    found = [int(path.name.removeprefix("step-")) for path in (work / "checkpoints").glob("step-*")]
    return max(found, default=0)


def wait_for(slurm: Slurm, job: str, work: Path, step: int) -> None:
    slurm._until(lambda: last_step(work) >= step, f"step {step} (job: {slurm.state(job)})", 180)


def compare(hosts: NetworkHosts, slurm: Slurm, options: argparse.Namespace, config: Path, work: Path) -> None:
    """srun on two nodes against two tasks of one node, to the end of a short run."""
    found = []
    for nodes in (1, 2):
        folder = work.parent / f"nodes{nodes}"
        changes = ["--set", "schedule.steps=6", "--set", "run.checkpoint_interval=1"]
        command = [sys.executable, str(options.repo / "launch" / "train.py"), "--config", str(config)]
        slurm("srun", "-N", str(nodes), "-n", "2", *command, "--work-dir", str(folder), *changes)
        found.append(read_weights(folder))
    apart = max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])
    print(f"srun -N 2 -n 2 against srun -N 1 -n 2: greatest difference of a weight {apart:.1g}")


if __name__ == "__main__":
    main()
