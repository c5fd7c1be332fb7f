"""The two ways that buckets travel between a worker and one shard: over the network, or through shared memory.

Both follow the same rules, because both end in the same calls on the shard; only the payload takes another way.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from ps_protocol.errors import PSError
from ps_protocol.layout import BucketSpec
from ps_protocol.v1.data_pb2 import DESCRIPTOR as DATA
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.retry import Peer, Retry
from ps_runtime.status import error_from
from ps_worker.cluster import convert
from ps_worker.cluster.convert import BucketPush, Identity, Pulled, StateChunk
from ps_worker.cluster.coordinator import CALL_SECONDS
from ps_worker.cluster.threads import Closed, DaemonPool
from ps_worker.model.flat import FlatModel

log = logging.getLogger("ps_worker")

DATA_SERVICE = DATA.services_by_name["DataService"].full_name
PULL_SECONDS = 60.0
# Pushes leave in one order over all shards, so that one whose link is slow for a moment holds up the others a little,
# rather than finish last by itself. With 4 workers and 4 shards on links of 200 Mbit/s, a round of 32 MiB over bare
# gRPC took 1.48 s with four in flight in one order, and 1.71 s with one to each shard. With one shard on 1 Gbit/s, two
# in flight were faster than one or four; and a shard that stays slow is not to gather all that is in flight.
PUSHES_IN_FLIGHT, PUSHES_TO_ONE_SHARD = 4, 2
# Buckets in a segment leave with a message of their own once they make so many bytes; the others go with the pull.
# Where workers compute on every core, what a shard does meanwhile is taken from them, and each message costs both: a
# step of 100 MB of weights took 1.01 of DDP's time with a message for each bucket, 0.96 with one for 16 MiB, 0.94 with
# one for 64.
TOGETHER_BYTES = 64 * 2**20
# Where weights do not land in place, a worker is told of buckets in its segment once they make so many bytes: it takes
# some over while others are applied. Elsewhere it is told of all at once. A word costs both ends a few turns of
# threads: a round of 256 MiB took 57 ms with a word for each 16 MiB, 48 with one for 64, 47 with one at the end.
WORD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class PullResult:
    """What a pull brought.

    size:       its bytes
    waited:     seconds for which a bucket was held back at most
    checkpoint: this worker's own state at this clock belongs to a checkpoint
    """

    size: int
    waited: float
    checkpoint: bool


@dataclass(frozen=True)
class PushResult:
    """What was pushed: its bytes, and when it was staged, on the clock of time.perf_counter."""

    size: int
    staged: float


class Draft:
    """The gradients of one step that leave while backward still runs, until `step` says whether they count."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._counts = False

    def settle(self, counts: bool) -> None:
        """They count, or another push takes the place of each. The first word is the one that holds."""
        if not self._settled.is_set():
            self._counts = counts
            self._settled.set()

    @property
    def is_dropped(self) -> bool:
        """Whether nobody waits for them any more."""
        return self._settled.is_set() and not self._counts

    def wait(self) -> bool:
        """Waits until it is known whether they count."""
        self._settled.wait()
        return self._counts


