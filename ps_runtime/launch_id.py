"""The launch that this process belongs to, and its report to the launcher.

The launch distinguishes a worker that is started again from another user's worker of the same job. The report is a
file, which the first worker creates once all declared workers have joined. The launcher looks for it when a worker
fails: until then a failure ends the launch. A second file has the ranks that a worker waits for in a job that has not
begun: the job may have ended, and begin anew, when one of its ranks has ended for good.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ps_protocol.errors import InvalidRequest
from ps_runtime.credentials import is_loopback

# The variables that `ps-worker run` sets for its workers, in addition to settings.
LAUNCHED = "PS_LAUNCHED"
LAUNCH_ID = "PS_LAUNCH_ID"
LAUNCH_RANKS = "PS_LAUNCH_RANKS"
GROUP_SIZE = "PS_GROUP_SIZE"
STARTED_FILE = "PS_STARTED_FILE"
# The exit code of a worker whose job has finished without it, in the middle of its script: the rest of its work is not
# done, and to start it again would do nothing. The codes up to 78 have meanings elsewhere (sysexits.h).
FINISHED_WITHOUT_CODE = 79
# The exit code of a member of a group that ends because another member gives no sign, or hangs: the group can be
# started again.
SILENT_MEMBER_CODE = 80


@dataclass(frozen=True)
class LaunchId:
    """One launch.

    name: the same for all its workers and their restarts; empty: unknown
    take_over: whether live workers of other launches are fenced
    ranks: all ranks that the launch is about to start; empty: unknown
    is_unique: whether no later launch has this name; a job that this launch has finished is then finished for all its
    workers
    """

    name: str = ""
    take_over: bool = False
    ranks: range = range(0)
    is_unique: bool = False


UNKNOWN = LaunchId()


def launch_id(world_size: int, take_over: bool) -> LaunchId:
    """Returns the launch of this process: from PS_LAUNCH_ID, torchrun's or Slurm's variables; otherwise one of its own.

    world_size: of the job; 0: elastic, where the launch has no ranks of its own
    """
    known = os.environ.get(LAUNCH_ID)
    if known:
        ranks = _ranks(os.environ.get(LAUNCH_RANKS, "")) if world_size else range(0)
        return LaunchId(known, take_over, ranks, is_unique=True)
    for find in (_torchrun, _slurm_array if not world_size else _slurm, _slurm):
        launch = find(os.environ)
        if launch is not None:
            name, count, again = launch
            whole = bool(world_size) and count == str(world_size) and not again
            # By default each torchrun of a host has the same name.
            return LaunchId(name, take_over, range(world_size if whole else 0), is_unique=find is not _torchrun)
    return LaunchId(_own(), take_over, is_unique=True)


def is_launched() -> bool:
    """Returns whether `ps-worker run` started this process."""
    return os.environ.get(LAUNCHED) == "1"


def launched_rank() -> str | None:
    """Returns the rank that `ps-worker run` gave to this process; None if it gave none."""
    return os.environ.get("PS_RANK")


def launched_member() -> int | None:
    """Returns the number of this process in its group, from `ps-worker run --group`; None if it is in no group of
    several.
    """
    rank = os.environ.get("RANK", "")
    return int(rank) if is_launched() and os.environ.get(GROUP_SIZE, "1") != "1" and rank.isdigit() else None


def launched_group_size() -> int:
    """Returns how many processes a launcher has started as this worker; 1 if it does not say."""
    size = os.environ.get(GROUP_SIZE, "")
    return int(size) if size.isdigit() else 1


class LauncherReports:
    """Tells the launcher whether the jobs of its workers have begun. Does nothing without a launcher."""

    def started(self, run: str) -> None:
        """Reports that all declared workers of a run have joined."""
        path = os.environ.get(STARTED_FILE)
        if path:
            with contextlib.suppress(OSError):  # the launcher has ended, or is on a file system of its own
                if run not in _runs(path):
                    with Path(path).open("a") as file:
                        file.write(f"{run}\n")
                awaited_file(path).unlink(missing_ok=True)

    def waits(self, run: str, ranks: Iterable[int]) -> None:
        """Reports that a worker waits for ranks to join. After a rollback, too, a worker waits for others, though not
        for ranks that have ended: so a run that has begun before is left out.
        """
        path = os.environ.get(STARTED_FILE)
        if path:
            with contextlib.suppress(OSError):
                if run not in _runs(path):
                    own = Path(f"{awaited_file(path)}-{os.getpid()}")
                    own.write_text(" ".join(map(str, ranks)))
                    own.replace(awaited_file(path))  # the launcher never reads half of it


def awaited_file(started: str | Path) -> Path:
    """Returns the path of the file with the ranks that a worker waits for, beside the one of STARTED_FILE."""
    return Path(f"{started}-awaits")


def awaited_ranks(started: Path) -> set[int]:
    """Returns the ranks that a worker waits for in a job that has not begun; none if none waits."""
    try:
        return {int(rank) for rank in awaited_file(started).read_text().split()}
    except FileNotFoundError:
        return set()


def _runs(path: str) -> list[str]:
    """Returns the runs of jobs that have begun."""
    try:
        return Path(path).read_text().split()
    except FileNotFoundError:
        return []


def new_launch_id() -> str:
    """Returns a name that no other launch has."""
    return f"run-{socket.gethostname()}-{secrets.token_hex(8)}"


@cache
def _own() -> str:
    """Returns the name of a process that no launcher started: a second session in it belongs to the same launch."""
    return new_launch_id()


def _torchrun(environment: Mapping[str, str]) -> tuple[str, str | None, bool] | None:
    """Returns the launch of a torchrun, its number of workers, and whether the workers were started again."""
    run = environment.get("TORCHELASTIC_RUN_ID")
    if not run:
        return None
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    # All that run on one host meet at the same address by default, on every host.
    where = socket.gethostname() if not address or is_loopback(address) else address
    again = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return f"torchrun-{run}-{where}:{port}", environment.get("WORLD_SIZE"), again


def _slurm(environment: Mapping[str, str]) -> tuple[str, str | None, bool] | None:
    """Returns the launch of one `srun`, a job step. Launches in an allocation's shell, without a step, look alike."""
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    if not job or not step:
        return None
    again = environment.get("SLURM_RESTART_COUNT", "0") != "0"
    return f"slurm-{job}.{step}", environment.get("SLURM_STEP_NUM_TASKS"), again


def _slurm_array(environment: Mapping[str, str]) -> tuple[str, str | None, bool] | None:
    """Returns the launch that consists of the tasks of a job array: each task is an elastic worker."""
    array, step = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_STEP_ID")
    return (f"slurm-{array}.{step}", None, False) if array and step else None


def _ranks(text: str) -> range:
    """Returns the ranks FIRST-LAST, as `ps-worker run` writes them; none for no text."""
    if not text:
        return range(0)
    ends = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if ends is None:
        raise InvalidRequest(f"PS_LAUNCH_RANKS is FIRST-LAST, two ranks, got {text!r}")
    return range(int(ends[1]), int(ends[2]) + 1)
