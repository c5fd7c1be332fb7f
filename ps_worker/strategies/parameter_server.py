"""Training on parameter servers.

prepare    The models are described as a job. The worker registers and joins it, and connects to its shards. Then the
           models lie in flat buffers and have the job's weights, rank 0's at first.
backward   Gradients become ready, and full buckets leave as drafts (ps_worker/model/step.py).
step       `optimizer.step()` checks the gradients; a step that must not be pushed raises here and changes nothing.
           Weights and optimizer state that the script has set since the last step are sent first (assignments.py).
           Then every bucket that trains is pushed, and its weights at the next clock are pulled. Pushes never wait for
           other workers, pulls wait as long as the mode says. The step is over when all pushes are staged and all
           weights have landed.
lost       A worker loses its place by a pause, a partition, or a rollback of the job. That ends the step: the worker
           takes another place and goes on from its weights (ps_worker/cluster/participation.py). The gradient counts
           if all of it was staged. After a rollback the worker's own state is rolled back too, and the batch's other
           steps are left out.
between    Leased data, values over all workers (ps_worker/cluster/rounds.py), optimizer state that the script reads or
           sets.
beside     A group that is added to an optimizer later is a job of its own, with a step for each of that optimizer's
           (added.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ps_protocol.data import BatchLease, LeaseRequest
from ps_protocol.errors import InvalidRequest, UnknownWorker, Unsupported
from ps_protocol.layout import bucket_layout
from ps_worker.cluster.options import JobOptions
from ps_worker.cluster.participation import Participation, PlaceLost, end_last_step
from ps_worker.cluster.rounds import Rounds
from ps_worker.cluster.shared_memory import check_transport
from ps_worker.data.leased import LeasedLoader, Leases, StepData, loader_spec
from ps_worker.data.loaders import PreparedLoader, dividing_sampler, shard_loader, warning_once, with_plain_batches
from ps_worker.data.look_ahead import look_ahead
from ps_worker.metrics import ModelNumbers, WorkerMetrics
from ps_worker.model.job_spec import describe
from ps_worker.model.optimizer import ParameterStates, ServerOptimizer
from ps_worker.model.optimizer_state import StateCollector, States, states_before
from ps_worker.model.step import EndedStep, StepMaker
from ps_worker.model.streamed_round import step_maker
from ps_worker.state.checkpoint import BesideCheckpoint, WorkerCheckpoint
from ps_worker.state.ending import is_cut_short, undisturbed
from ps_worker.state.model_state import ModelState
from ps_worker.state.sender import LEAVING_SECONDS, StateSender
from ps_worker.strategies.added import AddedGroups, added_name
from ps_worker.strategies.assignments import Assignments
from ps_worker.strategies.row_reads import RowReads
from ps_worker.strategies.sent_step import SentStep, count_step
from ps_worker.strategies.strategy import Prepared
from ps_worker.tables.modules import named_tables
from ps_worker.tables.server_rows import ServerTables
from ps_worker.timeline.profiler import PULL, PUSH, WAIT, named
from ps_worker.timeline.recording import Timeline
from ps_worker.values import PrepareOptions, PullResult, PushResult, SavedState, StateChunk

log = logging.getLogger("ps_worker")

T = TypeVar("T")


class ParameterServer:
    """The strategy of sync, ssp and async, for one job. started: called when all declared workers have joined"""

    def __init__(
        self,
        job: JobOptions,
        metrics: WorkerMetrics,
        device: torch.device,
        started: Callable[[], None],
        timeline: Timeline,
    ) -> None:
        self._job = job
        self._metrics = metrics
        self._timeline = timeline
        self._device = device
        self._started = started
        self._joining: Participation | None = None  # from the beginning of `prepare` on
        self._training: JobTraining | None = None  # from the end of `prepare` on
        self._rounds: Rounds | None = None  # likewise

    @property
    def rank(self) -> int:
        """This worker's rank; 0 in an elastic job before `prepare`."""
        return self._training.participation.rank if self._training else self._job.rank or 0

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self._training.participation.world_size if self._training else self._job.world_size or 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0; in an elastic job the lowest live rank, as this worker heard last."""
        if self._training is not None:
            return self._training.participation.is_main
        if not self._job.world_size:
            raise InvalidRequest(
                "session.is_main: an elastic job gives out ranks when it is joined; call prepare first"
            )
        return self._job.rank == 0

    @property
    def clock(self) -> int:
        """Steps finished, counted from the job's beginning."""
        return self._training.clock if self._training else 0

    @property
    def round(self) -> int:
        """The same."""
        return self.clock

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns none: the model has the weights that were pulled last."""
        return {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> Prepared:
        """Joins the job; returns the models with rank 0's weights, and optimizers that step on the servers."""
        training = self._join(models, optimizers, options)
        return models, [ServerOptimizer(optimizer, training, index) for index, optimizer in enumerate(optimizers)]

    def _join(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        options: PrepareOptions,
        make: Callable[..., JobTraining] | None = None,
    ) -> JobTraining:
        figures, metrics_address = self._metrics.figures, self._metrics.announced
        self._joining = Participation(self._job, metrics_address, self._started, figures, self._timeline)
        training = join(self._joining, options, models, optimizers, self._metrics, self._device, make=make)
        self._training, self._rounds = training, Rounds(self._joining, training)
        return training

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> PreparedLoader | LeasedLoader:
        """Returns a loader of this worker's share; in an elastic job, of batches that the coordinator leases to it."""
        training = self._training
        if training is None:
            raise InvalidRequest(
                "prepare the model first, or together with its loaders: joining tells the share of data"
            )
        fixed = dividing_sampler(loader)
        if fixed is not None and not self._job.world_size:
            raise Unsupported(
                f"the loader's {type(fixed).__name__} divides the data once and for all, and workers of an elastic job "
                "come and go: give the loader shuffle=True or False instead"
            )
        share, timer = shard_loader(loader, training.participation.share, seed), self._metrics.timer
        is_iterable = isinstance(loader.dataset, IterableDataset)
        if self._job.world_size or is_iterable:
            begin = training.checkpoint.add_loader(share, training.look_ahead).batches
            if is_iterable:
                begin = warning_once(loader, training.participation.share, begin)
            return PreparedLoader(share, self._device, timer, begin)
        loader = with_plain_batches(loader)
        leases = Leases(loader_spec(len(training.data.accounts), loader, seed), training.data, training)
        shares = PreparedLoader(share, self._device, timer)
        return LeasedLoader(loader, shares, leases, self._device, timer, training.look_ahead)

    def keep(self, things: Sequence[Any]) -> None:
        """Has the state of these rolled back with the job, from `prepare` of the models on."""
        if self._training is not None:
            for thing in things:
                self._training.checkpoint.add(thing)
            self._training.checkpoint.try_restore()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients only add up; they leave with the next backward outside, or `step`."""
        return self._training.no_sync() if self._training else nullcontext()

    def samples(self, count: int) -> None:
        """Does nothing: an update has one step of each worker, and all weigh the same."""

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """Returns the values of all live workers, by rank; see Rounds.exchange."""
        if self._rounds is None:
            raise InvalidRequest(
                f"session.{what.split()[0]}: this worker takes no part in the job yet; call prepare first"
            )
        return self._rounds.exchange(value, what)

    def close(self) -> None:
        """Leaves the job and ends every thread and connection."""
        if self._training is not None:
            self._training.close()
        elif self._joining is not None:
            self._joining.close()


def join(
    participation: Participation,
    options: PrepareOptions,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    metrics: WorkerMetrics,
    device: torch.device,
    beside: bool = False,
    make: Callable[..., JobTraining] | None = None,
) -> JobTraining:
    """Joins a job; the models have its weights when this returns. Raises PSError; the worker has left again then.

    optimizers: those that step on the servers
    beside: the job goes beside another of this worker, to which all of the script's state belongs but the weights
    make:   what trains in it; takes what JobTraining does
    """
    job, world_size = participation.options, participation.options.world_size
    assert job.consistency is not None
    with ExitStack() as undo:
        undo.callback(participation.close)
        described, tensors = describe(
            models, optimizers, options, name=job.job, consistency=job.consistency, world_size=world_size
        )
        check_transport(described, job.transport)
        states = states_before(described, tensors, optimizers)
        spec = participation.join(described)
        optimizers_named = list(zip(spec.optimizers, optimizers, strict=True))
        tables = ServerTables(named_tables(models), spec.non_finite)
        layout, timeline = bucket_layout(spec.parameters, spec.bucket_bytes), participation.timeline
        timeline.describe(layout)
        steps = step_maker(spec)(
            *(spec, tensors, layout, optimizers_named, tables, options.overlap, metrics),
            draft=lambda full: participation.connection.draft(full),
            timeline=timeline,
        )
        undo.callback(steps.model.release)
        checkpoint_wanted = participation.connect(steps.model, states, tables)

        def begin(number: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> JobTraining:
            rank = participation.rank if world_size else None
            added = participation.beside(replace(job, job=added_name(job.job, number), rank=rank))
            # A step is counted once, by this job: nothing scrapes the metrics of the other.
            return join(added, options, [module], [optimizer], WorkerMetrics(), device, beside=True)

        groups = AddedGroups(spec, tensors, optimizers_named, begin)
        training = (make or JobTraining)(participation, steps, tensors, groups, metrics, device, beside)
        undo.callback(training.close)
        undo.callback(tables.connect(training.row_reads(), participation.connection.shards))
        metrics.watch_model(ModelNumbers(tables.looked_up, steps.model.residuals.ratio))
        for optimizer in optimizers:
            optimizer.state.clear()  # the shards have it, and a copy here would not follow
        frozen = {index: tensor for index, tensor in enumerate(tensors) if spec.parameters[index].group is None}
        training.begin(optimizers, frozen, checkpoint_wanted)
        tables.forget()
        undo.pop_all()
        return training


class JobTraining:
    """Trains models in one job, from joining it to its end: the step loop.

    Methods are for the training thread; any thread may read `clock` and call `close`.

    participation: this worker's place in the job
    data:          leased batches that no step has used yet
    checkpoint:    this worker's own part of the job's checkpoints
    stepped:       this process has made a step of its own
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
    ) -> None:
        self.data = StepData()
        self.stepped = False
        self.participation = participation
        self._steps = steps
        self._model = steps.model
        self._assignments = Assignments(steps.model, tensors)
        self._added = added
        self._metrics = metrics
        self._sender = StateSender(participation.coordinator, participation.members)
        self.checkpoint = (BesideCheckpoint if beside else WorkerCheckpoint)(device, self._sender.send)
        self._sent: SentStep | None = None
        self._restore_count = participation.connection.place.restore_count  # the rollbacks that this worker has made
        self._rolled_back = False  # and the script has asked for no batch since
        self._closing = False

    def begin(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        frozen: Mapping[int, torch.Tensor],
        checkpoint_wanted: bool,
    ) -> None:
        """Begins at the clock of the first place, with this worker's own state if one of its rank was here before.

        frozen: the tensors that no optimizer steps, by index in the job
        """
        if checkpoint_wanted:
            self.checkpoint.want(self.clock)
        self._steps.allow_drafts(self.participation.rank, self.participation.ranks)
        self.checkpoint.watch(optimizers, ModelState(frozen, self._model.residuals))
        saved = self.participation.connection.place.state
        if saved is not None:
            self.checkpoint.rollback(saved.content, self.clock, saved.clock)
        elif self.clock and self.participation.options.world_size:
            log.warning(
                "worker %d begins at clock %d without a state: no checkpoint has one of its rank, so its data and its "
                "schedulers begin anew",
                *(self.participation.rank, self.clock),
            )
        self.participation.begin_step()

    def close(self) -> None:
        """Leaves the job with this worker's state, and ends threads and connections; may be called more than once."""
        if self._closing:
            return
        self._closing = True
        self._added.close()
        state = None
        try:
            state = self._last_state()
        except Exception:
            log.exception("this worker's state could not be caught")  # the worker leaves all the same
        self._sender.close()
        self.participation.close(state, done=not is_cut_short())
        self._model.release()

    def _last_state(self) -> SavedState:
        """Returns this worker's state after its last step that counts: a signal may have ended it in the middle of one.

        A step counts if all its pushes are staged, whether or not the other workers have come. Of drafts, which count
        with the pull that commits them, it is known only if that has failed. After a rollback that this worker has not
        made yet, it is the state that it would go back to.
        """
        sent, place = self._sent, self.participation.members.place
        if place is not None and place.restore_count > self._restore_count and place.state is not None:
            return place.state  # it stops before it has gone on from there
        if sent is None:
            return SavedState(self.clock, self.checkpoint.last_state(self.clock, False, cut_short=is_cut_short()))
        counts = sent.counts(place)
        if counts is None:
            wait([push for push in sent.pushed if push not in sent.committing], LEAVING_SECONDS)
            failed = [
                push for push in sent.pushed if (push.exception() if push.done() else push not in sent.committing)
            ]
            if failed and len(failed) < len(sent.pushed):
                log.warning("this worker stops in step %d, of which a part may count", sent.clock)
            counts = not failed
        if counts:
            self._model.count(sent.buckets)
        clock = sent.clock - (not counts)
        return SavedState(clock, self.checkpoint.last_state(clock, counts, cut_short=is_cut_short()))

    @property
    def clock(self) -> int:
        """Steps finished, counted from the job's beginning."""
        return self.participation.connection.clock

    def row_reads(self) -> RowReads:
        """Returns what reads rows in this worker's place."""
        return RowReads(self.participation, self._in_place, self._metrics)

    def look_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of a loader; where a table finds its ids in them, one is read ahead."""
        tables = self._steps.tables
        return look_ahead(batches, tables.announce) if tables.look_ahead else batches

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, index: int) -> None:
        """Makes one step of one optimizer, or the step in which a lost place is replaced by another."""
        if self._closing:
            raise UnknownWorker("the session is closed: connect and prepare anew to train on")
        if self._rolled_back and self.checkpoint.waits_for_loader:
            return  # one of the remaining steps of a batch: the job was rolled back to before its first
        self._rolled_back = False
        self.checkpoint.stepping()
        self._metrics.timer.stepping()
        staged = self._in_place(lambda: self._exchange(index))
        self.stepped = True
        if staged is not None:
            (self.data.pushed if staged else self.data.lost)()
        self._added.step(index)

    def empty_step(self) -> None:
        """Makes a step without a gradient, for a worker that has no data while others wait for its clock."""
        self._metrics.empty_step()
        self.checkpoint.stepping()
        if self._in_place(lambda: self._exchange(None)) is not None:
            self.data.keep()  # no shard has seen it
        self._added.empty_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients only add up inside; they leave with the next backward outside, or `step`."""
        with self._steps.no_sync(), self._added.no_sync():
            yield

    def _in_place(self, exchange: Callable[[], None]) -> bool | None:
        """Runs an exchange with the shards; returns None. If the place is lost, takes another: see `come_back`."""
        self.participation.members.raise_lost()
        if self.participation.has_place:
            try:
                exchange()
                return None
            except PlaceLost:
                pass
            except BaseException as error:
                self.participation.connection.drop_drafts()
                self._steps.tables.give_back()
                if isinstance(error, Exception):  # a signal that ends the script leaves what is sent under way
                    if self._sent is not None:
                        self.participation.connection.fail()
                    self._sent = None
                    self.participation.begin_step()
                self.data.failed()
                raise
        return self.come_back()

    def _exchange(self, index: int | None) -> None:
        """Pushes a step of one optimizer, or of none, and pulls all weights."""
        connection = self.participation.connection
        end_last_step(self.participation)
        step = self._ended(index)
        self._model.begin_pull()
        ranges = self.data.use()
        pushes = self._steps.pushes(step, connection.clock + 1, ranges)
        with undisturbed():
            with named(PUSH):
                ahead = self._steps.tables.ask_ahead()
                pushed, pulls, committing = connection.push_pull(pushes, step.drafts_hold, step.rows, ranges, ahead)
            self._steps.tables.sent()
            buckets = [push.bucket for push in pushes if not push.empty]
            self._sent = SentStep(connection.place, connection.clock, [*pushed, *committing], committing, buckets)
        self._finish(pushed, pulls)
        self.data.pushed()

    def _ended(self, index: int | None) -> EndedStep:
        """Ends the step at hand, and sends what the script has set before it."""
        participation = self.participation
        self._assignments.find_weights()
        step = self._steps.end_empty() if index is None else self._steps.end(index)
        began_late = participation.came_late and not self.stepped
        if self._assignments.send(
            participation.connection, participation.ranks, began_late, self.checkpoint.at_pass_begin
        ):
            participation.settle()
        return step

    def _finish(self, pushes: list[Future[PushResult]], pulls: list[Future[PullResult]]) -> None:
        """Waits for a step's pushes and pulls, and counts them."""
        began = self._metrics.timer.now()
        with named(WAIT):
            self.participation.settle()
        with named(PULL):
            self._model.end_pull()
        is_wanted = count_step(self._metrics, pushes, pulls, began, self.clock)
        self._steps.allow_drafts(self.participation.rank, self.participation.ranks)
        with undisturbed():
            self._end_sent(counts=True)
            if is_wanted:
                self.checkpoint.want(self.clock)
            self.checkpoint.stepped()
            self.participation.timeline.end_step()
        self.participation.begin_step()

    def _end_sent(self, counts: bool) -> None:
        """Ends the step that is under way. counts: so what it has lost on the wire leaves with the next"""
        sent, self._sent = self._sent, None
        if counts and sent is not None:
            self._model.count(sent.buckets)

    # -- lost --------------------------------------------------------------------------------------------------------

    def come_back(self) -> bool:
        """Goes on in a new place, where the old one is lost. Ends the step at hand; returns whether it counts."""
        self._steps.abandon()
        self._steps.tables.forget_ahead()
        self._assignments.lost_step()
        lost = self.participation.connection
        checkpoint_wanted = self.participation.rejoin(self._model)
        place = self.participation.connection.place
        self._steps.allow_drafts(self.participation.rank, self.participation.ranks)
        rolled_back = place.restore_count > self._restore_count
        with undisturbed():
            self._restore_count = place.restore_count
            sent = self._sent
            staged = sent is not None and sent.counts(place)
            if staged is None:  # every push is done: no call of the old place is under way
                assert sent is not None
                staged = all(push.exception() is None for push in sent.pushed)
            self._end_sent(counts=staged)
            if checkpoint_wanted:
                self.checkpoint.want(self.clock)
            if rolled_back:
                self._roll_back(place.state)
            else:
                self.checkpoint.stepped()
        self._metrics.rejoined(not staged and not rolled_back, self.clock)
        self.participation.begin_step()
        log.warning(
            "worker %d lost its place at clock %d and goes on at clock %d as incarnation %d; %s",
            *(place.identity.rank, lost.clock, self.clock, place.identity.incarnation),
            "the job was rolled back" if rolled_back else f"its last gradient {'counts' if staged else 'is lost'}",
        )
        return staged

    def _roll_back(self, saved: SavedState | None) -> None:
        """Rolls this worker back with the job. saved: its own state of that checkpoint"""
        if saved is None:
            rank = self.participation.rank
            log.warning("worker %d had saved no state: its place in the data stays what it is", rank)
            self.checkpoint.forget()
        else:
            self.checkpoint.rollback(saved.content, self.clock, saved.clock)
            self.checkpoint.try_restore()
        self.data.rollback()
        self._rolled_back = True
        self._assignments.rollback(self.clock)

    # -- between steps -----------------------------------------------------------------------------------------------

    @property
    def others_wait(self) -> bool:
        """Whether other workers may wait for this one's clock."""
        return self._model.spec.consistency.max_staleness is not None

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self.participation.world_size

    def pause(self, seconds: float) -> None:
        """Waits; raises the reason if this worker takes part no more."""
        self.participation.wait(seconds)
        if self._closing:
            raise UnknownWorker("the session is closed")

    def lease(self, ask: LeaseRequest) -> BatchLease | None:
        """Returns batches of leased data; None: this worker took another place, and has to ask anew."""
        self.pause(0.0)
        try:
            return self.participation.call(lambda identity: self.participation.coordinator.lease(identity, ask))
        except PlaceLost:
            self.come_back()
            return None

    # -- the optimizers ----------------------------------------------------------------------------------------------

    def load(self, index: int, states: ParameterStates) -> None:
        """Has the next step begin with this state of one optimizer. Raises what `check_states` does."""
        self._added.load(index, states)
        self._assignments.load(self._steps.parameters_of(index), states)

    def state(self, index: int) -> ParameterStates:
        """Returns the state of one optimizer as the shards have it at this clock, or as the script has set it since."""
        parameters = self._steps.parameters_of(index)
        states = self._assignments.loaded(parameters)
        if states is None:
            states = self._fetched()
        return {**self._assignments.by_tensor(parameters, states), **self._added.state(index)}

    def _fetched(self) -> States:
        if self._closing:
            raise UnknownWorker(
                "the session is closed, and the optimizer's state went with its place in the job: save it before"
            )
        while True:
            collector = StateCollector(self._model.spec, self._model.layout)

            def fetch(land: Callable[[StateChunk], None] = collector.land) -> None:
                self.participation.connection.pull_state(land)
                self.participation.settle()

            if self._in_place(fetch) is None:
                return collector.states

    def add_group(self, index: int, group: dict[str, Any]) -> None:
        """Has one optimizer train more parameters, in a job beside this one. Raises what `AddedGroups.add` does."""
        parameters = self._added.add(index, group)
        self._assignments.note_between_passes(self.clock + 1)
        self.checkpoint.trains(parameters)
