"""What a shard sends to those who follow a table: rounds, as its reader takes them; and what it refuses."""

from __future__ import annotations

import gc
import math
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import InvalidRequest, LimitExceeded, NotFound, PSError, RunEnded, TryLater, UnknownWorker
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages.rows import RowPushKind, RowsMessage, RowsPush, RowsWatch
from ps_protocol.modes import Consistency
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Lent
from ps_server.shard.pulls import MESSAGE_BYTES
from ps_server.shard.row_feeds import LAST_ROWS_SECONDS, SIGN_OF_LIFE_SECONDS, RowCursor, row_cursor
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads

DIM = 64
SPEC = JobSpec(
    "job",
    (),
    "SGD",
    ({"lr": 1.0},),
    Consistency(None),
    64,
    1,
    tables=tuple(
        JobTable(TableSpec(name, DIM, Initializer("constant", 1.0), max_rows=most), "SGD", {"lr": 1.0})
        for name, most in (("items", 0), ("few", 100))
    ),
)


class Reader:
    """An outbox whose reader takes a message when it wants to, and keeps a copy of the table."""

    def __init__(self) -> None:
        self.queued: deque[Callable[[], AbstractContextManager[Lent]]] = deque()
        self.error: PSError | None = None
        self.rows: dict[int, list[float]] = {}
        self.parts: list[RowsMessage] = []
        self.close: Callable[[], None] = lambda: None

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        self.queued.append(lent)

    def fail(self, error: PSError) -> None:
        self.error = error

    def on_close(self, callback: Callable[[], None]) -> None:
        self.close = callback

    def take(self) -> RowsMessage:
        """Takes one message, as the gRPC stream makes it."""
        with self.queued.popleft()() as (part, _):
            assert isinstance(part, RowsMessage)
        self.parts.append(part)
        payload = part.payload or b""
        assert len(payload) <= MESSAGE_BYTES
        ids = np.frombuffer(payload, "<i8", part.removed + part.rows)
        values = np.frombuffer(payload, "<f4", offset=ids.nbytes).reshape(part.rows, DIM)
        if part.begin is not None and part.begin.full:
            self.rows.clear()
        for number in ids[: part.removed].tolist():
            self.rows.pop(number, None)
        self.rows |= dict(zip(ids[part.removed :].tolist(), values.tolist(), strict=True))
        return part

    def round(self) -> list[RowsMessage]:
        """Takes all messages of a round."""
        first = len(self.parts)
        while not self.take().cursor:
            pass
        return self.parts[first:]


class Feeding:
    """A shard with the job, whose time a test moves."""

    def __init__(self, limit: float = math.inf) -> None:
        self.now, self._clocks = 0.0, [0, 0]
        self.shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), clock=lambda: self.now, feed_limit=limit)
        self.make()

    def make(self) -> None:
        self.shard.create_job(SPEC, [])
        self.shard.add_worker("job", 0, 1, 0)
        self._clocks = [0, 0]

    def watch(self, cursor: bytes = b"", table: str = "items", period: float = 1.0) -> Reader:
        reader = Reader()
        self.shard.feeds.watch(RowsWatch("job", table, cursor, period), reader)  # type: ignore[arg-type]
        return reader

    def train(self, ids: np.ndarray, table: int = 0) -> None:
        self._clocks[table] += 1
        clock, size = self._clocks[table], 10_000
        for first in range(0, len(ids), size):
            part = ids[first : first + size].astype(np.int64)
            payload = part.tobytes() + np.ones(len(part), np.uint32).tobytes() + bytes(4 * DIM * len(part))
            pushed = RowPushKind.GRADIENT, payload, first, len(part), len(ids), {}
            self.shard.push_rows(RowsPush(Identity("job", 0, 1), table, clock, *pushed))  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.shard.tick()

    def held(self, table: int = 0) -> dict[int, list[float]]:
        tensors = self.shard.jobs()["job"].partition.tables[table].weights.snapshot()
        return dict(zip(tensors["ids"].tolist(), tensors["weights"].tolist(), strict=True))


@pytest.fixture
def feeding() -> Feeding:
    return Feeding()


