"""Requests are received a few at a time: nobody's wait for a place depends on how much the others send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_server.core.admission import (
    ACTIVE_SECONDS,
    HELD_SECONDS,
    PENALTY_SECONDS,
    WINDOW_BYTES,
    RequestKind,
    RequestLimits,
    RequestSlots,
    request_limits,
)
from ps_server.core.limits import Limits
from ps_server.rpc.auth import Authenticator
from ps_server.rpc.call_limits import SMALL_BYTES, CallLimits
from ps_server.rpc.permissions import Principal
from tests.tools.cases import crossed

PLACES, WAITING = 3, 8
GIVEN = RequestLimits(PLACES, WAITING, seconds=30.0, patience=10.0)


def ask(admission: RequestSlots[str], call: str, now: float = 0.0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Asks for a call such as "a.host.1.x", whose principal, host and connection stand in its name."""
    changes = admission.ask(call, tuple(call.split(".")[:3]), now)
    return changes.admitted, changes.refused


def leave(admission: RequestSlots[str], call: str, now: float = 0.0) -> tuple[str, ...]:
    return admission.leave(call, now).admitted


def test_places_are_given_out_until_there_are_none() -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    assert [ask(admission, f"a.h.1.{n}") for n in range(4)] == [((f"a.h.1.{n}",), ()) for n in range(3)] + [((), ())]
    assert (admission.received, admission.waiting) == (3, 1)
    assert leave(admission, "a.h.1.1") == ("a.h.1.3",)
    assert leave(admission, "a.h.1.1") == (), "it has left already"


@pytest.mark.parametrize("other", ["b.h.1.x", "a.other.1.x", "a.h.2.x"])
def test_another_principal_host_or_connection_comes_next_however_many_wait(other: str) -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    for n in range(PLACES + 5):
        ask(admission, f"a.h.1.{n}")
    ask(admission, other)
    next_ones = [*leave(admission, "a.h.1.0"), *leave(admission, "a.h.1.1")]
    assert other in next_ones


def test_many_hosts_of_one_principal_have_one_turn() -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    for n in range(PLACES + 4):
        ask(admission, f"a.h{n}.1.x")
    for n in range(2):
        ask(admission, f"b.h.1.{n}")
    turns = [call for n in range(3) for call in leave(admission, f"a.h{n}.1.x")]
    assert sorted(call[0] for call in turns) == ["a", "b", "b"]


def test_the_last_place_is_for_another_while_there_is_another() -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    ask(admission, "b.h.1.x")
    leave(admission, "b.h.1.x")
    assert [bool(ask(admission, f"a.h.1.{n}", 1.0)[0]) for n in range(3)] == [True, True, False]
    assert ask(admission, "b.h.1.y", 2.0)[0] == ("b.h.1.y",)
    leave(admission, "b.h.1.y")
    alone = 2.0 + ACTIVE_SECONDS + 1.0
    assert ask(admission, "a.h.1.z", alone)[0] == ("a.h.1.2",), "b has gone"


def test_where_too_many_wait_the_last_of_the_most_is_refused() -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    for n in range(PLACES + WAITING):
        assert not ask(admission, f"a.h.1.{n}")[1]
    assert ask(admission, "b.h.1.x")[1] == (f"a.h.1.{PLACES + WAITING - 1}",)
    assert ask(admission, "a.h.1.more")[1] == ("a.h.1.more",)
    assert admission.waiting == WAITING


def test_a_place_is_given_back_when_its_time_is_over_or_another_has_waited() -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    for n in range(PLACES):
        ask(admission, f"a.h.1.{n}", float(n))
    assert admission.overdue(29.0) == []
    assert admission.overdue(31.0) == ["a.h.1.0", "a.h.1.1"]
    ask(admission, "b.h.1.x", 15.0)
    assert admission.overdue(24.0) == [], "nobody has waited long"
    assert admission.overdue(25.0) == ["a.h.1.0"], "one waits, so one makes room"


def test_a_time_shorter_than_the_patience_with_others_holds_too() -> None:
    admission: RequestSlots[str] = RequestSlots(RequestLimits(PLACES, WAITING, seconds=1.0, patience=10.0))
    ask(admission, "a.h.1.x")
    assert admission.overdue(0.9) == []
    assert admission.overdue(1.0) == ["a.h.1.x"]


@pytest.mark.parametrize("flood", ["a.h.1.", "a.other.1."])
def test_no_flood_of_one_principal_has_the_request_of_another_broken_off(flood: str) -> None:
    admission: RequestSlots[str] = RequestSlots(RequestLimits(2, WAITING, seconds=30.0, patience=1.0))
    ask(admission, "b.h.1.x")
    ask(admission, "a.h.1.first")
    for n in range(WAITING):
        assert not ask(admission, f"{flood}{n}")[0]
    assert admission.overdue(2.0) == ["a.h.1.first"]
    assert admission.overdue(40.0) == ["b.h.1.x", "a.h.1.first"], "the time of both is over"


