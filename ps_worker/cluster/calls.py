"""Calls to a shard, repeated when they fail: over its data connection if one is open, otherwise by gRPC."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc

from ps_frames.client import Answers, ClientConnection, DataLink, EachAnswer, OneAnswer
from ps_frames.frames import KINDS, ConnectionOffer
from ps_frames.opening import open_data_connection
from ps_frames.reading import ReadingThreads
from ps_protocol.errors import TryLater, Unreachable
from ps_protocol.framing import Parts, split_head, split_message
from ps_protocol.layout import BucketSpec
from ps_protocol.v1 import data_pb2
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import FAILURES, CallFailed, error_from, failure_of
from ps_runtime.pools import DaemonPool
from ps_runtime.retry import Peer, Retry
from ps_runtime.signals import await_all
from ps_runtime.troubles import Troubles
from ps_worker.cluster.coordinator_calls import CALL_SECONDS
from ps_worker.cluster.landing import ExchangeLanding, Landing, PullPlan, RowLanding
from ps_worker.values import PullResult

log = logging.getLogger("ps_worker")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Failure: TypeAlias = "grpc.RpcError | CallFailed"

DATA_SERVICE = data_pb2.DESCRIPTOR.services_by_name["DataService"].full_name
PULL_SECONDS = 60.0
OPEN_SECONDS = 5.0  # timeout of OpenDataConnection


class ShardCalls:
    """The calls to one shard. Requests and answers are bytes: neither gRPC nor protobuf copies a payload.

    timeout:   seconds without progress after which a call fails
    directory: the directory of unix sockets on this host, for data connections; None: use TCP only
    """

    def __init__(
        self, index: int, address: str, timeout: float, access: Access = PLAINTEXT, directory: Path | None = None
    ) -> None:
        self.index = index
        self.peer = Peer(f"shard {index}", address, access)
        self.closing = threading.Event()
        self._address, self._timeout, self._access, self._directory = address, timeout, access, directory
        self._channel = open_channel(address, access)
        self._last: Any = None  # the pull that ended last
        self._waits = Troubles(log, None)  # ps_worker_step_seconds has for how long
        self._link: DataLink | None = None

    # -- the data connection -----------------------------------------------------------------------------------------

    def open_data_connection(self, request: bytes, must: bool, reading: ReadingThreads) -> None:
        """Opens a data connection, which later calls use. If it breaks, another one is opened.

        request: the bytes of an OpenDataConnectionRequest
        must:    True: use TCP, and retry for as long as any call; False: try once now, and again later
        reading: the threads that receive

        Raises Unreachable if no data connection is possible, TryLater if there is none now, and other PSErrors as any
        call.
        """
        directory = None if must else self._directory

        def make() -> ClientConnection:
            call = self._channel.unary_unary(f"/{DATA_SERVICE}/OpenDataConnection")
            try:
                answer = data_pb2.OpenDataConnectionResponse.FromString(call(request, timeout=OPEN_SECONDS))
            except grpc.RpcError as error:
                raise failure_of(error) from None
            offer = ConnectionOffer(answer.port, answer.location, answer.socket_inode, answer.ticket)
            data = open_data_connection(offer, self._address, self._access, directory, str(self.peer), reading)
            data.takes_row_payloads = answer.row_payloads
            return data

        link, retry = DataLink(make, str(self.peer), self.closing), self._retry()
        while True:
            try:
                link.open()
                break
            except FAILURES as error:
                retry.failed(error)
            except TryLater as error:
                if not must:
                    self._link = link
                    raise
                retry.wait_after(error)
        self._link = link

    @property
    def is_connected(self) -> bool:
        """Whether a data connection is open."""
        return self.data() is not None

    def data(self) -> ClientConnection | None:
        """Returns the data connection that is open; None: calls go by gRPC."""
        return None if self._link is None else self._link.current

    # -- calls with one answer ---------------------------------------------------------------------------------------

    def unary(self, method: str, request: Parts) -> bytes:
        """Calls a method of the data service, with retries, and returns its answer. Raises PSError."""
        return self._retry().call(lambda: self._unary(method, request))

    def try_once(self, method: str, request: Parts) -> None:
        """Calls a method of the data service, without retries. Raises PSError."""
        try:
            self._unary(method, request)
        except FAILURES as error:
            raise error_from(error, str(self.peer)) from None

    def _unary(self, method: str, request: Parts) -> bytes:
        data = self.data() if method in KINDS else None
        if data is not None:
            return data.unary(KINDS[method], request, CALL_SECONDS)
        call = self._channel.unary_unary(f"/{DATA_SERVICE}/{method}")
        response: bytes = call(request.whole(), timeout=CALL_SECONDS)
        return response

    # -- calls with a stream of answers ------------------------------------------------------------------------------

    def first_of(self, method: str, request: bytes, seconds: float) -> bytes | None:
        """Returns the first message of a streaming method's answer, without retries; None: the stream was empty.

        seconds: the timeout
        Raises PSError.
        """
        messages: list[bytes] = []
        try:
            self._stream(method, request, seconds, lambda fields, payload: messages.append(fields))
            return messages[0] if messages else None
        except FAILURES as error:
            raise error_from(error, str(self.peer)) from None

    def stream(
        self,
        method: str,
        request: bytes,
        read: Callable[[bytes, memoryview | None], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls a streaming method. If the stream breaks, it is called again, and all messages come again.

        read:  is called with the fields and the payload of each message
        begin: is called before the first message of each attempt
        """
        retry = self._retry()

        def progressing(fields: bytes, payload: memoryview | None) -> None:
            retry.progressed()
            read(fields, payload)

        while True:
            begin()
            try:
                self._stream(method, request, PULL_SECONDS, progressing)
                return
            except FAILURES as error:
                retry.failed(error)

    def _stream(
        self, method: str, request: bytes, seconds: float, read: Callable[[bytes, memoryview | None], None]
    ) -> None:
        data = self.data()
        if data is not None:
            each = EachAnswer(lambda head, payload: read(split_head(head, len(payload or b"")), payload))
            data.call(KINDS[method], Parts(request), each, seconds).done.result()
            return
        for message in self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")(request, timeout=seconds):
            read(*split_message(message))

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pull(
        self, method: str, plan: PullPlan, clock: int, buckets: Sequence[BucketSpec], pool: DaemonPool
    ) -> Future[PullResult]:
        """Pulls buckets, and writes each to the model as it comes. A retry after a failure pulls the missing ones.

        method: Pull or Exchange
        pool:   runs the call if it needs a thread to wait in
        """
        landing = Landing(plan, clock, buckets, self._waits)

        def again(error: Failure | None) -> Future[PullResult]:
            return pool.submit(partial(self._land, method, landing, error))

        return self._soon(self.data(), method, landing, PULL_SECONDS, again, pool)

    def pull_rows(self, landing: RowLanding, pool: DaemonPool, method: str = "PullRows") -> Future[PullResult]:
        """Pulls rows. A retry after a failure pulls all of them again.

        pool:   as in `pull`
        method: PullRows or ExchangeRows
        """

        def land(error: Failure | None) -> PullResult:
            retry = self._retry()
            landing.progressed = retry.progressed
            if error is not None:
                retry.failed(error)
            while True:
                landing.begin()
                try:
                    self._stream(method, landing.request().whole(), PULL_SECONDS, landing.message)
                    return landing.result()
                except FAILURES as failed:
                    retry.failed(failed)

        return self._soon(
            self.data(), method, landing, PULL_SECONDS, lambda error: pool.submit(partial(land, error)), pool
        )

    def push_rows(self, request: Parts, result: Callable[[], T], pool: DaemonPool) -> Future[T]:
        """Pushes rows. The future's result is the return value of `result`, which is called after the push. pool: as in
        `pull`

        The memory of the request must not change until the future is done.
        """

        def again(error: Failure | None) -> Future[T]:
            return self._push_again(request, result, pool, error)

        return self._soon(self.data(), "PushRows", _Pushed(request, result), CALL_SECONDS, again, pool)

    def _push_again(
        self, request: Parts, result: Callable[[], T], pool: DaemonPool, error: Failure | None
    ) -> Future[T]:
        def push() -> T:
            retry = self._retry()
            if error is not None:
                retry.failed(error)
            retry.call(lambda: self._unary("PushRows", request))
            return result()

        return pool.submit(push)

    @property
    def takes_row_payloads(self) -> bool:
        """Whether `exchange_rows` is one call: a data connection is open, and the shard's version takes rows and ids in
        the message of an exchange.
        """
        data = self.data()
        return data is not None and data.takes_row_payloads

    def exchange_rows(
        self,
        landing: ExchangeLanding,
        apart: Callable[[], tuple[Parts, RowLanding]],
        pushers: DaemonPool,
        pullers: DaemonPool,
    ) -> Future[PullResult]:
        """Pushes and pulls rows in one call, in whose message they are.

        A retry after a failure is a push and then a pull. So is a call for which no such data connection is open any
        more: a shard of an earlier version may have taken the place. Those that need threads share none, because a pull
        may wait for other workers, which may wait for this worker's push.

        The memory of the request must not change until the landing says that the push is staged, or the call fails.
        The landing has kept a copy by then, if the push may have to be repeated.

        apart: returns the request of the push, and the pull
        """

        def again(error: Failure | None) -> Future[PullResult]:
            request, pull = apart()
            landed: Future[PullResult] = Future()

            def pushed(done: Future[None]) -> None:
                try:
                    done.result()
                    _follow(self.pull_rows(pull, pullers), landed)
                except Exception as failed:  # nobody else would hear of it: a callback's errors are only logged
                    landed.set_exception(failed)

            self._push_again(request, landing.is_staged, pushers, error).add_done_callback(pushed)
            return landed

        data = self.data()
        takes = data is not None and data.takes_row_payloads
        return self._soon(data if takes else None, "ExchangeRows", landing, PULL_SECONDS, again, pushers)

    @staticmethod
    def _soon(
        data: ClientConnection | None,
        method: str,
        asked: Asked[T],
        seconds: float,
        again: Callable[[Failure | None], Future[T]],
        pool: DaemonPool,
    ) -> Future[T]:
        """Makes a call. Over a data connection no thread waits for its answer: it is sent in this thread, as far as
        that needs no waiting, otherwise in one of the pool.

        data:  the connection to use; None if there is none
        again: makes the call with retries, over a data connection or gRPC, if the first attempt fails or there is none.
               Its argument is the error of the first attempt, or None
        """
        if data is None:
            return again(None)
        kind, asks = KINDS[method], asked.request()
        request = asks if isinstance(asks, Parts) else Parts(asks)
        landed: Future[T] = Future()

        def ended(done: Future[None]) -> None:
            error = done.exception()
            try:
                if error is None and asked.is_done:
                    landed.set_result(asked.result())
                elif error is None or isinstance(error, FAILURES):
                    _follow(again(error), landed)
                else:
                    landed.set_exception(error)
            except Exception as raised:  # nobody else would hear of it: a callback's errors are only logged
                landed.set_exception(raised)

        def send() -> None:
            data.call(kind, request, asked, seconds).done.add_done_callback(ended)

        def sent(done: Future[None]) -> None:
            if done.exception() is not None:
                ended(done)

        try:
            call = data.call_now(kind, request, asked, seconds)
        except CallFailed:  # it has just ended
            return again(None)
        if call is not None:
            call.done.add_done_callback(ended)
        else:
            pool.submit(send).add_done_callback(sent)
        return landed

    def _land(self, method: str, landing: Landing, error: Failure | None = None) -> PullResult:
        """Continues a pull with retries until it is done, over a data connection or gRPC. error: of an earlier
        attempt
        """
        retry = self._retry()
        landing.progressed = retry.progressed
        if error is not None:
            retry.failed(error)
        while not landing.is_done:
            try:
                data = self.data()
                if data is not None:
                    data.call(KINDS[method], Parts(landing.request()), landing, PULL_SECONDS).done.result()
                else:
                    self._land_by_grpc(method, landing)
            except FAILURES as failed:
                retry.failed(failed)
        return landing.result()

    def _land_by_grpc(self, method: str, landing: Landing) -> None:
        stream = self._channel.unary_stream(f"/{DATA_SERVICE}/{method}")
        # gRPC cancels a call that nothing refers to, and this one has not ended when the loop is left.
        self._last = stream(landing.request(), timeout=PULL_SECONDS)
        for message in self._last:
            landing.message(message)
            if landing.is_done:
                return

    @property
    def threads(self) -> list[threading.Thread]:
        """Its threads, which end soon after `close`."""
        return [] if self._link is None else self._link.threads

    def close(self) -> None:
        """Closes the connections; calls in flight end."""
        self.closing.set()
        self._channel.close()
        if self._link is not None:
            self._link.close()

    def _retry(self) -> Retry:
        return Retry(self.peer, self._timeout, self.closing)


