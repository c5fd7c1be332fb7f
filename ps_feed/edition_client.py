"""The gRPC calls that fetch editions: a coordinator lists its shards and jobs, and shards send their buckets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

import grpc

from ps_feed.edition import Damaged
from ps_protocol.errors import InvalidRequest, PSError, TryLater, Unsupported
from ps_protocol.framing import Buffer, split_message
from ps_protocol.job import MAX_MESSAGE_BYTES
from ps_protocol.messages.editions import (
    EditionBucket,
    EditionCall,
    EditionMessage,
    WeightsAsked,
    WeightsHere,
    read_edition_part,
    read_weights_here,
    write_edition_call,
    write_weights_asked,
)
from ps_protocol.v1 import cluster_pb2, feed_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access
from ps_runtime.pools import Closed, DaemonPool
from ps_runtime.retry import Peer

T = TypeVar("T")

CALL_SECONDS = 10.0
REPORT_SECONDS = 2.0  # for a report of a relay, whose answer nobody waits for
MOST_SHARDS = 1024  # the most shards of a cluster that a reader accepts
_SERVICE = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name


def receive(
    parts: Iterable[EditionMessage],
    take: Callable[[EditionBucket, int], None],
    alive: Callable[[int, float | None], None],
    memory_for: Callable[[EditionBucket], memoryview | None],
) -> bool:
    """Hands out the parts of an edition as they come. Returns whether all buckets came that its begin has announced.

    take, alive, memory_for: see ShardReader.pull
    """
    left, timeline, joined = None, 0, JoinedParts(memory_for)
    for part in parts:
        alive(part.now, part.age)
        if part.begin is not None:
            left, timeline = part.begin.buckets, part.begin.timeline
        bucket = joined.add(part)
        if bucket is not None:
            left = 0 if left is None else left - 1
            take(bucket, timeline)
    return left == 0 and not joined.is_waiting


class Unreadable(Damaged):
    """A message has another form than any that this reader knows."""


class JoinedParts:
    """Joins the messages of one stream into buckets.

    memory_for: returns memory for a payload that comes in several messages; None: use memory that the next such payload
           reuses
    """

    def __init__(self, memory_for: Callable[[EditionBucket], memoryview | None]) -> None:
        self._memory_for = memory_for
        self._own = self._memory = memoryview(b"")
        self._bucket: EditionBucket | None = None  # the bucket whose messages are coming
        self._came = 0

    @property
    def is_waiting(self) -> bool:
        """Whether more of a bucket is to come."""
        return self._bucket is not None

    def add(self, part: EditionMessage) -> EditionBucket | None:
        """Returns the bucket of which this is the last part; None if there is none. Raises Damaged."""
        begun = self._bucket
        if part.bucket is None:
            return None if part.more is None else self._add(part.more)
        if begun is not None:
            raise Damaged(f"bucket {part.bucket.bucket} came where more of bucket {begun.bucket} was to come")
        size = part.bucket.payload_bytes
        if size is None:
            return part.bucket
        if size > MAX_MESSAGE_BYTES:
            raise Damaged(f"bucket {part.bucket.bucket} was announced with {size} bytes, more than any has")
        memory = self._memory_for(part.bucket)
        if memory is None and size > len(self._own):
            self._own = memoryview(bytearray(size))
        self._memory = self._own if memory is None else memory
        self._bucket, self._came = part.bucket, 0
        return self._add(part.bucket.payload)

    def _add(self, payload: Buffer) -> EditionBucket | None:
        bucket, size = self._bucket, 0 if self._bucket is None else self._bucket.payload_bytes or 0
        begin, end = self._came, self._came + len(payload)
        if bucket is None or end > size:
            raise Damaged(f"{len(payload)} bytes came where {size - begin if bucket else 0} were to come of a bucket")
        self._memory[begin:end], self._came = payload, end
        if end < size:
            return None
        self._bucket = None
        return bucket._replace(payload=self._memory[:size], payload_bytes=None)


def _part(data: bytes) -> EditionMessage:
    """Reads a message. Raises Unreadable: a feed goes on after that, and would end with InvalidRequest."""
    try:
        return read_edition_part(*split_message(data))
    except InvalidRequest as error:
        raise Unreadable(f"a message of an edition cannot be read: {error}") from None


class KnownShards(NamedTuple):
    """The addresses of the known shards, by index; the number of shards of the cluster; and the coordinator's jobs."""

    addresses: dict[int, str]
    shards: int
    jobs: frozenset[str]


def cluster(server: str, access: Access) -> KnownShards:
    """Asks a coordinator for its shards and jobs. Raises PSError.

    server: HOST:PORT
    access: needs the role of a reader
    """
    with open_channel(server, access) as channel:
        try:
            status = ClusterServiceStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise Peer("coordinator", server, access).error(error) from None
    jobs = frozenset(each.name for each in status.jobs)
    return KnownShards({each.index: each.address for each in status.shards}, status.coordinator.shard_count, jobs)


