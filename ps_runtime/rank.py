"""The rank of a process, the number of workers, and its local rank on the host.

The user's settings (arguments, PS_* variables) come first. Missing ones come from the variables of a single launcher:
never the rank from one launcher and the number of workers from another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest


@dataclass(frozen=True)
class Launcher:
    """The environment variables in which a launcher tells a process its rank.

    world_size, local_rank: None: the launcher has no such variable
    within: a variable that must be set, too; otherwise the others do not apply to this process
    """

    rank: str
    world_size: str | None
    local_rank: str | None
    within: str | None = None

    def count_given(self) -> int:
        """Returns how many of the variables for rank and world size are set: 0 to 2."""
        if self.within is not None and not os.environ.get(self.within):
            return 0
        return sum(bool(os.environ.get(name or "")) for name in (self.rank, self.world_size))


TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK")
LAUNCHERS = (
    TORCHRUN,
    # A batch script has SLURM_PROCID too: only within a step of srun is each process a task of its own.
    Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", within="SLURM_STEP_ID"),
    Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("JOB_COMPLETION_INDEX", None, None),  # an Indexed Job of Kubernetes
)


@dataclass(frozen=True)
class RankOfProcess:
    """The rank of a process, the number of workers, and its local rank, as far as the user or a launcher says.

    rank, world_size: None if neither the user nor a launcher says
    local_rank:       0 if neither says
    missing:          what to set if a launcher is there and only one of rank and world_size is known; otherwise None
    """

    rank: int | None
    world_size: int | None
    local_rank: int
    missing: str | None = None


def find_rank(rank: int | None, world_size: int | None, local_rank: int | None) -> RankOfProcess:
    """Completes what the user gave from the variables of one launcher: the one that has most of them.

    Raises InvalidRequest if a launcher's variable is not a whole number.
    """
    launcher = max(LAUNCHERS, key=Launcher.count_given)  # the first of several equals; torchrun if no variable is set
    missing = None
    if launcher.count_given():
        rank = _whole(launcher.rank) if rank is None else rank
        world_size = _whole(launcher.world_size) if world_size is None else world_size
        if rank is None or world_size is None:
            missing = _advice(launcher, rank)
    if local_rank is None:
        local_rank = _whole(launcher.local_rank)
    return RankOfProcess(rank, world_size, local_rank or 0, missing)


def hide_launcher_variables(names: Iterable[str]) -> None:
    """Removes variables from this process's environment, because libraries would use them."""
    for name in names:
        os.environ.pop(name, None)


def _advice(launcher: Launcher, rank: int | None) -> str:
    if launcher.world_size is None:
        return (
            f"{launcher.rank} says that this is worker {rank}, but not of how many: "
            "set PS_WORLD_SIZE to the Job's completions, or call connect(world_size=...)"
        )
    there, absent = (launcher.world_size, launcher.rank) if rank is None else (launcher.rank, launcher.world_size)
    return f"{there} is set, but {absent} is not: set both, or PS_RANK and PS_WORLD_SIZE"


def _whole(name: str | None) -> int | None:
    text = os.environ.get(name or "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest(f"{name}: expected a whole number, got {text!r}")
    return int(text)
