"""Tells the coordinator what this worker's script has set for the job, such as a schedule, for workers that join late.

It is captured while the script stands still, inside a call of the session. If the script is not in such a call, the
training thread captures it at the next one. If the script is in one already, another thread captures it at once: the
script may be waiting in a step for the very worker that asks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ps_protocol.messages.workers import SavedState

log = logging.getLogger("ps_worker")


class ScriptTelling:
    """Answers the coordinator's requests for what this script has set. Thread-safe.

    send: sends an answer, given the request's number and what the script has set; returns at once
    """

    def __init__(self) -> None:
        self.send: Callable[[int, SavedState | None], None] = lambda request, script: None
        self._capture: Callable[[], SavedState | None] | None = None
        self._at_any_time = False
        self._depth = 0  # of the calls that the script is in
        self._moves = False  # in such a call, the session changes what the script has set
        self._request = 0
        self._lock = threading.RLock()

    def begin(self, capture: Callable[[], SavedState | None], at_any_time: bool = False) -> None:
        """Begins to answer requests.

        capture:     returns what the script has set; None: there is nothing to tell
        at_any_time: True: `capture` may be called at any time; False: only while the script stands still
        """
        with self._lock:
            self._capture, self._at_any_time = capture, at_any_time

    @contextmanager
    def standing(self) -> Iterator[None]:
        """A `with` block in which the script stands still, inside a call of the session. For the training thread."""
        with self._lock:
            self._depth += 1
            self._try()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                self._moves &= self._depth > 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A `with` block in which what the script has set changes. It belongs to no clock until the script
        has gone on.
        """
        with self._lock:
            self._moves = self._depth > 0
            yield

    def want(self, request: int) -> None:
        """Takes the number of a request; 0: there is none. A repeated request is answered again."""
        with self._lock:
            self._request = request
            self._try()

    def last(self) -> SavedState | None:
        """Returns what the script has set, for a worker that leaves; None: there is nothing to tell."""
        with self._lock:
            return self._captured()

    def _try(self) -> None:
        """Answers the coordinator's open request, if the script is where its state may be read."""
        stands = self._at_any_time or (self._depth > 0 and not self._moves)
        if self._request and (stands or self._capture is None):
            request, self._request = self._request, 0
            self.send(request, self._captured())

    def _captured(self) -> SavedState | None:
        try:
            return None if self._capture is None else self._capture()
        except Exception:
            log.exception("what the script has set could not be caught for workers that join later")
            self._capture = None
            return None
