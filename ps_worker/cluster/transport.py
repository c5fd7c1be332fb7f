"""The interface of a transport for buckets between a worker and one shard, and the transport over the network.

shared_memory.py is the other one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from ps_protocol.errors import PSError, Unauthenticated
from ps_protocol.framing import Buffer, Parts
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages import data
from ps_protocol.messages.data import BucketPush, PullCall, PulledBucket, PulledState, PushCall, PushedBucket, PushKind
from ps_runtime.pools import DaemonPool
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.landing import PullPlan
from ps_worker.model.flat import FlatModel
from ps_worker.timeline.recording import RecordedStep, Timeline
from ps_worker.values import BucketAssignment, PullResult, PushResult


class Draft:
    """The gradients of one step that are sent while backward still runs, and the decision whether they count."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._counts = False

    def settle(self, counts: bool) -> None:
        """Decides whether the drafts count; if not, another push replaces each. Only the first call has an effect."""
        if not self._settled.is_set():
            self._counts = counts
            self._settled.set()

    @property
    def is_dropped(self) -> bool:
        """Whether it is decided that the drafts do not count."""
        return self._settled.is_set() and not self._counts

    def wait(self) -> bool:
        """Waits for the decision. Returns whether the drafts count."""
        self._settled.wait()
        return self._counts


@dataclass(frozen=True)
class ShardStep:
    """The calls to one shard for its part of a step.

    pushes:  those that are sent; each is done when the shard has staged one push, or all of a message
    pull:    done when all buckets have landed
    commits: the pull's call commits drafts and empty pushes
    rest:    the pushes that the caller must still send, bucket by bucket
    """

    pushes: Sequence[Future[PushResult]]
    pull: Future[PullResult]
    commits: bool
    rest: Sequence[BucketPush]


class Transport(Protocol):
    """Moves buckets between this worker and one shard. Methods return at once; futures raise PSError."""

    @property
    def has_drafts(self) -> bool:
        """Whether `draft` does anything."""

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Sends a gradient that may still change. Returns None if there is nothing to send yet."""

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Sends a bucket. Done when the shard has staged it."""

    def pull(self, clock: int, buckets: Sequence[BucketSpec], all_staged: bool = False) -> Future[PullResult]:
        """Pulls buckets; the future is done when all have landed.

        all_staged: with every update that is staged on the shard when the call comes
        """

    def exchange(
        self,
        clock: int,
        pushes: Sequence[BucketPush],
        buckets: Sequence[BucketSpec],
        drafted: Mapping[int, Future[PushResult]],
    ) -> ShardStep:
        """Pulls buckets at a step's clock, and makes as many of the step's pushes in the same call as it can.

        drafted: by bucket, the drafts of the step, all of which count
        """

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """Its threads, which end soon after `close`."""

    def close(self) -> None:
        """Ends the threads and the connection."""


# -- the way over the network ------------------------------------------------------------------------------------------

# Buckets go to a shard as messages, over a data connection or gRPC (calls.py). A pool of threads pushes them in the
# order in which they were submitted, a few at a time.

# Pushes leave in one order over all shards, so that one whose link is slow for a moment holds up the others a little,
# rather than finish last by itself. With 4 workers and 4 shards on links of 200 Mbit/s, a round of 32 MiB over bare
# gRPC took 1.48 s with four in flight in one order, and 1.71 s with one to each shard. With one shard on 1 Gbit/s, two
# in flight were faster than one or four; and a shard that stays slow is not to gather all that is in flight.
PUSHES_IN_FLIGHT, PUSHES_TO_ONE_SHARD, MOST_PUSHES = 4, 2, 8


def network_pushers(shards: int) -> DaemonPool:
    """Returns the pool of threads that push to `shards` shards.

    It has PUSHES_IN_FLIGHT threads, or one for each shard if that is more, up to MOST_PUSHES; and at most
    PUSHES_TO_ONE_SHARD for each.
    """
    return DaemonPool(min(max(PUSHES_IN_FLIGHT, min(shards, MOST_PUSHES)), PUSHES_TO_ONE_SHARD * shards), "push")


def pullers(shards: int) -> DaemonPool:
    """Returns the pool of threads for pulls that need one: two for each shard."""
    return DaemonPool(2 * shards, "pull")


