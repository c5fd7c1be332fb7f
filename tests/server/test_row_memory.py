"""Rows in memory that a worker shares with a shard: messages name places in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import Fenced, InvalidRequest, NonFiniteGradient, NotShared, PSError, UnknownWorker
from ps_protocol.framing import message_parts
from ps_protocol.identity import Identity
from ps_protocol.messages import rows as row_messages
from ps_protocol.messages.data import Notice
from ps_protocol.messages.rows import PulledRows, PullOffsets, RowPushKind, RowsPull, RowsPush
from ps_protocol.segment_layout import MAX_ROW_BYTES, PAGE_BYTES, RowMemory, pulled_bytes, pushed_bytes
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_protocol.v1 import rows_pb2
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_server.core.checking_rows import RowChecker
from ps_server.shard.pushes import Pushes
from ps_server.shard.shard import Shard
from ps_tables.choosing import AUTO, OFF, choose
from ps_tables.native import in_use
from ps_worker.cluster.local_segment import LocalSegment
from tests.tools.outbox import Answers
from tests.tools.partitions import changed, job_spec, lone_shard

DIM, ROW_BYTES = 2, 4096
IDS = np.array([3, -7, 2**40])


class Sharing:
    """A shard with a job whose table is of ones, and its worker 0 with a segment for rows."""

    def __init__(self, row_bytes: int = ROW_BYTES, mode: str = "async", workers: int = 1) -> None:
        table = JobTable(TableSpec("items", DIM, Initializer("constant", 1.0)), "SGD", {"lr": 1.0, "momentum": 0.0})
        self.shard: Shard = lone_shard(workers=workers, spec=replace(job_spec(mode), tables=(table,)))
        self.attach(row_bytes)

    def attach(self, row_bytes: int) -> None:
        """Hands over a segment for rows, in place of the one before."""
        with LocalSegment(PAGE_BYTES + row_bytes, DEFAULT_SHARED_DIRECTORY, row_bytes) as segment:
            self.shard.attach(Identity("sums", 0, 1), segment.offer)
        self.memory = RowMemory(segment.memory)

    def push(self, clock: int, value: float = 1.0, place: int = PAGE_BYTES) -> None:
        """Pushes the same gradient of all ids."""
        self.put(place, value)
        self.shard.push_rows(named(clock, place))

    def put(self, place: int, value: float) -> None:
        """Writes what is to be pushed."""
        count = len(IDS)
        self.memory.array(place, count, np.int64)[:] = IDS
        self.memory.array(place + 8 * count, count, np.uint32)[:] = 1
        self.memory.rows(place + 12 * count, count, DIM).fill_(value)

    def pull(self, clock: int, place: int = PAGE_BYTES) -> list[list[float]]:
        """Returns rows of all ids as they come into the segment."""
        count, outbox = len(IDS), Answers()
        self.memory.array(place, count, np.int64)[:] = IDS
        places = PullOffsets(place, count, place + 8 * count)
        self.shard.pull(RowsPull(Identity("sums", 0, 1), 0, clock, b"", places=places), outbox)
        [answer] = outbox.told
        assert isinstance(answer, PulledRows)
        assert answer.in_segment
        assert answer.payload is None
        assert outbox.finished
        return self.memory.rows(place + 8 * count, count, DIM).tolist()


def named(clock: int, place: int, count: int = len(IDS)) -> RowsPush:
    return RowsPush(Identity("sums", 0, 1), 0, clock, RowPushKind.GRADIENT, b"", 0, count, count, {}, place=place)


def test_rows_are_pushed_from_the_segment_and_pulled_into_it() -> None:
    worker = Sharing()
    assert worker.pull(0) == [[1.0, 1.0]] * 3
    worker.push(1)
    worker.push(2, 3.0, PAGE_BYTES + 512)
    assert worker.pull(2, PAGE_BYTES + 1024) == [[-3.0, -3.0]] * 3


def test_a_push_is_what_the_segment_had_when_it_came() -> None:
    worker = Sharing(mode="sync", workers=2)
    worker.push(1)  # it waits for worker 1
    worker.memory.rows(PAGE_BYTES + 36, 3, DIM).fill_(float("nan"))
    worker.memory.array(PAGE_BYTES, 3, np.int64)[:] = 5
    other = IDS.tobytes() + np.ones(3, np.uint32).tobytes() + np.full((3, DIM), 3.0, np.float32).tobytes()
    worker.shard.push_rows(changed(named(1, 0), rank=1, incarnation=2, place=None, payload=other))
    assert worker.pull(1, PAGE_BYTES + 512) == [[-1.0, -1.0]] * 3


@pytest.fixture(params=[AUTO, OFF])
def native(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the library, where this installation has it, and with numpy."""
    if not choose(request.param).level and request.param == AUTO:
        pytest.skip("this installation has no library: make native")
    yield
    in_use.use(None)


