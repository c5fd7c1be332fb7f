"""One call that pushes rows and asks for others, with rows and ids in its message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.framing import split_message
from ps_protocol.identity import Identity
from ps_protocol.messages import rows as row_messages
from ps_protocol.messages.data import Notice
from ps_protocol.messages.rows import PulledRows, PullOffsets, RowPushKind, RowsPush
from ps_protocol.segment_layout import PAGE_BYTES
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_protocol.v1 import rows_pb2
from ps_server.shard.pushes import Updates
from tests.tools.outbox import Answers
from tests.tools.partitions import changed, job_spec, lone_shard

DIM = 2
IDS = np.array([3, -7, 2**40])
WANTED = np.array([-7, 11, 3])


def parts(value: float = 1.0, ids: np.ndarray = IDS) -> tuple[bytes, bytes, bytes]:
    """The payload of a push of the same gradient of all ids."""
    return ids.tobytes(), np.ones(len(ids), np.uint32).tobytes(), np.full((len(ids), DIM), value, np.float32).tobytes()


def push_of(clock: int, ids: np.ndarray = IDS, **more: Any) -> RowsPush:
    count = len(ids)
    made = RowsPush(Identity("sums", 0, 1), 0, clock, RowPushKind.GRADIENT, ids.tobytes(), 0, count, count, {})
    return changed(made, **more)


def request(clock: int, value: float = 1.0, wanted: np.ndarray = WANTED) -> bytes:
    _, *more = parts(value)
    return row_messages.write_exchange(push_of(clock), None, wanted.tobytes(), more).whole()


class Exchanging:
    """A shard with a table of ones, and its worker 0."""

    def __init__(self, mode: str = "async", workers: int = 1) -> None:
        table = JobTable(TableSpec("items", DIM, Initializer("constant", 1.0)), "SGD", {"lr": 1.0, "momentum": 0.0})
        spec = job_spec(mode)
        self.shard = lone_shard(workers=workers, spec=replace(spec, tables=(table,)))

    def exchange(self, message: bytes) -> Answers:
        outbox = Answers()
        self.shard.exchange(*row_messages.read_exchange(message), outbox)
        return outbox


def rows_in(outbox: Answers) -> list[list[float]]:
    [answer] = [answer for answer in outbox.told if isinstance(answer, PulledRows)]
    assert answer.payload is not None
    assert (answer.first, answer.in_segment) == (0, False)
    found: list[list[float]] = np.frombuffer(answer.payload, np.float32).reshape(-1, DIM).tolist()
    return found


def test_one_message_pushes_rows_and_gets_what_they_are_then() -> None:
    worker = Exchanging()
    for clock in (1, 1, 2):  # one comes again
        outbox = worker.exchange(request(clock))
        assert outbox.finished
        assert rows_in(outbox) == [[1.0 - clock] * DIM, [1.0] * DIM, [1.0 - clock] * DIM]


def test_it_may_want_no_rows_or_push_none() -> None:
    worker = Exchanging()
    outbox = worker.exchange(request(1, wanted=WANTED[:0]))
    assert [answer.rows for answer in outbox.told if isinstance(answer, PulledRows)] == [0]
    none = changed(push_of(2, IDS[:0]), kind=RowPushKind.NO_GRADIENT)
    outbox = worker.exchange(row_messages.write_exchange(none, None, WANTED.tobytes()).whole())
    assert rows_in(outbox) == [[0.0] * DIM, [1.0] * DIM, [0.0] * DIM]


def test_rows_that_wait_for_others_do_not_keep_the_message() -> None:
    worker = Exchanging("sync", workers=2)
    outbox = worker.exchange(request(1))
    assert outbox.told == []
    [table] = worker.shard.jobs()["sums"].tables.values()
    [waiter] = table.waiters.values()
    assert isinstance(waiter.pull.wanted, np.ndarray)
    base: Any = waiter.pull.wanted.base
    assert len(base) == WANTED.nbytes, "its ids are a copy"
    worker.shard._pulls.tell_staged(worker.shard._clock() + 1)
    [notice] = outbox.told
    assert isinstance(notice, Notice)
    other = b"".join(parts(3.0))
    worker.shard.push_rows(changed(push_of(1), rank=1, incarnation=2, payload=other))
    assert rows_in(outbox) == [[-1.0] * DIM, [1.0] * DIM, [-1.0] * DIM]


def test_one_that_is_refused_leaves_nothing_staged() -> None:
    worker = Exchanging()
    with pytest.raises(NonFiniteGradient):
        worker.exchange(request(1, float("nan")))
    assert rows_in(worker.exchange(request(1)))[0] == [0.0] * DIM


def test_the_thread_that_receives_rows_in_messages_leaves_their_updates_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that makes updates goes on for as long as other workers push, and receives nothing meanwhile."""
    worker = Exchanging()
    monkeypatch.setattr(Updates, "run_here", lambda *_: pytest.fail("the calling thread makes them"))
    outbox = worker.exchange(request(1))
    worker.shard.push_rows(push_of(2, payload=b"".join(parts())))
    assert rows_in(outbox)[0] == [0.0] * DIM


