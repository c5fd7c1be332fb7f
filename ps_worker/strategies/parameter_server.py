"""Training on a parameter server.

prepare   describe the models as a job, register it, join, move them into flat buffers, start from rank 0's weights
step      push every bucket's gradient, pull every bucket's weights; pulls wait as long as the mode says, pushes never
          a script with several optimizers steps one of them: the buckets of the others get empty pushes
assign    what the script has changed itself since the last step, weights or optimizer state, goes with the step
lost      a worker whose place was lost (a pause, a partition, a job set back) takes another, and goes on from there
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, NotFound, PSError, UnknownWorker
from ps_protocol.job import MAX_BUCKET_BYTES, HyperParameters, JobSpec, NonFinite, validate
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_runtime.launch_id import report_started
from ps_worker.cluster.connection import Shards
from ps_worker.cluster.convert import BucketPush, DataRange, JoinResult, Lease, Offer, RoundNews, StateChunk
from ps_worker.cluster.coordinator import CoordinatorClient
from ps_worker.cluster.membership import Membership
from ps_worker.cluster.rounds import Heard, Rounds
from ps_worker.cluster.transports import PullResult, PushResult
from ps_worker.data.leased import StepData
from ps_worker.metrics import WorkerMetrics
from ps_worker.model.flat import FlatModel
from ps_worker.model.job_spec import describe, has_stepped
from ps_worker.model.optimizer import ParameterStates, ServerOptimizer
from ps_worker.model.optimizer_state import StateCollector, States, check_states, pieces, tensors_of
from ps_worker.model.outgoing import LiveGroups, bucket_push, is_left_out
from ps_worker.model.overlap import Overlap
from ps_worker.state.checkpoint import Bystander, WorkerCheckpoint
from ps_worker.state.sender import StateSender
from ps_worker.strategies.added import checked_group, holder, optimizer_of
from ps_worker.strategies.options import JobOptions
from ps_worker.strategies.strategy import Prepared

log = logging.getLogger("ps_worker")


class _PlaceLost(Exception):
    """A call failed because the place it was made from was lost; its cause says how."""


class ParameterServer:
    """One worker of one job."""

    def __init__(self, options: JobOptions, metrics: WorkerMetrics, device: torch.device, beside: bool = False) -> None:
        """beside: the job goes beside another of this worker, which has all but the weights; see `added`."""
        self._options = options
        self._device = device
        self._metrics = metrics
        self._coordinator = CoordinatorClient(options.server, options.link.timeout, options.link.access)
        self._members = Membership(
            self._coordinator,
            options.job,
            options.rank,
            options.world_size,
            options.link.timeout,
            options.start_timeout,
            metrics.announced,
            self._finished,
            self._moved,
            options.launch,
        )
        self._sender = StateSender(self._coordinator, self._members)
        self.rewind = (Bystander if beside else WorkerCheckpoint)(device, self._sender.send)
        self._added: list[tuple[int, ParameterServer]] = []  # by the optimizer that has them
        self._place: JoinResult | None = (
            None  # the one that the training thread is in; the membership may have a newer one
        )
        self._shards: Shards | None = None
        self._flat: FlatModel | None = None
        self._begun = False
        self._lost: BaseException | None = None  # how the place that the training thread is in was lost
        self._pushed: list[Future[Any]] = []  # once all of these are done, the step at hand counts
        self._relied_on: int | None = None  # the rank whose changes of weights counted in the last step
        self._undone = False  # the job was set back, and the script has asked for no batch since
        self._changed_between: deque[int] = deque(maxlen=64)  # clocks with a change that the loop may not make again
        self._changed: set[int] = set()  # parameters that the script has set since weights last landed
        self._loaded: dict[int, Mapping[str, torch.Tensor]] | None = None  # optimizer state that the script has set
        self._draft_room = 0.0  # bytes that may still leave as drafts in this step
        self.data = StepData()
        self.stepped = self.came_late = False
        self._rounds = Rounds(self)
        self._clock = 0
        self._closing = False

    # -- who takes part ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank; in an elastic job it is known from `prepare` on."""
        return self._place.identity.rank if self._place else self._options.rank or 0

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self._options.world_size or max(1, len(self._members.roster.ranks))

    @property
    def clock(self) -> int:
        """Steps finished."""
        return self._clock

    def share(self) -> tuple[int, int]:
        """The rank's share; in an elastic job, this worker's place among those who take part now."""
        ranks = self._members.roster.ranks
        if self._options.world_size or self.rank not in ranks:
            return self.rank, self.world_size
        return ranks.index(self.rank), len(ranks)

    def close(self) -> None:
        """Leaves the job and ends every thread and connection."""
        if self._closing:
            return
        self._closing = True
        for _, added in self._added:
            added.close()
        try:
            self.rewind.close()
        except Exception:
            log.exception("this worker's state could not be caught")  # and it leaves all the same
        self._sender.close()
        self._coordinator.closing.set()
        self._members.close()
        self._coordinator.close()
        if self._shards is not None:
            self._shards.close()
        if self._flat is not None:
            self._flat.release()

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Prepared:
        """Joins the job; returns the models with rank 0's weights, and optimizers that step on the servers."""
        options = self._options
        self._spec, self._tensors = describe(
            models,
            optimizers,
            name=options.job,
            consistency=options.consistency,
            bucket_bytes=options.bucket_bytes,
            world_size=options.world_size,
            non_finite=options.non_finite,
            gradient_wire=options.gradient_wire,
            weight_wire=options.weight_wire,
        )
        self._indices = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self._optimizers = list(zip(self._spec.optimizers, optimizers, strict=True))
        self._groups = LiveGroups(self._optimizers)
        self._initial_states = self._states_before(optimizers)
        place = self._join(self._spec)
        self._layout = bucket_layout(self._spec.parameters, self._spec.bucket_bytes)
        self._trained = [bucket for bucket in self._layout.buckets if not bucket.held]
        self._overlaps = [
            Overlap([bucket for bucket in self._trained if bucket.optimizer == index], options.overlap)
            for index in range(len(optimizers))
        ]
        self._take_places(place)
        assert self._place is not None
        self.came_late = self._place.clock > 0
        for optimizer in optimizers:
            optimizer.state.clear()  # the shards have it, and a copy here would not follow
        untrained = {i: tensor for i, tensor in enumerate(self._tensors) if self._spec.parameters[i].group is None}
        self.rewind.watch(optimizers, untrained)
        if self._place.state is not None:  # a worker of this rank was here before
            self.rewind.go_back(self._place.state, self._clock)
        return models, [ServerOptimizer(one, _Stepped(self, index)) for index, one in enumerate(optimizers)]

    def _states_before(self, optimizers: Sequence[torch.optim.Optimizer]) -> States:
        """The state of optimizers that have taken steps already. Raises if the shards cannot go on with it."""
        found = {
            self._indices[id(parameter)]: tensors_of(state)
            for optimizer in optimizers
            if has_stepped(optimizer)
            for parameter, state in optimizer.state.items()
        }
        check_states(self._spec, found)
        return found

    def _join(self, spec: JobSpec) -> JoinResult:
        """Registers the job and takes a place in it."""
        for last in (False, True):
            self._shard_map, bucket_bytes = self._coordinator.register(spec)
            self._spec = replace(spec, bucket_bytes=bucket_bytes)
            validate(self._spec, MAX_BUCKET_BYTES)  # whatever the server answers
            try:
                return self._members.join()
            except NotFound as error:  # it ended while this worker waited for a place, with the launch that held it
                if last or self._closing:
                    raise
                log.warning("%s: this worker begins it anew", error)
        raise AssertionError

    # -- a place, taken and lost -------------------------------------------------------------------------------------

    def _finished(self, place: JoinResult) -> int:
        """The steps that this worker has finished in a place."""
        return self._clock if self._place is place else place.clock

    def _moved(self, place: JoinResult | None) -> None:
        """Ends what is under way in the old place; the training thread may be in the new one already."""
        shards = self._shards
        if shards is not None and (place is None or shards.who != place.identity):
            shards.cut()

    def _take_places(self, place: JoinResult) -> None:
        """Takes a place, and each that comes after it should it be lost on the way."""
        while True:
            cause: BaseException | None
            try:
                self._take(place)
                return
            except _PlaceLost as lost:
                cause = lost.__cause__
            except Exception as error:
                if not self._members.has_lost(place, error):
                    raise
                cause = error
            if self._shards is not None:
                self._shards.end()
            place = self._members.renewed(place, cause)

    def _take(self, place: JoinResult) -> None:
        """Goes on from a place: with the weights at its clock (rank 0's at first), when all declared workers joined."""
        self._shard_map = place.shard_map or self._shard_map
        shards = Shards(self._options.link, place.identity, self._spec, self._layout, self._shard_map)
        self._shards = shards
        if self._flat is None:
            check = self._options.non_finite is not NonFinite.ALLOW
            self._flat = FlatModel(self._spec, self._tensors, self._layout, shards.segment, check, self._gradient_ready)
        else:
            self._flat.move(shards.segment)
        shards.open(self._flat)
        self._place, self._clock = place, place.clock
        if not self._begun:
            if self.rank == 0:  # the shards take its values if they have none yet
                for piece in pieces(self._spec, self._layout, self._initial_states, self._initial_states.keys()):
                    shards.assign(0, piece.bucket, piece.absent, piece.state, piece.payload)
                self._settle()
                shards.push_initial(self._layout.buckets)
                self._settle()
            self._members.await_started(place)  # with its limit: rank 0 sends what the pulls below wait for
            shards.pull(self._clock, held=True)
            self._settle()
        self._flat.begin_pull()
        pulls = shards.pull(self._clock)
        self._settle()
        self._flat.end_pull()
        if any(pull.result().checkpoint for pull in pulls):
            self.rewind.want(self._clock)
        self._begun = True
        self._members.await_started(place)
        if self._members.place is not place:
            raise _PlaceLost
        report_started()
        self._draft_room = self._room_for_drafts()

    def _settle(self) -> None:
        """Waits for all that is under way. Raises the first error of any, as _PlaceLost where that is why."""
        assert self._shards is not None
        assert self._place is not None
        error = self._shards.settle()
        if error is not None:
            self._members.raise_lost()  # that this worker was fenced explains whatever else failed
            if self._members.has_lost(self._place, error):
                raise _PlaceLost from error
            raise error

    def _come_back(self) -> bool:
        """Goes on in a new place, after the one of the last steps was lost. The step at hand is over: true if in."""
        assert self._shards is not None
        assert self._place is not None
        self._shards.end()
        before, clock = self._place, self._clock
        staged = bool(self._pushed) and all(push.exception() is None for push in self._pushed)
        staged = staged and self._lost is not None  # by the time of the step: all its buckets are on their way
        for overlap in self._overlaps:
            overlap.abandon()
        self._pushed, self._changed = [], set()  # what the script has set goes with the step
        self._take_places(self._members.renewed(before, self._lost))
        self._lost = None
        back = self._place.restore_count > before.restore_count
        if back:
            self._go_back()
            self.data.set_back()
            self._undone = True
            if any(changed > self._clock for changed in self._changed_between):
                log.warning(
                    "this script changed weights, optimizer state or groups between two passes after clock %d: what it "
                    "does between passes is not done again when they are made again",
                    self._clock,
                )
        else:
            self.rewind.stepped()
        self._metrics.rejoined(not staged and not back, self._clock)
        log.warning(
            "worker %d lost its place at clock %d and goes on at clock %d as incarnation %d; %s",
            *(self.rank, clock, self._clock, self._place.identity.incarnation),
            "the job was set back" if back else f"its last gradient {'counts' if staged else 'is lost'}",
        )
        return staged

    # -- leased data -------------------------------------------------------------------------------------------------

    @property
    def others_wait(self) -> bool:
        """Whether other workers may wait for this one's clock."""
        return self._options.consistency.max_staleness is not None

    def lease(self, ask: Lease) -> tuple[list[DataRange], bool] | None:
        """Batches of leased data, and whether the pass is complete; None: this worker took another place, ask anew."""
        self.pause(0.0)
        assert self._place is not None
        try:
            return self._coordinator.lease(self._place.identity, ask)
        except PSError as error:
            if not self._members.has_lost(self._place, error):
                raise
            self._lost = error
            self._come_back()
            return None

    def offer(self, offer: Offer, heard: Heard) -> RoundNews | None:
        """Gives a value to a round; the round when it is complete. None: `heard` ended it, or the place is another."""
        self.pause(0.0)
        place = self._place
        assert place is not None

        def stays(news: RoundNews) -> bool:
            return heard(news) and self._members.place is place

        try:
            return self._coordinator.exchange(place.identity, offer, stays)
        except PSError as error:
            if not self._members.has_lost(place, error):
                raise
            self._lost = error
            self._come_back()
            return None

    def pause(self, seconds: float) -> None:
        """Waits; raises the reason if this worker takes part no more."""
        self._coordinator.closing.wait(seconds)
        self._members.raise_lost()
        if self._closing:
            raise UnknownWorker("the session is closed")

    def empty_step(self) -> None:
        """A step without a gradient, for a worker that has no data while others wait for its clock."""
        self._metrics.empty_step()
        self.rewind.stepping()
        if self._in_place(self._exchange_nothing) is not None:
            self.data.keep()  # nobody has seen it
        for _, added in self._added:
            added.empty_step()

    # -- rounds ------------------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Rank 0; in an elastic job the lowest live rank, as this worker heard last."""
        ranks = self._members.roster.ranks
        return self.rank == (min(ranks, default=0) if not self._options.world_size else 0)

    @property
    def restore_count(self) -> int:
        """How often the job was set back to a checkpoint, as far as this worker has gone back with it."""
        return self._place.restore_count if self._place is not None else 0

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        """The values of all live workers, by rank; see Rounds.exchange."""
        if not self._begun:
            raise InvalidRequest(f"session.{what}: this worker takes no part in the job yet; call prepare first")
        return self._rounds.exchange(value, what)

    def _go_back(self) -> None:
        """This worker's own state becomes what it had saved for the checkpoint that the job goes on from."""
        assert self._place is not None
        if self._place.state is None:
            log.warning("worker %d had saved no state: its place in the data stays what it is", self.rank)
            return
        self.rewind.go_back(self._place.state, self._clock)
        self.rewind.settle()

    # -- step --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside only add up; nothing leaves before the next backward outside, or `step`."""
        before = [overlap.paused for overlap in self._overlaps]
        for overlap in self._overlaps:
            overlap.paused = True
        try:
            with contextlib.ExitStack() as stack:
                for _, added in self._added:
                    stack.enter_context(added.no_sync())
                yield
        finally:
            for overlap, paused in zip(self._overlaps, before, strict=True):
                overlap.paused = paused

    def _gradient_ready(self, parameter: int) -> None:
        """Backward has finished one gradient: full buckets leave now, if they may. Runs on autograd's thread."""
        assert self._flat is not None
        assert self._shards is not None
        self._metrics.timer.gradient()
        overlap = self._overlaps[self._spec.parameters[parameter].optimizer]
        for bucket in overlap.ready(parameter, self._flat.gradient_marks(overlap.spaces)):
            if self._draft_room > 0 and not self._flat.saw_not_finite(bucket):
                self._flat.leaving(bucket)
                push = BucketPush(bucket, self._clock + 1, empty=False, absent=(), groups={})
                self._draft_room -= self._shards.draft(push)

    def step(self, index: int) -> None:
        """One step of one optimizer; where this worker has lost its place, the step in which it takes another."""
        if self._closing:
            raise UnknownWorker("the session is closed: connect and prepare anew to train on")
        if self._undone and self.rewind.is_due:
            return  # the rest of a batch's steps, of which the job was set back to before the first
        self._undone = False
        self.rewind.stepping()
        self._metrics.timer.stepping()
        staged = self._in_place(lambda: self._exchange(index))
        self.stepped = True
        if staged is not None:
            (self.data.pushed if staged else self.data.lost)()
        for owner, added in self._added:
            if owner == index:
                added.step(0)

    def _in_place(self, exchange: Callable[[], None]) -> bool | None:
        """Exchanges with the shards; None. Where this worker has lost its place: takes another, says if it was in."""
        self._members.raise_lost()
        if self._members.place is self._place and self._lost is None:
            try:
                exchange()
                return None
            except _PlaceLost as lost:
                self._lost = lost.__cause__
            except BaseException:
                assert self._shards is not None
                self._shards.drop_drafts()
                self._pushed = []
                self.data.failed()
                raise
        return self._come_back()

    def _exchange(self, index: int) -> None:
        """Gradients for weights. Nothing is pushed unless every gradient is fit to be."""
        assert self._flat is not None
        self._changed |= self._flat.changed()
        overlap = self._overlaps[index]
        absent = self._flat.gather(overlap.parameters)
        groups = self._groups.read()
        changed, drafts_hold = overlap.finish(self._flat.gradient_marks(overlap.spaces), absent)
        name = self._flat.not_finite(overlap.parameters - absent, changed)
        skip = is_left_out(name, self._options.non_finite, self._metrics)
        self._send(index, absent, groups, skip, drafts_hold)

    def _exchange_nothing(self) -> None:
        """A step of empty pushes."""
        assert self._flat is not None
        self._changed |= self._flat.changed()
        for overlap in self._overlaps:
            overlap.abandon()
        self._send(None, set(), self._groups.read(), True, False)

    def _send(
        self, index: int | None, absent: Set[int], groups: list[HyperParameters], skip: bool, drafts_hold: bool
    ) -> None:
        """Pushes a step of one optimizer, or of none, and pulls all weights.

        absent: of its parameters, those without a gradient
        skip:   the step counts as none
        """
        assert self._shards is not None
        assert self._flat is not None
        self._assign()
        self._flat.begin_pull()
        ranges = self.data.use()
        pushes = [self._made(b, absent, groups, skip or b.optimizer != index, ranges) for b in self._trained]
        pushed, pulls, committing = self._shards.push_pull(self._clock + 1, pushes, drafts_hold and not skip)
        self._pushed = [*pushed, *committing]
        self._clock += 1
        self._finish(pushed, pulls)
        self.data.pushed()

    def _finish(self, pushes: list[Future[PushResult]], pulls: list[Future[PullResult]]) -> None:
        """Waits for a step's pushes and pulls, and counts them."""
        assert self._flat is not None
        began = self._metrics.timer.now()
        self._settle()
        self._flat.end_pull()
        sent = [push.result() for push in pushes]
        pushed = max([began, *(push.staged for push in sent)])
        pulled = [pull.result() for pull in pulls]
        self._pushed = []
        self._draft_room = self._room_for_drafts()
        waited = max((landed.waited for landed in pulled), default=0.0)
        self._metrics.stepped(
            sum(push.size for push in sent), sum(landed.size for landed in pulled), pushed, waited, self._clock
        )
        if any(landed.checkpoint for landed in pulled):
            self.rewind.want(self._clock)
        self.rewind.stepped()

    def _room_for_drafts(self) -> float:
        """Bytes of a step that may leave as drafts, so that the shards have room for those of all workers.

        In sync the drafts of the lowest rank become the open sum; the others share as much as the weights. In ssp and
        async all do.
        """
        ranks = self._members.roster.ranks
        first = self._options.consistency.aggregate and self.rank == min(ranks, default=self.rank)
        sharing = len(ranks) - 1 if self._options.consistency.aggregate else len(ranks)
        return math.inf if first else sum(bucket.nbytes for bucket in self._trained) / max(1, sharing)

    def _made(
        self,
        bucket: BucketSpec,
        absent: Set[int],
        groups: list[HyperParameters],
        skip: bool,
        ranges: Sequence[DataRange],
    ) -> BucketPush:
        assert self._flat is not None
        self._flat.leaving(bucket)
        return bucket_push(self._spec, bucket, self._clock + 1, absent, groups, skip, ranges)

    # -- what the script sets itself ---------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Tells the shards what the script has changed since the last step, to take effect with this one."""
        assert self._shards is not None
        assert self._flat is not None
        if self.rewind.at_pass_begin and (self._changed or self._loaded is not None):
            self._changed_between.append(self._clock + 1)
        relied_on, self._relied_on = self._relied_on, None
        if relied_on is not None and relied_on not in self._members.roster.ranks:
            log.warning(
                "worker %d is gone since the step in which this script changed weights or optimizer state: "
                "if it died in that step, the change is lost",
                relied_on,
            )
        changed, self._changed = self._changed, set()
        states, self._loaded = self._loaded, None
        if not changed and states is None:
            return
        if self.came_late and not self.stepped:
            log.warning(
                "the job was at clock %d when this worker joined: what the script has loaded or changed before its "
                "first step is not taken over; the servers' weights and optimizer state count",
                self._clock,
            )
            return
        lowest = min(self._members.roster.ranks, default=self.rank)
        if self._options.consistency.aggregate and self.rank != lowest:
            self._relied_on = lowest  # its values count, and it says them
            return
        for bucket in self._trained:
            absent = [p for p, segment in enumerate(bucket.segments) if segment.parameter not in changed]
            if len(absent) < len(bucket.segments):
                self._shards.assign(self._clock + 1, bucket, absent, None, self._flat.assigned(bucket))
        for piece in pieces(self._spec, self._layout, states or {}, (states or {}).keys()):
            self._shards.assign(self._clock + 1, piece.bucket, piece.absent, piece.state, piece.payload)
        self._settle()

    def load(self, index: int, states: ParameterStates) -> None:
        """Has the next step begin with this state of one optimizer. Raises what `check_states` does."""
        for owner, added in self._added:
            if owner == index:
                added.load(0, {tensor: states[tensor] for tensor in added._tensors if tensor in states})
        states = {tensor: state for tensor, state in states.items() if self._trains(tensor)}
        # What has none in `states` has none from then on.
        found: dict[int, Mapping[str, torch.Tensor]] = {i: {} for i in self._overlaps[index].parameters}
        found |= {self._indices[id(tensor)]: state for tensor, state in states.items()}
        check_states(self._spec, found)
        self._loaded = {**(self._loaded or {}), **found}

    def state(self, index: int) -> ParameterStates:
        """The state of one optimizer as the shards have it at this clock, or as the script has set it since."""
        parameters = self._overlaps[index].parameters
        if self._loaded is not None and parameters <= self._loaded.keys():
            found: States = {i: self._loaded[i] for i in parameters}
        else:
            found = self._fetched()
        own: dict[torch.Tensor, Mapping[str, torch.Tensor]] = {
            self._tensors[i]: {name: self._placed(self._tensors[i], name, value) for name, value in found[i].items()}
            for i in sorted(parameters & found.keys())
            if found[i]
        }
        for owner, added in self._added:
            if owner == index:
                own |= added.state(0)
        return own

    def _trains(self, tensor: torch.Tensor) -> bool:
        return self._spec.parameters[self._indices[id(tensor)]].group is not None

    def add_group(self, index: int, group: dict[str, Any]) -> None:
        """Has one optimizer train more of the models' parameters, in a job beside this one; see `added`.

        Blocks, in a job with a world size, until all workers have come here. Raises what `checked_group` and `prepare`
        do, and what torch's own add_param_group does; the optimizer is unchanged then.
        """
        taken = {self._indices[id(tensor)] for _, added in self._added for tensor in added._tensors}
        parameters = checked_group(group, self._spec, self._indices, taken)
        name, optimizer = self._optimizers[index]
        optimizer.add_param_group({**group, "params": parameters})
        live = optimizer.param_groups[-1]
        options = replace(
            self._options,
            job=f"{self._options.job}.added{len(self._added) + 1}",
            rank=self.rank if self._options.world_size else None,
        )
        # Its figures are scraped by nothing: a step's are those of this job.
        added = ParameterServer(options, WorkerMetrics(), self._device, beside=True)
        try:
            added.prepare([holder(self._spec, self._indices, parameters)], [optimizer_of(optimizer, live)])
        except BaseException:
            added.close()
            optimizer.param_groups.pop()
            raise
        self._added.append((index, added))
        self._changed_between.append(self._clock + 1)
        self.rewind.trains([self._indices[id(parameter)] for parameter in parameters])
        log.info("%d parameters are added to %s: job %s", len(parameters), name, options.job)

    @staticmethod
    def _placed(tensor: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        """State lies beside its parameter, but for numbers, which torch keeps on the host."""
        return value.to(tensor.device) if value.shape == tensor.shape and name != "step" else value

    def _fetched(self) -> States:
        if self._closing:
            raise UnknownWorker(
                "the session is closed, and the optimizer's state went with its place in the job: save it before"
            )
        while True:
            collector = StateCollector(self._spec, self._layout)

            def fetch(land: Callable[[StateChunk], None] = collector.land) -> None:
                assert self._shards is not None
                self._shards.pull_state(land)
                self._settle()

            if self._in_place(fetch) is None:
                return collector.states


@dataclass(frozen=True)
class _Stepped:
    """One optimizer of a script, on the servers; see `ps_worker.model.optimizer.OnServers`."""

    server: ParameterServer
    index: int

    def step(self) -> None:
        self.server.step(self.index)

    def state(self) -> ParameterStates:
        return self.server.state(self.index)

    def load(self, states: ParameterStates) -> None:
        self.server.load(self.index, states)

    def add_group(self, group: dict[str, Any]) -> None:
        self.server.add_group(self.index, group)
