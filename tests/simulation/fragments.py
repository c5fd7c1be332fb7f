"""A worker's rounds of mode `local:H/F`: it pushes and pulls one fragment of the buckets after the other.

It does as ps_worker.strategies.fragment_exchange: what a fragment's calls do is not waited for until it is due, and
steps go on meanwhile; with the last fragment the round is over, and all buckets are of the same clock. A worker of one
process looks in each step whether its place is lost. Members of a group meet, and look, where a fragment leaves and
where it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ps_protocol.fragments import Fragments

if TYPE_CHECKING:
    from tests.simulation.runs import Run
    from tests.simulation.worker import Place, Worker


class StreamedRound:
    """The round at hand of one worker."""

    def __init__(self, worker: Worker, run: Run) -> None:
        self._worker, self._run = worker, run
        self._step = self._pushed = 0
        self._flight: tuple[Place, Callable[[], None]] | None = None  # of the fragment that was pushed last

    @property
    def is_under_way(self) -> bool:
        """Whether some fragments of the round have left, and it is not over."""
        return self._pushed > 0

    def begun_in(self, place: Place) -> int | None:
        """Returns the number of the round, if fragments of it were pushed from a place, which may be lost by now."""
        return place.clock + (0 if self._has_sent_all else 1) if self._pushed else None

    @property
    def number(self) -> int:
        """The number of the round, from 1."""
        return self._worker.clock + (0 if self._has_sent_all else 1)

    @property
    def _fragments(self) -> Fragments:
        local = self._run.spec.local
        assert local is not None
        assert local.fragments is not None
        return local.fragments

    @property
    def _has_sent_all(self) -> bool:
        return self._pushed > 0 and self._pushed == self._fragments.count

    def begin(self, clock: int) -> None:
        """Begins the round after so many others; nothing is under way."""
        local = self._run.spec.local
        self._step = 0 if local is None or clock == local.warm_up else local.delay
        self._pushed, self._flight = 0, None

    def stepped(self, place: Place) -> None:
        """Ends a step: takes the fragment that is due, and pushes the one that is. Raises PlaceLost."""
        parts = self._fragments
        self._step += 1
        if len(self._worker.members.hosts) == 1:
            self._worker.check(place)
        self._land()
        if self._pushed < parts.count and self._step >= parts.leaves(self._pushed):
            self._send(place)
            self._land()

    def _send(self, place: Place) -> None:
        """Pushes the next fragment, and asks for its weights, at the clock after this round."""
        worker, number, fragment = self._worker, self.number, self._pushed
        worker.check(place)
        worker.members.meet()
        if fragment == 0:
            worker.attempt(place, number)
        buckets = [bucket for bucket in self._run.buckets if self._fragments.of(bucket) == fragment]
        gradient = worker.gradient(number, number)
        works = worker.pulls(place, number, buckets, apart=True)
        works += worker.pushes(place, number, gradient, buckets)
        works += worker.exchanges(place, number, gradient, buckets)
        self._pushed += 1
        if self._has_sent_all:
            place.clock = number
        self._flight = place, worker.begun(place, works)

    def _land(self) -> None:
        """Waits for the fragment that is under way, if it is due; ends the round with the last one."""
        if self._flight is None or self._step < self._fragments.lands(self._pushed - 1):
            return
        place, await_all = self._flight
        self._worker.check(place)
        await_all()
        self._worker.members.meet()
        self._flight = None
        if self._has_sent_all:
            number = self.number
            self.begin(number)
            self._worker.acknowledge(place, number, number)
