"""Training on a parameter server.

prepare   describe the model as a job, register it, join, move the model into flat buffers, start from rank 0's weights
step      push every bucket's gradient, pull every bucket's weights; pulls wait as long as the mode says, pushes never
lost      a worker whose place was lost (a pause, a partition, a job set back) takes another, and goes on from there
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import nn

from ps_protocol.channel import MAX_BUCKET_BYTES
from ps_protocol.errors import NonFiniteGradient, NotFound, PSError, UnknownWorker
from ps_protocol.job import HyperParameters, JobSpec, NonFinite, validate
from ps_protocol.layout import Bucket, bucket_layout
from ps_worker.client import CoordinatorClient
from ps_worker.describe import describe
from ps_worker.flat import FlatModel
from ps_worker.leased import StepData
from ps_worker.membership import Membership
from ps_worker.messages import BucketPush, DataRange, Lease, Place
from ps_worker.metrics import WorkerMetrics
from ps_worker.optimizer import ServerOptimizer
from ps_worker.outgoing import LiveGroups, bucket_push, is_left_out
from ps_worker.overlap import Overlap
from ps_worker.rewind import Rewind
from ps_worker.server_options import ServerOptions
from ps_worker.shards import Shards
from ps_worker.state_sender import StateSender
from ps_worker.transports import Landed, Sent

log = logging.getLogger("ps_worker")


class _PlaceLost(Exception):
    """A call failed because the place it was made from was lost; its cause says how."""


class ParameterServer:
    """One worker of one job."""

    def __init__(self, options: ServerOptions, metrics: WorkerMetrics, device: torch.device) -> None:
        self._options = options
        self._metrics = metrics
        self._coordinator = CoordinatorClient(options.server, options.link.timeout, options.link.access)
        self._members = Membership(
            self._coordinator,
            options.job,
            options.rank,
            options.world_size,
            options.link.timeout,
            metrics.announced,
            self._finished,
            self._moved,
            options.launch,
        )
        self._sender = StateSender(self._coordinator, self._members)
        self.rewind = Rewind(device, self._sender.send)
        self._place: Place | None = None  # the one that the training thread is in; the membership may have a newer one
        self._shards: Shards | None = None
        self._flat: FlatModel | None = None
        self._begun = False
        self._lost: BaseException | None = None  # how the place that the training thread is in was lost
        self._pushed: list[Future[Sent]] = []  # of the buckets that left during backward
        self._told: list[HyperParameters] | None = None  # what buckets that leave during backward are stepped with
        self.data = StepData()
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

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Joins the job; returns the model with rank 0's weights, and an optimizer that steps on the servers."""
        options = self._options
        self._spec, self._tensors = describe(
            model,
            optimizer,
            name=options.job,
            consistency=options.consistency,
            bucket_bytes=options.bucket_bytes,
            world_size=options.world_size,
            non_finite=options.non_finite,
            gradient_wire=options.gradient_wire,
            weight_wire=options.weight_wire,
        )
        self._groups = LiveGroups(self._spec, optimizer)
        place = self._join(self._spec)
        self._layout = bucket_layout(self._spec.parameters, self._spec.bucket_bytes)
        self._overlap = Overlap([bucket for bucket in self._layout.buckets if not bucket.held], options.overlap)
        self._take_places(place)
        assert self._place is not None
        untrained = {i: tensor for i, tensor in enumerate(self._tensors) if self._spec.parameters[i].group is None}
        self.rewind.watch(optimizer, untrained)
        if self._place.state is not None:  # a worker of this rank was here before
            self.rewind.go_back(self._place.state, self._clock)
        return model, ServerOptimizer(optimizer, self._step)

    def _join(self, spec: JobSpec) -> Place:
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

    def _finished(self, place: Place) -> int:
        """The steps that this worker has finished in a place."""
        return self._clock if self._place is place else place.clock

    def _moved(self, place: Place | None) -> None:
        """Ends what is under way in the old place; the training thread may be in the new one already."""
        shards = self._shards
        if shards is not None and (place is None or shards.who != place.identity):
            shards.cut()

    def _take_places(self, place: Place) -> None:
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

    def _take(self, place: Place) -> None:
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
                shards.push_initial(self._layout.buckets)
                self._settle()
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
        self._overlap.abandon()
        self._pushed, self._told = [], None
        self._take_places(self._members.renewed(before, self._lost))
        self._lost = None
        back = self._place.restore_count > before.restore_count
        if back:
            self._go_back()
            self.data.set_back()
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

    def pause(self, seconds: float) -> None:
        """Waits; raises the reason if this worker takes part no more."""
        self._coordinator.closing.wait(seconds)
        self._members.raise_lost()
        if self._closing:
            raise UnknownWorker("the session is closed")

    def empty_step(self) -> None:
        """A step without a gradient, for a worker that has no data while others wait for its clock."""
        self._metrics.empty_step()
        if self._in_place(self._exchange_nothing) is not None:
            self.data.keep()  # nobody has seen it

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
        before, self._overlap.paused = self._overlap.paused, True
        try:
            yield
        finally:
            self._overlap.paused = before

    def _gradient_ready(self, parameter: int) -> None:
        """Backward has finished one gradient: full buckets leave now, if they may. Runs on autograd's thread."""
        assert self._flat is not None
        if self._told is None:
            self._told = self._groups.read()
        ready = self._overlap.ready(parameter, self._flat.versions())
        # One that is not finite stays, and all after it: `step` will refuse them.
        if ready and not any(self._flat.saw_not_finite(bucket) for bucket in ready):
            assert self._shards is not None
            self._pushed += [self._shards.push(self._made(b, frozenset(), self._told, False)) for b in ready]
        else:
            self._overlap.left -= {bucket.index for bucket in ready}

    def _step(self) -> None:
        """One step; where this worker has lost its place, the step in which it takes another."""
        self.rewind.stepping()
        self._metrics.timer.stepping()
        staged = self._in_place(self._exchange)
        if staged is not None:
            (self.data.pushed if staged else self.data.lost)()

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
                self._pushed = []
                self.data.failed()
                raise
        return self._come_back()

    def _exchange(self) -> None:
        """Gradients for weights. Of what has not left yet, nothing is pushed unless every gradient is fit to be."""
        assert self._shards is not None
        assert self._flat is not None
        absent = self._flat.gather()
        groups = self._groups.read()
        told, self._told = self._told, None
        changed, left = self._overlap.finish(self._flat.versions(), absent, told is not None and groups != told)
        refused: NonFiniteGradient | None = None
        try:
            skip = is_left_out(self._flat.not_finite(absent, changed), self._options.non_finite, self._metrics)
        except NonFiniteGradient as error:
            if not left:
                raise
            # A step that is half out is finished without the rest, so that all stay in step.
            skip, refused = True, error
        self._send(absent, groups, skip, left)
        if refused is not None:
            raise refused

    def _exchange_nothing(self) -> None:
        """A step of empty pushes, but for what has left in a backward that no `step` followed."""
        assert self._flat is not None
        left: set[int] = set()
        if self._pushed:
            _, left = self._overlap.finish(self._flat.versions())
            self._told = None
        self._send(set(), self._groups.read(), True, left)

    def _send(self, absent: Set[int], groups: list[HyperParameters], skip: bool, left: Set[int]) -> None:
        """Pushes all buckets but those that have left, and pulls all."""
        assert self._shards is not None
        assert self._flat is not None
        self._flat.begin_pull()
        rest = [bucket for bucket in self._layout.buckets if not bucket.held and bucket.index not in left]
        pushes = [self._made(bucket, absent, groups, skip) for bucket in rest]
        pushed, pulls = self._shards.push_pull(self._clock + 1, pushes)
        self._pushed += pushed
        self._clock += 1
        self._finish(pulls)
        self.data.pushed()

    def _finish(self, pulls: list[Future[Landed]]) -> None:
        """Waits for a step's pushes and pulls, and counts them."""
        assert self._flat is not None
        began = self._metrics.timer.now()
        self._settle()
        self._flat.end_pull()
        sent = [push.result() for push in self._pushed]
        pushed = max([began, *(push.staged for push in sent)])
        pulled = [pull.result() for pull in pulls]
        self._pushed = []
        waited = max((landed.waited for landed in pulled), default=0.0)
        self._metrics.stepped(
            sum(push.size for push in sent), sum(landed.size for landed in pulled), pushed, waited, self._clock
        )
        if any(landed.checkpoint for landed in pulled):
            self.rewind.want(self._clock)
        self.rewind.stepped()

    def _made(self, bucket: Bucket, absent: Set[int], groups: list[HyperParameters], skip: bool) -> BucketPush:
        assert self._flat is not None
        self._flat.leaving(bucket)
        return bucket_push(self._spec, bucket, self._clock + 1, absent, groups, skip, self.data.use())
