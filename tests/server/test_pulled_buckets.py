"""Buckets that are asked for and not sent: so many for each caller, so that pulls that wait fill no memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import Backlogged, PSError, UnknownWorker
from ps_protocol.identity import Identity
from ps_protocol.messages.data import PullCall, PushCall, PushedBucket, PushKind
from ps_protocol.messages.rows import RowsPull, TablePull
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.core.limits import DEFAULTS
from ps_server.rpc.streams import PullStream
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Outbox
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.shard.waiting import WAITING_BYTES
from ps_tables.contributions import RowGradients
from tests.tools.partitions import changed, lone_shard, push
from tests.tools.raw_worker import vector_job
from tests.tools.table_shards import messages


class Stream(Outbox):
    """An outbox that a test closes, as its reader's end does."""

    def __init__(self) -> None:
        self.sent, self.error, self.is_over = 0, None, False
        self._closed: Callable[[], None] = lambda: None

    def on_close(self, callback: Callable[[], None]) -> None:
        self._closed = callback

    def lend(self, lent: Callable[[], Any], is_small: bool = False) -> None:
        self.sent += 1

    def tell(self, answer: object) -> None:
        pass

    def finish(self) -> None:
        self.is_over = True
        self._closed()

    def fail(self, error: PSError) -> None:
        self.error = error  # type: ignore[assignment]
        self._closed()

    def close(self) -> None:
        self._closed()


@pytest.fixture
def shard() -> Shard:
    """Two workers in sync, and three buckets for each caller."""
    return lone_shard("sync", 2, pulled_limit=3)


def pull(clock: int, *buckets: int, rank: int = 0) -> PullCall:
    return PullCall(Identity("sums", rank, rank + 1), clock, buckets)


def test_a_caller_that_waits_for_too_many_buckets_is_told_to_come_back_whichever_worker_it_is(shard: Shard) -> None:
    first, others = Stream(), Stream()
    shard.pull(pull(1, 0, 1), first, "them")  # type: ignore[arg-type]
    with pytest.raises(Backlogged, match=r"2 buckets, .* wait for other workers, and now for 2: max-pulled-.* is 3"):
        shard.pull(pull(1, 0, 1, rank=1), Stream(), "them")  # type: ignore[arg-type]
    ready = Stream()
    shard.pull(pull(0, 0, 1, rank=1), ready, "them")  # type: ignore[arg-type]
    assert ready.is_over, "the first may be waiting for this very worker"
    shard.pull(pull(1, 0, 1, rank=1), others, "others")  # type: ignore[arg-type]
    waits = shard.statistics().jobs["sums"].waits
    assert [(wait.rank, wait.bucket_count) for wait in waits] == [(0, 2), (1, 2)]
    first.close()
    shard.pull(pull(1, 0, 1, rank=1), Stream(), "them")  # type: ignore[arg-type]


def test_what_is_sent_counts_until_its_stream_is_over(shard: Shard) -> None:
    stream = Stream()
    stream.finish = lambda: None  # type: ignore[method-assign]  # its reader does not read
    shard.pull(pull(0, 0, 1), stream, "them")  # type: ignore[arg-type]
    assert stream.sent == 2
    with pytest.raises(Backlogged, match=r"2 buckets, .* are not sent yet, and now for 2"):
        shard.pull(pull(0, 0, 1), Stream(), "them")  # type: ignore[arg-type]
    with pytest.raises(Backlogged):
        shard.pull_state(pull(0, 0, 1), Stream(), "them")  # type: ignore[arg-type]
    shard.pull(pull(1, 0, 1, rank=1), Stream(), "them")  # type: ignore[arg-type]
    stream.close()
    shard.pull(pull(0, 0, 1), Stream(), "them")  # type: ignore[arg-type]


def test_however_a_pull_ends_its_buckets_count_no_more(shard: Shard) -> None:
    def is_free() -> bool:
        ready, waiting = Stream(), Stream()
        shard.pull(pull(0, 0, 1, 2), ready, "them")  # type: ignore[arg-type]
        shard.pull(pull(1, 0, 1, 2), waiting, "them")  # type: ignore[arg-type]
        waiting.close()
        return ready.is_over

    with pytest.raises(UnknownWorker):
        shard.pull(pull(0, 0, 1, rank=7), Stream(), "them")  # type: ignore[arg-type]
    assert is_free()
    shard.pull_state(pull(0, 0, 1), Stream(), "them")  # type: ignore[arg-type]
    assert is_free()
    lost = Stream()
    shard.pull(pull(1, 0, 1, rank=1), lost, "them")  # type: ignore[arg-type]
    shard.remove_worker("sums", 1, 2)
    assert lost.error is not None
    assert is_free()
    dropped = Stream()
    shard.pull(pull(1, 0, 1), dropped, "them")  # type: ignore[arg-type]
    shard.drop_job("sums")
    assert dropped.error is not None
    shard.create_job(vector_job("sums", "async", 48, 0), [0, 1, 2])
    shard.pull(PullCall(Identity("sums", 0, 0), 0, (0, 1, 2)), Stream(), "them")  # type: ignore[arg-type]  # a reader


def test_a_pull_of_no_bucket_is_over_at_once_and_counts_nothing(shard: Shard) -> None:
    for clock in (0, 1):
        stream = Stream()
        shard.pull(pull(clock), stream, "them")  # type: ignore[arg-type]
        assert stream.is_over
    shard.pull_state(pull(0), Stream(), "them")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
