"""What can be done to a cluster, and to whom.

kill        kill -9 of a worker; `ps-worker run` starts it again
pause       SIGSTOP of a worker for less than its lease, then SIGCONT: nobody may notice
stop        SIGSTOP for longer than its lease: it is fenced, and comes back to find so
cut         every connection of a worker is reset, at once
flap        nothing passes between a worker and the servers for less than its lease; then all arrives, late
partition   the same for longer than its lease

kill-shard    kill -9 of a shard; it is started again, and its part of the job rolled back to a checkpoint
kill-saving   the same while its file of a checkpoint is being written, or is there and the manifest is not
pause-shard   SIGSTOP of a shard, up to three leases, then SIGCONT
full-disk     a shard can write no more than a few bytes to any file, for a few leases

kill-coordinator       kill -9 of the process that coordinates; it is started again (of `ps-server up`: shard 0's)
pause-coordinator      SIGSTOP of it, up to three leases, then SIGCONT
full-disk-coordinator  it can write no more than a few bytes to any file, for a few leases

cut-servers        of containers: every connection between a shard and the coordinator is reset, at once
partition-servers  of containers: nothing passes between them, for up to three leases

kill-reader    kill -9 of a process that follows the job's weights; it is started again
pause-reader   SIGSTOP of it, up to three leases, then SIGCONT
kill-relay     kill -9 of the relay through which most of them follow; it is started again
pause-relay    SIGSTOP of it, up to three leases, then SIGCONT

kill-cluster   kill -9 of `ps-server up` itself, without which its shards end, or of all containers at one time
pause-cluster  SIGSTOP of `ps-server up` itself, while which no shard is started again, or of all containers
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.audience import Audience
from tests.chaos.crew import Crew
from tests.chaos.links import Link
from tests.chaos.processes import send
from tests.chaos.servers import Servers

Heal = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """One fault that happened.

    victim: the worker's or reader's slot or the shard's index; 0 for the coordinator, the relay and the cluster
    at, until: when it began and ended, in seconds on the monotonic clock; the same for what takes no time
    killed: the shards that it killed
    first:  the kind of the fault that this one was to overlap with; None: it came alone, or is that fault itself
    """

    kind: str
    victim: int
    at: float
    until: float
    killed: tuple[int, ...] = ()
    first: str | None = None

    @property
    def of_worker(self) -> bool:
        """Whether it was done to a worker."""
        return KINDS[self.kind].to == "worker"

    def hits(self, slot: int) -> bool:
        """Whether it was done to this worker."""
        return self.of_worker and self.victim == slot

    def data(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Arena:
    """What faults happen to; `links`: each worker's, to all servers."""

    servers: Servers
    crew: Crew
    audience: Audience
    links: Mapping[int, Sequence[Link]] = field(default_factory=dict)

    def signal(self, to: str, victim: int, number: int) -> list[int]:
        """Sends processes a signal, and returns those that it reached."""
        if to in ("reader", "relay"):
            return self.audience.signal(to, victim, number)
        return self.crew.signal(victim, number) if to == "worker" else self.servers.signal(to, victim, number)

    def links_of(self, to: str, victim: int) -> Sequence[Link]:
        """The links of a worker, or those between a shard and the coordinator."""
        return (self.links if to == "worker" else self.servers.between)[victim]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    to:     worker, shard, coordinator, between (a shard and the coordinator), reader, relay or cluster
    weight: how often it is drawn, where it comes alone
    long:   its shortest and longest time, in leases; (0, 0) for what takes no time
    begin:  does it to a victim; returns what ends it, or None if there was nothing to do it to
    kills:  its victim's process ends
    """

    to: str
    weight: int
    long: tuple[float, float]
    begin: Callable[[Arena, str, int], Heal | None]
    kills: bool = False

    @property
    def ends_shards(self) -> bool:
        """Whether what its victim had of the job is gone, if that was a shard."""
        return self.kills and self.to in ("shard", "coordinator", "cluster")


def _kill(arena: Arena, to: str, victim: int) -> Heal | None:
    return _nothing if arena.signal(to, victim, signal.SIGKILL) else None


def _pause(arena: Arena, to: str, victim: int) -> Heal | None:
    """What was stopped goes on at the end, and nothing else: another process may have its place by then."""
    stopped = arena.signal(to, victim, signal.SIGSTOP)
    return (lambda: [send(pid, signal.SIGCONT) for pid in stopped]) if stopped else None


def _cut(arena: Arena, to: str, victim: int) -> Heal:
    for link in arena.links_of(to, victim):
        link.cut()
        link.heal()  # new connections may be made
    return _nothing


def _partition(arena: Arena, to: str, victim: int) -> Heal:
    links = arena.links_of(to, victim)
    for link in links:
        link.hold()

    def heal() -> None:
        for link in links:
            link.heal()

    return heal


def _kill_saving(arena: Arena, to: str, victim: int) -> Heal | None:
    """Looks for a moment whether it is saving; if not, it is asked for again."""
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        if arena.servers.is_saving(victim):
            return _kill(arena, to, victim)
        time.sleep(WATCH_SECONDS / 400)  # another process saves: nothing tells this one of it
    return None


def _full_disk(arena: Arena, to: str, victim: int) -> Heal | None:
    """Needs no root: a process may set the limits of others of its user."""
    full = [pid for pid in arena.servers.pids(to, victim) if _limit_files(pid, FULL_BYTES)]
    return (lambda: [_limit_files(pid, UNLIMITED) for pid in full]) if full else None


def _limit_files(pid: int, size: int) -> bool:
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, UNLIMITED))
        return True
    return False


def _nothing() -> None:
    pass


WATCH_SECONDS = 0.2
FULL_BYTES, UNLIMITED = 64, resource.RLIM_INFINITY

KINDS: Mapping[str, Kind] = {
    "kill": Kind("worker", 4, (0, 0), _kill, kills=True),
    "pause": Kind("worker", 2, (0.1, 0.5), _pause),
    "stop": Kind("worker", 2, (1.5, 3.0), _pause),
    "cut": Kind("worker", 2, (0, 0), _cut),
    "flap": Kind("worker", 1, (0.1, 0.5), _partition),
    "partition": Kind("worker", 2, (1.5, 3.0), _partition),
    "kill-shard": Kind("shard", 3, (0, 0), _kill, kills=True),
    "kill-saving": Kind("shard", 2, (0, 0), _kill_saving, kills=True),
    "pause-shard": Kind("shard", 2, (0.3, 3.0), _pause),
    "full-disk": Kind("shard", 1, (1.0, 2.5), _full_disk),
    "kill-coordinator": Kind("coordinator", 2, (0, 0), _kill, kills=True),
    "pause-coordinator": Kind("coordinator", 2, (0.3, 3.0), _pause),
    "full-disk-coordinator": Kind("coordinator", 1, (1.0, 2.5), _full_disk),
    "cut-servers": Kind("between", 2, (0, 0), _cut),
    "partition-servers": Kind("between", 2, (0.3, 3.0), _partition),
    "kill-reader": Kind("reader", 3, (0, 0), _kill, kills=True),
    "pause-reader": Kind("reader", 1, (0.3, 3.0), _pause),
    "kill-relay": Kind("relay", 2, (0, 0), _kill, kills=True),
    "pause-relay": Kind("relay", 1, (0.3, 3.0), _pause),
    "kill-cluster": Kind("cluster", 1, (0, 0), _kill, kills=True),
    "pause-cluster": Kind("cluster", 1, (0.3, 3.0), _pause),
}
