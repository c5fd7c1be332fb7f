"""Repeats a failed call: the pauses, the time limit, and the meaning of the failure.

Retrying is safe because every mutating call is idempotent: the servers recognise a repeat by its clock and incarnation.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from ps_protocol.errors import PSError, TryLater, Unauthenticated, Unreachable
from ps_runtime import tls_diagnosis
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import FAILURES, CallFailed, error_from
from ps_runtime.reloading import CHECK_SECONDS
from ps_runtime.troubles import Troubles

T = TypeVar("T")

log = logging.getLogger("ps_runtime")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
NOTICE_SECONDS = 1.0
NAMED_PAUSE_SECONDS = 0.5  # a peer that asks for such a pause has its reason logged
LONG_WAIT_SECONDS = 3.0  # a peer that asks for more time than this is worth a warning
_AWAY, _BUSY = "away", "busy"  # kinds of a peer's troubles: it does not answer; it asks to repeat the call later
# A generator of its own: retries must not change a script's random numbers.
_RANDOM = random.Random()


@dataclass(frozen=True)
class Peer:
    """A server that is called.

    role:     its name in messages; empty: only its address is shown
    access:   the credentials for the calls
    troubles: logs failed calls: if the server is away, many calls fail, and the log says so once
    waits:    logs calls that the server asks to repeat in a moment, which is not an error
    """

    role: str
    address: str
    access: Access = PLAINTEXT
    troubles: Troubles = field(default_factory=lambda: Troubles(log, "peer"), compare=False, repr=False)
    waits: Troubles = field(default_factory=lambda: Troubles(log, None), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.role} at {self.address}" if self.role else self.address

    def error(self, call: grpc.RpcError | CallFailed) -> PSError:
        """Returns a failed call as an error: `Untrusted` if a TLS handshake fails."""
        return self.explained(error_from(call, str(self)))

    def explained(self, error: PSError) -> PSError:
        """Returns the error itself, or an `Untrusted` with the reason, if a failing TLS handshake may be its cause."""
        if not isinstance(error, TryLater):
            return error
        return tls_diagnosis.explain(self.address, self.access) or error


class Retry:
    """Repeats a call after failures that may pass, with growing pauses, up to a time limit.

    If the server names a pause, this pause is used and counts as progress. An error whose `progress` has changed counts
    as progress, too.

    timeout: seconds without progress after which Unreachable is raised, with the last error
    closing: once it is set, the call is not repeated
    """

    def __init__(self, peer: Peer, timeout: float, closing: threading.Event) -> None:
        self._peer = peer
        self._timeout = timeout
        self._closing = closing
        self._is_explained = False
        self._waits_since: float | None = None  # when the peer first asked to repeat the call later
        self._is_long = False  # whether the log warns of that
        self._progress: str | None = None  # the last progress
        self._is_unknown = False  # the peer did not know the token that was shown last
        self._begin_anew()

    def progressed(self) -> None:
        """Restarts the time limit, because a message has arrived."""
        if self._peer.troubles.open or self._peer.waits.open:
            self._peer.troubles.over(_AWAY)
            self._peer.troubles.over(_BUSY)
            self._peer.waits.over(_BUSY)
        self._waits_since, self._is_long, self._is_unknown = None, False, False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._since = time.monotonic()
        self._pause = FIRST_PAUSE_SECONDS
        self._has_warned = False

    def failed(self, call: grpc.RpcError | CallFailed) -> None:
        """Waits before the next attempt. Raises the error if it cannot pass, Unreachable after the time limit."""
        self.wait_after(error_from(call, str(self._peer)))

    def wait_after(self, error: PSError) -> None:
        """Waits before the next try, as `failed` does."""
        is_renewed = isinstance(error, Unauthenticated) and self._peer.access.token_file is not None
        if is_renewed and not self._is_unknown and not self._closing.is_set():
            self._is_unknown = True
            self._closing.wait(CHECK_SECONDS)  # a token that was renewed a moment ago has been read again by then
            return
        if not error.retryable or self._closing.is_set():
            raise error
        if isinstance(error, TryLater) and not self._is_explained:
            self._is_explained = True
            explained = self._peer.explained(error)
            if explained is not error:
                raise explained from None
        if error.retry_after is not None:  # the peer is alive, and has said when to try again
            # A push that waits for room is tried again in a moment, at many steps: that is not worth a line.
            if isinstance(error, TryLater) or error.retry_after >= NAMED_PAUSE_SECONDS:
                self._name_wait(error)
            self._begin_anew()
            self._closing.wait(error.retry_after * _RANDOM.uniform(1.0, 1.5))
            return
        if error.progress is not None and error.progress != self._progress:
            self._progress = error.progress  # the peer's progress, which restarts the time limit
            self._begin_anew()
            self._name_wait(error)
        passed = time.monotonic() - self._since
        if passed >= self._timeout:
            raise Unreachable(f"gave up after {self._timeout:g} s: {error}") from None
        if not self._has_warned and passed > NOTICE_SECONDS:
            self._peer.troubles.met(_AWAY, "%s; trying again for %g s", error, self._timeout)
            self._has_warned = True
        # Random pauses (jitter), so that workers that lost the same server do not all retry at the same moment.
        self._closing.wait(self._pause * _RANDOM.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)

    def _name_wait(self, error: PSError) -> None:
        """Logs the reason for which the peer makes a call wait, and warns once that this takes long. Most such waits
        are over in a moment.
        """
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
            self._peer.waits.met(_BUSY, "%s", error, level=logging.INFO, detail=str(error))
        elif not self._is_long and now - self._waits_since >= LONG_WAIT_SECONDS:
            self._is_long = True
            what = "waiting for %s for %.0f s now: %s"
            waited = self._peer, now - self._waits_since
            self._peer.troubles.met(_BUSY, what, *waited, error, detail=str(error))

    def call(self, attempt: Callable[[], T]) -> T:
        """Returns the result of the first attempt that succeeds."""
        while True:
            try:
                result = attempt()
            except FAILURES as call:
                self.failed(call)
            else:
                self.progressed()
                return result