def test_the_message_is_what_the_generated_class_writes() -> None:
    written = row_messages.write_exchange(push_of(1), None, WANTED.tobytes(), parts()[1:])
    assert written.payload is not None
    whole = rows_pb2.ExchangeRowsRequest.FromString(written.whole())
    assert whole.payload == WANTED.tobytes() + b"".join(parts())
    assert whole.row_count == len(WANTED)
    assert whole.SerializeToString() == written.whole()
    answer = rows_pb2.ExchangeRowsResponse(payload=b"1234")
    answer.pulled.row_count = 1
    fields, payload = split_message(answer.SerializeToString())
    assert payload is not None
    assert payload.tobytes() == b"1234"
    assert row_messages.read_exchanged(fields)[1] == PulledRows(rows=1)


def refused(text: str, **fields: Any) -> None:
    message = rows_pb2.ExchangeRowsRequest.FromString(request(1))
    for name, value in fields.items():
        if isinstance(value, int | bytes):
            setattr(message, name, value)
        else:
            getattr(message, name).CopyFrom(value)
    with pytest.raises(InvalidRequest, match=text):
        row_messages.read_exchange(message.SerializeToString())


def test_rows_and_ids_are_all_in_the_message_or_all_in_the_segment() -> None:
    place = rows_pb2.RowPlace(offset=PAGE_BYTES)
    refused("are in the segment or in the message, got both", ids_in_segment=place, rows_in_segment=place)
    refused("are in the segment or in the message, got both", rows_in_segment=place)
    places = PullOffsets(PAGE_BYTES, 1, PAGE_BYTES)
    in_segment = row_messages.write_exchange(push_of(1, payload=b"", place=PAGE_BYTES), places)
    named = rows_pb2.ExchangeRowsRequest.FromString(in_segment.head)
    refused("rows are in the segment or in the message, got both", push=named.push)
    refused("expected 99999 ids in the message", row_count=99999)
    whole = rows_pb2.ExchangeRowsRequest.FromString(request(1))
    whole.push.total_row_count += 1
    refused("got 3 of 4 rows and 0 bytes", push=whole.push)
    whole = rows_pb2.ExchangeRowsRequest.FromString(request(1))
    whole.push.payload = b"1234"
    refused("got 3 of 3 rows and 4 bytes", push=whole.push)


def test_ids_that_are_said_to_be_more_leave_too_few_bytes_for_the_push() -> None:
    message = rows_pb2.ExchangeRowsRequest.FromString(request(1))
    message.row_count += 1
    with pytest.raises(InvalidRequest, match="expected 60 bytes"):
        Exchanging().exchange(message.SerializeToString())