def test_a_round_comes_in_messages_of_a_few_mib_and_the_next_brings_what_changed(feeding: Feeding) -> None:
    feeding.train(np.arange(60_000))
    reader = feeding.watch()
    parts = reader.round()
    assert len(parts) == 4
    assert [part.begin is not None for part in parts] == [True, False, False, False]
    assert [bool(part.cursor) for part in parts] == [False, False, False, True]
    begin = parts[0].begin
    assert begin is not None
    assert begin == (True, 1, 1, SPEC.tables[0].rows.dim, SPEC.tables[0].rows.initializer)
    assert reader.rows == feeding.held()
    assert not reader.queued
    feeding.train(np.array([5, 10**6]))
    feeding.pass_time(0.5)
    assert not reader.queued, "no period has passed"
    feeding.pass_time(0.5)
    [part] = reader.round()
    assert (part.begin is not None and part.begin.full, part.rows, part.removed) == (False, 2, 0)
    assert reader.rows == feeding.held()


def test_removed_ids_come_before_the_rows_of_a_round(feeding: Feeding) -> None:
    feeding.train(np.arange(100), 1)
    reader = feeding.watch(table="few")
    reader.round()
    feeding.train(np.arange(100, 150), 1)
    feeding.train(np.arange(20), 1)  # of those that had to go some are back
    feeding.pass_time(1.0)
    [part] = reader.round()
    assert part.removed >= 50
    assert reader.rows == feeding.held(1)


def test_a_reader_that_never_reads_has_one_message_waiting_and_training_goes_on(feeding: Feeding) -> None:
    reader = feeding.watch()
    for number in range(50):
        feeding.train(np.arange(10) + number)
        feeding.pass_time(1.0)
    assert len(reader.queued) == 1
    reader.round()
    assert reader.rows == feeding.held(), "made when it was taken"
    for _ in range(5):
        feeding.train(np.arange(10))
        feeding.pass_time(1.0)
    assert len(reader.queued) == 1


def test_where_nothing_changes_a_sign_of_life_comes_now_and_then(feeding: Feeding) -> None:
    reader = feeding.watch()
    [first] = reader.round()
    for _ in range(int(SIGN_OF_LIFE_SECONDS) - 1):
        feeding.pass_time(1.0)
        assert not reader.queued
    feeding.pass_time(1.0)
    [part] = reader.round()
    assert (part.rows, part.removed, part.cursor) == (0, 0, first.cursor)


def test_a_feed_goes_on_from_its_cursor_and_starts_again_in_another_history(feeding: Feeding) -> None:
    feeding.train(np.arange(10))
    reader = feeding.watch()
    cursor = reader.round()[-1].cursor
    reader.close()
    feeding.train(np.arange(5, 15))
    reader.queued = feeding.watch(cursor).queued
    [part] = reader.round()
    assert part.begin is not None
    assert (part.begin.full, part.rows) == (False, 10)
    assert reader.rows == feeding.held()
    feeding.shard.drop_job("job")
    feeding.make()
    feeding.train(np.arange(3))
    reader.queued = feeding.watch(part.cursor).queued
    [part] = reader.round()
    assert part.begin is not None
    assert part.begin.full
    assert reader.rows == feeding.held()


