"""A real Slurm of two nodes on this machine: slurmctld, a slurmd for each node, and munged, with nothing installed.

The nodes n0 and n1 are addresses of the loopback interface. Their names are in a hosts file of their own, which the
daemons see in place of this machine's: jobs find each other by name, as on a cluster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ps_runtime.free_ports import free_port
from tests.tools import cluster
from tests.tools.launching import ROOT, environment

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel", "srun", "unshare")
FILES = ROOT / "deploy" / "slurm"
START_SECONDS = 60.0
JOB_SECONDS = 200.0  # a job starts several processes that import torch
LOOK_SECONDS = 0.25  # a look is a process of Slurm's
_IN_OWN_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=10
SlurmdParameters=config_overrides
NodeName=n0 NodeAddr=127.0.0.2 Port={ports[1]} CPUs=4
NodeName=n1 NodeAddr=127.0.0.3 Port={ports[2]} CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)})"
    return None if os.geteuid() == 0 else "slurmd needs root"


def until(condition: Callable[[], object], what: str, seconds: float = JOB_SECONDS) -> None:
    """Looks at a condition now and then until it holds."""
    cluster.until(condition, what, seconds, LOOK_SECONDS)


class Slurm:
    """Two nodes of four CPUs each. Jobs run in `folder`, and their logs are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = [free_port() for _ in range(3)]
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=socket.gethostname(), ports=ports, folder=folder))
        (folder / "hosts").write_text("127.0.0.1 localhost\n127.0.0.2 n0\n127.0.0.3 n1\n")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        own = [f"--{name}={folder}/munge.{kind}" for name, kind in (("socket", "sock"), ("pid-file", "pid"))]
        own += [f"--key-file={key}", f"--seed-file={folder}/munge.seed"]
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start_all(own)
        except BaseException:
            self._end_daemons()
            raise

    def _start_all(self, of_munge: list[str]) -> None:
        self._start("munged", "--foreground", "--force", *of_munge)
        until((self.folder / "munge.sock").exists, "munged", START_SECONDS)
        self._start("slurmctld", "-D")
        for node in ("n0", "n1"):
            self._start("slurmd", "-D", "-N", node)
        until(lambda: self.run("sinfo", "-h", "-o", "%t %D") == "idle 2", "two nodes that are idle", START_SECONDS)

    def run(self, *command: str, **variables: str) -> str:
        """A command of Slurm's; what it prints."""
        own = environment(SLURM_CONF=str(self.folder / "slurm.conf"), **variables)
        own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=self.folder, env=own, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip()

    def submit(self, file: str, *words: str, options: tuple[str, ...] = (), **variables: str) -> str:
        """Submits one of our files; the number of its job."""
        number = self.run("sbatch", "--parsable", *options, str(FILES / file), *words, **variables)
        assert number.isdigit()
        return number

    def log(self, name: str) -> str:
        """What a job has written so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: str) -> str:
        """The state of a job, or of a task of an array."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def await_state(self, job: str, state: str) -> None:
        """Waits until a job has a state."""
        until(lambda: self.state(job) == state, f"{state} of job {job}")

    def await_end(self, job: str) -> str:
        """Waits until a job has ended; its state then."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        until(lambda: self.state(job) in ends, f"the end of job {job}")
        return self.state(job)

    def stop(self) -> None:
        """Ends all jobs, then the daemons."""
        self.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--partition=main")
        self.run("scancel", "--partition=main")
        try:
            until(lambda: self.run("squeue", "--noheader") == "", "the end of all jobs", START_SECONDS)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(START_SECONDS)

    def _start(self, *command: str) -> None:
        own = environment(SLURM_CONF=str(self.folder / "slurm.conf"))
        with (self.folder / f"{command[0]}-{len(self._daemons)}.out").open("wb") as out:
            words = (*_IN_OWN_HOSTS, str(self.folder / "hosts"), *command)
            self._daemons.append(subprocess.Popen(words, env=own, stdout=out, stderr=subprocess.STDOUT))