class ShardReader:
    """One shard. `tell` and `cancel` may be called from any thread, all else is for one at a time."""

    def __init__(self, index: int, address: str, access: Access) -> None:
        self.index, self.address = index, address
        self.peer = Peer(f"shard {index}", address, access)
        self._channel = open_channel(address, access)
        self._describe = self._channel.unary_unary(f"/{_SERVICE}/DescribeWeights")
        self._pull = self._channel.unary_stream(f"/{_SERVICE}/PullEdition")
        self._call: Any = None
        self._telling: Any = None
        self._is_cancelled = self._is_closed = False
        self._lock = threading.Lock()

    def describe(self, asked: WeightsAsked) -> WeightsHere:
        """Asks what the shard has of a job's weights. Raises PSError."""
        if self._is_closed:
            raise self._cancelled()
        try:
            data = self._describe(write_weights_asked(asked), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise self.peer.error(error) from None
        return read_weights_here(data)

    def tell(self, asked: WeightsAsked) -> None:
        """Sends what a relay says of itself with a call whose answer nobody waits for. It is not repeated if it fails,
        because the next report comes soon. Does nothing unless a pull is under way: a channel without a call would
        start a thread for this one."""
        with self._lock, contextlib.suppress(PSError, grpc.RpcError):
            if not self._is_cancelled and self._call is not None:
                # gRPC cancels a call that nothing refers to.
                self._telling = self._describe.future(write_weights_asked(asked), timeout=REPORT_SECONDS)

    def pull(
        self,
        call: EditionCall,
        take: Callable[[EditionBucket, int], None],
        alive: Callable[[int, float | None], None],
        memory_for: Callable[[EditionBucket], memoryview | None],
    ) -> None:
        """Receives buckets of an edition. Raises PSError, also when it is cancelled.

        take:  is handed each bucket, and the timeline of its version
        alive: is told the lowest version of the shard's buckets whenever a message comes, and the age of a relay's
               edition
        memory_for: returns the memory for the payload of a bucket that comes in several messages; None: any, until the
                    next bucket comes
        """
        with self._lock:
            if self._is_cancelled:
                raise self._cancelled()
            self._call = self._pull(write_edition_call(call))
        try:
            parts = map(_part, self._call)
            is_whole = receive(parts, take, alive, memory_for)
        except grpc.RpcError as error:
            # The error is the call itself, to which its own traceback refers, and that to what has come.
            raise self.peer.error(error.with_traceback(None)) from None
        finally:
            with self._lock:
                under_way, self._call = self._call, None  # it may be the error
            under_way.cancel()
            del under_way
        if not is_whole:
            raise TryLater(f"{self.peer}: the edition ended too early")

    def _cancelled(self) -> TryLater:
        return TryLater(f"{self.peer}: the call was cancelled")

    def allow(self) -> None:
        """Allows pulls again after `cancel`, but not after `close`."""
        with self._lock:
            self._is_cancelled = self._is_closed

    def cancel(self) -> None:
        """Ends the pull that is under way, and any that begins before `allow`."""
        with self._lock:
            self._is_cancelled, call = True, self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        self.cancel()
        self._channel.close()


def _error_of(failed: Future[T]) -> BaseException:
    error = failed.exception()
    assert error is not None
    return TryLater("the connections are closed") if isinstance(error, Closed) else error


class EachShard:
    """The shards of a cluster, as long as their number and addresses stay: one thread each."""

    def __init__(self, server: str, access: Access) -> None:
        found = cluster(server, access)
        if found.shards > MOST_SHARDS:  # the server may be a stranger's, and each shard costs a connection and a thread
            raise Unsupported(f"{server} says that it has {found.shards} shards: expected {MOST_SHARDS} at most")
        missing = [index for index in range(found.shards) if index not in found.addresses]
        if missing or not found.shards:
            raise TryLater(f"shard {missing[0] if missing else 0} of {found.shards} is not known at {server} yet")
        self.readers = [ShardReader(index, found.addresses[index], access) for index in range(found.shards)]
        # An executor's threads would keep a script from ending whose job stands still.
        self._pools = [DaemonPool(1, "ps-feed-shard") for _ in self.readers]

    def all(self, call: Callable[[ShardReader], T]) -> list[T]:
        """Calls all, at the same time. Raises the first error, after the calls of the others are cancelled."""
        for reader in self.readers:
            reader.allow()
        calls = [partial(call, reader) for reader in self.readers]
        futures = [pool.submit(each) for pool, each in zip(self._pools, calls, strict=True)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = [number for number, each in enumerate(futures) if each.done() and each.exception() is not None]
            if failed:
                self.cancel()  # the errors of these calls say nothing
                wait(futures)
                raise _error_of(futures[failed[0]])
            return [future.result() for future in futures]
        finally:
            # The traceback of an error refers to this frame. If the frame referred to the error, all that the calls
            # have, such as a part of an edition, would stay until the garbage collector runs.
            futures.clear()
            calls.clear()

    def cancel(self) -> None:
        """Ends what is under way."""
        for reader in self.readers:
            reader.cancel()

    def end(self) -> None:
        """Closes the connections to all shards; calls under way fail."""
        for reader in self.readers:
            reader.close()

    def close(self) -> None:
        """Ends all connections, and the threads."""
        self.end()
        for pool in self._pools:
            pool.close()
        for pool in self._pools:
            pool.join()
