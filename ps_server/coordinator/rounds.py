"""The rounds of one job on the coordinator: the rules of core.rounds with a lock, and the streams of those who wait.

A worker that waits holds no thread. It is told whom it waits for, and whether one of those waits for it: in sync and
ssp a worker may be in a step that cannot go on without the step of one that is in a round already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ps_protocol.errors import NotFound, PSError, TryLater, UnknownWorker
from ps_server.core.rounds import Given, Round, Rounds

# How often those who wait are looked after; after how long they are told again whom they wait for, and to ask again.
LOOK_SECONDS = 0.25
NOTICE_SECONDS = 2.0
HOLD_SECONDS = 10.0

Live = Callable[[], tuple[Mapping[int, int], bool]]


@dataclass(frozen=True)
class Wait:
    """One worker's waiting for another on a shard, each by its rank: `rank` needs a step of each of `others`."""

    rank: int
    clock: int
    others: frozenset[int]


@dataclass(frozen=True)
class Standing:
    """How a round stands for one that asked.

    found:       the round, if it is complete
    waiting_for: ranks that have not given their value
    step_wanted: one of them waits for a step of the one that asked
    """

    number: int
    found: Round | None = None
    waiting_for: tuple[int, ...] = ()
    step_wanted: bool = False


@dataclass(frozen=True)
class ExchangeRequest:
    """One worker's value for a round; see ExchangeValuesRequest."""

    rank: int
    incarnation: int
    number: int
    clock: int
    value: bytes = field(repr=False)
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Terms:
    """What a round needs of the coordinator.

    limit: bytes of all values of the open round, and of those that are kept
    check: raises unless the worker that asks is live, and who it says
    save:  keeps what is complete on disk, before any worker is told
    """

    limit: int
    check: Callable[[], object]
    save: Callable[[], None]


class Listener(Protocol):
    """The stream of one that asked. Its methods do not wait."""

    def tell(self, standing: Standing) -> None:
        """Says how the round stands; nothing more comes if it is complete."""

    def finish(self) -> None:
        """Nothing more comes: ask again."""

    def fail(self, error: PSError) -> None:
        """Ends it with an error."""


@dataclass(eq=False)
class _Waiter:
    rank: int
    incarnation: int
    clock: int
    listener: Listener
    since: float
    told: float


class JobRounds:
    """All rounds of one job. Methods may be called from any thread.

    world_size: how many workers the job declares; 0: elastic
    live:       the incarnation of each live worker, by rank, and whether all declared ones have joined
    """

    def __init__(self, world_size: int, live: Live) -> None:
        self._rounds = Rounds(0)
        self._world_size = world_size
        self._live = live
        self._lock = threading.RLock()
        self._waiters: list[_Waiter] = []
        self.done: tuple[int, tuple[Round, ...]] = (0, ())  # the last complete round, and those kept
        self._save = _nothing
        self._looked = 0.0

    def take_up(self, completed: int, kept: Sequence[Round]) -> None:
        """Goes on from what an earlier coordinator had kept."""
        with self._lock:
            self._rounds.completed, self._rounds.kept = completed, tuple(kept)
            self._rounds.behind = True
            self.done = completed, self._rounds.kept

    def exchange(self, ask: ExchangeRequest, terms: Terms, listener: Listener) -> Callable[[], None]:
        """Takes a worker's value, and tells it how the round stands until it is complete. Returns how to stop that."""
        with self._lock:
            terms.check()
            self._rounds.limit, self._save = terms.limit, terms.save
            if not ask.number:
                listener.tell(Standing(self._rounds.following(ask.clock)))
                listener.finish()
                return _nothing
            given = Given(ask.incarnation, ask.clock, ask.value)
            before = self._rounds.completed
            live, started = self._live()
            found = self._rounds.contribute(ask.rank, ask.number, given, live, started)
            now = time.monotonic()
            if found is None:
                waiter = _Waiter(ask.rank, ask.incarnation, ask.clock, listener, now, now)
                self._waiters.append(waiter)
                listener.tell(Standing(ask.number, waiting_for=self._missing(live)))
                return lambda: self._drop(waiter)
            if self._rounds.completed > before:
                self._publish(found)
            listener.tell(Standing(found.number, found))
            return _nothing

    def changed(self) -> None:
        """Somebody joined, left, or is gone: it is not waited for, and where it waits itself it learns of it."""
        with self._lock:
            live, started = self._live()
            lost = [waiter for waiter in self._waiters if live.get(waiter.rank) != waiter.incarnation]
            self._waiters = [waiter for waiter in self._waiters if waiter not in lost]
            for waiter in lost:
                waiter.listener.fail(UnknownWorker(f"worker {waiter.rank} lost its place in the job: join again"))
            found = self._rounds.settle(live, started)
            if found is not None:
                self._publish(found)

    def end(self, error: NotFound | TryLater) -> None:
        """The job is over, or the coordinator stops: whoever waits is told."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.listener.fail(error)

    def waiting(self) -> bool:
        """Whether a worker waits."""
        return bool(self._waiters)

    def look_due(self) -> bool:
        """Whether it is time to ask the shards who waits there; seldom where those who wait have done so for long."""
        with self._lock:
            now = time.monotonic()
            waited = min((now - waiter.since for waiter in self._waiters), default=0.0)
            if waited < LOOK_SECONDS or now - self._looked < min(NOTICE_SECONDS, waited / 4):
                return False
            self._looked = now
            return True

    def look(self, waits: Collection[Wait]) -> None:
        """Tells those who wait how the round stands, as often as it is due.

        waits: of workers on shards, found since
        """
        with self._lock:
            live, _ = self._live()
            missing, now = self._missing(live), time.monotonic()
            number = self._rounds.completed + 1
            for waiter in list(self._waiters):
                # One that is behind in steps, and in this round already, will not make the step that is waited for.
                wanted = any(
                    wait.rank in missing and waiter.rank in wait.others and wait.clock > waiter.clock for wait in waits
                )
                if wanted or now - waiter.since >= HOLD_SECONDS:
                    self._waiters.remove(waiter)
                    waiter.listener.tell(Standing(number, None, missing, wanted))
                    waiter.listener.finish()
                elif now - waiter.told >= NOTICE_SECONDS:
                    waiter.told = now
                    waiter.listener.tell(Standing(number, None, missing))

    def _missing(self, live: Mapping[int, int]) -> tuple[int, ...]:
        _, started = self._live()
        ranks = set(live) if started else {*live, *range(self._world_size)}
        return tuple(sorted(ranks - self._rounds.given.keys()))

    def _publish(self, found: Round) -> None:
        self.done = self._rounds.completed, self._rounds.kept
        self._save()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.listener.tell(Standing(found.number, found))

    def _drop(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


def _nothing() -> None:
    pass
