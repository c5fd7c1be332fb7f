"""What is done to a cluster, and to whom: seeded, so that the same seed does the same at the same times.

kill       kill -9 of a worker; it is started again
pause      SIGSTOP of a worker for less than its lease, then SIGCONT: nobody may notice
stop       SIGSTOP for longer than its lease: it is fenced, and comes back to find so
cut        every connection of a worker is reset, at once
partition  nothing passes between a worker and the servers for longer than its lease; then all arrives, late
flap       the same for less than its lease
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.chaos.cluster import Crew, Servers
from bench.chaos.links import Links

Heal = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """One fault that happened.

    victim: the worker's rank or the shard's index
    at, until: when it began and ended, in seconds on the monotonic clock; the same for what takes no time
    fences: whether it lasts longer than a lease
    """

    kind: str
    victim: int
    at: float
    until: float
    fences: bool

    def data(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Arena:
    """What faults happen to."""

    servers: Servers
    crew: Crew
    links: Links
    lease: float


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    weight: how often it is drawn
    long:   its shortest and longest time, in leases; (0, 0) for what takes no time
    begin:  does it to a victim; returns what ends it, or None if there was nobody to do it to
    """

    weight: int
    long: tuple[float, float]
    begin: Callable[[Arena, int], Heal | None]


def _kill(arena: Arena, rank: int) -> Heal | None:
    return _nothing if arena.crew.signal(rank, signal.SIGKILL) else None


def _stop(arena: Arena, rank: int) -> Heal | None:
    if not arena.crew.signal(rank, signal.SIGSTOP):
        return None
    return lambda: arena.crew.signal(rank, signal.SIGCONT)


def _cut(arena: Arena, rank: int) -> Heal:
    for link in arena.links.of[rank].values():
        link.cut()
    return _nothing


def _partition(arena: Arena, rank: int) -> Heal:
    for link in arena.links.of[rank].values():
        link.hold()

    def heal() -> None:
        for link in arena.links.of[rank].values():
            link.heal()

    return heal


def _nothing() -> None:
    pass


KINDS: Mapping[str, Kind] = {
    "kill": Kind(4, (0, 0), _kill),
    "pause": Kind(2, (0.1, 0.5), _stop),
    "stop": Kind(2, (1.5, 2.5), _stop),
    "cut": Kind(2, (0, 0), _cut),
    "flap": Kind(1, (0.1, 0.5), _partition),
    "partition": Kind(2, (1.5, 2.5), _partition),
}


@dataclass(frozen=True)
class Plan:
    """One fault to come: `after` seconds after the window's beginning, to the victim that is first of those who can."""

    after: float
    kind: str
    victims: tuple[int, ...]
    seconds: float


def plan(seed: str, seconds: float, every: float, kinds: list[str], workers: int, lease: float) -> list[Plan]:
    """A fault about every `every` seconds; nothing in the last of them, so that each has time to be seen."""
    draw = random.Random(seed)
    found, after = [], every / 2
    while after < seconds - every / 2:
        kind = draw.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        shortest, longest = KINDS[kind].long
        victims = tuple(draw.sample(range(workers), workers))
        found.append(Plan(after, kind, victims, lease * draw.uniform(shortest, longest)))
        after += every * draw.uniform(0.8, 1.2)
    return found