@pytest.mark.parametrize("seed", range(5))
def test_the_limit_keeps_no_worker_from_getting_on(mode: str, seed: int) -> None:
    """All workers are one caller, which may wait for one bucket.

    A push counts though the pull with it is refused, and a worker that need not wait is not refused for those that do.
    """
    shard = lone_shard(mode, 3, pulled_limit=1)
    order = random.Random(seed)
    streams: dict[int, Stream] = {}
    clocks, refused = dict.fromkeys(range(3), 0), 0
    for _ in range(2000):
        for rank in [rank for rank, stream in streams.items() if stream.is_over]:
            del streams[rank]
            clocks[rank] += 1
        idle = [rank for rank in clocks if rank not in streams and clocks[rank] < 4]
        if not idle:
            break
        rank = order.choice(idle)
        clock, stream = clocks[rank] + 1, Stream()
        try:
            shard.exchange(_skip(clock, rank), pull(clock, 0, rank=rank), stream, "them")  # type: ignore[arg-type]
        except Backlogged:
            refused += 1
            continue
        streams[rank] = stream
    assert clocks == dict.fromkeys(range(3), 4)
    assert refused or mode != "sync"


def _skip(clock: int, rank: int) -> PushCall:
    return push(0, clock, rank, rank + 1, kind=PushKind.SKIP, payload=b"")


class Unread:
    """A call whose caller does not read, and the threads that would send to it."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def submit(self, task: Callable[[], None]) -> None:
        pass

    def stream(self) -> PullStream:
        return PullStream(lambda message: None, self, self, lambda answer: b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("clock", [0, 5], ids=["unread", "waiting"])
def test_the_memory_of_pulls_has_a_bound(clock: int) -> None:
    """150 calls for 8,000 buckets each took 280 MiB once. A bucket takes about the same whatever it holds."""
    count, calls = 1000, 8
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), pulled_limit=count * calls)
    shard.create_job(vector_job("job", "sync", 16 * count, 0), range(count), "1")
    shard.add_worker("job", 0, 1, None, run="1")
    values = PushCall(
        Identity("job", 0, 1), 0, tuple(PushedBucket(index, PushKind.INITIAL_VALUE) for index in range(count)), b""
    )
    shard.push(changed(values, payload=bytes(64 * count), run="1"))
    asked = [PullCall(Identity("job", 0, 1, run="1"), clock, tuple(range(count))) for _ in range(calls)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    streams = [Unread().stream() for _ in asked]
    for call, stream in zip(asked, streams, strict=True):
        shard.pull(call, stream, "them")
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert shard.statistics().jobs["job"].waiting_pulls == (count * calls if clock else 0)
    with pytest.raises(Backlogged):
        shard.pull(asked[0], Unread().stream(), "them")
    print(f"{taken / count / calls:.0f} bytes a bucket")
    assert taken < count * calls * WAITING_BYTES
    assert 2 * DEFAULTS.pulled_buckets * WAITING_BYTES <= 2**30
    shard.stop()


def test_ids_of_rows_that_wait_and_copies_of_tables_that_nobody_reads_count_by_their_bytes() -> None:
    ids = np.arange(10_000)
    kept = ids.nbytes // WAITING_BYTES + 1  # buckets that they count as, and their table
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), pulled_limit=3 * kept)
    spec = vector_job("job", "async", 16, 0)
    table = JobTable(TableSpec("rows", 64, Initializer("constant", 0.0)), "SGD", {"lr": 0.1})
    shard.create_job(replace(spec, tables=(table,)), range(1), "1")
    shard.add_worker("job", 0, 1, None, run="1")
    for number in range(3):
        shard.pull(RowsPull(Identity("job", 0, 1, run="1"), 0, 5, ids.tobytes()), Stream(), f"caller {number}")
    waiting = RowsPull(Identity("job", 0, 1, run="1"), 0, 5, ids.tobytes())
    streams = [Stream() for _ in range(3)]
    for stream in streams:
        shard.pull(waiting, stream, "them")
    with pytest.raises(Backlogged, match="that wait for other workers"):
        shard.pull(waiting, Stream(), "them")
    shard.pull(RowsPull(Identity("job", 0, 1, run="1"), 0, 0, ids[:10].tobytes()), Stream(), "them")  # waits for none
    streams[0].close()
    shard.pull(waiting, Stream(), "them")

    rows = RowGradients(ids, np.ones(len(ids), np.int64), torch.ones(len(ids), 64))
    for message in messages(0, 1, 1, rows, 1):
        shard.push_rows(changed(message, job="job", run="1"), "them")
    whole = TablePull(Identity("job", 0, 1, run="1"), 0, 1, count_only=False)
    shard.pull(whole, Unread().stream(), "reader")  # the first may be of any size
    with pytest.raises(Backlogged, match="bytes of whole tables, as all its workers, that are not sent yet"):
        shard.pull(whole, Unread().stream(), "reader")
    for _ in range(3):  # other pulls go on
        shard.pull(replace(whole, count_only=True), Unread().stream(), "reader")
        shard.pull(replace(waiting, clock=1, payload=ids[:10].tobytes()), Stream(), "reader")
    shard.stop()


def test_a_pull_of_no_bucket_ends_as_one_of_some(shard: Shard) -> None:
    """A worker whose stream broke after its last bucket asks for those that are missing: for none."""
    stream = Stream()
    shard.pull(pull(0), stream, "them")  # type: ignore[arg-type]
    assert stream.is_over