CALLS = st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.sampled_from("xy"), st.sampled_from("12")))


@given(CALLS)
def test_every_call_is_received_waits_or_was_refused(events: list[tuple[bool, str, str, str]]) -> None:
    admission: RequestSlots[str] = RequestSlots(GIVEN)
    received: list[str] = []
    waiting: list[str] = []
    for number, (leaves, *origin) in enumerate(events):
        known = received + waiting
        if leaves and known:
            call = known[number % len(known)]
            changes = admission.leave(call, float(number))
            (received if call in received else waiting).remove(call)
        else:
            call = ".".join((*origin, str(number)))
            changes = admission.ask(call, tuple(origin), float(number))
            waiting.append(call)
        for call in changes.admitted:
            waiting.remove(call)
            received.append(call)
        for call in changes.refused:
            waiting.remove(call)
        assert (admission.received, admission.waiting) == (len(received), len(waiting))
        assert len(received) <= PLACES
        assert len(waiting) <= WAITING
        # A place stays empty only for one that holds fewer than it may.
        assert len(received) >= PLACES - 1 or not waiting or len({call[0] for call in waiting}) <= 1


@pytest.mark.parametrize("is_shard", [True, False])
def test_what_all_places_and_windows_hold_together_fits_the_budget(is_shard: bool) -> None:
    limits = Limits()
    places = sum(given.places for given in request_limits(limits, is_shard).values())
    assert places * limits.message_bytes + limits.all_calls * WINDOW_BYTES <= limits.receiving_bytes == 232 * 2**20
    assert places == 13, "more than the budget holds is one thing, to waste it another"
    assert all(
        given.places in ((2, 3, 4) if is_shard else (0, 2, 11)) for given in request_limits(limits, is_shard).values()
    )


def test_a_smaller_budget_has_second_places_of_exchanges_and_large_requests_before_third_ones_of_pushes() -> None:
    ones = {RequestKind.DATA: 1, RequestKind.FRAMED: 1}
    limits = Limits(receiving_bytes=145 * 2**20)
    found = {kind: given.places for kind, given in request_limits(limits, is_shard=True).items()}
    assert found == {RequestKind.QUICK: 2, RequestKind.LARGE: 2, RequestKind.EXCHANGE: 2, **ones}
    least = Limits(receiving_bytes=115343360)
    found = {kind: given.places for kind, given in request_limits(least, is_shard=True).items()}
    assert found == {RequestKind.QUICK: 2, RequestKind.LARGE: 1, RequestKind.EXCHANGE: 1, **ones}


def test_one_that_had_no_turn_for_longest_comes_next() -> None:
    """Those that ask all the time would otherwise stand before each that asks now and then."""
    admission: RequestSlots[str] = RequestSlots(RequestLimits(1, 50, seconds=30.0, patience=10.0))
    for n in range(3):
        for name in "abc":
            ask(admission, f"{name}.h.1.{n}")
    turns = [*leave(admission, "a.h.1.0"), *leave(admission, "b.h.1.0"), *leave(admission, "c.h.1.0")]
    assert turns == ["b.h.1.0", "c.h.1.0", "a.h.1.1"]
    ask(admission, "victim.h.1.x")
    assert leave(admission, "a.h.1.1") == ("victim.h.1.x",), "it came last, and had no turn yet"


def test_a_refusal_is_kept_back_from_whom_a_request_was_broken_off_lately() -> None:
    admission: RequestSlots[str] = RequestSlots(RequestLimits(1, 50, seconds=30.0, patience=1.0))
    ask(admission, "a.h.1.0")
    ask(admission, "b.h.1.0")
    assert admission.held_seconds(("a", "h", "1"), 1.0) == 0.0
    assert admission.overdue(1.0) == ["a.h.1.0"]
    assert admission.held_seconds(("a", "h", "1"), 1.0) == HELD_SECONDS
    assert admission.held_seconds(("b", "h", "1"), 1.0) == 0.0
    assert admission.held_seconds(("a", "h", "2"), 2.0 + PENALTY_SECONDS) == 0.0


def test_a_call_that_is_refused_later_holds_no_thread_and_is_refused_then() -> None:
    limits, told = CallLimits(Authenticator(), Limits(all_calls=8)), Queue[str]()
    try:
        limits.after(0.0, lambda: told.put("at once"))
        assert told.get_nowait() == "at once"
        for number in (1, 2):
            limits.after(3.0, lambda number=number: told.put(f"later {number}"))  # type: ignore[misc]
        limits.after(60.0, lambda: told.put("too many"))
        assert told.get_nowait() == "too many"
        assert [told.get(timeout=20.0), told.get(timeout=20.0)] == ["later 1", "later 2"]
    finally:
        limits.stop()