class Sending(threading.local):
    """Each sending thread's memory for the payload of one bucket, which it reuses: to allocate fresh memory may take
    several times as long as to fill it (measured).
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor [numel] with undefined content. It is valid until the thread's next call."""
        size = numel * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._bytes[:size].view(dtype)


SENDING = Sending()


class NetworkTransport:
    """The transport to one shard over the network."""

    def __init__(
        self,
        calls: ShardCalls,
        worker: Identity,
        flat: FlatModel,
        pushers: DaemonPool,
        pullers: DaemonPool,
        timeline: Timeline,
    ) -> None:
        """pushers, pullers: threads that belong to all shards"""
        self._timeline = timeline
        self._calls = calls
        self._worker = worker
        self._flat = flat
        self._pushers = pushers
        self._free = threading.Semaphore(PUSHES_TO_ONE_SHARD)
        self._pullers = pullers

    # -- pushes ------------------------------------------------------------------------------------------------------

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Pushes a bucket. Its message is made only when a thread sends it, so that only messages in flight take
        memory.
        """
        leaving = None if push.empty else self._flat.leaving(push.bucket)

        def message() -> tuple[Parts, int]:
            if leaving is None:
                return data.write_push(self._call([push], b"")), 0
            payload = self._flat.gradient(leaving, push.absent, SENDING.memory)
            return data.write_push(self._gradient(push, payload, PushKind.GRADIENT)), len(payload)

        step = self._timeline.step
        wire = self._flat.gradient_codec(push.bucket).name if leaving is not None else ""
        return self._push(message, wire, None if step is None else lambda: step.sent((push.bucket.index,)))

    def push_initial(self, bucket: BucketSpec) -> Future[PushResult]:
        """Sends a bucket's initial value; over the network whatever the transport, because it happens once."""

        def message() -> tuple[Parts, int]:
            payload = self._flat.initial(bucket)
            pushed = PushedBucket(bucket.index, PushKind.INITIAL_VALUE)
            return data.write_push(PushCall(self._worker, 0, (pushed,), payload)), len(payload)

        return self._push(message, bucket.dtype)

    def tell(self, clock: int, bucket: BucketSpec, payload: memoryview) -> Future[PushResult]:
        """Sends a bucket that no optimizer steps, for readers of the weights."""
        call = PushCall(self._worker, clock, (PushedBucket(bucket.index, PushKind.INITIAL_VALUE),), payload)
        return self._push(lambda: (data.write_push(call), len(payload)), bucket.dtype)

    def assign(self, clock: int, assignment: BucketAssignment) -> Future[PushResult]:
        """Sends an assignment, over the network likewise; it takes effect with the step of that clock."""

        def message() -> tuple[Parts, int]:
            payload = assignment.payload or b""
            call = PushCall(self._worker, clock, (_assigned(assignment),), payload, stage=assignment.stage)
            return data.write_push(call), len(payload)

        return self._push(message, assignment.bucket.dtype)

    def _push(
        self, message: Callable[[], tuple[Parts, int]], wire: str, leaving: Callable[[], None] | None = None
    ) -> Future[PushResult]:
        """Sends the message that `message` makes.

        message: returns the message, and the size of its payload
        wire:    the payload's wire format
        leaving: called just before the message is sent
        """

        def send() -> PushResult:
            with self._free:
                request, size = message()
                if leaving is not None:
                    leaving()
                self._calls.unary("Push", request)
                return PushResult({wire: size}, time.perf_counter())

        return self._pushers.submit(send)

    def _call(self, pushes: Sequence[BucketPush], payload: Buffer, kind: PushKind = PushKind.GRADIENT) -> PushCall:
        return data.push_of(self._worker, pushes[0].clock, pushes, payload, kind)

    def _gradient(self, push: BucketPush, payload: memoryview, kind: PushKind) -> PushCall:
        wire_format = self._flat.gradient_codec(push.bucket).wire_format(push.bucket)
        return data.push_of(self._worker, push.clock, [push], payload, kind, wire_format)

    @property
    def has_drafts(self) -> bool:
        """Returns True: a bucket that is sent before the step is in transit while backward still runs."""
        return True

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Sends a bucket as a draft. A shard without room for drafts refuses it until the step: then it is sent once
        more.
        """
        leaving = self._flat.leaving(push.bucket)
        step = self._timeline.step

        def send() -> PushResult:
            if draft.is_dropped:
                return PushResult({}, time.perf_counter())
            with self._free:
                payload = self._flat.gradient(leaving, memory=SENDING.memory)
                message = data.write_push(self._gradient(push, payload, PushKind.DRAFT))
                size = len(payload)
                if step is not None:
                    step.sent((push.bucket.index,), draft=True)
                try:
                    self._calls.try_once("Push", message)
                except PSError as error:
                    if not error.retryable and not isinstance(error, Unauthenticated):  # which may have a newer token
                        raise
                    if draft.wait():
                        self._calls.unary("Push", message)
                return PushResult({self._flat.gradient_codec(push.bucket).name: size}, time.perf_counter())

        return self._pushers.submit(send)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        clock: int,
        pushes: Sequence[BucketPush],
        buckets: Sequence[BucketSpec],
        drafted: Mapping[int, Future[PushResult]],
    ) -> ShardStep:
        """Commits drafts and empty pushes in the call of the pull. Other pushes are returned as `rest`, to send one by
        one.
        """
        committed = [push for push in pushes if push.empty or push.bucket.index in drafted]
        rest = [push for push in pushes if not push.empty and push.bucket.index not in drafted]
        drafts = [drafted[push.bucket.index] for push in committed if not push.empty]
        pull = self._pull(clock, buckets, committed, self._timeline.step)
        return ShardStep(drafts, pull, bool(committed), rest)

    def pull(self, clock: int, buckets: Sequence[BucketSpec], all_staged: bool = False) -> Future[PullResult]:
        """Pulls buckets in one stream. all_staged: with every update that is staged on the shard when the call comes"""
        return self._pull(clock, buckets, (), None, all_staged)

    def _pull(
        self,
        clock: int,
        buckets: Sequence[BucketSpec],
        commit: Sequence[BucketPush],
        step: RecordedStep | None,
        all_staged: bool = False,
    ) -> Future[PullResult]:
        """Fetches buckets in one stream. `commit`: pushes that count first, which makes the pull an exchange."""

        def land(bucket: BucketSpec, pulled: PulledBucket) -> int:
            self._flat.land(bucket, pulled)
            if step is not None:
                step.landed(self._calls.index, pulled)
            return len(pulled.payload)

        def request(missing: list[int]) -> bytes:
            if step is not None:
                step.sent(push.bucket.index for push in commit if push.empty)
            whole = frozenset(index for index in missing if all_staged or not self._flat.has_before(index, clock))
            is_recorded = step is not None
            wanted = PullCall(self._worker, clock, tuple(missing), False, 0, is_recorded, whole, all_staged)
            if commit:
                return data.write_exchange(self._call(commit, b"", PushKind.COMMIT), wanted)
            return data.write_pull(wanted)

        def read(fields: bytes, payload: memoryview | None) -> list[PulledBucket]:
            return data.read_pulled(fields, payload, self._weight_bytes, exchange=bool(commit))

        def memory_for(bucket: BucketSpec, pulled: PulledBucket, size: int) -> memoryview | None:
            return self._flat.landing_place(bucket, pulled, size)

        method = "Exchange" if commit else "Pull"
        return self._calls.pull(method, PullPlan(request, read, land, memory_for), clock, buckets, self._pullers)

    def _weight_bytes(self, index: int, wire_format: str) -> int:
        return self._flat.weight_bytes(self._flat.layout.buckets[index], wire_format)

    def pull_state(self, buckets: Sequence[BucketSpec], land: Callable[[PulledState], None]) -> Future[None]:
        """Pulls the optimizer state of buckets. land: is called with each kind of state of each bucket, perhaps more
        than once
        """
        request = data.write_pull_state(PullCall(self._worker, 0, tuple(bucket.index for bucket in buckets)))

        def fetch() -> None:
            self._calls.stream("PullState", request, lambda *message: land(data.read_state(*message)))

        return self._pullers.submit(fetch)

    @property
    def threads(self) -> list[threading.Thread]:
        """Its own threads: none."""
        return []

    def close(self) -> None:
        """Ends the connection."""
        self._calls.close()


def _assigned(assignment: BucketAssignment) -> PushedBucket:
    state, following = assignment.state, assignment.next
    kind = PushKind.ASSIGN if state is None else PushKind.ASSIGN_STATE
    return PushedBucket(
        assignment.bucket.index,
        kind if following is None else PushKind.NEXT_OPTIMIZER,
        frozenset(assignment.absent),
        state=state or "",
        next_optimizer=following,
    )