class ShardCalls:
    """The calls to one shard, each with the one retry loop. Identity (de)serializers: what goes in and out is bytes."""

    def __init__(self, index: int, address: str, timeout: float, access: Access = PLAINTEXT) -> None:
        self.peer = Peer(f"shard {index}", address, access)
        self.closing = threading.Event()
        self._timeout = timeout
        self._channel = open_channel(address, access)
        self._last: Any = None  # the pull that ended last

    def unary(self, method: str, request: bytes) -> bytes:
        """The answer of one method of the data service."""
        call = self._channel.unary_unary(f"/{DATA_SERVICE}/{method}")
        retry = Retry(self.peer, self._timeout, self.closing)
        found: bytes = retry.call(lambda: call(request, timeout=CALL_SECONDS))
        return found

    def try_once(self, method: str, request: bytes) -> None:
        """One method of the data service, without another try. Raises the PSError that came."""
        try:
            self._channel.unary_unary(f"/{DATA_SERVICE}/{method}")(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise error_from(error, str(self.peer)) from None

    def stream(self, method: str, request: bytes, read: Callable[[bytes], None]) -> None:
        """Hands each message of one streaming method's answer to `read`; all of them anew if the stream breaks off."""
        retry = Retry(self.peer, self._timeout, self.closing)
        while True:
            try:
                for message in self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")(request, timeout=PULL_SECONDS):
                    retry.progressed()
                    read(message)
                return
            except grpc.RpcError as error:
                retry.failed(error)

    def pull(
        self,
        method: str,
        request: Callable[[list[int]], bytes],
        clock: int,
        buckets: Sequence[BucketSpec],
        read: Callable[[bytes], list[Pulled]],
        land: Callable[[BucketSpec, Pulled], int],
    ) -> PullResult:
        """Fetches buckets, landing each as it comes; `request` asks for some, `land` returns the bytes of one."""
        stream = self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")
        left = {bucket.index: bucket for bucket in buckets}
        size, longest, checkpoint = 0, 0.0, False
        retry = Retry(self.peer, self._timeout, self.closing)
        while left:
            try:
                # Kept: a call that nobody refers to is cancelled, and its end is still to come.
                self._last = stream(request(list(left)), timeout=PULL_SECONDS)
                for message in self._last:
                    retry.progressed()
                    for found in read(message):
                        if found.waiting is not None:
                            log.warning("waiting at clock %d: %s", clock, found.waiting[1])
                            continue
                        size += land(left.pop(found.bucket), found)
                        longest = max(longest, found.waited)
                        checkpoint = checkpoint or found.checkpoint
                    if not left:
                        break
            except grpc.RpcError as error:
                retry.failed(error)
        return PullResult(size, longest, checkpoint)

    def close(self) -> None:
        """Closes the connection; calls in flight end."""
        self.closing.set()
        self._channel.close()


class Transport(Protocol):
    """Moves buckets between this worker and one shard. Methods return at once; futures raise PSError."""

    name: str

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Sends what may still change, so that little is left to do when it counts; None where nothing is sent."""

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Done when the shard has staged it."""

    def pull(self, clock: int, buckets: Sequence[BucketSpec], commit: Sequence[BucketPush] = ()) -> Future[PullResult]:
        """Done when all have landed. `commit`: what left as a draft and counts now, and what is empty."""

    def push_pull(
        self, clock: int, pushes: Sequence[BucketPush], buckets: Sequence[BucketSpec]
    ) -> tuple[list[Future[PushResult]], Future[PullResult]] | None:
        """As all those pushes, and the pull, in one call; None where that is no gain."""

    def close(self) -> None:
        """Ends the threads and the connection."""


class NetworkTransport:
    """Buckets as gRPC messages, pushed in the order in which the pool takes them up, and few at a time."""

    name = "grpc"

    def __init__(self, calls: ShardCalls, who: Identity, flat: FlatModel, pushers: DaemonPool) -> None:
        self._calls = calls
        self._who = who
        self._flat = flat
        self._pushers = pushers
        self._room = threading.Semaphore(PUSHES_TO_ONE_SHARD)
        self._puller = DaemonPool(1, "pull")

    def push_initial(self, bucket: BucketSpec) -> Future[PushResult]:
        """Sends a bucket's initial value; over the network whatever the transport, because it happens once."""

        def send() -> PushResult:
            with self._room:
                payload = self._flat.initial(bucket)
                self._calls.unary("Push", convert.initial_push(self._who, bucket.index, payload))
                return PushResult(len(payload), time.perf_counter())

        return self._pushers.submit(send)

    def assign(
        self, clock: int, bucket: BucketSpec, absent: Sequence[int], state: str | None, payload: memoryview | None
    ) -> Future[PushResult]:
        """Sends what the script has set in a bucket before its step of that clock; see `convert.assignment`."""

        def send() -> PushResult:
            with self._room:
                self._calls.unary("Push", convert.assignment(self._who, bucket.index, clock, absent, state, payload))
                return PushResult(0 if payload is None else len(payload), time.perf_counter())

        return self._pushers.submit(send)

    def pull_state(self, buckets: Sequence[BucketSpec], land: Callable[[StateChunk], None]) -> Future[None]:
        """Fetches the optimizer state of buckets, landing each kind of each as it comes; some may come twice."""
        request = convert.state_request(self._who, [bucket.index for bucket in buckets])

        def fetch() -> None:
            self._calls.stream("PullState", request, lambda message: land(convert.state_chunk(message)))

        return self._puller.submit(fetch)

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """A shard without room for drafts takes this one when it counts; by then it is sent once more."""

        def send() -> PushResult:
            if draft.is_dropped:
                return PushResult(0, time.perf_counter())
            with self._room:
                payload = self._flat.gradient(push.bucket)
                message, size = convert.gradient_push(self._who, push, payload, draft=True), len(payload)
                del payload
                try:
                    self._calls.try_once("Push", message)
                except PSError as error:
                    if not error.retryable:
                        raise
                    if draft.wait():
                        self._calls.unary("Push", message)
                return PushResult(size, time.perf_counter())

        return self._pushers.submit(send)

    def push(self, push: BucketPush) -> Future[PushResult]:
        """The message is made when its turn has come, so that only those in flight are in memory."""

        def send() -> PushResult:
            with self._room:
                payload = None if push.empty else self._flat.gradient(push.bucket)
                message = convert.gradient_push(self._who, push, payload)
                size = 0 if payload is None else len(payload)
                del payload
                self._calls.unary("Push", message)
                return PushResult(size, time.perf_counter())

        return self._pushers.submit(send)

    def pull(self, clock: int, buckets: Sequence[BucketSpec], commit: Sequence[BucketPush] = ()) -> Future[PullResult]:
        """One stream for all buckets."""

        def land(bucket: BucketSpec, found: Pulled) -> int:
            self._flat.land(bucket, found.payload)
            return len(found.payload)

        def ask(left: list[int]) -> bytes:
            return convert.pull_request(self._who, clock, left, commit=commit)

        return self._puller.submit(lambda: self._calls.pull("Pull", ask, clock, buckets, _one_pulled, land))

    def push_pull(
        self, clock: int, pushes: Sequence[BucketPush], buckets: Sequence[BucketSpec]
    ) -> tuple[list[Future[PushResult]], Future[PullResult]] | None:
        """None: payloads travel side by side, and weights come back while gradients still leave."""
        return None

    def close(self) -> None:
        """Ends the thread and the connection; the pool is others' too."""
        self._calls.close()
        self._puller.close()


def network_pushers(shards: int) -> DaemonPool:
    """What pushes to that many shards go through: on average there is one for each, where there are many."""
    return DaemonPool(min(max(PUSHES_IN_FLIGHT, shards), PUSHES_TO_ONE_SHARD * shards), "push")


def _one_pulled(message: bytes) -> list[Pulled]:
    return [convert.pulled(message)]


@dataclass
class _Leaving:
    """A bucket that is on its way, and who waits for it."""

    push: BucketPush
    futures: list[Future[PushResult]]

    def staged(self, found: PushResult) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(found)

    def failed(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class SharedTransport:
    """Buckets in a segment that worker and shard both map; only headers travel, as many at a time as there are.

    A call costs both ends as much as a bucket does. So what is made in the segment waits for others to go with it, and
    what leaves last in a step goes with the pull.
    """

    name = "shm"

    def __init__(self, calls: ShardCalls, who: Identity, flat: FlatModel) -> None:
        self._calls = calls
        self._who = who
        self._flat = flat
        self._kept: dict[int, _Leaving] = {}  # by bucket: of one clock, and not told of yet
        self._pushes: queue.SimpleQueue[list[_Leaving] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._puller = DaemonPool(1, "pull")
        self._copier = DaemonPool(0 if flat.in_segment else 1, "copy")
        self._copies: dict[int, tuple[int, Draft, Future[None]]] = {}  # by bucket, at which clock it left as a draft
        threading.Thread(target=self._run, name="push", daemon=True).start()

    def draft(self, push: BucketPush, draft: Draft) -> Future[PushResult] | None:
        """Puts the gradient into the segment, where that takes a copy: no shard looks at it before it counts."""
        if not self._flat.in_segment:
            copying = self._copier.submit(lambda: self._flat.share_gradient(push.bucket))
            self._copies[push.bucket.index] = push.clock, draft, copying
        return None

    def _share(self, push: BucketPush) -> None:
        """The gradient is in the segment when this returns, as it counts."""
        clock, draft, copying = self._copies.pop(push.bucket.index, (0, None, None))
        if copying is not None:
            copying.result()
        if clock != push.clock or draft is None or draft.is_dropped:
            self._flat.share_gradient(push.bucket)

    def push(self, push: BucketPush) -> Future[PushResult]:
        """Joins the next message."""
        future: Future[PushResult] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(Closed())
                return future
            if any(kept.push.clock != push.clock for kept in self._kept.values()):
                self._pushes.put(self._take())
            self._kept.setdefault(push.bucket.index, _Leaving(push, [])).futures.append(future)
            if not self._flat.in_segment or self._bytes(self._kept.values()) >= TOGETHER_BYTES:
                self._pushes.put(self._take())
        return future

    def _take(self) -> list[_Leaving]:
        found, self._kept = list(self._kept.values()), {}
        return found

    def _run(self) -> None:
        over = False
        while not over:
            waiting = [self._pushes.get()]
            while not self._pushes.empty():
                waiting.append(self._pushes.get())
            over = None in waiting
            by_clock: dict[int, list[_Leaving]] = {}
            for one in (one for batch in waiting if batch for one in batch):
                by_clock.setdefault(one.push.clock, []).append(one)
            for clock, together in by_clock.items():
                self._send(clock, together)

    def _send(self, clock: int, together: list[_Leaving]) -> None:
        pushes = [one.push for one in together]
        try:
            for push in pushes:
                if not push.empty:
                    self._share(push)
            self._calls.unary("PushShared", convert.shared_push(self._who, clock, pushes, self._finite(pushes)))
        except Exception as error:
            for one in together:
                one.failed(error)
        else:
            self._staged(together)

    def _staged(self, together: list[_Leaving], ago: float = 0.0) -> None:
        now = time.perf_counter()
        for one in together:
            one.staged(PushResult(self._bytes([one]), now - ago))

    def _finite(self, pushes: Sequence[BucketPush]) -> set[int]:
        return {push.bucket.index for push in pushes if self._flat.was_looked_at(push.bucket)}

    def _bytes(self, together: Iterable[_Leaving]) -> int:
        return sum(self._flat.gradient_bytes(one.push.bucket) for one in together if not one.push.empty)

    def pull(self, clock: int, buckets: Sequence[BucketSpec], commit: Sequence[BucketPush] = ()) -> Future[PullResult]:
        """One stream for all buckets; the shard writes them into the segment. Nothing here is ever to be committed."""

        def ask(left: list[int]) -> bytes:
            return convert.pull_request(self._who, clock, left, self._word_bytes)

        def read(message: bytes) -> list[Pulled]:
            return convert.shared_pulled(message)[0]

        return self._puller.submit(lambda: self._calls.pull("PullShared", ask, clock, buckets, read, self._land))

    def push_pull(
        self, clock: int, pushes: Sequence[BucketPush], buckets: Sequence[BucketSpec]
    ) -> tuple[list[Future[PushResult]], Future[PullResult]] | None:
        """None where gradients are not made in the segment: each is pushed as soon as it is there."""
        if not self._flat.in_segment:
            return None
        with self._lock:
            kept = self._take()
        last = [_Leaving(push, [Future()]) for push in pushes]
        together = kept + last
        if not together:
            return [], self.pull(clock, buckets)
        every = [one.push for one in together]
        finite = self._finite(every)

        def ask(left: list[int]) -> bytes:
            return convert.push_pull(self._who, clock, every, finite, left, self._word_bytes)

        def read(message: bytes) -> list[Pulled]:
            found, staged = convert.shared_pulled(message)
            if staged is not None:
                self._staged(together, staged)
            return found

        def fetch() -> PullResult:
            return self._calls.pull("PushPullShared", ask, clock, buckets, read, self._land)

        def ended(pulled: Future[PullResult]) -> None:
            error = pulled.exception()
            if error is None:
                self._staged(together)  # or it would not have been answered
            for one in together:
                one.failed(error or Closed())

        pulled = self._puller.submit(fetch)
        pulled.add_done_callback(ended)
        return [one.futures[0] for one in last], pulled

    @property
    def _word_bytes(self) -> int:
        return 0 if self._flat.lands_in_place else WORD_BYTES

    def _land(self, bucket: BucketSpec, _: Pulled) -> int:
        self._flat.land_shared(bucket)
        return self._flat.weight_bytes(bucket)

    def close(self) -> None:
        """Ends the threads and the connection."""
        self._calls.close()
        with self._lock:
            self._closed = True
            for one in self._take():
                one.failed(Closed())
            self._pushes.put(None)
        self._puller.close()
        self._copier.close()
