"""Admission: decides which requests a server receives now, and which wait. Callers take turns.

Once a server reads a request, gRPC buffers up to the largest message that is allowed, whatever the method. Before that
it buffers one window of the stream. So the server reads a request only when one of a limited number of *places* is
free. Each place counts as one largest message, and the memory budget divided by that size is their number. Each kind of
request has places of its own.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ps_protocol.errors import InvalidRequest
from ps_server.core.limits import Limits
from ps_server.core.thread_shares import MOST_OF_A_POOL

# Bytes of each stream that gRPC buffers before the server reads its request: enough for a heartbeat.
WINDOW_BYTES = 512
# For so long after its last request an origin counts as active. While one does, no other origin may take all places.
ACTIVE_SECONDS = 60.0

_WAITING = 4_096  # most requests of a kind that wait for a place; few of them have a thread
_FEW = 8  # most calls of one kind that hold a thread while they wait

# Seconds for which a principal is penalised after one of its requests was broken off: the first time, and at most. Each
# further request that is broken off doubles them.
PENALTY_SECONDS, LONGEST_PENALTY_SECONDS = 60.0, 600.0

HELD_SECONDS = 5.0  # delay of a refusal to a penalised principal, which would otherwise call again at once

C = TypeVar("C", bound=Hashable)


class RequestKind(enum.Enum):
    """The kinds of requests. Each kind has its own places."""

    QUICK = "quick"  # requests of a few bytes, which arrive with their headers
    LARGE = "large"  # jobs, states, values
    EXCHANGE = "exchange"  # pushes that come with a pull: mostly without a payload, and the pull waits for them
    DATA = "data"  # pushes
    FRAMED = "framed"  # requests over data connections: they never wait for a request over gRPC


@dataclass(frozen=True)
class RequestLimits:
    """The limits for requests of one kind.

    places:   how many requests are received at a time
    waiting:  how many wait for a place at most
    seconds:  how long a request may take to arrive
    patience: after this many seconds a request that is still arriving gives its place to one that has waited as long,
              if the origin of the waiting request has fewer places
    """

    places: int
    waiting: int
    seconds: float
    patience: float


CallerPath = tuple[str, ...]  # where a request comes from, the widest first: principal, host, connection


@dataclass(frozen=True)
class AdmissionDecisions(Generic[C]):
    """The result of a change of the places: the calls that have got a place, and the calls that are refused."""

    admitted: tuple[C, ...] = ()
    refused: tuple[C, ...] = ()


def request_limits(limits: Limits, is_shard: bool, pool: int = MOST_OF_A_POOL) -> dict[RequestKind, RequestLimits]:
    """Returns the limits of each kind of request on a server.

    pool: the number of threads in each pool for calls. A request that has a place has a thread; most threads are left
          for other calls

    Raises InvalidRequest if the budget has no room for one request of each kind.
    """
    least = {
        RequestKind.QUICK: 2,
        RequestKind.LARGE: 1,
        RequestKind.EXCHANGE: int(is_shard),
        RequestKind.DATA: int(is_shard),
        RequestKind.FRAMED: int(is_shard),
    }
    windows = limits.all_calls * WINDOW_BYTES
    places = (limits.receiving_bytes - windows) // limits.message_bytes
    needed = sum(least.values())
    if places < needed:
        raise InvalidRequest(
            f"--max-receiving-bytes must be at least {needed * limits.message_bytes + windows}, {needed} times "
            f"--max-message-bytes and {WINDOW_BYTES} times --max-all-calls, got {limits.receiving_bytes}"
        )
    # Exchanges and large requests get a second place before pushes get more: one caller never takes both of two places
    # while another one is active.
    wanted = ([RequestKind.EXCHANGE, RequestKind.LARGE] if is_shard else [])[: places - needed]
    for kind in wanted:
        least[kind] += 1
    left = places - needed - len(wanted)
    if is_shard:
        least[RequestKind.DATA] += min(left // 2, pool // 4)
        least[RequestKind.FRAMED] += left - left // 2
    else:
        least[RequestKind.LARGE] += min(left, pool // 4)
    quick = min(limits.request_seconds, limits.upload_seconds)
    return {
        RequestKind.QUICK: RequestLimits(least[RequestKind.QUICK], _WAITING, quick, 0.5),
        RequestKind.LARGE: RequestLimits(least[RequestKind.LARGE], _WAITING, limits.upload_seconds, 5.0),
        RequestKind.EXCHANGE: RequestLimits(least[RequestKind.EXCHANGE], _WAITING, limits.upload_seconds, 1.0),
        RequestKind.DATA: RequestLimits(least[RequestKind.DATA], _WAITING, limits.upload_seconds, 3.0),
        # A worker whose data connection is broken off repeats the call by gRPC, and opens another connection.
        RequestKind.FRAMED: RequestLimits(least[RequestKind.FRAMED], _WAITING, limits.upload_seconds, 2.0),
    }


def waiting_threads(pool: int) -> int:
    """Returns how many unary calls of one kind may hold a thread before they are read.

    pool: the threads of each pool
    """
    return max(1, min(_FEW, pool // 8))


class RequestSlots(Generic[C]):
    """The places of one kind of request. A call is any hashable value.

    Principals take turns, then the hosts of each principal, then the connections of each host: the next place goes to
    the principal, host or connection whose last turn is the longest ago. None of them gets the last place while another
    one of the same level is active. So a caller whose requests never end cannot keep all places. All principals whose
    requests were broken off lately count as one caller in this.
    """

    def __init__(self, given: RequestLimits) -> None:
        self._limits = given
        # Calls with their origin and the time at which they got a place, or began to wait: the earliest first. The
        # counters have the number of these calls for each prefix of an origin: a principal, its host, its connection.
        self._received: dict[C, tuple[CallerPath, float]] = {}
        self._held: Counter[CallerPath] = Counter()
        self._waiting: dict[C, tuple[CallerPath, float]] = {}
        self._queued: Counter[CallerPath] = Counter()
        # The waiting calls, as nested dictionaries: principal, host, connection, call. Calls are in order of arrival.
        self._turns: dict[Any, Any] = {}
        self._turn: dict[CallerPath, int] = {}  # by prefix of an active origin, the number of its last turn
        self._turns_taken = 0
        # By principal: the end of its penalty, and its length
        self._penalties: dict[CallerPath, tuple[float, float]] = {}
        self._broken_off: set[C] = set()  # received calls that `overdue` has returned: each is penalised once
        # By length of the prefix: the active prefixes, with the time of their last request, the earliest first.
        self._active: dict[int, dict[CallerPath, float]] = {}

    @property
    def received(self) -> int:
        """How many requests are being received."""
        return len(self._received)

    @property
    def waiting(self) -> int:
        """How many requests wait for a place."""
        return len(self._waiting)

    def ask(self, call: C, origin: CallerPath, now: float) -> AdmissionDecisions[C]:
        """Asks for a place for a call. If too many wait, the last call of the connection with the most waiting is
        refused.

        origin: where the call comes from: principal, host, connection
        now:    the time in seconds
        """
        self._is_active(origin, now)
        self._waiting[call] = origin, now
        turns = self._turns
        for name in origin:
            turns = turns.setdefault(name, {})
        turns[call] = None
        self._queued.update(_beginnings(origin))
        admitted = self._admit(now)
        if len(self._waiting) <= self._limits.waiting:
            return AdmissionDecisions(admitted)
        refused = self._last_of_most()
        self._forget(refused)
        return AdmissionDecisions(admitted, (refused,))

    def leave(self, call: C, now: float) -> AdmissionDecisions[C]:
        """Ends a call: it no longer waits, or gives back its place. Returns the calls that are admitted in
        its place.
        """
        if call in self._received:
            origin, _ = self._received.pop(call)
            self._broken_off.discard(call)
            _take_one(self._held, origin)
        elif call in self._waiting:
            self._forget(call)
        return AdmissionDecisions(self._admit(now))

    def overdue(self, now: float) -> list[C]:
        """Returns the calls that must give back their places: they took too long, or other calls have waited
        too long.
        """
        given = self._limits
        waiting = Counter(origin for origin, since in self._waiting.values() if now - since >= given.patience)
        overdue: list[C] = []
        for call, (origin, since) in self._received.items():
            claimant = None
            if now - since >= given.patience:
                claimant = next((other for other in waiting if self._has_claim(other, origin, now)), None)
            if claimant is not None:
                waiting -= Counter((claimant,))
            if claimant is not None or now - since >= given.seconds:
                overdue.append(call)
                if call not in self._broken_off:
                    self._broken_off.add(call)
                    self._penalise(origin[:1], now)
        return overdue

    def held_seconds(self, origin: CallerPath, now: float) -> float:
        """Returns for how many seconds a refusal is delayed: 0, unless a request of the same principal was broken off
        lately.
        """
        return HELD_SECONDS if self._is_penalised(origin[:1], now) else 0.0

    def _penalise(self, principal: CallerPath, now: float) -> None:
        """Records that a request of a principal was broken off."""
        _, before = self._penalties.pop(principal, (0.0, PENALTY_SECONDS / 2))
        seconds = min(2 * before, LONGEST_PENALTY_SECONDS)
        self._penalties[principal] = now + seconds, seconds
        for other, (until, last) in list(self._penalties.items()):
            if until + last < now:  # forgotten once it is over for as long as it lasted: the next one is short again
                del self._penalties[other]

    def _is_penalised(self, principal: CallerPath, now: float) -> bool:
        until, _ = self._penalties.get(principal, (0.0, 0.0))
        return now < until

    def _has_claim(self, waiting: CallerPath, received: CallerPath, now: float) -> bool:
        """Returns whether a waiting request may take the place of one that is being received.

        It may if both come from the same connection. Otherwise they are compared at the first level at which their
        origins differ: the waiting request's principal, host or connection must hold fewer places. A principal whose
        request was broken off lately has no claim on the place of a principal without a penalty.
        """
        if self._is_penalised(waiting[:1], now) and not self._is_penalised(received[:1], now):
            return False
        for one, other in zip(_beginnings(waiting), _beginnings(received), strict=True):
            if one != other:
                return self._held[one] < self._held[other]
        return True

    def _admit(self, now: float) -> tuple[C, ...]:
        """Gives the free places to waiting calls, in turn. Returns these calls."""
        admitted = []
        while len(self._received) < self._limits.places:
            call = self._next(self._turns, (), now)
            if call is None:
                break
            origin, _ = self._waiting[call]
            self._received[call] = origin, now
            self._held.update(_beginnings(origin))
            self._forget(call)
            admitted.append(call)
        return tuple(admitted)

    def _next(self, turns: dict[Any, Any], origin: CallerPath, now: float) -> C | None:
        """Returns the call whose turn it is, and records the turn of its principal, host and connection."""
        # The longest ago first. Single calls have no turns, and sorting is stable: they stay in order of arrival.
        for name in sorted(turns, key=lambda name: self._turn.get((*origin, name), 0)):
            beginning, below = (*origin, name), turns[name]
            if below is None:
                return name  # type: ignore[no-any-return]
            if self._may_take_a_place(beginning, now):
                call = self._next(below, beginning, now)
                if call is not None:
                    self._turns_taken += 1
                    self._turn[beginning] = self._turns_taken
                    return call
        return None

    def _may_take_a_place(self, origin: CallerPath, now: float) -> bool:
        """Whether a principal, a host or a connection may get one more place. origin: the prefix that names it"""
        most, active = max(1, self._limits.places - 1), self._active[len(origin)]
        if self._held[origin] >= most and not active.keys() <= {origin}:
            return False  # the last place is for another active origin
        if len(origin) == 1 and self._is_penalised(origin, now):
            # All penalised principals count as one: together they leave the last place to the others.
            likes = {other for other in active if self._is_penalised(other, now)}
            held = sum(self._held[other] for other in self._penalties if self._is_penalised(other, now))
            return held < most or active.keys() <= likes
        return True

    def _is_active(self, origin: CallerPath, now: float) -> None:
        """Records that an origin has just asked. Forgets prefixes of origins that are no longer active."""
        for beginning in _beginnings(origin):
            active = self._active.setdefault(len(beginning), {})
            active.pop(beginning, None)
            active[beginning] = now
            while now - next(iter(active.values())) > ACTIVE_SECONDS:
                gone = next(iter(active))
                del active[gone]
                self._turn.pop(gone, None)

    def _last_of_most(self) -> Any:
        """Returns the latest call of the principal, host and connection that have most calls waiting."""
        turns: dict[Any, Any] = self._turns
        origin: CallerPath = ()
        while next(iter(turns.values())) is not None:
            origin = max(((*origin, name) for name in reversed(turns)), key=self._queued.__getitem__)
            turns = turns[origin[-1]]
        return next(reversed(turns))

    def _forget(self, call: C) -> None:
        """Removes a call from those that wait."""
        origin, _ = self._waiting.pop(call)
        _take_one(self._queued, origin)
        path: list[tuple[dict[Any, Any], Any]] = []
        turns = self._turns
        for name in (*origin, call):
            path.append((turns, name))
            turns = turns[name]
        for turns, name in reversed(path):
            if not turns[name]:
                del turns[name]


def _beginnings(origin: CallerPath) -> list[CallerPath]:
    """Returns the prefixes of an origin: its principal, with its host, and with its connection."""
    return [origin[: length + 1] for length in range(len(origin))]


def _take_one(counts: Counter[CallerPath], origin: CallerPath) -> None:
    for beginning in _beginnings(origin):
        counts[beginning] -= 1
        if not counts[beginning]:
            del counts[beginning]
