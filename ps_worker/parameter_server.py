"""Training on a parameter server.

prepare   describe the model as a job, register it, join, move the model into flat buffers, start from rank 0's weights
step      push every bucket's gradient, pull every bucket's weights; pulls wait as long as the mode says, pushes never
beside    a heartbeat keeps the lease; a watcher knows who takes part
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient, PSError, UnknownWorker
from ps_protocol.job import HyperParameters, NonFinite
from ps_protocol.layout import Bucket, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import hyper_parameters
from ps_worker import messages
from ps_worker.client import CoordinatorClient, ShardConnection
from ps_worker.describe import describe
from ps_worker.flat import FlatModel
from ps_worker.messages import Identity, Place, Pulled, Roster
from ps_worker.metrics import WorkerMetrics
from ps_worker.optimizer import ServerOptimizer

T = TypeVar("T")

log = logging.getLogger("ps_worker")

HEARTBEATS_PER_LEASE = 4
NOTICE_SECONDS = 2.0


@dataclass(frozen=True)
class ServerOptions:
    """What a job on a parameter server is, besides model and optimizer."""

    server: str
    job: str
    consistency: Consistency
    rank: int | None
    world_size: int
    timeout: float
    bucket_bytes: int
    non_finite: NonFinite


class ParameterServer:
    """One worker of one job."""

    def __init__(self, options: ServerOptions, metrics: WorkerMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._coordinator = CoordinatorClient(options.server, options.timeout)
        self._place: Place | None = None
        self._shards: dict[int, ShardConnection] = {}
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
        if self._place is not None and not isinstance(self._error, UnknownWorker):
            self._coordinator.leave(self._place.identity)
        self._coordinator.close()
        for shard in self._shards.values():
            shard.close()

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
        )
        shard_map = self._coordinator.register(spec)
        self._join(shard_map.addresses)
        self._spec = spec
        self._flat = FlatModel(spec.parameters, tensors, bucket_layout(spec.parameters, spec.bucket_bytes))
        self._buckets: dict[int, list[Bucket]] = {index: [] for index in shard_map.addresses}
        for bucket, shard in zip(self._flat.layout.buckets, shard_map.bucket_shards, strict=True):
            self._buckets[shard].append(bucket)
        if self.rank == 0:
            self._send_initial_values()
        self._finish(self._pull(held=True))
        self._await_workers()
        return model, ServerOptimizer(optimizer, lambda: self._step(optimizer))

    def _send_initial_values(self) -> None:
        """Sends the model as it is; the shards take it if they have none yet."""

        def maker(bucket: Bucket) -> Callable[[], bytes]:
            return lambda: messages.initial_push(self._who, bucket.index, self._flat.initial(bucket))

        each = [(shard, bucket) for shard, buckets in self._buckets.items() for bucket in buckets]
        self._finish([self._shards[shard].push(maker(bucket)) for shard, bucket in each])

    def _join(self, addresses: dict[int, str]) -> None:
        self._place = self._coordinator.join(
            self._options.job, self._options.rank, os.getpid(), socket.gethostname(), self._metrics.address
        )
        self._clock = self._place.clock
        self._shards = {
            index: ShardConnection(index, address, self._options.timeout) for index, address in addresses.items()
        }
        for name, run in (("heartbeat", self._heartbeat), ("watch", self._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def _await_workers(self) -> None:
        """Waits until every declared worker has joined: a job that starts without some trains another model."""
        said = time.monotonic()
        with self._changed:
            while not self._roster.started and self._error is None:
                self._changed.wait(NOTICE_SECONDS)
                if time.monotonic() - said >= NOTICE_SECONDS and not self._roster.started:
                    missing = sorted(set(range(self._options.world_size)) - set(self._roster.ranks))
                    log.warning("waiting for ranks %s to join", ", ".join(map(str, missing)))
                    said = time.monotonic() + 4 * NOTICE_SECONDS
        self._raise_lost()

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

    # -- step --------------------------------------------------------------------------------------------------------

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step: nothing is pushed unless every gradient is fit to be."""
        self._raise_lost()
        timer = self._metrics.timer
        timer.stepping()
        absent = self._flat.gather()
        skip = self._refuse_or_skip(absent)
        groups = [hyper_parameters(self._spec.optimizer, group) for group in optimizer.param_groups]
        self._clock += 1
        # The pulls are asked for first: the shards hold them until their own pushes are in and the mode admits them.
        pulls = self._pull(held=False)
        pushes = [
            self._shards[shard].push(self._push_maker(bucket, absent, groups, skip))
            for shard, buckets in self._buckets.items()
            for bucket in buckets
            if not bucket.held
        ]
        sent = sum(self._finish(pushes, beside=pulls))
        pushed = timer.now()
        waited = max(self._finish(pulls), default=0.0)
        self._metrics.stepped(sent, pushed, waited, self._clock)

    def _refuse_or_skip(self, absent: set[int]) -> bool:
        name = self._flat.not_finite(absent)
        if name is None:
            return False
        self._metrics.not_finite()
        if self._options.non_finite is NonFinite.REFUSE:
            raise NonFiniteGradient(
                f"the gradient of {name} is not finite; nothing was pushed "
                "(prepare(..., non_finite='skip') leaves out such steps instead)"
            )
        log.warning("the gradient of %s is not finite; this step is skipped", name)
        return True

    def _push_maker(
        self, bucket: Bucket, absent: set[int], groups: list[HyperParameters], skip: bool
    ) -> Callable[[], bytes]:
        clock, parameters = self._clock, self._spec.parameters
        missing = [position for position, segment in enumerate(bucket.segments) if segment.parameter in absent]
        mine = {parameters[segment.parameter].group for segment in bucket.segments}
        updates = {group: groups[group] for group in mine if group is not None}
        empty = skip or len(missing) == len(bucket.segments)

        def make() -> bytes:
            payload = None if empty else self._flat.gradient(bucket)
            return messages.gradient_push(self._who, bucket.index, clock, payload, [] if skip else missing, updates)

        return make

    def _pull(self, held: bool) -> list[Future[float]]:
        """Asks every shard for its buckets at this worker's clock; with or without those that no optimizer steps."""
        futures = []
        for shard, buckets in self._buckets.items():
            wanted = {bucket.index: bucket for bucket in buckets if held or not bucket.held}

            def land(found: Pulled, wanted: dict[int, Bucket] = wanted) -> None:
                self._flat.land(wanted[found.bucket], found.payload)
                self._metrics.pulled(len(found.payload))

            if wanted:
                futures.append(self._shards[shard].pull(self._who, self._clock, list(wanted), land))
        return futures

    def _finish(self, futures: list[Future[T]], beside: list[Future[float]] | None = None) -> list[T]:
        """The results of all futures, as soon as they are there; the first error of any, of `beside` too."""
        waiting: set[Future[Any]] = set(futures)
        watched: set[Future[Any]] = {*futures, *(beside or ())}
        while waiting:
            done, watched = wait(watched, return_when=FIRST_COMPLETED)
            for future in done:
                error = future.exception()
                if error is not None:
                    self._raise_lost()  # that this worker was fenced explains whatever else failed
                    raise error
            waiting -= done
        return [future.result() for future in futures]
