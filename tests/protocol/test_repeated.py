"""A request is known by its bytes if it differs in its clock and its hyper-parameters alone, and only then."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Parts, varint
from ps_protocol.messages.data import read_exchange
from ps_protocol.messages.repeated import (
    MOST_REPEATED,
    Repeated,
    read_groups,
    repeated_exchange,
    says_no_more,
    write_groups,
)
from ps_protocol.v1 import data_pb2, types_pb2
from tests.tools.exchanges import CLOCKS, EXCHANGES, GROUPS, SEGMENT, UNKNOWN, exchanging, group, pushing, with_groups


def repeated(request: bytes | Parts) -> Repeated | None:
    """Of a request that a shard would keep, and know again."""
    push, pull = read_exchange(request)
    head = request.head if isinstance(request, Parts) else request
    return repeated_exchange(request, push) if says_no_more(head, push, pull) else None


def changed(found: Repeated, request: bytes, clock: int) -> tuple[Repeated, dict[int, Any]] | None:
    before = found.at(clock)
    assert before is not None
    return found.changed(request, clock, before)


@settings(max_examples=80)
@given(EXCHANGES, CLOCKS, GROUPS)
def test_a_request_is_written_for_others_as_the_generated_class_writes_it(
    request: data_pb2.ExchangeRequest, clock: int, groups: dict[int, Any]
) -> None:
    written = request.SerializeToString()
    found = repeated(written)
    assert found is not None
    assert found.at(request.push.clock) == written
    other = with_groups(request, clock, groups)
    encoded = write_groups(groups)
    assert found.with_groups(encoded).at(clock) == other.SerializeToString()
    assert "secret" not in repr(found)
    known = changed(found, other.SerializeToString(), clock)
    request.push.clock = clock
    if len(varint(request.push.ByteSize())) == len(varint(other.push.ByteSize())):
        assert known is not None
    if known is not None:
        assert known[0] == found.with_groups(encoded)
        assert repr(known[1]) == repr(groups), "also where a value is NaN"


@settings(max_examples=80)
@given(EXCHANGES, EXCHANGES, st.data())
def test_only_what_it_is_but_for_clock_and_hyper_parameters_is_known(
    request: data_pb2.ExchangeRequest, other: data_pb2.ExchangeRequest, data: st.DataObject
) -> None:
    found, clock = repeated(request.SerializeToString()), request.push.clock
    assert found is not None
    raw = bytearray(other.SerializeToString() if data.draw(st.booleans()) else request.SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + 1] = data.draw(st.binary(max_size=2))
    try:
        known = changed(found, bytes(raw), clock)
    except InvalidRequest:
        with pytest.raises(InvalidRequest):
            read_exchange(bytes(raw))
        return
    if known is not None:
        push, _ = read_exchange(bytes(raw))
        assert repr(push.groups) == repr(known[1])
        read = data_pb2.ExchangeRequest.FromString(bytes(raw))
        assert with_groups(read, clock, {}) == with_groups(request, clock, {})


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\x0a\xff", b"\x0a\x00", b"\x0a" + b"\xff" * 12])
def test_of_what_is_cut_nothing_is_known(data: bytes) -> None:
    found = repeated(exchanging())
    assert found is not None
    assert changed(found, data, 5) is None


def test_a_request_that_says_something_twice_is_not_known_again() -> None:
    """What comes last counts, so the clock that stands where it belongs may not be that of the request."""
    plain, again = exchanging(), data_pb2.ExchangeRequest(push={"clock": 7}).SerializeToString()
    assert repeated(plain) is not None
    assert read_exchange(plain + again)[0].clock == 7
    lent = data_pb2.ExchangeRequest(push=pushing()).SerializeToString()
    assert repeated(lent) is not None
    without = data_pb2.ExchangeRequest(push=pushing(worker=None, clock=0), in_segment=SEGMENT).SerializeToString()
    for unusual in (plain + again, again + plain, lent + b"\x7a\x00", b"", without):
        assert repeated(unusual) is None


def test_in_the_place_of_hyper_parameters_is_nothing_else() -> None:
    groups = write_groups({0: {"lr": 0.5}, 1: {"lr": 0.1}})
    assert read_groups(groups) == {0: {"lr": 0.5}, 1: {"lr": 0.1}}
    others = [pushing(worker=None, clock=0), pushing(worker=None, buckets=[]), data_pb2.PushHeader(stage=1)]
    for other in (*(header.SerializeToString() for header in others), UNKNOWN, groups[:-1], b"\xff"):
        assert read_groups(other + groups) is None
        assert read_groups(groups + other) is None
    with pytest.raises(InvalidRequest, match="group 0 comes twice"):
        read_groups(write_groups({0: {"lr": 0.5}}) * 2)
    twice = group(0, lr=0.5)
    twice.hyper_parameters.append(twice.hyper_parameters[0])
    with pytest.raises(InvalidRequest, match="'lr' comes twice"):
        read_groups(data_pb2.PushHeader(groups=[twice]).SerializeToString())


def test_a_group_may_have_a_field_that_this_code_does_not_know() -> None:
    """As in a request that is read: workers may be newer than servers."""
    newer = group(0, lr=0.5)
    newer.MergeFromString(UNKNOWN)
    written = data_pb2.PushHeader(groups=[newer]).SerializeToString()
    assert UNKNOWN in written
    assert read_groups(written) == {0: {"lr": 0.5}} == read_exchange(exchanging(groups=[newer]))[0].groups


@pytest.mark.parametrize(
    ("one", "other"),
    [(1.0, True), (0.0, False), (0.0, -0.0), (math.nan, 0.5), (0.5, None), ((0.5,), (0.5, 0.5)), (None, ())],
)
def test_values_of_other_kinds_are_other_bytes(one: Any, other: Any) -> None:
    """1 and True are equal in Python, and another number and switch in a job."""
    found = repeated(exchanging(groups=[group(0, lr=one)]))
    assert found is not None
    for value in (one, other):
        known = changed(found, exchanging(groups=[group(0, lr=value)]), 5)
        assert known is not None
        assert repr(known[1]) == repr({0: {"lr": value}})


def test_a_request_with_a_field_that_was_not_read_is_not_known_again() -> None:
    plain = exchanging()
    assert UNKNOWN in data_pb2.ExchangeRequest.FromString(plain + UNKNOWN).SerializeToString()
    assert repeated(plain) is not None
    assert repeated(plain + UNKNOWN) is None


def test_large_requests_and_those_with_elements_or_leased_data_are_not_kept() -> None:
    whole = data_pb2.ExchangeRequest(push=pushing(), payload=b"elements").SerializeToString()
    large = data_pb2.ExchangeRequest(push=pushing(), buckets=range(MOST_REPEATED), in_segment=SEGMENT)
    split = Parts(whole[: -len(b"elements")], b"elements")
    for request in (split, large.SerializeToString(), exchanging(ranges=[types_pb2.DataRange(stop=2)])):
        assert repeated_exchange(request, read_exchange(request)[0]) is None


def test_a_request_that_grows_large_is_not_known() -> None:
    """A shard would keep what it is known with."""
    found = repeated(exchanging(groups=[group(0, lr=(0.5,) * 32)]))
    assert found is not None
    most = MOST_REPEATED // 8 - 5
    for size, is_known in ((most, True), (most + 1, False)):
        request = exchanging(groups=[group(0, lr=(0.5,) * size)])
        assert (len(request) <= MOST_REPEATED) is is_known
        header = data_pb2.ExchangeRequest.FromString(request).push.ByteSize()
        assert len(varint(header)) == 2, "otherwise it is refused for that"
        assert (changed(found, request, 5) is not None) is is_known


def test_a_request_has_no_clock_past_the_last() -> None:
    """The bytes of that clock would be a number that no message has."""
    request = exchanging(clock=2**64 - 1)
    found = repeated(request)
    assert found is not None
    assert found.at(2**64 - 1) == request
    assert found.at(2**64) is None
