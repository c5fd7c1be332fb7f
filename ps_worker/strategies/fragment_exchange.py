"""The exchange of a round that is pushed fragment by fragment, in mode `local:H/F`.

step     After a step at which a fragment is due, the worker pushes the fragment's difference and pulls its weights. The
         script goes on at once. Some steps later the worker mixes in the pulled weights, and waits only if they have
         not arrived by then (ps_worker/model/local_round.py).
round    On the servers, all fragments of a round have one clock: the number of the round. The round is over with its
         last fragment. Nothing is under way then, so this worker's state for a checkpoint is captured at that moment.
leaves   A worker that leaves in the middle of a round makes empty pushes for the rest of the round.
lost     The round at hand ends if the place is lost. The worker pushes what shards have not had of its fragments from
         the next place, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.messages.workers import JoinResult
from ps_runtime.signals import undisturbed
from ps_worker.metrics import PULL, PUSH, WAIT, WorkerMetrics, named
from ps_worker.model.flat import FlatModel
from ps_worker.model.local_round import LocalRound
from ps_worker.state.inner import InnerStates
from ps_worker.state.state_sender import LEAVING_SECONDS
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.sent_step import SentStep
from ps_worker.strategies.unfinished import Unfinished
from ps_worker.values import PullResult, PushResult


@dataclass(frozen=True)
class SentFragment(SentStep):
    """A fragment that was pushed and is not mixed in yet.

    fragment: its number
    due:      the step of the round after which it is mixed in
    pushes, pulls: all of its calls
    """

    fragment: int
    due: int
    pushes: Sequence[Future[PushResult]]
    pulls: Sequence[Future[PullResult]]

    def counts(self, now: JoinResult | None) -> bool | None:
        """Whether the servers have said that all fragments of its round count; None: they have not said so
        of this one.
        """
        return super().counts(now) or None

    def lost(self, model: FlatModel) -> None:
        """Gives the fragment up, of which it is unknown whether it was staged. The residuals of its push
        are dropped.
        """
        model.residuals.forget(self.buckets)


class FragmentExchange:
    """Pushes the fragments of rounds and mixes them in. For the training thread.

    begin_round: begins the next round; called when one is over
    flight:      the fragment that was pushed and is not mixed in yet; None: there is none
    """

    def __init__(
        self,
        loop: JobTraining,
        at_hand: LocalRound,
        inner: InnerStates,
        metrics: WorkerMetrics,
        begin_round: Callable[[], None],
    ) -> None:
        self._loop, self._round, self._inner = loop, at_hand, inner
        self._metrics, self._begin_round = metrics, begin_round
        self.flight: SentFragment | None = None
        self._wanted = False  # a checkpoint wants this worker's state after the round at hand

    # -- steps ---------------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Ends a step of the script; pushes and mixes in the fragments that are due."""
        loop = self._loop
        loop.rolled_back = False
        self._round.stepped()
        loop.stepped = True
        landed: list[bool] = []
        if loop.in_place(lambda: landed.append(self._advance())) is not None:
            loop.data.lost()
        elif not landed[0]:
            self._metrics.stepped_alone(self._round.steps)

    def empty_step(self) -> None:
        """Advances the round until a fragment is mixed in, because other workers wait for it.

        Steps that this worker has not made count, too, so that all clocks agree.
        """
        self._metrics.empty_step()
        self._loop.script.follow()
        self._loop.checkpoint.stepping(is_empty=True)
        self._loop.in_place(self._bring)
        self._metrics.at(self._round.steps)

    def _bring(self) -> None:
        """Lets the time of the round go on until a fragment is mixed in. Steps that are missing count, so that all
        clocks agree."""
        landed = False
        while not landed:
            self._round.stepped()
            landed = self._advance()

    def _advance(self) -> bool:
        """Mixes the pulled weights of the fragment under way into the model if its step has come, then pushes the next
        fragment if its step has. Without a delay that one is mixed in at once. Returns whether any was mixed in.
        """
        with self._metrics.rounds.exchanging():
            landed, fragment = self._land_due(), self._round.leaving
            if fragment is not None:  # nothing is under way
                self._send(fragment)
                landed |= self._land_due()
        return landed

    def _send(self, fragment: int) -> None:
        """Pushes a fragment, and asks for its weights."""
        connection, at_hand = self._loop.participation.connection, self._round
        pushes = at_hand.leave(fragment, connection.clock + 1)
        self._loop.model.begin_pull()
        with undisturbed():
            with named(PUSH):
                is_last = fragment == at_hand.fragments.count - 1
                pushed, pulls, committing = connection.push_pull(pushes, False, (), (), is_part=not is_last)
            buckets, due = [push.bucket for push in pushes if not push.empty], at_hand.fragments.lands(fragment)
            place, clock = connection.place, connection.clock + (not is_last)
            waited_for: list[Future[Any]] = [*pushed, *committing]
            flight = SentFragment(place, clock, waited_for, committing, buckets, fragment, due, pushed, pulls)
            self._loop.sent = self.flight = flight
            self._loop.lag = int(is_last)
            at_hand.left()
        if at_hand.left_out and not self._inner.is_finite:
            self._inner.begin_anew()

    def _land_due(self) -> bool:
        """Mixes in the fragment that is under way, if its time has come; with the last one the round is over."""
        flight, began = self.flight, self._metrics.timer.now()
        if flight is None or self._round.step < flight.due:
            return False
        self.await_flight()
        with undisturbed():
            with named(PULL):
                self._round.land(flight.fragment)
            self._loop.sent = flight
            self._loop.end_sent(counts=True)
            is_over = bool(self._loop.lag)
            self.forget_flight()
            pulls = [pull.result() for pull in flight.pulls]
            self._metrics.stepped([push.result() for push in flight.pushes], pulls, began, self._round.steps)
            self._wanted |= any(pull.checkpoint for pull in pulls)
            if is_over:
                self._end_round()
        return True

    def await_flight(self) -> None:
        """Waits for the calls of the fragment in `flight`. Raises their first error, in each call."""
        with named(WAIT):
            self._loop.participation.settle()
        assert self.flight is not None
        for push in self.flight.pushes:
            push.result()
        for pull in self.flight.pulls:
            pull.result()

    def _end_round(self) -> None:
        loop = self._loop
        if self._wanted:
            loop.checkpoint.want(loop.clock)
        self._wanted = False
        self._metrics.rounds.ended()
        loop.checkpoint.stepped()
        if loop.participation.timeline.wanted is not None:
            loop.participation.timeline.end_step()
        loop.participation.begin_step()
        self._begin_round()

    # -- lost, and left ------------------------------------------------------------------------------------------------

    def forget_flight(self) -> None:
        """Forgets all fragments that are under way."""
        self.flight, self._loop.lag = None, 0

    def losing(self) -> None:
        """Ends the current round, because the place is lost. Its remaining fragments become one step, pushed from the
        next place.
        """
        loop = self._loop
        if self.flight is not None:
            loop.sent = self.flight
        if loop.unfinished is None and self._round.is_streamed and not loop.rolled_back:
            with suppress(NonFiniteGradient):  # of which nothing is pushed
                self._end_fragments()
        self._wanted = False
        self.forget_flight()

    def _end_fragments(self) -> None:
        at_hand, clock = self._round, self._loop.clock
        if at_hand.step and at_hand.leave_rest():
            begun = clock + 1 if at_hand.pushed else None
            self._loop.unfinished = Unfinished(at_hand.whole(), clock, is_early=True, begun=begun)

    def leave(self) -> None:
        """Makes empty pushes for the rest of the current round, in which this worker leaves, and waits for the calls
        under way.
        """
        at_hand, connection = self._round, self._loop.participation.connection
        if not self._loop.participation.has_place:
            return
        calls = list(self.flight.pushes) if self.flight is not None else []
        if 0 < at_hand.pushed < at_hand.fragments.count:
            calls += connection.push_apart(at_hand.leave_out(connection.clock + 1))
        wait(calls, LEAVING_SECONDS)
