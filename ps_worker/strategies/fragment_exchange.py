"""The exchange of a round that is pushed fragment by fragment, in mode `local:H/F`.

step     After a step at which a fragment is due, the worker pushes the fragment's difference and pulls its weights. The
         script goes on at once. Some steps later the worker mixes in the pulled weights, and waits only if they have
         not arrived by then (ps_worker/model/local_round.py).
round    On the servers, all fragments of a round have one clock: the number of the round. The round is over with its
         last fragment. Nothing is under way then, so this worker's state for a checkpoint is captured at that moment.
group    Where the worker is a group of processes, all members push a fragment or none does, and none mixes it in before
         it has come to all. They compare before each of the two; steps without either need none of that.
leaves   A worker that leaves in the middle of a round makes empty pushes for the rest of the round.
lost     The round at hand ends if the place is lost. The worker pushes what shards have not had of its fragments from
         the next place, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ps_protocol.messages.data import BucketPush
from ps_protocol.messages.workers import JoinResult
from ps_runtime.signals import undisturbed
from ps_worker.group import in_call
from ps_worker.metrics import PULL, PUSH, WAIT, WorkerMetrics, named
from ps_worker.model.flat import FlatModel
from ps_worker.model.local_round import LocalRound
from ps_worker.state.state_sender import LEAVING_SECONDS
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.sent_step import SentStep
from ps_worker.strategies.together import in_this_place
from ps_worker.strategies.unfinished import Unfinished
from ps_worker.values import PullResult, PushResult

T = TypeVar("T")
_Sent = tuple[list[Future[PushResult]], list[Future[PullResult]], list[Future[PullResult]]]


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
        """Whether the servers have confirmed all fragments of its round; None: they have not confirmed this one."""
        return super().counts(now) or None

    def lost(self, model: FlatModel) -> None:
        """Gives the fragment up, of which it is unknown whether it was staged. The residuals of its push
        are dropped.
        """
        model.residuals.forget(leaving.bucket for leaving in self.left)


class FragmentExchange:
    """Pushes the fragments of rounds and mixes them in. For the training thread; all members of a group make the same
    calls.

    begin_round: begins the next round; called when one is over
    sent:        is called when a fragment was pushed, or left out
    flight:      the fragment that was pushed and is not mixed in yet; None: there is none
    """

    def __init__(
        self,
        loop: JobTraining,
        at_hand: LocalRound,
        metrics: WorkerMetrics,
        begin_round: Callable[[], None],
        sent: Callable[[], None],
    ) -> None:
        self._loop, self._round, self._metrics = loop, at_hand, metrics
        self._begin_round, self._on_sent = begin_round, sent
        self.flight: SentFragment | None = None
        self._wanted = False  # a checkpoint wants this worker's state after the round at hand
        self._leaving = 0  # the last round of which members began to push a fragment

    # -- steps ---------------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Ends a step of the script; pushes and mixes in the fragments that are due."""
        loop = self._loop
        if self.is_broken_off:
            self._leave_round_out(partial(loop.step, None))
            return
        self._round.stepped()
        loop.stepped = True
        landed: list[bool] = []
        # One process looks in each step whether its place is lost. Members of a group would have to compare for that.
        exchanges = loop.participation.group is None or self._is_due
        if exchanges and loop.in_place(lambda: landed.append(self._advance()), compares=True) is not None:
            loop.data.lost()
        elif not any(landed):
            self._metrics.stepped_alone(self._round.steps)
        if not loop.is_past:  # a script without a loader sees in the clock that it was rolled back
            loop.rolled_back = None

    @property
    def is_broken_off(self) -> bool:
        """Whether all that was left of the current round was pushed from a new place, and an interrupt or an error has
        come before the round was over. Calls under way may write the weights after the round to the base, and no
        fragment may be pushed for it any more. The same in all members of a group, unless Ctrl-C came to one of them
        alone.
        """
        return self.flight is None and self._loop.participation.connection.clock >= self._round.number

    def _leave_round_out(self, step: Callable[[], None]) -> None:
        """Begins a round with the weights after the one that was broken off. Between the two is one without a
        difference, as in local:H. step: makes it, as a step of the script or one for others that wait
        """
        with self._metrics.rounds.exchanging():
            step()

    @property
    def _is_due(self) -> bool:
        """Whether a fragment is to be mixed in, or pushed, after the last step."""
        return self._has_to_land or self._round.leaving is not None

    @property
    def _has_to_land(self) -> bool:
        return self.flight is not None and self._round.step >= self.flight.due

    def empty_step(self) -> None:
        """Advances the round until a fragment is mixed in, because other workers wait for it.

        Steps that this worker has not made count, too, so that all clocks agree.
        """
        if self.is_broken_off:
            self._leave_round_out(self._loop.make_empty_step)
            return
        self._metrics.empty_step()
        self._loop.script.follow(may_ask_again=not self._round.made)
        self._loop.checkpoint.stepping(is_empty=True)
        self._loop.in_place(self._bring, compares=True)
        self._metrics.at(self._round.steps)

    def _bring(self) -> None:
        """Advances the round until a fragment is mixed in. Steps that this worker has not made count, so that all
        clocks agree.
        """
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
        at_hand, place = self._round, self._loop.participation.connection.place
        self._leaving = at_hand.number
        with self._part(fragment, "leaves"):
            is_pushed = at_hand.agree(self._with_all)
        pushes = at_hand.leave(fragment, at_hand.number, is_pushed)
        self._loop.model.begin_pull()
        with undisturbed():
            with named(PUSH):
                is_last = fragment == at_hand.fragments.count - 1
                pushed, pulls, committing = self._push(pushes, is_last)
            left = self._loop.model.left(push.bucket for push in pushes if not push.empty)
            due = at_hand.fragments.lands(fragment)
            waited_for: list[Future[Any]] = [*pushed, *committing]
            flight = SentFragment(place, at_hand.number, waited_for, committing, left, fragment, due, pushed, pulls)
            self._loop.sent = self.flight = flight
            self._loop.lag = int(is_last)
            at_hand.left()
        self._on_sent()

    def _push(self, pushes: Sequence[BucketPush], is_last: bool) -> _Sent:
        """Sends the pushes of a fragment, and asks for its weights. Returns what Connection.push_pull does.

        In a group an error is that of a push: it is raised where the fragment is due, by all members, of which the
        others have pushed theirs. One process raises it at once, and pushes the fragment in its next step.
        """
        connection = self._loop.participation.connection
        try:
            return connection.push_pull(pushes, False, (), (), is_part=not is_last)
        except Exception as error:
            if self._loop.participation.group is None:
                connection.clock = self._round.number - 1
                raise
            connection.fail(self._round.number - (not is_last))
            failed: Future[PushResult] = Future()
            failed.set_exception(error)
            return [failed], [], []

    def _with_all(self, make: Callable[[], tuple[T, bool]]) -> tuple[T, bool]:
        """Makes a part of the exchange of a fragment from the place at hand: see Participation.together_or."""
        part = self._loop.participation
        return part.together_or(partial(in_this_place, part, make))

    def _part(self, fragment: int, what: str) -> AbstractContextManager[None]:
        """Returns a context in which members of a group make one part of the exchange of a fragment. `what` is in the
        name of the call: so a member that was interrupted in one part, and is in another one than the rest, is found
        out.
        """
        call = f"optimizer.step (fragment {fragment} of round {self._round.number} {what})"
        return in_call(self._loop.participation.group, call)

    def _land_due(self) -> bool:
        """Mixes in the fragment that is under way, if its time has come; with the last one the round is over."""
        flight = self.flight
        if flight is None or not self._has_to_land:
            return False
        with self._part(flight.fragment, "lands"):
            self._land(flight)
        return True

    def _land(self, flight: SentFragment) -> None:
        began = self._metrics.timer.now()
        pulls, is_wanted = self._with_all(lambda: self._landed(flight))
        try:
            with undisturbed():
                with named(PULL):
                    self._round.land(flight.fragment)
                self._loop.sent = flight
                self._loop.end_sent(counts=True)
                is_over = bool(self._loop.lag)
                self.forget_flight()
                self._metrics.stepped([push.result() for push in flight.pushes], pulls, began, self._round.steps)
                self._wanted |= is_wanted
                if is_over:
                    self._end_round()
        finally:
            self._loop.model.base.share_alike()  # also where a signal is to act: the others wait for this member

    def _landed(self, flight: SentFragment) -> tuple[list[PullResult], bool]:
        """Waits for the calls of a fragment. Returns its pulls, and whether a checkpoint wants this worker's state of
        the round's end. Raises their first error, in each call.
        """
        with named(WAIT):
            self._loop.participation.settle()
        for push in flight.pushes:
            push.result()
        pulls = [pull.result() for pull in flight.pulls]
        return pulls, any(pull.checkpoint for pull in pulls)

    def await_flight(self) -> None:
        """Waits for the fragment in `flight`, whose weights are in the base then. Raises the first error of its calls,
        in each call.
        """
        assert self.flight is not None
        self._landed(self.flight)
        self._loop.model.end_pull(is_part=True)

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
        """Records a fragment under way as the sent step, because the place is lost."""
        if self.flight is not None:
            self._loop.sent = self.flight

    def rest(self) -> Unfinished:
        """Returns the remaining fragments of the current round, which may count, as one step for the next place."""
        at_hand, clock = self._round, self._loop.clock
        at_hand.leave_rest()
        return Unfinished(at_hand.whole(), clock, begun=clock + 1 if at_hand.pushed else None)

    def lost(self) -> None:
        """Forgets the current round, whose place is lost."""
        self._wanted = False
        self.forget_flight()

    def leave(self) -> None:
        """Makes empty pushes for the rest of the current round, in which this worker leaves, and waits for the calls
        under way.
        """
        at_hand, connection = self._round, self._loop.participation.connection
        if not self._loop.participation.has_place or self.is_broken_off:
            return
        calls = list(self.flight.pushes) if self.flight is not None else []
        first = at_hand.pushed
        if self.flight is not None and not self.flight.pulls:  # this member could not push it, and others have
            first = self.flight.fragment
        # Members of a group may have agreed on a fragment that this one, ended by a signal, has not pushed.
        is_group = self._loop.participation.group is not None
        if at_hand.pushed or (is_group and self._leaving == at_hand.number):
            calls += connection.push_apart(at_hand.leave_out(at_hand.number, first))
        wait(calls, LEAVING_SECONDS)
