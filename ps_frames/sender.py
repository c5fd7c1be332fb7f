"""Sends the frames of one data connection in order. Any thread may queue frames, and none waits.

A frame that fits into the kernel's buffer is sent by the thread that queues it, the rest by a thread of a pool. Small
frames that are queued together are sent together, because each piece wakes the other end: the end of a call, sent by
itself, took 8 % of the CPU of a small step over TCP (measured).

Payloads are lent, and sent without a copy. While the sender waits for the kernel, the shard may take its memory back
(loans.py): a worker that reads slowly delays no update.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from ps_frames.frames import FrameSocket, nothing
from ps_frames.loans import Loan
from ps_protocol.framing import Buffer
from ps_runtime.background import note_error

Frame = Sequence[Buffer]
LentFrame = tuple[Frame, Loan | None]
Lender = Callable[[], AbstractContextManager[LentFrame]]
Item = Frame | Lender
Then = Callable[[], None]

_TOGETHER_BYTES = 2**16  # of frames that leave in one piece, behind the first of them
_TOGETHER_PARTS = 128  # the kernel takes 1024 parts


def _each(thens: Sequence[Then]) -> None:
    for then in thens:
        then()


class FrameSender:
    """Sends frames on a connection until it ends. Thread-safe.

    pool:    threads that send what cannot be sent at once
    limited: returns a context that limits the time of a send
    """

    def __init__(
        self, frames: FrameSocket, pool: ThreadPoolExecutor, limited: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._frames = frames
        self._pool = pool
        self._limited = limited
        self._lock = threading.Lock()
        self._queue: deque[tuple[Item, Then]] = deque()
        self._is_busy = False  # a thread sends
        self._is_over = False

    def put(self, frame: Frame, then: Then = nothing) -> None:
        """Queues a frame; sends it in this thread if that needs no waiting. then: is called when the kernel has
        accepted the frame
        """
        if self._begins(frame, then) and not self._drain(waits=False):
            self._submit()

    def lend(self, lender: Lender) -> None:
        """Queues a frame that is made when its turn comes.

        lender: opens a context with the frame; its memory may be read until the context is closed
        """
        if self._begins(lender, nothing):
            self._submit()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A `with` block: small frames that are queued in it are sent as one piece."""
        with self._lock:
            begins, self._is_busy = not self._is_busy, True
        try:
            yield
        finally:
            if begins and not self._drain(waits=False):
                self._submit()

    def _begins(self, item: Item, then: Then) -> bool:
        """Queues what is to be sent; returns whether the caller has to see to that: no thread sends."""
        with self._lock:
            if self._is_over:
                return False
            self._queue.append((item, then))
            begins, self._is_busy = not self._is_busy, True
            return begins

    def end(self) -> None:
        """Drops all queued frames. Nothing more is sent."""
        with self._lock:
            self._is_over = True
            self._queue.clear()

    def _submit(self) -> None:
        with suppress(RuntimeError):  # the pool is shut down: the server is stopping
            self._pool.submit(self._drain, True)

    def _drain(self, waits: bool) -> bool:
        """Sends what is queued; returns whether all is sent. Without `waits`, what fits and is not lent."""
        while True:
            with self._lock:
                if not self._queue:
                    self._is_busy = False
                    return True
                if not waits and callable(self._queue[0][0]):
                    return False
                item, behind, then = self._take()
            try:
                if not self._send(item, behind, then, waits):
                    return False
                then()
            except OSError:
                self._broken()
                return True
            except Exception:
                note_error("send")
                self._broken()
                return True

    def _take(self) -> tuple[Item, Frame, Then]:
        """Takes what leaves in one piece: the next item, the small frames behind it, and what to call then. The caller
        holds the lock."""
        item, then = self._queue.popleft()
        behind: list[Buffer] = []
        thens, size = [then], 0
        while self._queue and not callable(self._queue[0][0]):
            frame = self._queue[0][0]
            size += sum(map(len, frame))
            if size > _TOGETHER_BYTES or len(behind) > _TOGETHER_PARTS:
                break
            behind += frame
            thens.append(self._queue.popleft()[1])
        return item, behind, then if len(thens) == 1 else partial(_each, thens)

    def _send(self, item: Item, behind: Frame, then: Then, waits: bool) -> bool:
        """Sends a frame, and those behind it. Without `waits`, what does not fit is put back, and False returned."""
        if callable(item):
            with item() as (frame, loan):
                self._send_all([*frame, *behind], loan)
            return True
        frames = [*item, *behind]
        if waits:
            self._send_all(frames)
            return True
        with self._frames.sending:
            rest: Frame = self._frames.send_now(frames)
        if not rest:
            return True
        with self._lock:
            if not self._is_over:
                self._queue.appendleft((rest, then))
        return False

    def _send_all(self, frame: Frame, loan: Loan | None = None) -> None:
        """Sends frames, and gives way to the lender of their memory while the kernel takes no more."""
        with self._frames.sending:
            left: Frame = self._frames.send_now(frame)
            if not left:
                return
            with self._limited():  # all of it: or one that reads a little now and then would keep a thread
                while left:
                    if loan is None:
                        self._frames.wait_for_room()
                    else:
                        left = loan.give_way(left, self._frames.wait_for_room)
                    left = self._frames.send_now(left)

    def _broken(self) -> None:
        """Ends the connection: a frame of which a part has left makes the rest worthless."""
        self.end()
        self._frames.abort()