def test_a_cursor_that_is_none_is_refused_with_one_error(feeding: Feeding) -> None:
    feeding.train(np.arange(10))
    cursor = feeding.watch().round()[-1].cursor
    good = row_cursor(cursor)
    before = feeding.shard.statistics()
    for wrong, said in (
        (b"nonsense", "expected a cursor as WatchRows gave it, of 21 bytes of format 01, got 8 bytes of format 6e"),
        (cursor + b"x", "of format 01, got 22 bytes of format 01"),
        (b"\2" + cursor[1:], "of format 01, got 21 bytes of format 02"),
        (b"x", "got 1 bytes of format 78"),
        (good._replace(version=2).to_bytes(), "of table 0 up to version 1, got one of table 0 and version 2"),
        (good._replace(table=1).to_bytes(), "got one of table 1"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            feeding.watch(wrong)
    assert feeding.shard.statistics() == before
    assert feeding.watch(RowCursor(9, good.history + 1, 2**63).to_bytes()).round()[0].begin == replace_full(
        good, feeding
    )


def replace_full(good: RowCursor, feeding: Feeding) -> object:
    """What a round begins with for a reader that has nothing."""
    begin = feeding.watch().round()[0].begin
    assert begin is not None
    assert begin.full
    assert good.version == begin.version
    return begin


def test_periods_tables_and_too_many_feeds_are_refused() -> None:
    feeding = Feeding(limit=2)
    for period in (0.05, 3601.0, math.nan):
        with pytest.raises(InvalidRequest, match=r"the period must be 0.1 to 3600 s"):
            feeding.watch(period=period)
    with pytest.raises(NotFound, match="job 'job' has no table 'other'; its tables: 'few', 'items'"):
        feeding.watch(table="other")
    one, _ = feeding.watch(), feeding.watch(table="few")
    with pytest.raises(LimitExceeded, match="has 2 feeds here: that is the limit max-feeds"):
        feeding.watch()
    one.close()
    feeding.watch()


def test_a_reader_gets_the_last_rows_of_a_job_that_has_ended(feeding: Feeding) -> None:
    feeding.train(np.arange(10))
    in_a_round, waits, has_all, unread = (feeding.watch(period=3600.0) for _ in range(4))
    waits.round()
    unread.round()
    feeding.train(np.arange(5, 15))
    has_all.round()
    last = feeding.held()
    feeding.shard.drop_job("job")
    feeding.pass_time(0.1)
    assert isinstance(has_all.error, NotFound)
    in_a_round.round()
    waits.round()
    assert (in_a_round.rows, waits.rows) == (last, last)
    feeding.pass_time(0.1)
    assert isinstance(in_a_round.error, NotFound)
    assert isinstance(waits.error, NotFound)
    assert unread.error is None
    feeding.pass_time(LAST_ROWS_SECONDS)
    assert isinstance(unread.error, NotFound), "nobody keeps a table in memory by not reading"
    assert unread.take() == RowsMessage(0)


def test_a_job_that_has_ended_is_freed_when_its_reader_has_the_last_rows(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.shard.hosted.COLLECTED_BYTES", 1)
    reader = feeding.watch()
    reader.round()
    feeding.train(np.arange(10))
    job = weakref.ref(feeding.shard.jobs()["job"])
    gc.disable()  # not by chance
    try:
        feeding.shard.drop_job("job")
        feeding.pass_time(0.1)
        assert job() is not None
        reader.round()
        feeding.pass_time(0.1)
        assert job() is None
    finally:
        gc.enable()


def test_a_run_that_a_later_one_replaces_keeps_no_memory_for_its_readers(feeding: Feeding) -> None:
    reader = feeding.watch()
    feeding.shard.jobs()["job"].end_feeds(RunEnded("a later run has begun"))
    assert isinstance(reader.error, RunEnded)


def test_a_shard_that_stops_ends_the_feeds_of_jobs_that_have_ended(feeding: Feeding) -> None:
    reader = feeding.watch()
    feeding.shard.drop_job("job")
    assert reader.error is None
    feeding.shard.stop()
    assert isinstance(reader.error, NotFound)


def test_feeds_end_with_their_job(feeding: Feeding) -> None:
    reader, other = feeding.watch(), feeding.watch()
    reader.round()
    feeding.shard.drop_job("job")
    feeding.pass_time(0.1)
    assert isinstance(reader.error, NotFound)
    other.round()
    feeding.pass_time(0.1)
    assert isinstance(other.error, NotFound)
    with pytest.raises(NotFound):
        feeding.watch()
    feeding.make()
    reader = feeding.watch()
    feeding.shard.jobs()["job"].end_feeds(UnknownWorker("rolled back: join again"))
    assert isinstance(reader.error, TryLater), "a reader joins nothing"
    assert reader.take() == RowsMessage(0), "what was queued brings nothing of a table that is gone"


def takes_at_once(lock: Any) -> bool:
    """Whether the thread that calls gets a lock without waiting."""
    taken: bool = lock.acquire(blocking=False)
    if taken:
        lock.release()
    return taken


def test_training_is_as_it_was_while_a_round_is_under_way(feeding: Feeding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.shard.row_feeds.MESSAGE_BYTES", 2**18)  # several messages for few rows
    feeding.train(np.arange(6_000))
    reader = feeding.watch()
    reader.take()
    feeding.train(np.arange(3_000, 9_000))
    table = feeding.shard.jobs()["job"].tables[0]
    with ThreadPoolExecutor(1) as another:
        assert another.submit(takes_at_once, table.tensors).result(), "an update would not wait"
    while not reader.take().cursor:
        pass
    assert len(reader.rows) == 6_000, "what is newer comes in the next round"
    feeding.pass_time(1.0)
    assert sum(part.rows for part in reader.round()) == 6_000
    assert reader.rows == feeding.held()


def test_half_types_travel_as_the_jobs_weights_do() -> None:
    feeding = Feeding()
    feeding.shard.drop_job("job")
    feeding.shard.create_job(replace(SPEC, weight_wire="bfloat16"), [])
    feeding.shard.add_worker("job", 0, 1, 0)
    feeding.train(np.arange(10))
    queued = feeding.watch().queued
    with queued.popleft()() as (part, _):
        assert isinstance(part, RowsMessage)
        assert part.wire_format == "bfloat16"
        assert part.payload is not None
        assert len(part.payload) == 10 * (8 + 2 * DIM)
