"""The transport through shared memory: buckets lie in a segment that this worker shares with a shard; headers travel.

gradients  If backward makes them in the segment, a whole step goes to a shard in one call, together with its pull: a
           call costs both ends as much as a bucket does. If they are copied into it (from a GPU), each is pushed as
           soon as it is in the segment, together with others that have come meanwhile.
weights    The shard writes them into the segment, and sends notices of the buckets that it has written.

Both keep their type: a narrower wire format is for networks, and would only cost time. A job whose wire formats
have blocks (int8, int4) shares no memory for buckets: its results must not depend on the transport.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ps_protocol.errors import NotShared, PSError, Unsupported
from ps_protocol.framing import Parts
from ps_protocol.identity import Identity
from ps_protocol.job import BLOCK_WIRES, JobSpec
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.messages import data, repeated
from ps_protocol.messages.data import BucketPush, PullCall, PulledBucket
from ps_protocol.messages.repeated import Groups, Repeated
from ps_protocol.segment_layout import (
    MAX_ROW_BYTES,
    PAGE_BYTES,
    RowMemory,
    SegmentMap,
    SegmentOffer,
    aligned,
    segment_plan,
)
from ps_runtime.pools import DaemonPool
from ps_runtime.quantities import ranges
from ps_runtime.troubles import Troubles
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.landing import PullPlan
from ps_worker.cluster.local_segment import LocalSegment
from ps_worker.cluster.transport import Draft, ShardStep
from ps_worker.model.flat import FlatModel
from ps_worker.timeline.recording import RecordedStep, Timeline
from ps_worker.values import PullResult, PushResult

log = logging.getLogger("ps_worker")
_GROUPS = attrgetter("groups")

# If pulled weights must be copied (to a GPU), the shard sends a notice after each so many bytes: the worker copies some
# buckets while others are applied. Otherwise one notice at the end is enough. A notice costs both ends a few turns of
# threads: a round of 256 MiB took 57 ms with a notice for each 16 MiB, 48 with one for 64, 47 with one at the end.
NOTIFY_BYTES = 64 * 2**20


# -- the segment -----------------------------------------------------------------------------------------------------


def check_transport(spec: JobSpec, transport: str) -> None:
    """Raises Unsupported if a job cannot use shared memory and the transport is "shm".

    A job whose wire formats have blocks cannot: blocks round, shared memory does not, and a job's result must not
    depend on the transport.
    """
    wires = [wire for wire in (spec.gradient_wire, spec.weight_wire) if wire in BLOCK_WIRES]
    if transport == "shm" and wires:
        raise Unsupported(
            f"buckets in shared memory keep their type, and this job's travel as {wires[0]}: use --transport auto, tcp "
            "or grpc, or on one machine no --wire at all, which is faster there"
        )


def share_memory(
    spec: JobSpec,
    layout: Layout,
    calls: Mapping[int, ShardCalls],
    worker: Identity,
    transport: str,
    directory: Path,
) -> tuple[SegmentMap | None, set[int]]:
    """Returns a segment that this worker shares with shards, and the shards that have mapped it; (None, empty) if none
    has.

    transport: "grpc" and "tcp" share with none; "shm" raises NotShared unless all shards map it; "auto" shares with
               those that do
    """
    if transport in ("grpc", "tcp") or not layout.trained:
        return None, set()
    if not {spec.gradient_wire, spec.weight_wire}.isdisjoint(BLOCK_WIRES):
        log.info("buckets travel in messages to shards on this host, too, so that results do not depend on the way")
        return None, set()
    plan = segment_plan(layout)
    try:
        segment = LocalSegment(plan.size, directory)
    except NotShared as error:
        return _over_the_network(transport, error)
    with segment:
        refusals = attach_to(segment.offer, calls, worker)
    sharing = set(calls) - set(refusals)
    if refusals and (transport == "shm" or not sharing):
        return _over_the_network(transport, refusals.popitem()[1])
    return SegmentMap(segment.memory, plan), sharing


def attach_to(offer: SegmentOffer, calls: Mapping[int, ShardCalls], worker: Identity) -> dict[int, NotShared]:
    """Asks each shard to map a segment. Returns, by shard, the errors of those that did not."""
    request, refusals = Parts(data.write_attach(worker, offer)), {}
    for index, shard in calls.items():
        try:
            shard.unary("AttachSegment", request)
        except NotShared as error:
            refusals[index] = error
    return refusals


def _over_the_network(transport: str, reason: NotShared) -> tuple[None, set[int]]:
    """Returns the result of `share_memory` without shared memory. Raises the reason if it must be shared."""
    if transport == "shm":
        raise reason
    log.info("buckets travel over the network: %s", reason)
    return None, set()


@dataclass(frozen=True)
class _Written:
    """An exchange that was written.

    content: all of it except its clock and its hyper-parameters
    groups:  the hyper-parameters of each of its pushes
    request: its message
    """

    content: object
    groups: Sequence[Groups]
    request: Repeated


# -- buckets ---------------------------------------------------------------------------------------------------------


class SharedTransport:
    """The transport through shared memory to one shard.

    has_drafts: gradients are copied into the segment; otherwise they lie there already
    """

    def __init__(
        self, calls: ShardCalls, worker: Identity, flat: FlatModel, pullers: DaemonPool, timeline: Timeline
    ) -> None:
        """pullers: threads for all shards"""
        self._timeline = timeline
        self._calls = calls
        self._worker = worker
        self._flat = flat
        self._pullers = pullers
        self.has_drafts, self._in_place = not flat.in_segment, flat.lands_in_place
        self._pusher, self._copier = (DaemonPool(int(self.has_drafts), name) for name in ("push", "copy"))
        self._copies: dict[int, tuple[int, Draft, Future[None]]] = {}  # by bucket, at which clock it left as a draft
        self._lock = threading.Lock()
        self._next = _SharedMessage(-1, None)  # the pushes of the next message
        self._written: _Written | None = None  # the last exchange

    # -- a whole step ------------------------------------------------------------------------------------------------

    def exchange(
        self,
        clock: int,
        pushes: Sequence[BucketPush],
        buckets: Sequence[BucketSpec],
        drafted: Mapping[int, Future[PushResult]],
    ) -> ShardStep:
        """Makes the pushes and the pull in one call, if gradients are made in the segment; `drafted` is empty then.

        Otherwise the pushes are returned as `rest`, to send one by one.
        """
        step = self._timeline.step
        if self.has_drafts:
            return ShardStep((), self._pull(clock, buckets, step), False, pushes)
        staged: Future[PushResult] = Future()

        def request(missing: list[int]) -> bytes:
            if step is not None:
                step.sent(push.bucket.index for push in pushes)
            return self._request(clock, pushes, missing, step)

        def read(fields: bytes, payload: memoryview | None) -> Sequence[PulledBucket]:
            notice = data.read_notice(fields, exchange=True)
            if notice.staged_seconds is not None:
                all_staged(time.perf_counter() - notice.staged_seconds)
            return notice.buckets

        def all_staged(when: float) -> None:
            if not staged.done():
                staged.set_result(PushResult(_sizes(pushes), when))

        def ended(pull: Future[PullResult]) -> None:
            error = pull.exception()
            if staged.done():
                return
            if error is None:
                all_staged(time.perf_counter())  # otherwise the pull would not have been answered
            else:
                staged.set_exception(error)

        plan = PullPlan(request, read, self._landing(step))
        pull = self._calls.pull("Exchange", plan, clock, buckets, self._pullers)
        pull.add_done_callback(ended)
        return ShardStep((staged,), pull, False, ())

    def _request(
        self, clock: int, pushes: Sequence[BucketPush], missing: Sequence[int], step: RecordedStep | None
    ) -> bytes:
        """Returns an ExchangeRequest. What does not differ from step to step is written once."""
        content, written = (pushes, missing, step is not None), self._written  # once: retries run on another thread
        groups: Sequence[Groups] = list(map(_GROUPS, pushes))
        if written is not None and written.content == content:
            if groups != written.groups:
                changed = written.request.with_groups(repeated.write_groups(data.groups_of(pushes)))
                self._written = written = _Written(content, groups, changed)
            again = written.request.at(clock)
            if again is not None:
                return again
        push = data.push_of(self._worker, clock, pushes, None, finite=self._finite(pushes))
        request = data.write_exchange(push, self._wanted(clock, missing, step))
        kept = repeated.repeated_exchange(request, push)
        self._written = None if kept is None else _Written(content, groups, kept)
        return request

    # -- gradients that are copied into the segment ------------------------------------------------------------------

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Copies the gradient into the segment, if it is not made there. Returns None: the shard is told only with the
        step.
        """
        if self.has_drafts:
            self._flat.leaving(push.bucket)
            copying = self._copier.submit(lambda: self._flat.share_gradient(push.bucket))
            self._copies[push.bucket.index] = push.clock, draft, copying
        return None

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Copies the gradient into the segment and tells the shard. Pushes that are ready by then go in the same
        message.
        """
        if not push.empty:
            self._flat.leaving(push.bucket)
        with self._lock:
            if self._next.clock != push.clock:
                self._next = _SharedMessage(push.clock, self._timeline.step)
            message = self._next
            message.pushes.append(push)

        def send() -> PushResult:
            with self._lock:
                if self._next is message:
                    self._next = _SharedMessage(-1, None)
            return PushResult(_sizes([push]), message.staged(self._send))

        return self._pusher.submit(send)

    def _send(self, clock: int, pushes: Sequence[BucketPush], step: RecordedStep | None) -> None:
        for push in pushes:
            if not push.empty:
                self._share(push)
        if step is not None:
            step.sent(push.bucket.index for push in pushes)
        call = data.push_of(self._worker, clock, pushes, None, finite=self._finite(pushes))
        self._calls.unary("Push", data.write_push(call))

    def _share(self, push: BucketPush) -> None:
        """Copies a gradient into the segment, unless its draft is there and unchanged."""
        clock, draft, copying = self._copies.pop(push.bucket.index, (0, None, None))
        if copying is not None:
            copying.result()
        if clock != push.clock or draft is None or draft.is_dropped:
            self._flat.share_gradient(push.bucket)

    def _finite(self, pushes: Sequence[BucketPush]) -> set[int]:
        return {push.bucket.index for push in pushes} if self._flat.is_checked else set()

    # -- weights -----------------------------------------------------------------------------------------------------

    def pull(self, clock: int, buckets: Sequence[BucketSpec], all_staged: bool = False) -> Future[PullResult]:
        """Pulls buckets in one stream. all_staged: with every update that is staged on the shard when the call comes"""
        return self._pull(clock, buckets, None, all_staged)

    def _pull(
        self, clock: int, buckets: Sequence[BucketSpec], step: RecordedStep | None, all_staged: bool = False
    ) -> Future[PullResult]:
        def request(missing: list[int]) -> bytes:
            return data.write_pull(self._wanted(clock, missing, step, all_staged))

        plan = PullPlan(request, lambda fields, payload: data.read_notice(fields).buckets, self._landing(step))
        return self._calls.pull("Pull", plan, clock, buckets, self._pullers)

    def _wanted(
        self, clock: int, missing: Sequence[int], step: RecordedStep | None, all_staged: bool = False
    ) -> PullCall:
        notify_bytes = 0 if self._in_place else NOTIFY_BYTES
        is_recorded = step is not None
        return PullCall(self._worker, clock, tuple(missing), True, notify_bytes, is_recorded, all_staged=all_staged)

    def _landing(self, step: RecordedStep | None) -> Callable[[BucketSpec, PulledBucket], int]:
        """Returns the function that adopts a step's pulled buckets from the segment."""

        def land(bucket: BucketSpec, pulled: PulledBucket) -> int:
            if pulled.wire_format or not self._in_place:
                self._flat.land_shared(bucket, pulled.wire_format)
            if step is not None:
                step.landed(self._calls.index, pulled)
            return bucket.nbytes

        return land

    @property
    def threads(self) -> list[threading.Thread]:
        """Its own threads, which end soon after `close`."""
        return [thread for pool in (self._pusher, self._copier) for thread in pool.threads]

    def close(self) -> None:
        """Ends the threads and the connection."""
        self._calls.close()
        for pool in (self._pusher, self._copier):
            pool.close()