class Asked(Answers, Protocol[T_co]):
    """A call over a data connection, which collects its answer."""

    @property
    def is_done(self) -> bool:
        """Whether the whole answer has come."""

    def request(self) -> bytes | Parts:
        """Returns the request."""

    def result(self) -> T_co:
        """Returns the result of the call. `is_done` must be True."""


class _Pushed(OneAnswer, Asked[T]):
    """A push of rows, and its acknowledgement."""

    is_done = True  # with its answer

    def __init__(self, request: Parts, result: Callable[[], T]) -> None:
        super().__init__()
        self._request, self._result = request, result

    def request(self) -> Parts:
        """Returns the request."""
        return self._request

    def result(self) -> T:
        """Returns the answer, or raises the error of the call."""
        return self._result()


def _follow(first: Future[T], second: Future[T]) -> None:
    """Ends one future as another one ends."""

    def ended(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            second.set_exception(error)
        else:
            second.set_result(done.result())

    first.add_done_callback(ended)


def open_data_connections(calls: Iterable[ShardCalls], request: bytes, transport: str, reading: ReadingThreads) -> None:
    """Opens a data connection to each shard with which it is possible.

    request:   the bytes of an OpenDataConnectionRequest
    reading:   the threads that receive from all of them
    transport: "tcp": every shard must have one over TCP; Unreachable is raised if one cannot
    """
    must, shards = transport == "tcp", list(calls)

    def open_one(shard: ShardCalls) -> None:
        try:
            shard.open_data_connection(request, must, reading)
        except (TryLater, Unreachable) as error:
            if must:
                raise
            log.info("%s; buckets travel by gRPC", error)

    pool = DaemonPool(len(shards), "data-open")
    try:
        for opened in await_all([pool.submit(partial(open_one, shard)) for shard in shards]):
            opened.result()
    finally:
        pool.close()
