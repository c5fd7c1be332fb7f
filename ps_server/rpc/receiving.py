"""Receives requests, a few of each kind at a time, so that unfinished requests use no more than their share of
memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from ps_frames.frames import nothing
from ps_frames.server import CallBroken, ServerCall
from ps_protocol.errors import TryLater
from ps_server.core.admission import AdmissionDecisions, CallerPath, RequestKind, RequestLimits, RequestSlots

# The kind of each method's requests, by the method's name. All other methods are quick.
KINDS = {
    "/ps_protocol.v1.DataService/Exchange": RequestKind.EXCHANGE,
    "/ps_protocol.v1.DataService/ExchangeRows": RequestKind.EXCHANGE,
    "/ps_protocol.v1.DataService/PullRows": RequestKind.DATA,  # it brings the ids
    "/ps_protocol.v1.DataService/Push": RequestKind.DATA,
    "/ps_protocol.v1.DataService/PushRows": RequestKind.DATA,
    "/ps_protocol.v1.DataService/PushTable": RequestKind.DATA,
    "/ps_protocol.v1.JobService/RegisterJob": RequestKind.LARGE,
    # It carries a worker's state, as SaveWorkerState does
    "/ps_protocol.v1.MembershipService/Leave": RequestKind.LARGE,
    "/ps_protocol.v1.MembershipService/SaveWorkerState": RequestKind.LARGE,
    "/ps_protocol.v1.RoundService/GatherValues": RequestKind.LARGE,
    "/ps_protocol.v1.ShardService/CreateJob": RequestKind.LARGE,
    "/ps_protocol.v1.ShardService/RestoreJob": RequestKind.LARGE,
}


def kind_of(method: str) -> RequestKind:
    """Returns the kind of a method's requests."""
    return KINDS.get(method, RequestKind.QUICK)


class Refused(Exception):
    """A request was refused: too many wait for a place.

    error:        the error for its caller
    held_seconds: the delay of this error, if the delay costs no thread
    """

    def __init__(self, held_seconds: float) -> None:
        super().__init__()
        self.error, self.held_seconds = TryLater("too many requests arrive here at once"), held_seconds


class _Call:
    """A call whose request is to be received: it waits for a place, or has one.

    on_decision: called once with this object, from any thread, if the decision comes while the call waits. It must not
          refer to this object: in a cycle, gRPC's call would live until the garbage collector runs, and gRPC refuses
          new streams on a connection that has too many.
    """

    def __init__(self, call: ServerCall, on_decision: Callable[[_Call], object]) -> None:
        self.call, self.on_decision = call, on_decision
        self.is_admitted = self.is_refused = False


class Receiving:
    """The places of each kind of request. Thread-safe. waits: called when a request has to wait for a place"""

    def __init__(self, kinds: Mapping[RequestKind, RequestLimits], waits: Callable[[], None] = nothing) -> None:
        self._on_wait = waits
        self._lock = threading.Lock()
        self._kinds = {kind: RequestSlots[_Call](limits) for kind, limits in kinds.items()}
        self._was_broken_off = False

    def waits(self) -> int:
        """Returns how many calls hold a place or wait for one."""
        with self._lock:
            return sum(kind.received + kind.waiting for kind in self._kinds.values())

    @contextlib.contextmanager
    def place(self, of: RequestKind, origin: CallerPath, call: ServerCall) -> Iterator[None]:
        """Holds a place for the request of a call, for which this thread waits. Raises Refused if too many wait."""
        decided = threading.Event()
        kind, waiting = self._kinds[of], _Call(call, lambda _: decided.set())
        is_decided = self._ask(kind, waiting, origin)
        try:
            if not is_decided and call.add_callback(decided.set):
                decided.wait()
        except BaseException:
            self._leave(kind, waiting)
            raise
        if not waiting.is_admitted:
            self._leave(kind, waiting)
            raise self._refusal(kind, origin)
        with self._placed(kind, waiting):
            yield

    def later(
        self,
        of: RequestKind,
        origin: CallerPath,
        call: ServerCall,
        submit: Callable[[Callable[[], object]], object],
        receive: Callable[[contextlib.AbstractContextManager[None]], None],
        refuse: Callable[[Refused], None],
    ) -> None:
        """Receives a request once a place is free. No thread waits for the place.

        submit:  runs a function in a pool
        receive: called with the place, which it enters while it reads; in this thread if a place is free at once
        refuse:  called instead if too many requests wait
        """
        kind = self._kinds[of]

        def decided(waiting: _Call) -> None:
            if waiting.is_admitted:
                receive(self._placed(kind, waiting))
            else:
                refuse(self._refusal(kind, origin))

        def on_decision(waiting: _Call) -> None:
            with contextlib.suppress(RuntimeError):  # the pool is shut down: the server is stopping
                submit(partial(decided, waiting))

        waiting = _Call(call, on_decision)
        if self._ask(kind, waiting, origin):
            decided(waiting)
        elif not call.add_callback(lambda: self._give_up(kind, waiting)):
            self._give_up(kind, waiting)

    def cut_off(self) -> None:
        """Cancels the calls that took too long to receive, or whose places other calls have a claim to."""
        now = time.monotonic()
        with self._lock:
            overdue = [waiting for kind in self._kinds.values() for waiting in kind.overdue(now)]
        for waiting in overdue:
            waiting.call.cancel()

    def was_broken_off(self) -> bool:
        """Returns whether a request was broken off since the last call of this method."""
        was, self._was_broken_off = self._was_broken_off, False
        return was

    def _ask(self, kind: RequestSlots[_Call], call: _Call, origin: CallerPath) -> bool:
        """Asks for a place. Returns whether the decision is made; if not, `on_decision` is called later."""
        with self._lock:
            decided = _decide(kind.ask(call, origin, time.monotonic()))
            is_decided = call.is_admitted or call.is_refused
        _tell(other for other in decided if other is not call)
        if not is_decided:
            self._on_wait()
        return is_decided

    @contextlib.contextmanager
    def _placed(self, kind: RequestSlots[_Call], call: _Call) -> Iterator[None]:
        try:
            yield
        except CallBroken:
            self._was_broken_off = True
            raise
        finally:
            self._leave(kind, call)

    def _leave(self, kind: RequestSlots[_Call], call: _Call) -> None:
        with self._lock:
            decided = _decide(kind.leave(call, time.monotonic()))
        _tell(decided)

    def _give_up(self, kind: RequestSlots[_Call], call: _Call) -> None:
        """Ends the wait of a call whose caller has gone. A call that got its place meanwhile gives it back itself."""
        with self._lock:
            if call.is_admitted:
                return
            decided = _decide(kind.leave(call, time.monotonic()))
        _tell(decided)

    def _refusal(self, kind: RequestSlots[_Call], origin: CallerPath) -> Refused:
        with self._lock:
            return Refused(kind.held_seconds(origin, time.monotonic()))


def _decide(changes: AdmissionDecisions[_Call]) -> list[_Call]:
    """Records the decisions, under the lock; returns the calls to notify without it."""
    for call in changes.admitted:
        call.is_admitted = True
    for call in changes.refused:
        call.is_refused = True
    return [*changes.admitted, *changes.refused]


def _tell(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.on_decision(call)
