"""Receives requests, a few of each kind at a time: what clients begin and do not end takes no more than its share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from ps_frames.server import CallBroken, ServerCall
from ps_protocol.errors import TryLater
from ps_server.core.admission import Changes, Kind, Origin, RequestPlaces, Terms

# Of methods by name; all others are quick.
KINDS = {
    "/ps_protocol.v1.DataService/Exchange": Kind.EXCHANGE,
    "/ps_protocol.v1.DataService/ExchangeRows": Kind.EXCHANGE,
    "/ps_protocol.v1.DataService/PullRows": Kind.DATA,  # it brings the ids
    "/ps_protocol.v1.DataService/Push": Kind.DATA,
    "/ps_protocol.v1.DataService/PushRows": Kind.DATA,
    "/ps_protocol.v1.DataService/PushTable": Kind.DATA,
    "/ps_protocol.v1.JobService/RegisterJob": Kind.LARGE,
    "/ps_protocol.v1.MembershipService/Leave": Kind.LARGE,  # it brings what SaveWorkerState does
    "/ps_protocol.v1.MembershipService/SaveWorkerState": Kind.LARGE,
    "/ps_protocol.v1.RoundService/GatherValues": Kind.LARGE,
    "/ps_protocol.v1.ShardService/CreateJob": Kind.LARGE,
    "/ps_protocol.v1.ShardService/RestoreJob": Kind.LARGE,
}


class Refused(Exception):
    """There is no place for a request.

    error:        what its caller is told
    held_seconds: for which it is not told so, if that costs no thread
    """

    def __init__(self, held_seconds: float) -> None:
        super().__init__()
        self.error, self.held_seconds = TryLater("too many requests arrive here at once"), held_seconds


class _Call:
    """A call whose request is to be received: it waits for a place, or has one."""

    def __init__(self, call: ServerCall) -> None:
        self.call = call
        self.is_admitted = False
        self._decided = threading.Event()

    def admit(self) -> None:
        """Tells the call that it has a place."""
        self.is_admitted = True
        self._decided.set()

    def refuse(self) -> None:
        """Tells the call that it gets no place, unless it has one."""
        self._decided.set()

    def wait(self) -> bool:
        """Waits for a place; returns whether it has one: not where too many wait, or its caller is gone."""
        if not self.is_admitted and self.call.add_callback(self.refuse):
            self._decided.wait()
        return self.is_admitted


class Receiving:
    """The places of each kind of request. Thread-safe. waits: is called where a request has to wait for a place"""

    def __init__(self, kinds: Mapping[Kind, Terms], waits: Callable[[], None] = lambda: None) -> None:
        self._on_wait = waits
        self._lock = threading.Lock()
        self._kinds = {kind: RequestPlaces[_Call](terms) for kind, terms in kinds.items()}
        self._was_broken_off = False

    def waits(self) -> int:
        """Returns how many requests are being received, or wait for that."""
        with self._lock:
            return sum(kind.received + kind.waiting for kind in self._kinds.values())

    @contextlib.contextmanager
    def place(self, method: str, origin: Origin, call: ServerCall) -> Iterator[None]:
        """Holds a place for the request of a call. Raises Refused if too many wait for one."""
        kind, waiting = self._kinds[KINDS.get(method, Kind.QUICK)], _Call(call)
        with self._lock:
            _tell(kind.ask(waiting, origin, time.monotonic()))
        if not waiting.is_admitted:
            self._on_wait()
        try:
            if not waiting.wait():
                with self._lock:
                    raise Refused(kind.held_seconds(origin, time.monotonic()))
            try:
                yield
            except CallBroken:
                self._was_broken_off = True
                raise
        finally:
            with self._lock:
                _tell(kind.leave(waiting, time.monotonic()))

    def cut_off(self) -> None:
        """Cancels the calls whose places are needed, and those whose time is over."""
        now = time.monotonic()
        with self._lock:
            overdue = [call for kind in self._kinds.values() for call in kind.overdue(now)]
        for call in overdue:
            call.call.cancel()

    def was_broken_off(self) -> bool:
        """Returns whether a request has been broken off since the last time that this was asked."""
        was, self._was_broken_off = self._was_broken_off, False
        return was


def _tell(changes: Changes[_Call]) -> None:
    for call in changes.admitted:
        call.admit()
    for call in changes.refused:
        call.refuse()
