"""Local steps whose model is pushed fragment by fragment: the mode `local:H/F`.

step     `optimizer.step()` steps on this worker. After a step at which a fragment is due, its difference is pushed and
         its weights are pulled, and the script goes on at once. Some steps later what was pulled is mixed in; only then
         does the worker wait, should it not be there yet (ps_worker/model/local_round.py).
round    Its clock on the servers is the round, for every fragment. It is over with the last fragment: nothing is under
         way then, and this worker's own state of a checkpoint is of that moment.
leaves   A worker that leaves in the middle of a round leaves the rest of it out, by empty pushes.
lost     As in local.py: a lost place ends the round at hand. What shards have not had of its fragments is pushed from
         the next place, all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ps_protocol.errors import NonFiniteGradient, Unsupported
from ps_worker.data.leased import LeasedLoader
from ps_worker.data.loaders import PreparedLoader
from ps_worker.state.ending import undisturbed
from ps_worker.state.inner import InnerStates
from ps_worker.state.inner_weights import InnerWithWeights
from ps_worker.state.sender import LEAVING_SECONDS
from ps_worker.strategies.local import LocalSteps, LocalTraining
from ps_worker.strategies.sent_step import SentStep, count_step
from ps_worker.strategies.unfinished import Unfinished
from ps_worker.timeline.profiler import PULL, PUSH, WAIT, named
from ps_worker.values import JoinResult, PullResult, PushResult, SavedState

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class SentFragment(SentStep):
    """A fragment that is under way.

    fragment: its number
    due:      the step of the round after which it is mixed in
    pushes, pulls: all of its calls
    """

    fragment: int
    due: int
    pushes: Sequence[Future[PushResult]]
    pulls: Sequence[Future[PullResult]]

    def counts(self, now: JoinResult | None) -> bool | None:
        """Whether the servers said that all fragments of its round count. None: they said nothing of this one."""
        return super().counts(now) or None


class StreamedSteps(LocalSteps):
    """The strategy of local:H/F, for one job."""

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> PreparedLoader | LeasedLoader:
        """Returns a loader as in sync. Raises Unsupported in an elastic job for one whose batches would be leased."""
        if not self._job.world_size and not isinstance(loader.dataset, IterableDataset):
            raise Unsupported(
                "an elastic job of local:H/F leases no batches, as the steps of one batch are in rounds of different "
                "fragments: give the job a world size, or its loader an IterableDataset, or use local:H"
            )
        return super().prepare_loader(loader, seed)

    @property
    def _training_class(self) -> type[LocalTraining]:
        return StreamedTraining


class StreamedTraining(LocalTraining):
    """Trains models in one job of local:H/F."""

    def __init__(self, *arguments: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(*arguments, optimizers=optimizers)
        self._streamed = self._round
        self._flight: SentFragment | None = None
        self._wanted = False  # a checkpoint wants this worker's state after the round at hand

    def _states_of(self, optimizers: Sequence[torch.optim.Optimizer]) -> InnerStates:
        fresh, base, at_hand = self._metrics.fresh_inner_state, self._model.base, self._round
        return InnerWithWeights(optimizers, fresh, base, lambda: not at_hand.made, lambda: self.clock)

    @property
    def clock(self) -> int:
        """Rounds that are over, counted from the job's beginning."""
        return self.participation.connection.clock - self._last_is_under_way

    @property
    def _last_is_under_way(self) -> bool:
        return self._flight is not None and self._flight.fragment == self._streamed.fragments.count - 1

    def base(self) -> Mapping[int, torch.Tensor]:
        """Returns of each fragment what was pulled last, by the id of the parameter. Waits for one under way."""
        if self._flight is not None:
            with self._metrics.rounds.exchanging():
                self._in_place(self._await_flight)
            self._model.end_pull(is_part=True)
        if self._flight is not None:
            return self._model.base.values()
        return super().base()

    def close(self) -> None:
        """Leaves the job as LocalTraining does, when what is under way is staged. In the middle of a round it leaves
        the rest of it out."""
        if not self._closing:
            try:
                self._leave_round()
            except Exception:
                log.exception("the round at hand could not be left out")  # the worker leaves all the same
        super().close()

    def _leave_round(self) -> None:
        at_hand, connection = self._streamed, self.participation.connection
        if not self.participation.has_place:
            return
        calls = list(self._flight.pushes) if self._flight is not None else []
        if 0 < at_hand.pushed < at_hand.fragments.count:
            calls += connection.push_apart(at_hand.leave_out(connection.clock + 1))
        wait(calls, LEAVING_SECONDS)

    def _last_state(self) -> SavedState:
        """Returns this worker's state after its last round that is over."""
        if self._flight is not None:  # the round of a fragment is not over
            self._sent = None
        return super()._last_state()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _stepped(self) -> None:
        """Ends a step of one of the script's optimizers; pushes and mixes in the fragments that are due."""
        waits = self._rolled_back and self.checkpoint.waits_for_loader
        if waits or not self._streamed.is_streamed:
            super()._stepped()
            return
        self._rolled_back = False
        self._streamed.stepped()
        self.stepped = True
        landed: list[bool] = []
        if self._in_place(lambda: landed.append(self._advance())) is not None:
            self.data.lost()
        elif not landed[0]:
            self._metrics.stepped_alone(self.steps)

    def empty_step(self) -> None:
        """Brings the next fragment, where others wait for it: with the steps that were made."""
        if not self._streamed.is_streamed:
            super().empty_step()
            return
        self._metrics.empty_step()
        self._follow_job()
        self.checkpoint.stepping(is_empty=True)
        self._in_place(self._bring)
        self._metrics.at(self.steps)

    def _bring(self) -> None:
        """Lets the time of the round go on until a fragment is mixed in. Steps that are missing count, so that all
        clocks agree."""
        landed = False
        while not landed:
            self._streamed.stepped()
            landed = self._advance()

    def _advance(self) -> bool:
        """Mixes in the fragment that is due, and pushes the one that is; returns whether one was mixed in."""
        with self._metrics.rounds.exchanging():
            landed, fragment = self._land_due(), self._streamed.leaving
            if fragment is not None:  # nothing is under way
                self._send(fragment)
                landed |= self._land_due()
        return landed

    def _send(self, fragment: int) -> None:
        """Pushes a fragment, and asks for its weights."""
        connection, at_hand = self.participation.connection, self._streamed
        pushes = at_hand.leave(fragment, connection.clock + 1)
        self._model.begin_pull()
        with undisturbed():
            with named(PUSH):
                is_last = fragment == at_hand.fragments.count - 1
                pushed, pulls, committing = connection.push_pull(pushes, False, (), (), is_part=not is_last)
            buckets, due = [push.bucket for push in pushes if not push.empty], at_hand.fragments.lands(fragment)
            place, clock = connection.place, connection.clock + (not is_last)
            waited_for: list[Future[Any]] = [*pushed, *committing]
            flight = SentFragment(place, clock, waited_for, committing, buckets, fragment, due, pushed, pulls)
            self._sent = self._flight = flight
            at_hand.left()
        if at_hand.left_out and not self._inner.is_finite:
            self._inner.begin_anew()

    def _land_due(self) -> bool:
        """Mixes in the fragment that is under way, if its time has come; with the last one the round is over."""
        flight, began = self._flight, self._metrics.timer.now()
        if flight is None or self._streamed.step < flight.due:
            return False
        self._await_flight()
        with undisturbed():
            with named(PULL):
                self._streamed.land(flight.fragment)
            self._sent = flight
            self._end_sent(counts=True)
            is_over, self._flight = self._last_is_under_way, None
            self._wanted |= count_step(self._metrics, flight.pushes, flight.pulls, began, self.steps)
            if is_over:
                self._end_round()
        return True

    def _await_flight(self) -> None:
        """Waits for the fragment that is under way. Raises its error, as often as it is asked for."""
        with named(WAIT):
            self.participation.settle()
        assert self._flight is not None
        for push in self._flight.pushes:
            push.result()
        for pull in self._flight.pulls:
            pull.result()

    def _end_round(self) -> None:
        if self._wanted:
            self.checkpoint.want(self.clock)
        self._wanted = False
        self._metrics.rounds.ended()
        self.checkpoint.stepped()
        self.participation.timeline.end_step()
        self.participation.begin_step()
        self._begin_round()

    def _end_sent(self, counts: bool) -> None:
        """Ends the step that is under way. Of a fragment that may be staged or not, what the wire has cost is lost."""
        if isinstance(self._sent, SentFragment) and not counts:
            self._model.residuals.forget(self._sent.buckets)
        super()._end_sent(counts)

    # -- lost --------------------------------------------------------------------------------------------------------

    def come_back(self) -> bool:
        """Goes on in a new place, as LocalTraining does: at the beginning of a round, with the weights there."""
        if self._flight is not None:
            self._sent = self._flight
        if self._unfinished is None and self._streamed.is_streamed and not self._rolled_back:
            with suppress(NonFiniteGradient):  # of which nothing is pushed
                self._end_fragments()
        self._flight, self._wanted = None, False
        return super().come_back()

    def _end_fragments(self) -> None:
        """Ends the round at hand with the steps that were made: what is left of its fragments is a step of its own."""
        at_hand = self._streamed
        if at_hand.step and at_hand.leave_rest():
            begun = self.clock + 1 if at_hand.pushed else None
            self._unfinished = Unfinished(at_hand.whole(), self.clock, is_early=True, begun=begun)

    def _begin_round(self) -> None:
        self._flight = None
        super()._begin_round()