def _sizes(pushes: Sequence[BucketPush]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for push in pushes:
        if not push.empty:
            sizes[push.bucket.dtype] = sizes.get(push.bucket.dtype, 0) + push.bucket.nbytes
    return sizes


class _SharedMessage:
    """Pushes of one clock that leave in one message: whichever of their tasks runs first sends all that were added by
    then.
    """

    def __init__(self, clock: int, step: RecordedStep | None) -> None:
        self.clock, self.step = clock, step
        self.pushes: list[BucketPush] = []
        self._staged: float | None = None
        self._error: BaseException | None = None

    def staged(self, send: Callable[[int, Sequence[BucketPush], RecordedStep | None], None]) -> float:
        """Returns when the shard had staged the pushes, on the clock of time.perf_counter. The first call sends them.

        Raises the error of `send`, in each call.
        """
        if self._staged is None and self._error is None:
            try:
                send(self.clock, self.pushes, self.step)
                self._staged = time.perf_counter()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._staged is not None
        return self._staged


# -- rows --------------------------------------------------------------------------------------------------------------


FIRST_BYTES = 2**20


def share_rows(
    spec: JobSpec, calls: Mapping[int, ShardCalls], worker: Identity, transport: str, directory: Path
) -> SharedRows | None:
    """Returns memory for a job's rows that this worker shares with shards; None if no shard has mapped it.

    transport: as in share_memory
    """
    if transport in ("grpc", "tcp") or not spec.tables:
        return None
    try:
        shared = SharedRows(calls, worker, directory)
        if transport == "shm" and shared.refusal is not None:
            raise shared.refusal
    except NotShared as error:
        if transport == "shm":
            raise
        log.info("rows travel over the network: %s", error)
        return None
    log.info("rows travel in shared memory to shards %s", ranges(sorted(shared.shards)))
    return shared


@dataclass
class SegmentRange:
    """A range of the segment, which is in use until its calls are over.

    calls: the calls that use it
    """

    memory: RowMemory
    calls: list[Future[Any]]
    _end: int = PAGE_BYTES

    def take(self, size: int) -> int:
        """Reserves `size` bytes of the segment; returns their offset."""
        place, self._end = self._end, self._end + aligned(size)
        return place


class SharedRows:
    """A segment for rows. It is replaced by a larger one when a step needs more. For the training thread.

    shards:  the shards that have mapped it
    refusal: why the other shards have not; None: all have

    Raises NotShared if there is too little memory, or no shard can map it.
    """

    def __init__(self, calls: Mapping[int, ShardCalls], worker: Identity, directory: Path) -> None:
        self._calls, self._worker, self._directory = calls, worker, directory
        self.shards: Collection[int] = set(calls)
        self.refusal: NotShared | None = None
        self._troubles = Troubles(log, None)
        self._calls_of_room: list[Future[Any]] = []
        self._memory = self._attached(FIRST_BYTES)

    def room(self, size: int) -> SegmentRange | None:
        """Returns memory for `size` bytes of a step; None: there is too little, or calls still use the last step's."""
        if any(not call.done() for call in self._calls_of_room) or size > MAX_ROW_BYTES:
            return None
        if size > self._memory.size:
            try:
                self._memory = self._attached(min(MAX_ROW_BYTES, max(size + size // 4, 2 * self._memory.size)))
            except NotShared as error:
                self._troubles.met("room", "rows of %d bytes travel in messages: %s", size, error)
                return None
            except PSError as error:
                # The worker's place is lost, or a shard has gone: later calls get that error too.
                log.debug("no larger segment for rows now: %s", error)
                return None
        self._calls_of_room = []
        return SegmentRange(self._memory, self._calls_of_room)

    def _attached(self, size: int) -> RowMemory:
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        calls = {index: self._calls[index] for index in self.shards}
        with LocalSegment(PAGE_BYTES + size, self._directory, size) as segment:
            refusals = attach_to(segment.offer, calls, self._worker)
        if refusals:
            self.refusal = next(iter(refusals.values()))
            if len(refusals) == len(calls):
                raise self.refusal
            self.shards = set(self.shards) - refusals.keys()
        return RowMemory(segment.memory)