@pytest.mark.usefixtures("native")
def test_rows_of_any_number_come_as_they_are_and_are_refused_if_one_is_not_finite() -> None:
    count, small = 200_000, 2.0**-140
    worker = Sharing(2 * pushed_bytes(count, DIM))
    ids = np.arange(-count // 2, count // 2)  # of which some, read as floats, are NaNs
    gradients = worker.memory.rows(PAGE_BYTES + 12 * count, count, DIM)

    def put() -> None:
        worker.memory.array(PAGE_BYTES, count, np.int64)[:] = ids
        worker.memory.array(PAGE_BYTES + 8 * count, count, np.uint32)[:] = 1
        gradients[:] = torch.linspace(-1.0, 1.0, DIM * count).view(count, DIM) * 3e38
        gradients[::3] = small

    for row in (0, 1, count // 2, count - 1):
        for odd in (float("nan"), float("inf"), -float("inf")):
            put()
            gradients[row, -1] = odd
            with pytest.raises(NonFiniteGradient):
                worker.shard.push_rows(named(1, PAGE_BYTES, count))
    put()
    worker.shard.push_rows(named(1, PAGE_BYTES, count))
    place, outbox = PAGE_BYTES + pushed_bytes(count, DIM), Answers()
    worker.memory.array(place, count, np.int64)[:] = ids
    places = PullOffsets(place, count, place + 8 * count)
    worker.shard.pull(RowsPull(Identity("sums", 0, 1), 0, 1, b"", places=places), outbox)
    assert outbox.finished
    assert torch.equal(worker.memory.rows(place + 8 * count, count, DIM), 1.0 - gradients)


def test_a_larger_segment_takes_the_place_of_the_one_before() -> None:
    worker = Sharing()
    worker.push(1)
    worker.attach(4 * ROW_BYTES)
    place = PAGE_BYTES + 3 * ROW_BYTES
    worker.push(2, 2.0, place)
    assert worker.pull(2, place) == [[-2.0, -2.0]] * 3


class Exchanging(Sharing):
    """What one call pushes, and pulls then."""

    def exchange(self, clock: int, value: float = 1.0, wanted: int = PAGE_BYTES + 512) -> Answers:
        count, outbox = len(IDS), Answers()
        self.put(PAGE_BYTES, value)
        self.memory.array(PAGE_BYTES + 512, count, np.int64)[:] = IDS[::-1]
        places = PullOffsets(wanted, count, wanted + 8 * count)
        self.shard.exchange(
            named(clock, PAGE_BYTES), RowsPull(Identity("sums", 0, 1), 0, clock, b"", places=places), outbox
        )
        return outbox

    def pulled(self) -> list[list[float]]:
        """Returns the rows that came."""
        return self.memory.rows(PAGE_BYTES + 512 + 8 * len(IDS), len(IDS), DIM).tolist()


def test_one_call_pushes_rows_and_pulls_what_they_are_then() -> None:
    worker = Exchanging()
    for clock in (1, 1, 2):  # one comes again
        outbox = worker.exchange(clock)
        assert [answer.in_segment for answer in outbox.told if isinstance(answer, PulledRows)] == [True]
        assert outbox.finished
        assert worker.pulled() == [[1.0 - clock] * DIM] * 3


def test_an_exchange_that_waits_for_others_says_that_its_push_is_staged() -> None:
    worker = Exchanging(mode="sync", workers=2)
    outbox = worker.exchange(1)
    assert outbox.told == []
    worker.shard._pulls.tell_staged(worker.shard._clock() + 1)
    [notice] = outbox.told
    assert isinstance(notice, Notice)
    assert notice.staged_seconds is not None
    other = IDS.tobytes() + np.ones(3, np.uint32).tobytes() + np.full((3, DIM), 3.0, np.float32).tobytes()
    worker.shard.push_rows(changed(named(1, 0), rank=1, incarnation=2, place=None, payload=other))
    assert outbox.finished
    assert worker.pulled() == [[-1.0] * DIM] * 3
    worker.shard._pulls.tell_staged(worker.shard._clock() + 2)
    assert len(outbox.told) == 2, "rows say that their push is staged"


def test_a_shard_forgets_an_exchange_once_its_rows_are_sent() -> None:
    worker = Exchanging(mode="sync", workers=2)
    waits, other = worker.exchange(1), IDS.tobytes() + np.ones(3, np.uint32).tobytes() + bytes(12 * DIM)
    assert worker.shard._pulls.needs_ticks, "it is told that its push is staged"
    worker.shard.push_rows(changed(named(1, 0), rank=1, incarnation=2, place=None, payload=other))
    assert waits.finished
    waits.close()
    assert not worker.shard._pulls.needs_ticks


def test_an_exchange_that_pulls_what_it_cannot_leaves_nothing_staged() -> None:
    worker = Exchanging()
    with pytest.raises(InvalidRequest, match="segment for rows"):
        worker.exchange(1, wanted=FAR)
    assert worker.pull(0) == [[1.0, 1.0]] * 3
    with pytest.raises(NonFiniteGradient):
        worker.exchange(1, float("nan"))
    worker.exchange(1)
    assert worker.pulled() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("what", "name", "is_staged"), [(RowChecker, "push", False), (Pushes, "_stage", True)], ids=["checked", "staged"]
)
def test_a_worker_that_is_removed_in_the_middle_of_an_exchange_gets_no_rows(
    what: Any, name: str, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, real = Exchanging(), getattr(what, name)

    def removed(*arguments: Any, **more: Any) -> Any:
        result = real(*arguments, **more)
        worker.shard.remove_worker("sums", 0, 1)
        return result

    monkeypatch.setattr(what, name, removed)
    before = worker.pulled()
    with pytest.raises(UnknownWorker):
        worker.exchange(1)
    assert worker.pulled() == before
    [table] = worker.shard.jobs()["sums"].tables.values()
    assert table.rule.version == is_staged, "what was staged before counts"


def test_an_exchange_has_all_rows_of_a_step_and_no_payload() -> None:
    push = rows_pb2.PushRowsRequest(kind="ROW_PUSH_KIND_GRADIENT", row_count=1, total_row_count=1, clock=3, table=1)
    push.payload = b"1234"
    with pytest.raises(InvalidRequest, match="got 1 of 1 rows and 4 bytes in the push"):
        row_messages.read_exchange(rows_pb2.ExchangeRowsRequest(push=push).SerializeToString())
    push.ClearField("payload")
    push.in_segment.offset, push.total_row_count = PAGE_BYTES, 2
    with pytest.raises(InvalidRequest, match="got 1 of 2 rows and 0 bytes"):
        row_messages.read_exchange(rows_pb2.ExchangeRowsRequest(push=push).SerializeToString())
    push.total_row_count = 1
    _, pull = row_messages.read_exchange(rows_pb2.ExchangeRowsRequest(push=push).SerializeToString())
    assert (pull.table, pull.clock, pull.places, pull.payload) == (1, 3, None, b"")


FAR = PAGE_BYTES + ROW_BYTES
BEFORE = PAGE_BYTES - 8


@pytest.mark.parametrize(
    "place", [0, BEFORE, PAGE_BYTES + 2, FAR - pushed_bytes(3, DIM) + 4, FAR, 2**40, 2**63, 2**64 - 8]
)
def test_a_place_that_is_none_is_refused_and_changes_nothing(place: int) -> None:
    worker = Sharing()
    worker.push(1)
    with pytest.raises(InvalidRequest, match=f"segment for rows of {ROW_BYTES} bytes, got bytes {place} to"):
        worker.shard.push_rows(named(2, place))
    for places in (PullOffsets(place, 9, PAGE_BYTES), PullOffsets(PAGE_BYTES, 9, place)):
        with pytest.raises(InvalidRequest, match="segment for rows"):
            worker.shard.pull(RowsPull(Identity("sums", 0, 1), 0, 1, b"", places=places), Answers())
    assert worker.pull(1) == [[0.0, 0.0]] * 3


def test_the_last_place_is_one() -> None:
    worker = Sharing(ROW_BYTES)
    worker.push(1, place=FAR - pushed_bytes(3, DIM) - 4)
    assert worker.pull(1, FAR - pulled_bytes(3, DIM)) == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("count", [10**9, 2**63])
def test_more_rows_than_the_segment_holds_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequest, match="expected a place"):
        Sharing().shard.push_rows(named(1, PAGE_BYTES, count))


def test_what_is_checked_in_messages_is_checked_in_the_segment() -> None:
    worker = Sharing()
    with pytest.raises(NonFiniteGradient):
        worker.push(1, float("inf"))
    with pytest.raises(InvalidRequest, match="as float32, got bfloat16"):
        worker.shard.push_rows(replace(named(1, PAGE_BYTES), wire_format="bfloat16"))
    worker.memory.array(PAGE_BYTES, 3, np.int64)[:] = 5
    worker.memory.rows(PAGE_BYTES + 36, 3, DIM).fill_(1.0)
    with pytest.raises(InvalidRequest, match="each id once"):
        worker.shard.push_rows(named(1, PAGE_BYTES))
    assert worker.pull(0) == [[1.0, 1.0]] * 3


def test_a_worker_has_the_segment_of_its_own_place_alone() -> None:
    worker = Sharing()
    shard = worker.shard
    shard.add_worker("sums", 1, 2, 0)
    with pytest.raises(NotShared, match="worker 1 has attached no segment for rows"):
        shard.push_rows(changed(named(1, PAGE_BYTES), rank=1, incarnation=2))
    shard.add_worker("sums", 0, 3, 0)  # it has joined again
    with pytest.raises(Fenced):
        worker.push(1)
    with pytest.raises(NotShared):
        shard.push_rows(changed(named(1, PAGE_BYTES), incarnation=3))


@pytest.mark.parametrize("row_bytes", [MAX_ROW_BYTES + 1, 2**63])
def test_a_segment_beyond_all_measure_is_refused(row_bytes: int) -> None:
    worker = Sharing()
    with LocalSegment(PAGE_BYTES, DEFAULT_SHARED_DIRECTORY) as segment:
        with pytest.raises(InvalidRequest, match=f"at most {MAX_ROW_BYTES} bytes"):
            worker.shard.attach(Identity("sums", 0, 1), replace(segment.offer, row_bytes=row_bytes))
        with pytest.raises(PSError, match=f"has {PAGE_BYTES} bytes where {PAGE_BYTES + 64} are needed"):
            worker.shard.attach(Identity("sums", 0, 1), replace(segment.offer, row_bytes=64))
    worker.push(1)
    assert worker.pull(1) == [[0.0, 0.0]] * 3


def test_a_job_without_tables_has_no_segment_for_rows() -> None:
    shard = lone_shard("async", 1)
    with (
        LocalSegment(2 * PAGE_BYTES, DEFAULT_SHARED_DIRECTORY, PAGE_BYTES) as segment,
        pytest.raises(InvalidRequest, match="in a job with tables"),
    ):
        shard.attach(Identity("sums", 0, 1), segment.offer)


def test_what_lies_in_the_segment_is_not_read_from_the_message_too() -> None:
    push = rows_pb2.PushRowsRequest(kind=rows_pb2.ROW_PUSH_KIND_GRADIENT)
    push.in_segment.offset = PAGE_BYTES
    with pytest.raises(InvalidRequest, match="got both"):
        row_messages.read_push(message_parts(push, b"1234").whole())
    pull = rows_pb2.PullRowsRequest(row_count=3)
    with pytest.raises(InvalidRequest, match="row_count only with ids_in_segment, got one without"):
        row_messages.read_pull(message_parts(pull).whole())
    pull.ids_in_segment.offset = PAGE_BYTES
    with pytest.raises(InvalidRequest, match="has no payload, got no place for its rows"):
        row_messages.read_pull(message_parts(pull).whole())


def test_memory_of_rows_is_a_view() -> None:
    worker = Sharing()
    rows = worker.memory.rows(PAGE_BYTES, 2, DIM)
    rows.fill_(2.0)
    assert torch.equal(worker.memory.rows(PAGE_BYTES, 2, DIM), rows)
