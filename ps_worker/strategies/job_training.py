"""The training of models in one job, from joining it to its end: the step loop.

backward   Gradients become ready, and full buckets leave as drafts (ps_worker/model/step.py).
step       `optimizer.step()` checks the gradients; a step that must not be pushed raises here and changes nothing.
           Weights and optimizer state that the script has set since the last step are sent first (assignments.py).
           Then every bucket that trains is pushed, and its weights at the next clock are pulled. Pushes never wait for
           other workers, pulls wait as long as the mode says. The step is over when all pushes are staged and all
           weights have landed.
lost       A worker loses its place by a pause, a partition, or a rollback of the job. It takes another one, with the
           weights there (ps_worker/cluster/participation.py). A step that was at hand counts as a whole: what shards
           have not had of it is pushed again from there (unfinished.py). Where a rollback has undone steps of this
           worker, its own state is rolled back too, and the batch's other steps are left out.
between    Leased data, values over all workers (value_rounds.py), optimizer state that the script reads or sets.
kind       What one step is, a step of gradients or a round of local steps: a StepKind (step_kind.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ps_protocol.batches import BatchLease, LeaseRequest
from ps_protocol.errors import UnknownWorker, Unsupported
from ps_protocol.messages.workers import JoinResult, SavedState
from ps_runtime.signals import exit_if_requested, is_cut_short, undisturbed
from ps_worker.cluster.participation import Participation, PlaceLost, arrive, break_off_move, end_last_step, teller
from ps_worker.data.leased import StepData
from ps_worker.data.look_ahead import look_ahead
from ps_worker.metrics import PULL, PUSH, WAIT, WorkerMetrics, named
from ps_worker.model.optimizer import ParameterStates
from ps_worker.model.step import StepMaker
from ps_worker.state.model_state import ModelState
from ps_worker.state.state_sender import StateSender
from ps_worker.strategies.added import AddedGroups
from ps_worker.strategies.assignments import Assignments, SetByScript, fetch_weights, fetched_states, send_assigned_rows
from ps_worker.strategies.job_stages import JobStages
from ps_worker.strategies.late_script import LateScript
from ps_worker.strategies.sent_step import SentStep, last_state
from ps_worker.strategies.step_kind import StepKind
from ps_worker.strategies.together import StepsTogether
from ps_worker.strategies.undone import undone_steps
from ps_worker.strategies.unfinished import Fate, Unfinished, count_interrupted, fate_in, has_all_before
from ps_worker.values import PullResult, PushResult

log = logging.getLogger("ps_worker")
_Calls = tuple[list[Future[PushResult]], list[Future[PullResult]], float]  # and when this worker began to wait for them


class JobTraining:
    """The step loop of one job. Methods are for the training thread; any thread may read `clock` and call `close`.

    kind:          what one step is; made from this loop
    participation: this worker's place in the job
    model, tensors: that it trains; the tensors in the order of the job's parameters
    data:          leased batches that no step has used yet
    assignments:   what the script has set and no step has taken along
    checkpoint:    this worker's own part of the job's checkpoints
    stepped:       this process has made a step of its own
    stages:        which optimizers step the job's parameters
    script:        what it has set, where this process has come late
    sent:          the step that is under way
    unfinished:    the step that has ended on this worker, until it counts
    rolled_back:   the job was, with this worker, from this number of steps; None: it was not, or a step was made since
    lag:           1 while the script goes on, and the weights of the connection's clock are still on their way; else 0
    """

    def __init__(
        self,
        participation: Participation,
        steps: StepMaker,
        tensors: Sequence[torch.Tensor],
        added: AddedGroups,
        metrics: WorkerMetrics,
        device: torch.device,
        beside: bool,
        kind: Callable[[JobTraining], StepKind],
    ) -> None:
        self.data = StepData()
        self.stepped = False
        self.participation = participation
        self._steps, self.model, self.tensors = steps, steps.model, tensors
        self.assignments = Assignments(steps.model, tensors, steps.tables)
        self._added = added
        self.stages = JobStages(participation, steps, self.assignments, added, lambda: self.checkpoint)
        self._metrics = metrics
        group, to_come = participation.group, (self._end, self._leave_out, self._push, self._come_back, self._broke_off)
        given = self.assignments, *to_come, self.model.base
        self._together = None if group is None else StepsTogether(group, participation, *given)
        self._sender = StateSender(participation.coordinator, participation.membership)
        self.sent: SentStep | None = None
        self.unfinished: Unfinished | None = None
        self.lag = 0
        self._counted: int | None = None  # the clock of the last step of this process that counts
        self._restore_count = participation.connection.place.restore_count  # the rollbacks that this worker has made
        self.rolled_back: int | None = None
        self._closing = False
        self._left: tuple[int, SetByScript, int] | None = None  # while between two places: see `_take_place`
        self._beside = beside
        self.kind = kind(self)
        self.checkpoint = self.kind.make_checkpoint(device, self._sender.send)
        late = participation, self.checkpoint, lambda: self.clock, self.kind.tell_script
        self.script = LateScript(*late, in_step=self.model.spec.consistency.one_clock)

    def begin(self, optimizers: Sequence[torch.optim.Optimizer], checkpoint_wanted: bool) -> None:
        """Begins at the clock of the first place, with the state that an earlier worker of this rank has left, if any.

        optimizers: the script's own; checkpoint_wanted: a checkpoint needs this worker's state at this clock
        """
        if checkpoint_wanted:
            self.checkpoint.want(self.clock)
        self._allow_drafts()
        self.checkpoint.watch(optimizers, ModelState.of(self.model, teller(self.participation, self.model)))
        saved = self.participation.connection.place.state
        if saved is not None:
            self.checkpoint.rollback(saved.content, self.clock, saved.clock)
        elif self.clock and self.participation.options.world_size:
            log.warning(
                "worker %d begins at clock %d without a state: no checkpoint has one of its rank, so its data begins "
                "anew",
                *(self.participation.rank, self.clock),
            )
        # With a state of an earlier clock, its schedule is behind the job's.
        if not self._beside and self.clock > (self.checkpoint.restored_clock or 0):
            self.script.joins()
        else:
            self.kind.tell_script()
        self.participation.begin_step()
        self.kind.begun()

    def close(self) -> None:
        """Leaves the job with this worker's state, and ends threads and connections; may be called more than once.
        Raises InvalidRequest at its end if steps are lost: see undone_steps.
        """
        if self._closing:
            return
        self._closing = True
        undone = None if self._beside else undone_steps(self.rolled_back, self.kind.counted, self.data)
        self.kind.leaving()
        self._added.close()
        state = None
        try:
            place = self.participation.membership.place
            state = last_state(self.checkpoint, self.clock, self.sent, place, self.model, self._restore_count)
            self.checkpoint.close()
        except Exception:
            log.exception("this worker's state could not be caught")  # the worker leaves all the same
        self._sender.close()
        self.participation.close(state, done=undone is None and not is_cut_short())
        self._sender.join()
        self.model.release()
        if undone is not None:
            raise undone

    @property
    def clock(self) -> int:
        """Steps finished, counted from the job's beginning."""
        return self.participation.connection.clock - self.lag

    def look_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of a loader. If a table can find its ids in them, one batch is read ahead."""
        tables = self._steps.tables
        return look_ahead(batches, tables.announce) if tables.look_ahead else batches

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, index: int | None) -> None:
        """Makes a step of an optimizer, by its number (None: a group leaves its round out). Rejoins first if needed."""
        if self._closing:
            raise UnknownWorker("the session is closed: connect and prepare anew to train on")
        exit_if_requested()
        if self.rolled_back is not None and self.is_past:
            self._steps.abandon()  # also rows that the optimizer has given its tables
            self.checkpoint.skip()  # one of the remaining steps of a batch: the job was rolled back to before its first
            return
        if index is not None and self._steps.stage.number:  # no optimizer is replaced before
            self.stages.check_steps(index)
        self.rolled_back = None
        if self.script.is_late:
            self.script.follow()
        self.checkpoint.stepping()
        self._metrics.timer.stepping()
        if self.unfinished is not None:
            self._drop_unfinished()  # it was interrupted: its gradient is here no more
        staged = self._step_in_place(index)
        self.stepped = True
        if staged is not None:
            (self.data.pushed if staged else self.data.lost)()
        if index is not None and self._added.groups:
            self._added.step(index)
        if self.rolled_back is not None and not self.is_past:  # a script without a loader sees it in the clock
            self.rolled_back = None

    @property
    def is_past(self) -> bool:
        """Whether the job was rolled back and the script has not reached its loader: its batch will come again."""
        return self.rolled_back is not None and self.checkpoint.waits_for_loader

    def empty_step(self) -> None:
        """Makes a step for a worker that has no data while others wait for its clock."""
        self.kind.empty_step()

    def make_empty_step(self) -> None:
        """Pushes a step without a gradient, so that workers which wait for this one's clock go on."""
        self._metrics.empty_step()
        self.script.follow()
        self.checkpoint.stepping(is_empty=True)
        if self._step_in_place(None) is not None:
            self.data.keep()  # no shard has seen it
        self._added.empty_step()

    def script_report(self) -> SavedState | None:
        """Returns what the script has set for the job, for workers that join late; None: nothing."""
        clock, report = self.clock, self.checkpoint.tells(self.clock)
        return None if report is None else SavedState(clock, report)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` block in which backward only accumulates gradients: the next backward outside sends them."""
        with self._steps.no_sync(), self._added.no_sync():
            yield

    def _step_in_place(self, index: int | None) -> bool | None:
        """Makes a step of one optimizer, or of none, as `in_place` runs an exchange."""
        if self._together is not None:
            with self.participation.script.standing():
                return self._together.step(index)
        end = None if index is None else lambda: self._end(index)
        return self.in_place(lambda: self._exchange(index), end)

    def _leave_out(self) -> None:
        self.unfinished = Unfinished(self._steps.end_empty(), self.clock)

    def in_place(
        self, exchange: Callable[[], None], end: Callable[[], object] | None = None, compares: bool = False
    ) -> bool | None:
        """Runs calls to the shards. Returns None; if the place was lost, takes another and returns as `come_back`.

        exchange: makes the calls and waits; end: ends the current step on this worker first; None: there is none
        compares: within it the members of a group compare, and hand on what they hold alike; otherwise at its end
        """
        with self.participation.script.standing():
            if self._together is not None:
                return self._together.run(exchange, compares)
            return self._in_this_place(exchange, end)

    def _in_this_place(self, exchange: Callable[[], None], end: Callable[[], object] | None) -> bool | None:
        may_call, is_local = self.participation.may_call, self.model.spec.local is not None
        is_behind = self._left is not None  # an interrupt came on the way to the place: it has not arrived there yet
        try:
            if not is_behind and may_call:
                try:
                    exchange()
                    return None
                except PlaceLost:
                    pass
            # Or it came in the step before: what the script has set for that one is known until this one ends.
            is_behind = is_behind or (self.sent is not None and self.unfinished is None and not is_local)
            if end is not None and self.unfinished is None and not is_behind:
                end()
        except BaseException as error:
            self._broke_off(error)
            raise
        counts = self.come_back()
        if is_behind and end is not None and self.rolled_back is None and not is_local:
            return self._in_this_place(exchange, end)
        if end is not None or self.rolled_back is not None:
            self._steps.abandon()
        return counts

    def _broke_off(self, error: BaseException) -> None:
        """Ends an exchange after an error other than the loss of the place."""
        self.participation.connection.drop_drafts()
        self._steps.tables.give_back()
        is_moving, is_sent = self._left is not None, self.sent is not None
        if isinstance(error, Exception) and not is_moving:  # a signal leaves what is sent under way, and so does a move
            if is_sent:
                self.participation.connection.fail()
                self._steps.tables.forget_ahead()  # their calls may have failed with the step
            self.sent = None
            self.participation.begin_step()
        elif self.sent is not None and self.unfinished is not None and self.unfinished.begun is not None:
            self.sent = self.sent.interrupted(self._steps.tables)
        begun = None if self.unfinished is None else self.unfinished.begun
        is_part = begun is not None and not is_sent and self._together is None  # sent from an earlier place
        if is_part:
            self._metrics.lost_step()
            log.warning("step %d was broken off before the rest of it was pushed: it is lost, or a part of it", begun)
        if is_part or (self.unfinished is not None and begun is None):
            self.assignments.take_back()
        self._drop_unfinished()
        self.data.failed()
        if is_moving and self.model.spec.local is None:
            break_off_move(self.participation, self.model)

    def _drop_unfinished(self) -> None:
        self.participation.connection.end_step()
        self.unfinished = None

    def _exchange(self, index: int | None) -> None:
        """Pushes a step of one optimizer, or of none, and pulls all weights."""
        end_last_step(self.participation)
        if self.sent is not None:  # it was interrupted, and is through, whatever becomes of this one
            self._counted = self.sent.clock
        self.unfinished = self.kind.end(index)
        self._push()

    def _allow_drafts(self) -> None:
        part = self.participation
        self._steps.allow_drafts(part.rank, part.ranks if part.connection.has_drafts else None)

    def _end(self, index: int | None) -> bool:
        self.unfinished = self.kind.end(index)
        return self.unfinished.step.is_empty

    def gather_assignments(self, began_late: bool = False, at_pass_begin: bool = False) -> None:
        """Includes what the script has set in the current step; see Assignments.gather."""
        place, ranks, later = self.participation.connection.place, self.participation.ranks, self._together is not None
        self.assignments.gather(place, self.clock + 1, ranks, began_late, at_pass_begin, later)

    def _push(self) -> None:
        """Pushes the step at hand, which has ended, to the shards that have not had it, and pulls all weights. In a
        group it is over once it is through for all members."""
        unfinished, clock = self.unfinished, self.participation.connection.clock
        assert unfinished is not None
        through: list[_Calls] = []  # of this process: the step may fail for another member of the group
        try:
            calls, is_wanted = self.participation.together_or(lambda: self._pushed(unfinished, through))
        except BaseException as error:
            if self._together is not None:
                self._together.push_failed(error, unfinished, clock + 1)
            if not isinstance(error, PlaceLost):
                self.model.step_failed(self.sent.left if through and self.sent is not None else None)
            raise
        self._finish(calls, is_wanted)
        if self._steps.tables.are_some:
            self._steps.tables.forget_assigned()
        if self.data.accounts:
            self.data.pushed()

    def _pushed(self, unfinished: Unfinished, through: list[_Calls]) -> tuple[_Calls, bool]:
        """Pushes the step at hand, and pulls. Once all is over it returns the calls, which it adds to `through`, with
        when it began to wait; and whether a checkpoint wants this worker's state after the step."""
        connection, step, begun = self.participation.connection, unfinished.step, unfinished.begun
        if self.sent is not None:  # it was interrupted, and is through
            self.model.count(self.sent.through())
            self._counted = self.sent.clock
        if self._steps.stage.number:
            self.stages.tell()
        if self.assignments.are_some and self.assignments.send(connection, begun):
            self.participation.settle()
        tables = self._steps.tables if self._steps.tables.are_some else None
        if tables is not None and tables.assigned():
            send_assigned_rows(self.participation, tables, begun)
        self.model.begin_pull()
        ranges = self.data.use() if self.data.accounts else ()
        pushes = self._steps.pushes(step, connection.clock + 1, ranges)
        with undisturbed():
            with named(PUSH):
                ahead = () if tables is None else tables.ask_ahead()
                pushed, pulls, committing = connection.push_pull(
                    pushes, step.drafts_hold, step.rows, ranges, ahead, begun=begun, is_awaited=True
                )
            if tables is not None:
                tables.sent()
            unfinished.begun = connection.clock if begun is None else begun
            left = self.model.left([push.bucket for push in pushes if not push.empty])
            self.sent = SentStep(connection.place, connection.clock, [*pushed, *committing], committing, left)
        began = self._metrics.timer.now()
        with named(WAIT):
            self.participation.settle()
        through.append((pushed, pulls, began))
        return through[0], any(pull.result().checkpoint for pull in pulls)

    def _finish(self, calls: _Calls, is_wanted: bool) -> None:
        """Counts a step's pushes and pulls, which are over. is_wanted: a checkpoint wants this worker's state, too"""
        with named(PULL):
            self.model.end_pull()
        if self._steps.stage.number:
            self.stages.shards_know()
        pushed, pulls, began = calls
        self._metrics.stepped([push.result() for push in pushed], [pull.result() for pull in pulls], began, self.clock)
        self._allow_drafts()
        with undisturbed():
            self.end_sent(counts=True)
            self._counted = self.clock
            if is_wanted and not self.checkpoint.waits_for_loader:
                self.checkpoint.want(self.clock)
            self.checkpoint.stepped()
            if self.participation.timeline.wanted is not None:
                self.participation.timeline.end_step()
        self.participation.begin_step()
        self.kind.finished()

    def end_sent(self, counts: bool) -> None:
        """Ends the step under way. counts: what its wire format has rounded off is added to the next push"""
        sent, self.sent = self.sent, None
        if sent is not None and not counts:
            sent.lost(self.model)
        elif sent is not None:
            self.model.count(sent.left)
        self._drop_unfinished()
        if self.assignments.are_some:
            self.assignments.step_is_over()

    # -- lost --------------------------------------------------------------------------------------------------------

    def come_back(self) -> bool:
        """Takes another place after the current one is lost. Returns whether the current step counts.

        Buckets that have not had the step are pushed again from there. If that place is lost, too, this is repeated.
        """
        return self._come_back() if self._together is None else self._together.go_on()

    def _come_back(self) -> bool:
        try:
            if self._left is None:
                self.kind.losing()
            counts = self._take_place()
            while self.unfinished is not None:
                try:
                    self._push()
                    counts = True
                except PlaceLost:
                    counts = self._take_place()
        except BaseException as error:
            self._broke_off(error)
            raise
        return counts

    def _take_place(self) -> bool:
        """Takes a new place; returns whether the step at hand counts. It is kept if it is to be pushed again."""
        unfinished, lost = self.unfinished, self.participation.connection
        is_leased = unfinished is not None and bool(self.data.use())
        self.stages.place_lost()
        self._steps.place_lost()
        gradients = self.model.held_gradients()
        is_sent = unfinished is not None or self.sent is not None
        if self._left is None:
            self._left = self.clock, self.assignments.at_hand(is_sent, since=unfinished is None), self.kind.counted
        elif unfinished is None:  # an interrupt came on the way: the script may have set more
            self._left = self._left[0], self.assignments.with_later(self._left[1]), self._left[2]
        (done, set_by_script, counted), rule = self._left, self.model.spec.consistency
        checkpoint_wanted = self.participation.rejoin(self.model)
        place = self.participation.connection.place
        self._allow_drafts()
        rolled_back = place.restore_count > self._restore_count
        with undisturbed():
            has_all = has_all_before(place, done, unfinished, self.sent, self._counted, rule)
            rolled_back = rolled_back and (bool(self.data.accounts) or not has_all)
            if rolled_back:
                with self.participation.script.moving():
                    self._roll_back(place.state, counted)
            else:
                self.sent, self._counted = count_interrupted(unfinished, self.sent, place, self.model, self._counted)
            fate = self._fate(place, rolled_back, is_leased)
            fate = fate if self._together is None else self._together.fate(fate)  # an interrupt waits for `arrived`
            if fate is Fate.AGAIN and unfinished is not None:
                unfinished.goes_on_from(place)
                self.model.hold_gradients(gradients)
                self.sent = None
            else:
                self._end_in_place(fate, rolled_back, set_by_script)
            if fate is Fate.COUNTS and unfinished is not None:
                self._counted = unfinished.begun
            if not rolled_back:
                self._checkpoint_in_place(checkpoint_wanted, fate)
            self._restore_count, self._left = place.restore_count, None
            again = rolled_back and (self.checkpoint.waits_for_loader or bool(self.data.accounts))
            self.kind.moved(self.unfinished is not None, again and (unfinished is not None or not is_sent), unfinished)
            arrive(self.participation)
            if self._together is not None and self.unfinished is not None:
                self._together.arrived()  # otherwise once what members hold alike is here
        self._metrics.rejoined(fate.is_lost, self.clock)
        self.participation.begin_step()
        log.warning(
            "worker %d lost its place at clock %d and goes on at clock %d as incarnation %d; %s%s",
            *(place.identity.rank, lost.clock, self.clock, place.identity.incarnation),
            *("the job was rolled back; " if rolled_back else "", fate.value),
        )
        return fate is Fate.COUNTS

    def _end_in_place(self, fate: Fate, rolled_back: bool, set_by_script: SetByScript) -> None:
        """Ends the step at hand in a new place. What the script has set and does not count goes with the next step."""
        sent, tables, counts = self.sent, self._steps.tables, fate is Fate.COUNTS
        is_lost = sent is not None and not counts and not sent.has_counted(self.participation.connection.place)
        if rolled_back or (counts and self.unfinished is not None):  # otherwise rows that are there were set since
            tables.forget_assigned()
        self.end_sent(counts)
        if not rolled_back:
            tables.keep_assigned(sent.assigned if sent is not None and is_lost else {})
            self.assignments.keep(set_by_script, counts)

    def _fate(self, place: JoinResult, rolled_back: bool, is_leased: bool) -> Fate:
        """Returns the fate of the current step in a new place. rolled_back: whether this worker was rolled back"""
        sets = self.assignments.has_some or bool(self._steps.tables.assigned())
        where = rolled_back, self.model.spec.consistency.one_clock, is_leased, self.checkpoint.waits_for_loader
        return fate_in(place, self.unfinished, self.sent, sets, *where)

    def _checkpoint_in_place(self, wanted: bool, fate: Fate) -> None:
        """Saves this worker's state at the clock of a new place, if a checkpoint wants it."""
        if fate in (Fate.AGAIN, Fate.NO_STEP, Fate.DATA_COMES_AGAIN):
            if wanted and self.model.spec.local is None:  # it is before the step at hand
                self.checkpoint.between_steps(self.clock, has_begun=fate is not Fate.NO_STEP)
            return
        if wanted:
            self.checkpoint.want(self.clock)
        self.checkpoint.stepped()

    def _roll_back(self, saved: SavedState | None, counted: int) -> None:
        """Rolls this worker back with the job. saved: its own state of that checkpoint; counted: steps until now"""
        with nullcontext() if self._together is None else self._together.interrupt_later():
            if saved is None:
                rank = self.participation.rank
                log.warning("worker %d had saved no state: its place in the data stays what it is", rank)
                if not self._beside:
                    self.script.goes_back()
                self.checkpoint.forget()
                self.checkpoint.inner.restore(self.clock, None)
            else:
                self.checkpoint.rollback(saved.content, self.clock, saved.clock)
                self.checkpoint.try_restore()
        self.data.rollback()
        self.rolled_back = max(counted, self.rolled_back or 0)
        self.assignments.rollback(self.clock)

    # -- between steps -----------------------------------------------------------------------------------------------

    @property
    def others_wait(self) -> bool:
        """Whether other workers may wait for this one's clock."""
        return self.model.spec.consistency.max_staleness is not None

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self.participation.world_size

    def pause(self, seconds: float) -> None:
        """Waits for `seconds`. Raises the error that ended this worker's part in the job, if there is one."""
        with self.participation.script.standing():
            self.participation.wait(seconds)
        if self._closing:
            raise UnknownWorker("the session is closed")

    def lease_batches(self, ask: LeaseRequest) -> BatchLease | None:
        """Leases batches of data. Returns None if this worker has taken another place: then call it again."""
        self.pause(0.0)
        try:
            with self.participation.script.standing():
                return self.participation.call(lambda who: self.participation.coordinator.lease_batches(who, ask))
        except PlaceLost:
            self.come_back()
            return None

    def refresh(self) -> None:
        """Pulls the weights with every update that is staged, of any worker, into the model.

        In sync the model has them already, and in local:H it has its own weights within a round: nothing is pulled.
        Weights that the script has set since its last step stay, and are sent with the next.
        """
        if self._closing or self.model.spec.local is not None:
            return
        if not self.model.spec.consistency.one_clock:
            wanted: list[bool] = []
            fetch = partial(fetch_weights, self.participation, self.assignments, self.model, self._metrics)
            while self.in_place(lambda: wanted.append(fetch())) is not None:
                pass
            if self.participation.together_or(lambda: (None, wanted[-1]))[1]:
                self.checkpoint.want(self.clock)
        self._added.refresh()

    # -- the optimizers ----------------------------------------------------------------------------------------------

    def load(self, index: int, states: ParameterStates) -> None:
        """Sets the state of one optimizer with which the next step begins. Raises what `check_states` does."""
        self.stages.check_steps(index)
        self._added.load(index, states)
        self.assignments.load(self._steps.parameters_of(index), states)

    def state(self, index: int) -> ParameterStates:
        """Returns the state of one optimizer: as the script has set it since the last step, or the shards'."""
        self.stages.check_steps(index)
        at, stage = (self.participation, self.in_place), self._steps.stage
        fetch = partial(fetched_states, *at, stage, self.model.layout)
        own = self.assignments.state_of(stage, index, self.participation.group, fetch)
        return {**own, **self._added.state(index)}

    def add_group(self, index: int, group: dict[str, Any]) -> None:
        """Trains more parameters with one optimizer, in a second job beside this one. Raises as `AddedGroups.add`."""
        if self.participation.group is not None:
            raise Unsupported("a worker that is a group of processes trains the parameters that it began with")
        self.stages.check_steps(index)
        self.checkpoint.trains(self._added.add(index, group))
        self.assignments.note_between_passes(self.clock + 1)
