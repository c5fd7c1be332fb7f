"""What is done to a cluster, and to whom: seeded, so that the same seed does the same at the same times.

kill        kill -9 of a worker; it is started again
pause       SIGSTOP of a worker for less than its lease, then SIGCONT: nobody may notice
stop        SIGSTOP for longer than its lease: it is fenced, and comes back to find so
cut         every connection of a worker is reset, at once
flap        nothing passes between a worker and the servers for less than its lease; then all arrives, late
partition   the same for longer than its lease

kill-shard        kill -9 of a shard; it is started again, and its part of the job rolled back to a checkpoint
kill-saving       the same while its file of a checkpoint is being written, or is there and the manifest is not
pause-shard       SIGSTOP of a shard, up to twice the lease, then SIGCONT
full-disk         a shard can write no more than a few bytes to any file, for a few leases
kill-coordinator  kill -9 of the coordinator, where it is in a process of its own; it is started again
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.cluster import Crew, Servers
from tests.chaos.links import Link

Heal = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """One fault that happened.

    victim: the worker's rank or the shard's index; 0 for the coordinator
    at, until: when it began and ended, in seconds on the monotonic clock; the same for what takes no time
    """

    kind: str
    victim: int
    at: float
    until: float

    @property
    def killed_shard(self) -> int | None:
        """The shard that it killed, if it did."""
        return self.victim if self.kind in ("kill-shard", "kill-saving") else None

    def hits(self, rank: int) -> bool:
        """Whether it was done to this worker."""
        return KINDS[self.kind].to == "worker" and self.victim == rank

    def data(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Arena:
    """What faults happen to; `links`: each worker's, to all servers."""

    servers: Servers
    crew: Crew
    links: Mapping[int, Sequence[Link]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    to:     worker, shard or coordinator
    weight: how often it is drawn
    long:   its shortest and longest time, in leases; (0, 0) for what takes no time
    begin:  does it to a victim; returns what ends it, or None if there was nobody to do it to
    """

    to: str
    weight: int
    long: tuple[float, float]
    begin: Callable[[Arena, int], Heal | None]


def _signals(to: str, number: int, later: int | None = None) -> Callable[[Arena, int], Heal | None]:
    """Sends a process of that kind a signal, and at the fault's end another."""

    def begin(arena: Arena, victim: int) -> Heal | None:
        def send(number: int) -> bool:
            if to == "worker":
                return arena.crew.signal(victim, number)
            return arena.servers.signal(victim if to == "shard" else None, number)

        if not send(number):
            return None
        return _nothing if later is None else lambda: send(later)

    return begin


def _cut(arena: Arena, rank: int) -> Heal:
    for link in arena.links[rank]:
        link.cut()
        link.heal()  # new connections may be made
    return _nothing


def _partition(arena: Arena, rank: int) -> Heal:
    for link in arena.links[rank]:
        link.hold()

    def heal() -> None:
        for link in arena.links[rank]:
            link.heal()

    return heal


def _kill_saving(arena: Arena, index: int) -> Heal | None:
    """Looks for a moment whether it is saving; if not, it is asked for again."""
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        if arena.servers.is_saving(index):
            return _signals("shard", signal.SIGKILL)(arena, index)
        time.sleep(WATCH_SECONDS / 400)
    return None


def _full_disk(arena: Arena, index: int) -> Heal | None:
    pid = arena.servers.pid(index)
    return None if pid is None or not _limit_files(pid, FULL_BYTES) else lambda: _limit_files(pid, UNLIMITED)


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
    "kill": Kind("worker", 4, (0, 0), _signals("worker", signal.SIGKILL)),
    "pause": Kind("worker", 2, (0.1, 0.5), _signals("worker", signal.SIGSTOP, signal.SIGCONT)),
    "stop": Kind("worker", 2, (1.5, 2.5), _signals("worker", signal.SIGSTOP, signal.SIGCONT)),
    "cut": Kind("worker", 2, (0, 0), _cut),
    "flap": Kind("worker", 1, (0.1, 0.5), _partition),
    "partition": Kind("worker", 2, (1.5, 2.5), _partition),
    "kill-shard": Kind("shard", 3, (0, 0), _signals("shard", signal.SIGKILL)),
    "kill-saving": Kind("shard", 1, (0, 0), _kill_saving),
    "pause-shard": Kind("shard", 1, (0.1, 2.0), _signals("shard", signal.SIGSTOP, signal.SIGCONT)),
    "full-disk": Kind("shard", 1, (1.0, 2.5), _full_disk),
    "kill-coordinator": Kind("coordinator", 2, (0, 0), _signals("coordinator", signal.SIGKILL)),
}


@dataclass(frozen=True)
class Plan:
    """One fault to come: `after` seconds after the window's beginning, to the victim that is first of those who can."""

    after: float
    kind: str
    victims: tuple[int, ...]
    seconds: float


def plan(
    seed: str, seconds: float, every: float, kinds: list[str], sizes: Mapping[str, int], lease: float
) -> list[Plan]:
    """A fault about every `every` seconds; nothing in the last of them, so that each has time to be seen.

    sizes: how many workers, shards and coordinators there are
    """
    draw = random.Random(seed)
    found, after = [], every / 2
    while after < seconds - every / 2:
        kind = draw.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        shortest, longest = KINDS[kind].long
        many = sizes[KINDS[kind].to]
        victims = tuple(draw.sample(range(many), many))
        found.append(Plan(after, kind, victims, lease * draw.uniform(shortest, longest)))
        after += every * draw.uniform(0.8, 1.2)
    return found
