"""What a shard knows of a request by the one before is what it would read of it, whatever bytes come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Parts
from ps_protocol.messages.data import PullCall, PushCall, read_exchange
from ps_protocol.messages.repeated import repeated_exchange, write_groups
from ps_protocol.v1 import data_pb2
from ps_server.rpc.data_service import _KnownExchange
from ps_server.shard.pushes import Checked
from tests.tools.cases import cases
from tests.tools.exchanges import (
    BUCKET,
    CLOCK,
    EXCHANGES,
    STAGE,
    UNKNOWN,
    exchanging,
    group,
    like,
    other_bytes,
    with_groups,
)


def read(request: bytes) -> _KnownExchange:
    """A request that is read in full, as by the first of a data connection."""
    push, pull = read_exchange(request)
    return _KnownExchange(repeated_exchange(request, push), push, pull, lambda _: Parts(b""), Checked())


def said(push: PushCall, pull: PullCall) -> tuple[object, ...]:
    """All of a request, so that it is equal to another of the same values: also NaN, and not True to 1."""
    return replace(push, groups={}, weight=0.0), repr(push.groups), repr(push.weight), pull


def bytes_after(data: st.DataObject, known: _KnownExchange) -> bytes:
    """The bytes of a request that comes after another: mostly such as are known by it, or nearly."""
    clock, kept = min(known.push.clock + 1, 2**64 - 1), known.request
    groups: dict[int, Any] = dict(data.draw(st.just(known.push.groups) | like(known.push.groups)))
    how = data.draw(st.sampled_from(["as before", "with other bytes", "as ours", "in other bytes", "another"]))
    if kept is None or how == "another":
        return with_groups(data.draw(EXCHANGES), clock, groups).SerializeToString()
    same = kept.at(clock)
    assert same is not None
    if how == "as before":
        return same
    if how == "with other bytes":
        more = data.draw(st.sampled_from([b"", UNKNOWN, CLOCK, BUCKET, STAGE, kept.buckets[-2:], b"\x22"]))
        made = kept.with_groups(more + write_groups(groups)).at(clock)
        assert made is not None
        return made
    ours = with_groups(data_pb2.ExchangeRequest.FromString(same), clock, groups)
    return ours.SerializeToString() if how == "as ours" else data.draw(other_bytes(ours))


@pytest.mark.parametrize("examples", cases([60], [1000]))
def test_what_is_known_of_a_request_is_what_it_says(examples: int) -> None:
    settings(max_examples=examples)(given(EXCHANGES, st.data())(is_what_it_says))()


def is_what_it_says(request: data_pb2.ExchangeRequest, data: st.DataObject) -> None:
    """The first may be written by other code than ours; those that follow are the same but for what changes, or not."""
    raw = data.draw(other_bytes(request)) if data.draw(st.booleans()) else request.SerializeToString()
    known: _KnownExchange | None = None
    for _ in range(4):
        try:
            expected = said(*read_exchange(raw))
        except InvalidRequest:
            if known is not None:
                with suppress(InvalidRequest):
                    assert known.next(raw) is None
            return
        following = None if known is None else known.next(raw)
        if following is not None:
            assert said(following.push, following.pull) == expected
        known = following or read(raw)
        raw = bytes_after(data, known)


def test_hyper_parameters_of_any_kind_are_known_from_step_to_step() -> None:
    values: list[Any] = [0.5, 0.25, None, (0.9, 0.5), (), True, 1.0, -0.0, float("nan"), float("inf"), 0.5, 0.5]
    known = read(exchanging(clock=1, groups=[group(0, lr=0.5), group(3)]))
    for clock, value in enumerate(values, 2):
        request = exchanging(clock=clock, groups=[group(0, lr=value), group(3)])
        following = known.next(request)
        assert following is not None
        assert said(following.push, following.pull) == said(*read_exchange(request))
        known = following


def test_the_values_of_a_step_are_those_of_the_step_before_if_their_bytes_are() -> None:
    """By that a shard knows that it need not check them."""
    first = read(exchanging(clock=1, groups=[group(0, lr=0.5)]))
    second = first.next(exchanging(clock=2, groups=[group(0, lr=0.5)]))
    assert second is not None
    assert second.push.groups is first.push.groups
    third = second.next(exchanging(clock=3, groups=[group(0, lr=0.25)]))
    assert third is not None
    assert third.push.groups is not first.push.groups


@pytest.mark.parametrize("groups", [[], [group(0, lr=0.5), group(1, lr=0.5)], [group(1, lr=0.5)]])
def test_a_step_with_other_groups_is_read(groups: list[Any]) -> None:
    """Of groups that were added, taken away or exchanged nothing was checked."""
    first = read(exchanging(clock=1, groups=[group(0, lr=0.5)]))
    for known in (first, first.next(exchanging(clock=2, groups=[group(0, lr=0.25)]))):
        assert known is not None
        assert known.next(exchanging(clock=known.push.clock + 1, groups=groups)) is None


def test_a_field_of_a_group_that_is_not_known_here_is_passed_over() -> None:
    """As in a request that is read in full. A first one that has it is not kept."""
    newer = group(0, lr=0.25)
    newer.MergeFromString(UNKNOWN)
    assert read(exchanging(clock=1, groups=[newer])).request is None
    known: _KnownExchange | None = read(exchanging(clock=1, groups=[group(0, lr=0.5)]))
    for clock, lr in ((2, group(0, lr=0.5)), (3, newer), (4, group(0, lr=0.75)), (5, newer)):
        assert known is not None
        request = exchanging(clock=clock, groups=[lr])
        known = known.next(request)
        assert known is not None
        assert said(known.push, known.pull) == said(*read_exchange(request))


def unusual() -> Iterator[tuple[str, bytes]]:
    plain = exchanging(clock=1, groups=[group(0, lr=0.5)])
    yield "an unknown field", plain + UNKNOWN
    yield "two parts", plain + data_pb2.ExchangeRequest(push={"clock": 1}).SerializeToString()


@pytest.mark.parametrize("first", [raw for _, raw in unusual()], ids=[name for name, _ in unusual()])
def test_nothing_is_known_by_a_request_in_other_bytes_than_ours(first: bytes) -> None:
    known = read(first)
    for rate in (0.5, 0.25):
        if known.request is not None:
            as_before = known.request.with_groups(write_groups({0: {"lr": rate}})).at(2)
            assert as_before is not None
            following = known.next(as_before)
            assert following is None or as_before == exchanging(clock=2, groups=[group(0, lr=rate)])