def pushing(request_bytes: int | None, waits: Callable[[], None] = lambda: None) -> Any:
    """A call whose request is still to come.

    request_bytes: None for one by gRPC
    waits:         is called when it has to wait for a place
    """

    def add_callback(_: object) -> bool:
        waits()
        return True

    peer = "ipv4:192.0.2.1:5"
    return SimpleNamespace(
        request_bytes=request_bytes, peer=lambda: peer, add_callback=add_callback, cancel=lambda: None
    )


@pytest.mark.timeout(30)
def test_pushes_over_data_connections_wait_for_none_that_come_by_grpc() -> None:
    limits, method = CallLimits(Authenticator(), Limits()), "/ps_protocol.v1.DataService/Push"
    try:
        with ExitStack() as stack:
            for number in range(request_limits(Limits(), is_shard=True)[RequestKind.DATA].places):
                attacker = Principal(f"attacker {number}", frozenset())
                stack.enter_context(limits.receiving(method, attacker, pushing(None)))
            with limits.receiving(method, Principal("worker", frozenset()), pushing(2**20)):
                pass
    finally:
        limits.stop()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [RequestKind.FRAMED, RequestKind.EXCHANGE])
def test_a_small_request_on_a_data_connection_needs_no_place(kind: RequestKind) -> None:
    """All places are taken, by requests on data connections, or by exchanges over gRPC: most exchanges are as small."""
    limits, method = CallLimits(Authenticator(), Limits()), "/ps_protocol.v1.DataService/Exchange"
    request_bytes = 2**20 if kind is RequestKind.FRAMED else None
    try:
        with ExitStack() as stack:
            for number in range(request_limits(Limits(), is_shard=True)[kind].places):
                attacker = Principal(f"attacker {number}", frozenset())
                stack.enter_context(limits.receiving(method, attacker, pushing(request_bytes)))
            taken = limits.statistics()["waits"]
            with limits.receiving(method, Principal("worker", frozenset()), pushing(SMALL_BYTES)):
                assert limits.statistics()["waits"] == taken + 1, "it is to arrive in time, all the same"
            waits = threading.Event()
            larger = pushing(SMALL_BYTES + 1, waits.set)
            entering = threading.Thread(target=enters, args=(limits, method, larger), daemon=True)
            entering.start()
            if kind is RequestKind.FRAMED:
                waits.wait()
        entering.join()
        assert limits.statistics()["waits"] == 0
    finally:
        limits.stop()


def enters(limits: CallLimits, method: str, call: Any) -> None:
    with limits.receiving(method, Principal("worker", frozenset()), call):
        pass


@pytest.mark.parametrize(
    ("kind", "attackers"), crossed([kind for kind in RequestKind if kind is not RequestKind.QUICK], [1, 2, 8])
)
def test_requests_that_are_never_whole_keep_no_other_principal_waiting(kind: RequestKind, attackers: int) -> None:
    """In turns of a twentieth of a second, as the server looks: each attacker has ten requests that never end."""
    admission: RequestSlots[str] = RequestSlots(request_limits(Limits(), is_shard=True)[kind])
    received: set[str] = set()
    waits: list[float] = []
    asked, names = 0.0, iter(range(1_000_000))

    def attack(number: int, now: float) -> None:
        received.update(ask(admission, f"attacker{number}.h.1.{next(names)}", now)[0])

    for number in range(attackers):
        for _ in range(10):
            attack(number, 0.0)
    victim = ""
    for turn in range(20 * 120):
        now = turn / 20
        for call in admission.overdue(now):
            received.discard(call)
            received.update(leave(admission, call, now))
            if call != victim:
                attack(int(call.split(".")[0].removeprefix("attacker")), now)
        if not victim:
            victim, asked = f"victim.h.1.{next(names)}", now
            received.update(ask(admission, victim, now)[0])
        if victim in received:  # a request that is whole: it has its place for no time
            received.discard(victim)
            received.update(leave(admission, victim, now))
            waits.append(now - asked)
            victim = ""
    waits.sort()
    assert waits[len(waits) // 2] == 0.0
    assert sum(waits) < 0.4 * 120, "nearly always there is a place, also while the attackers have their first turns"


def test_one_whose_request_was_broken_off_breaks_off_none_of_another_principal() -> None:
    admission: RequestSlots[str] = RequestSlots(RequestLimits(2, WAITING, seconds=30.0, patience=1.0))
    ask(admission, "a.h.1.x")
    assert admission.overdue(30.0) == ["a.h.1.x"]
    leave(admission, "a.h.1.x", 30.0)
    for name in ("b.h.1.x", "c.h.1.x"):
        assert ask(admission, name, 31.0)[0] == (name,)
    ask(admission, "a.h.1.y", 32.0)
    assert admission.overdue(40.0) == [], "both are slow, and only one waits that kept others waiting before"


def test_a_budget_without_room_for_each_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--max-receiving-bytes must be at least 115343360, 6 times"):
        request_limits(Limits(receiving_bytes=2**20), is_shard=True)
