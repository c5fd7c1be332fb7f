"""Reports the settings that this worker's script makes for the job (a schedule) to the coordinator, for workers that
join late.

They are captured while the script stands still, inside a call of the session. If the script is not in such a call, the
training thread captures them at the next one. If the script is in one already, another thread captures them at once:
the script may be waiting in a step for the very worker that asks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ps_protocol.messages.workers import SavedState

log = logging.getLogger("ps_worker")


class ScriptTelling:
    """Answers the coordinator's requests for the script's settings. Thread-safe.

    send: sends an answer, given the request's number and the settings; returns at once
    is_ahead: whether the job was rolled back, and this worker has not gone back with it yet: it has nothing to report
    """

    def __init__(self, is_ahead: Callable[[], bool] = lambda: False) -> None:
        self._is_ahead = is_ahead
        self.send: Callable[[int, SavedState | None], None] = lambda request, script: None
        self._capture: Callable[[], SavedState | None] | None = None
        self._at_any_time = False
        self._depth = 0  # the nesting of the calls that the script is in
        self._moves = False  # inside such a call, the session changes the script's settings
        self._request = 0
        self._lock = threading.RLock()

    def begin(self, capture: Callable[[], SavedState | None], at_any_time: bool = False) -> None:
        """Begins to answer requests.

        capture:     returns the script's settings; None: there are none
        at_any_time: True: `capture` may be called at any time; False: only while the script stands still
        """
        with self._lock:
            self._capture, self._at_any_time = capture, at_any_time

    def end(self) -> None:
        """Answers from now on, until `begin`, that there is nothing to report."""
        with self._lock:
            self._capture = None
            self._try()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """A `with` block in which the script stands still, inside a call of the session. For the training thread."""
        before = self._depth
        try:  # from here on Ctrl-C may act in any line, and a notebook goes on
            with self._lock:
                self._depth = before + 1
                if self._request:
                    self._try()
            yield
        finally:
            self._depth = before  # first: a wait for the lock may be interrupted
            with self._lock:
                self._moves &= before > 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A `with` block in which the session changes the script's settings. They belong to no clock until it has
        ended.
        """
        with self._lock:
            self._moves = self._depth > 0
            yield

    def want(self, request: int) -> None:
        """Records the number of the coordinator's request; 0: there is none. A repeated request is answered again."""
        with self._lock:
            self._request = request
            self._try()

    def last(self) -> SavedState | None:
        """Returns the script's settings, for a worker that leaves; None: there are none."""
        with self._lock:
            return self._captured()

    def _try(self) -> None:
        """Answers the coordinator's open request, if the script's settings may be read now."""
        stands = self._at_any_time or (self._depth > 0 and not self._moves)
        if self._request and (stands or self._has_nothing()):
            request, self._request = self._request, 0
            self.send(request, self._captured())

    def _has_nothing(self) -> bool:
        return self._capture is None or self._is_ahead()

    def _captured(self) -> SavedState | None:
        try:
            return None if self._capture is None or self._is_ahead() else self._capture()
        except Exception:
            log.exception("what the script has set could not be caught for workers that join later")
            self._capture = None
            return None
