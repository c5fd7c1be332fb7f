"""Server streams that hold no thread while they wait.

gRPC's threaded server gives a handler one pool thread for as long as it runs, so a thousand waiting pulls would need a
thousand threads, and pushes would find none left. A handler marked `non_blocking` gets a function to send with and
returns at once; its messages are sent later by a pool of senders. (This is how grpcio-health-checking serves Watch.)
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc

from ps_protocol.errors import PSError
from ps_protocol.framing import Parts
from ps_runtime.background import note_error
from ps_runtime.frame_socket import nothing
from ps_runtime.grpc_status import STATUS_KEY, code_of, status_of
from ps_server.shard.waiting import Answer, Lent, Outbox

Send = Callable[[Any], None]


def set_error(context: grpc.ServicerContext, error: PSError) -> None:
    """Ends a call with this error once its handler returns or its stream is closed."""
    context.set_code(code_of(error))
    context.set_details(str(error))
    context.set_trailing_metadata(((STATUS_KEY, status_of(error).SerializeToString()),))


class ResponseStream:
    """One server stream: messages are put by any thread without waiting, and sent one after the other by the pool."""

    def __init__(self, send: Send, context: grpc.ServicerContext, senders: ThreadPoolExecutor) -> None:
        self._send = send
        self._context = context
        self._senders = senders
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], Any]] = deque()
        self._draining = False
        self._on_close: Callable[[], None] = nothing
        self.closed = False
        if not context.add_callback(self._closed):  # it may be called, by another thread, before this returns
            self.closed = True

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has a sender call back when the stream is over, however it ended; at once if it already is."""
        with self._lock:
            over = self.closed
            if not over:
                self._on_close = callback
        if over:
            self._submit(callback)

    def put(self, make: Callable[[], Any]) -> None:
        """Queues a message. `make` is called when its turn has come; what it returns is sent. None ends the stream."""
        with self._lock:
            if self.closed:
                return
            self._queue.append(make)
            if self._draining:
                return
            self._draining = True
        self._submit(self._drain)

    def finish(self) -> None:
        """Ends the stream after what is queued."""
        self.put(lambda: None)

    def fail(self, error: PSError) -> None:
        """Ends the stream with an error, after what is queued."""

        def make() -> None:
            set_error(self._context, error)

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
                set_error(self._context, PSError("internal error; the server's log says more"))
                message = None
            self._send(message)
            if message is None:  # the end of the stream: another reason to end, queued behind it, is dropped
                self._closed()

    def _closed(self) -> None:
        with self._lock:
            first, self.closed = not self.closed, True
            self._queue.clear()
            # Dropped: it refers to this outbox, and a cycle is only freed when the collector comes by.
            callback, self._on_close = self._on_close, nothing
        if first:
            # gRPC tells of a call's end on the one thread that serves every call: nothing may be waited for there.
            self._submit(callback)

    def _submit(self, task: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is shut down: the server is stopping
            self._senders.submit(task)


class PullStream(ResponseStream, Outbox):
    """The answers to one pull, as a shard hands them over.

    write: what makes a message of an answer
    """

    def __init__(
        self,
        send: Send,
        context: grpc.ServicerContext,
        senders: ThreadPoolExecutor,
        write: Callable[[Any], Parts],
    ) -> None:
        super().__init__(send, context, senders)
        self._write = write

    def tell(self, answer: Answer) -> None:
        """Queues an answer."""
        self.put(lambda: self._write(answer).whole())

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]]) -> None:
        """Queues an answer that is made when its turn has come: its payload is copied once, into the message."""

        def make() -> bytes:
            with lent() as (answer, _):
                return self._write(answer).whole()

        self.put(make)
