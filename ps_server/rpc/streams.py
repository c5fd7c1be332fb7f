"""Server streams that hold no thread while they wait.

gRPC's threaded server gives a handler one pool thread for as long as it runs, so a thousand waiting pulls would need a
thousand threads, and pushes would find none left. A handler marked `non_blocking` gets a function to send with and
returns at once; its messages are sent later by a pool of senders. (This is how grpcio-health-checking serves Watch.)
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import grpc

from ps_frames.frames import nothing
from ps_frames.server import AuthContext, CallBroken, Metadata, ServerCall
from ps_protocol.errors import PSError, without_traceback
from ps_protocol.framing import Parts
from ps_runtime.background import guarded, note_error
from ps_runtime.grpc_status import STATUS_KEY, code_of, status_of
from ps_server.shard.outbox import Answer, Lent, Outbox

Send = Callable[[Any], None]


class GrpcCall(ServerCall):
    """A call over gRPC. requests: the caller's messages"""

    worker = None
    request_bytes = kept = None

    def __init__(self, context: grpc.ServicerContext, requests: Iterator[bytes] | None = None) -> None:
        self._context, self._requests = context, requests

    @property
    def code(self) -> str:
        """The name of the code with which it fails; empty: it has not failed."""
        code = self._context.code()
        return code.name if code else ""

    def peer(self) -> str:
        """Returns the caller's address."""
        return str(self._context.peer())

    def invocation_metadata(self) -> Metadata:
        """Returns its metadata."""
        return tuple(self._context.invocation_metadata() or ())

    def auth_context(self) -> AuthContext:
        """Returns the properties of the caller's TLS certificate, by name."""
        found: AuthContext = self._context.auth_context()
        return found

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the call is over; returns False if it already is."""
        return bool(self._context.add_callback(callback))

    def cancel(self) -> None:
        """Cancels the call."""
        self._context.cancel()

    def receive(self) -> bytes | None:
        """Returns the next request; None if there is no more. Raises CallBroken."""
        try:
            return None if self._requests is None else next(self._requests, None)
        except grpc.RpcError as error:
            # gRPC keeps the error with the call, and its traceback refers to the call: see `_error_of`.
            without_traceback(error)
            raise CallBroken from None

    def fail(self, error: PSError) -> None:
        """Sets the error with which the call ends: when its stream is closed, or by `abort`."""
        self._context.set_code(code_of(error))
        self._context.set_details(str(error))
        self._context.set_trailing_metadata(((STATUS_KEY, status_of(error).SerializeToString()),))

    def abort(self) -> NoReturn:
        """Ends a method whose call has failed or was broken off: gRPC wants an exception, and logs any but its own."""
        self._context.abort(self._context.code() or grpc.StatusCode.CANCELLED, self._context.details() or "")
        raise AssertionError


class ResponseStream:
    """One server stream: messages are put by any thread without waiting, and sent one after the other by the pool."""

    def __init__(self, send: Send, call: ServerCall, senders: ThreadPoolExecutor) -> None:
        self._send = send
        self._call = call
        self._senders = senders
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], Any]] = deque()
        self._draining = False
        self._on_close: Callable[[], None] = nothing
        self.closed = False
        if not call.add_callback(self._closed):  # it may be called, by another thread, before this returns
            self.closed = True

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls back in a sender's thread when the stream is over, however it ended; at once if it already is.

        The callback comes before the client learns of the end."""
        with self._lock:
            over = self.closed
            if not over:
                self._on_close = callback
        if over:
            self._submit(callback)

    def put(self, make: Callable[[], Any]) -> None:
        """Queues a message: `make` is called when its turn has come, and returns the message. None ends the stream."""
        with self._lock:
            if self.closed:
                return
            self._queue.append(make)
            if self._draining:
                return
            self._draining = True
        self._submit(self._drain)

    def finish(self) -> None:
        """Ends the stream after the queued messages."""
        self.put(lambda: None)

    def fail(self, error: PSError) -> None:
        """Ends the stream with an error, after the queued messages."""

        def make() -> None:
            self._call.fail(error)

        self.put(make)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if self.closed or not self._queue:
                    self._draining = False
                    return
                make = self._queue.popleft()
            try:
                message = make()
            except Exception:
                note_error("send")
                self._call.fail(PSError("internal error; the server's log says more"))
                message = None
            if message is None:  # the end of the stream: another reason to end, queued behind it, is dropped
                # First, so that this call is no longer counted when the client learns of the end, and calls again.
                guarded("send", self._over())
            self._send(message)

    def _closed(self) -> None:
        # gRPC reports a call's end on the one thread that serves every call: nothing may block it.
        callback = self._over()
        if callback is not nothing:
            self._submit(callback)

    def _over(self) -> Callable[[], None]:
        """Drops the queued messages. Returns the callback, the first time."""
        with self._lock:
            self.closed = True
            self._queue.clear()
            # Dropped because it refers to this outbox: the garbage collector alone would free the cycle.
            callback, self._on_close = self._on_close, nothing
        return callback

    def _submit(self, task: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is shut down: the server is stopping
            self._senders.submit(task)


class PullStream(ResponseStream, Outbox):
    """The outbox for the answers to one pull over gRPC.

    write: encodes an answer as a message
    """

    def __init__(
        self,
        send: Send,
        call: ServerCall,
        senders: ThreadPoolExecutor,
        write: Callable[[Any], Parts],
    ) -> None:
        super().__init__(send, call, senders)
        self._write = write

    def tell(self, answer: Answer) -> None:
        """Queues an answer."""
        self.put(lambda: self._write(answer).whole())

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        """Queues an answer that is made when its turn has come: its payload is copied once, into the message."""

        def make() -> bytes:
            with lent() as (answer, _):
                return self._write(answer).whole()

        self.put(make)
