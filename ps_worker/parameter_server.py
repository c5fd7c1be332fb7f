"""Training on a parameter server.

prepare   describe the model as a job, register it, join, move the model into flat buffers, start from rank 0's weights
step      push every bucket's gradient, pull every bucket's weights; pulls wait as long as the mode says, pushes never
beside    a heartbeat keeps the lease; a watcher knows who takes part
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ps_protocol.credentials import PLAINTEXT, Access
from ps_protocol.errors import NonFiniteGradient, PSError, UnknownWorker
from ps_protocol.job import HyperParameters, NonFinite
from ps_protocol.layout import Bucket, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import check_hyper_parameters, hyper_parameters
from ps_worker.client import CoordinatorClient
from ps_worker.describe import describe
from ps_worker.flat import FlatModel
from ps_worker.leased import StepData
from ps_worker.messages import BucketPush, DataRange, Identity, Lease, Place, Roster
from ps_worker.metrics import WorkerMetrics
from ps_worker.optimizer import ServerOptimizer
from ps_worker.overlap import Overlap
from ps_worker.shared_memory import share_memory
from ps_worker.transports import NetworkTransport, ShardCalls, SharedTransport, Transport

T = TypeVar("T")

log = logging.getLogger("ps_worker")

HEARTBEATS_PER_LEASE = 4
NOTICE_SECONDS = 2.0


@dataclass(frozen=True)
class ServerOptions:
    """What a job on a parameter server is, besides model and optimizer.

    transport: "shm", "grpc", or "auto": shared memory with every shard that can see this worker's
    overlap:   whether full buckets leave while backward runs; None: once the script was seen to allow it
    """

    server: str
    job: str
    consistency: Consistency
    rank: int | None
    world_size: int
    timeout: float
    bucket_bytes: int
    non_finite: NonFinite
    gradient_wire: str
    weight_wire: str
    transport: str
    shared_directory: Path
    overlap: bool | None
    access: Access = PLAINTEXT


class ParameterServer:
    """One worker of one job."""

    def __init__(self, options: ServerOptions, metrics: WorkerMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._coordinator = CoordinatorClient(options.server, options.timeout, options.access)
        self._place: Place | None = None
        self._transports: dict[int, Transport] = {}
        self._network: dict[int, NetworkTransport] = {}
        self._pushed: list[Future[int]] = []  # of the buckets that left during backward
        self._checked: list[HyperParameters] = []
        self._told: list[HyperParameters] | None = None  # what buckets that leave during backward are stepped with
        self._release_model: Callable[[], None] = lambda: None
        self.data = StepData()
        self._clock = 0
        self._error: PSError | None = None
        self._roster = Roster((), options.world_size, False)
        self._changed = threading.Condition()
        self._closing = threading.Event()

    # -- who takes part ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank; in an elastic job it is known from `prepare` on."""
        return self._place.identity.rank if self._place else self._options.rank or 0

    @property
    def world_size(self) -> int:
        """The declared world size, or how many take part now in an elastic job."""
        return self._options.world_size or max(1, len(self._roster.ranks))

    @property
    def clock(self) -> int:
        """Steps finished."""
        return self._clock

    def share(self) -> tuple[int, int]:
        """The rank's share; in an elastic job, this worker's place among those who take part now."""
        ranks = self._roster.ranks
        if self._options.world_size or self.rank not in ranks:
            return self.rank, self.world_size
        return ranks.index(self.rank), len(ranks)

    def close(self) -> None:
        """Leaves the job and ends every thread and connection."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._changed:
            self._changed.notify_all()  # `prepare` in another thread may be waiting
        if self._place is not None and not isinstance(self._error, UnknownWorker):
            self._coordinator.leave(self._place.identity)
        self._coordinator.close()
        for transport in [*self._network.values(), *self._transports.values()]:
            transport.close()
        self._release_model()

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Joins the job; returns the model with rank 0's weights, and an optimizer that steps on the servers."""
        options = self._options
        spec, tensors = describe(
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
        shard_map = self._coordinator.register(spec)
        self._join()
        layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        calls = {
            index: ShardCalls(index, address, options.timeout, options.access)
            for index, address in shard_map.addresses.items()
        }
        segment, sharing = share_memory(spec, layout, calls, self._who, options.transport, options.shared_directory)
        self._spec, self._optimizer = spec, optimizer
        check = options.non_finite is not NonFinite.ALLOW
        self._flat = FlatModel(spec, tensors, layout, segment, check, self._gradient_ready)
        self._release_model = self._flat.release
        self._buckets: dict[int, list[Bucket]] = {index: [] for index in calls}
        for bucket, shard in zip(layout.buckets, shard_map.bucket_shards, strict=True):
            self._buckets[shard].append(bucket)
        self._shard_of = shard_map.bucket_shards
        trained = [bucket for bucket in layout.buckets if not bucket.held]
        self._overlap = Overlap(trained, options.overlap)
        self._network = {index: NetworkTransport(call, self._who, self._flat) for index, call in calls.items()}
        self._transports = {
            index: SharedTransport(call, self._who, self._flat) if index in sharing else self._network[index]
            for index, call in calls.items()
        }
        self._start(layout.buckets)
        return model, ServerOptimizer(optimizer, self._step)

    def _start(self, buckets: Sequence[Bucket]) -> None:
        """Begins with rank 0's weights, when every declared worker is there."""
        if self.rank == 0:  # the shards take its values if they have none yet
            self._finish([self._network[self._shard_of[b.index]].push_initial(b) for b in buckets])
        held = {index: [b for b in buckets if b.held] for index, buckets in self._buckets.items()}
        self._finish([self._network[index].pull(self._clock, found) for index, found in held.items() if found])
        self._flat.begin_pull()
        self._finish(self._pull())
        self._flat.end_pull()
        self._await_workers()

    def _join(self) -> None:
        self._place = self._coordinator.join(
            self._options.job, self._options.rank, os.getpid(), socket.gethostname(), self._metrics.announced
        )
        self._clock = self._place.clock
        for name, run in (("heartbeat", self._heartbeat), ("watch", self._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def _await_workers(self) -> None:
        """Waits until every declared worker has joined: a job that starts without some trains another model."""
        said = time.monotonic()
        with self._changed:
            while not self._roster.started and self._error is None and not self._closing.is_set():
                self._changed.wait(NOTICE_SECONDS)
                if time.monotonic() - said >= NOTICE_SECONDS and not self._roster.started:
                    missing = sorted(set(range(self._options.world_size)) - set(self._roster.ranks))
                    log.warning("waiting for ranks %s to join", ", ".join(map(str, missing)))
                    said = time.monotonic() + 4 * NOTICE_SECONDS
        self._raise_lost()
        if self._closing.is_set():
            raise UnknownWorker("the session was closed while it waited for the other workers to join")

    def _heartbeat(self) -> None:
        assert self._place is not None
        pause = self._place.lease / HEARTBEATS_PER_LEASE
        while not self._closing.wait(pause):
            try:
                self._coordinator.heartbeat(self._who, self._clock, pause)
            except PSError as error:
                if error.retryable or self._closing.is_set():
                    continue  # the coordinator may come back; training does not need it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _watch(self) -> None:
        while not self._closing.is_set():
            for roster in self._coordinator.watch(self._options.job):
                with self._changed:
                    self._roster = roster
                    self._changed.notify_all()
            self._closing.wait(NOTICE_SECONDS)

    @property
    def _who(self) -> Identity:
        assert self._place is not None
        return self._place.identity

    def _raise_lost(self) -> None:
        if self._error is not None:
            raise self._error

    # -- leased data -------------------------------------------------------------------------------------------------

    @property
    def others_wait(self) -> bool:
        """Whether other workers may wait for this one's clock."""
        return self._options.consistency.max_staleness is not None

    def lease(self, ask: Lease) -> tuple[list[DataRange], bool]:
        """Batches of leased data, and whether the pass is complete."""
        self.pause(0.0)
        return self._coordinator.lease(self._who, ask)

    def pause(self, seconds: float) -> None:
        """Waits; raises the reason if this worker takes part no more."""
        closed = self._closing.wait(seconds)
        self._raise_lost()
        if closed:
            raise UnknownWorker("the session is closed")

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
        if self._told is None:
            self._told = self._hyper_parameters()
        ready = self._overlap.ready(parameter, self._flat.versions())
        # One that is not finite stays, and all after it: `step` will refuse them.
        if ready and not any(self._flat.saw_not_finite(bucket) for bucket in ready):
            self._pushed += [self._push(bucket, frozenset(), self._told, False) for bucket in ready]
        else:
            self._overlap.left -= {bucket.index for bucket in ready}

    def _step(self) -> None:
        """One step. Of what has not left during backward, nothing is pushed unless every gradient is fit to be."""
        self._raise_lost()
        self._metrics.timer.stepping()
        absent = self._flat.gather()
        groups = self._hyper_parameters()
        told, self._told = self._told, None
        changed, left = self._overlap.finish(self._flat.versions(), absent, told is not None and groups != told)
        refused: NonFiniteGradient | None = None
        try:
            skip = self._refuse_or_skip(absent, changed)
        except NonFiniteGradient as error:
            if not left:
                raise
            skip, refused = (
                True,
                error,
            )  # a step that is half out is finished without the rest, so that all stay in step
        self._exchange(absent, groups, skip, left)
        if refused is not None:
            raise refused

    def empty_step(self) -> None:
        """A step without a gradient, for a worker that has no data while others wait for its clock."""
        self._raise_lost()
        self._metrics.empty_step()
        groups = self._hyper_parameters()
        left: set[int] = set()
        if self._pushed:  # a backward that no `step` followed
            _, left = self._overlap.finish(self._flat.versions())
            self._told = None
        self._exchange(set(), groups, True, left)

    def _exchange(self, absent: Set[int], groups: list[HyperParameters], skip: bool, left: Set[int]) -> None:
        """Gradients for weights: pushes every bucket but those that have left, and pulls all."""
        timer = self._metrics.timer
        self._flat.begin_pull()
        # The pulls are asked for first: the shards hold them until their own pushes are in and the mode admits them.
        pulls = self._pull(ahead=1)
        pushes, self._pushed = self._pushed, []
        for bucket in self._flat.layout.buckets:
            if not bucket.held and bucket.index not in left:
                pushes.append(self._push(bucket, absent, groups, skip))
        self._clock += 1
        pushed = timer.now()

        def staged(_: Future[int]) -> None:
            nonlocal pushed
            pushed = timer.now()  # of the last one, once all are

        for push in pushes:
            push.add_done_callback(staged)
        # One wait for both: each wait looks at every future, and there may be thousands.
        everything: list[Future[Any]] = [*pushes, *pulls]
        try:
            self._finish(everything)
        except BaseException:
            self.data.lost()
            raise
        self.data.pushed()
        sent = sum(push.result() for push in pushes)
        pulled = [pull.result() for pull in pulls]
        self._flat.end_pull()
        waited = max((seconds for _, seconds in pulled), default=0.0)
        self._metrics.stepped(sent, sum(size for size, _ in pulled), pushed, waited, self._clock)

    def _hyper_parameters(self) -> list[HyperParameters]:
        """The groups' hyper-parameters now. Raises InvalidRequest for what the shards would refuse, before a push."""
        found = [hyper_parameters(self._spec.optimizer, group) for group in self._optimizer.param_groups]
        if found != self._checked:
            for values in found:
                check_hyper_parameters(self._spec.optimizer, values)
            self._checked = found
        return found

    def _refuse_or_skip(self, absent: set[int], changed: bool) -> bool:
        name = self._flat.not_finite(absent, changed)
        if name is None:
            return False
        self._metrics.not_finite()
        if self._options.non_finite is NonFinite.REFUSE:
            raise NonFiniteGradient(
                f"the gradient of {name} is not finite; it was not pushed "
                "(prepare(..., non_finite='skip') leaves out such steps instead)"
            )
        log.warning("the gradient of %s is not finite; this step is skipped", name)
        return True

    def _push(self, bucket: Bucket, absent: Set[int], groups: list[HyperParameters], skip: bool) -> Future[int]:
        parameters = self._spec.parameters
        missing = [position for position, segment in enumerate(bucket.segments) if segment.parameter in absent]
        mine = {parameters[segment.parameter].group for segment in bucket.segments}
        push = BucketPush(
            bucket=bucket,
            clock=self._clock + 1,
            absent=[] if skip else missing,
            empty=skip or len(missing) == len(bucket.segments),
            groups={group: groups[group] for group in mine if group is not None},
            ranges=self.data.use(),
        )
        self._flat.leaving(bucket)
        return self._transports[self._shard_of[bucket.index]].push(push)

    def _pull(self, ahead: int = 0) -> list[Future[tuple[int, float]]]:
        """Asks every shard for its weights at this worker's clock, or that of the step being made."""
        trained = {index: [b for b in buckets if not b.held] for index, buckets in self._buckets.items()}
        return [
            self._transports[index].pull(self._clock + ahead, buckets) for index, buckets in trained.items() if buckets
        ]

    def _finish(self, futures: list[Future[T]]) -> list[T]:
        """The results of all futures, when all are there; the first error of any as soon as it is."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        error = next((found for future in done if (found := future.exception()) is not None), None)
        if error is not None:
            self._raise_lost()  # that this worker was fenced explains whatever else failed
            raise error
        return [future.result() for future in futures]
