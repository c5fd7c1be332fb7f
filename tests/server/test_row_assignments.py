"""What a shard takes of rows that a worker's script has set, and what it refuses: then it is as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import Backlogged, InvalidRequest, LimitExceeded, NotFound, OutOfOrder, UnknownWorker
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages import rows as row_messages
from ps_protocol.messages.rows import RowPushKind, RowsPush
from ps_protocol.modes import parse_mode
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import MAX_PUSHED_BYTES, Initializer, JobTable, TableSpec
from ps_protocol.v1 import rows_pb2
from ps_server.core.commands import AddWorker, RemoveWorker, Staged
from ps_server.core.consistency import Add
from ps_server.core.partition import JobPartition
from ps_server.core.placement import TableShare

DIM, RATE = 2, 1.0
ALL = np.arange(200)
HERE, ELSEWHERE = (ALL[shards_of(ALL, 2) == shard][:8] for shard in range(2))


def running(mode: str = "sync", workers: int = 1, limit: int | None = None, **rows: Any) -> JobPartition:
    """A job of one table, shard 0 of 2."""
    table = JobTable(TableSpec("items", DIM, Initializer("constant", 1.0), **rows), "SGD", {"lr": RATE})
    rule = parse_mode(mode)
    assert rule is not None
    spec = JobSpec("job", (), "SGD", ({"lr": 1.0},), rule, 64, 2, tables=(table,))
    job = JobPartition(spec, [], limit, math.inf, share=TableShare(0, 2, 2**20))
    for rank in range(workers):
        job.execute(AddWorker(rank, rank + 1, 0))
    return job


def assign(ids: np.ndarray = HERE[:3], value: float = 5.0, clock: int = 1, rank: int = 0, **more: Any) -> RowsPush:
    payload = ids.astype("<i8").tobytes() + np.full((len(ids), DIM), value, "<f4").tobytes()
    what = Identity("job", rank, rank + 1), 0, clock
    return replace(RowsPush(*what, RowPushKind.ASSIGN, payload, 0, len(ids), len(ids), {}, assignment=1), **more)


def step(ids: np.ndarray = HERE[:0], clock: int = 1, rank: int = 0, skip: bool = False, number: int = 1) -> RowsPush:
    payload = (
        ids.astype("<i8").tobytes() + np.ones(len(ids), "<u4").tobytes() + np.ones((len(ids), DIM), "<f4").tobytes()
    )
    kind = RowPushKind.SKIP if skip else RowPushKind.GRADIENT
    what = Identity("job", rank, rank + 1), 0, clock
    return RowsPush(*what, kind, payload, 0, len(ids), len(ids), {}, assignment=number)


def send(job: JobPartition, one: RowsPush) -> Staged:
    """Checks and stages, and does what there is to do then."""
    staged = job.execute(job.row_checker.push(one))
    rule, rows = job.rules[0], job.tables[0].weights
    while (work := rule.next()) is not None:
        if isinstance(work, Add):
            rows.add(work.contribution)
        else:
            rows.step()
        job.done(0, work)
    return staged


def weights(job: JobPartition, ids: np.ndarray = HERE[:3]) -> list[float]:
    out = torch.empty(len(ids), DIM)
    job.tables[0].weights.pull(ids, out)
    return out[:, 0].tolist()


def image(job: JobPartition) -> list[object]:
    """All that a message could change."""
    table = job.tables[0]
    coming = {
        rank: (each.clock, each.step, each.assigned and (each.assigned.total, sorted(each.assigned.parts)))
        for rank, each in table.pending.items()
    }
    room = job._room.bytes
    return [coming, room, table.rule.version, dict(table.rule.staged), weights(job, HERE)]


def test_an_update_begins_from_rows_that_are_set() -> None:
    job = running(admit_after=9)
    assert send(job, assign(HERE[:3])).kept
    assert weights(job) == [1.0] * 3, "they wait for their step"
    send(job, step(HERE[2:4]))
    assert weights(job, HERE[:4]) == [5.0, 5.0, 5.0 - RATE, 1.0], "an id gets a row, whatever admit_after says"
    assert (len(job.tables[0].weights), job.tables[0].weights.version) == (3, 1)
    assert job._room.bytes == (0, 0, 0)


@pytest.mark.parametrize("skip", [False, True])
def test_a_step_without_a_gradient_takes_them_along(skip: bool) -> None:
    job = running()
    send(job, assign())
    send(job, step(skip=skip))
    assert weights(job) == [5.0] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2, 2)])
def test_messages_come_in_any_order_and_more_than_once(order: tuple[int, ...]) -> None:
    job = running()
    parts = [
        replace(assign(HERE[first:end], 5.0 + first), first=first, total=8) for first, end in ((0, 3), (3, 4), (4, 8))
    ]
    seen = set()
    for number in order:
        assert send(job, parts[number]).duplicate == (number in seen)
        seen.add(number)
    send(job, step())
    assert weights(job, HERE) == [5.0] * 3 + [8.0] + [9.0] * 4
    before = image(job)
    assert send(job, parts[0]).duplicate
    assert image(job) == before, "the step has come before"


def test_a_step_before_all_are_here_is_refused_and_may_come_again() -> None:
    job = running()
    send(job, replace(assign(HERE[:3]), total=8))
    before = image(job)
    with pytest.raises(InvalidRequest, match=r"worker 0 came before all rows that are assigned with it \(number 1\)"):
        send(job, step(HERE[:1]))
    assert image(job) == before
    send(job, replace(assign(HERE[3:]), first=3, total=8))
    send(job, step(HERE[:1]))
    assert weights(job, HERE) == [5.0 - RATE] + [5.0] * 7


def test_in_sync_the_lowest_rank_counts_whatever_comes_first() -> None:
    for order in ((0, 1), (1, 0)):
        job = running(workers=2)
        for rank in order:
            send(job, assign(HERE[rank : rank + 2], 5.0 + rank, rank=rank))
            send(job, step(rank=rank))
        assert weights(job) == [5.0, 5.0, 6.0]


def test_in_async_each_step_brings_its_own() -> None:
    job = running("async", workers=2)
    for rank in (1, 0):
        send(job, assign(HERE[:1], 5.0 + rank, rank=rank))
    send(job, step(rank=0))
    assert weights(job, HERE[:1]) == [5.0]
    send(job, step(HERE[:1], rank=1))
    assert weights(job, HERE[:1]) == [6.0 - RATE]


def test_a_later_assignment_takes_the_place_of_one_that_was_broken_off() -> None:
    job = running()
    send(job, replace(assign(HERE[:3]), total=8))
    send(job, assign(HERE[:1], 7.0, assignment=2))
    assert send(job, replace(assign(HERE[3:], first=3), total=8)).duplicate, "a message that was under way"
    send(job, step(number=2))
    assert weights(job) == [7.0, 1.0, 1.0]


def test_a_step_that_names_none_drops_what_has_come() -> None:
    job = running()
    send(job, assign())
    send(job, step(number=0))
    assert weights(job) == [1.0] * 3
    assert (job.tables[0].pending, job._room.bytes) == ({}, (0, 0, 0))


@pytest.mark.parametrize("command", [RemoveWorker(0, 1), AddWorker(0, 2, 0)])
def test_what_is_set_goes_with_the_place_of_its_worker(command: AddWorker | RemoveWorker) -> None:
    job = running("async")
    send(job, assign())
    job.execute(command)
    assert job.tables[0].pending == {}
    assert job._room.bytes == (0, 0, 0)


def test_rows_that_make_room_are_those_trained_longest_ago() -> None:
    job = running(max_rows=8)  # 4 on this shard
    send(job, step(HERE[:2], number=0))
    send(job, step(HERE[2:4], clock=2, number=0))
    send(job, assign(HERE[4:6], clock=3))
    send(job, step(clock=3))
    assert weights(job, HERE[:6]) == [1.0, 1.0, 1.0 - RATE, 1.0 - RATE, 5.0, 5.0]
    assert job.tables[0].weights.counts.evicted == 2


REFUSED: dict[str, tuple[Callable[[], RowsPush], type[Exception], str]] = {
    "no rows": (lambda: assign(HERE[:0]), InvalidRequest, "rows 0 to 0 came of 0 that are assigned"),
    "rows beyond": (lambda: assign(first=1), InvalidRequest, "rows 1 to 4 came of 3 that are assigned"),
    "a byte short": (
        lambda: assign(payload=assign().payload[1:]),
        InvalidRequest,
        r"expected 48 bytes \(3 rows of 16\)",
    ),
    "an id twice": (lambda: assign(HERE[[0, 1, 0]]), InvalidRequest, "expected each id once"),
    "rows of another shard": (lambda: assign(ELSEWHERE), InvalidRequest, "and came to shard 0 of 2"),
    "no number": (lambda: assign(assignment=0), InvalidRequest, "what is assigned has a number from 1, got 0"),
    "a NaN": (lambda: assign(value=math.nan), InvalidRequest, "that are assigned are not finite"),
    "hyper-parameters": (lambda: assign(values={"lr": 0.1}), InvalidRequest, "are float32 in the message, and nothing"),
    "a place in memory": (lambda: assign(place=4096), InvalidRequest, "are float32 in the message, and nothing"),
    "another wire format": (lambda: assign(wire_format="float16"), InvalidRequest, "are float32 in the message"),
    "another table": (lambda: assign(table=1), NotFound, "has 1 tables, and table 1 is asked for"),
    "another total": (lambda: assign(total=9), InvalidRequest, "9 rows are assigned here at clock 1, and another 8"),
    "too many": (
        lambda: assign(total=MAX_PUSHED_BYTES),
        LimitExceeded,
        f"a worker may assign {MAX_PUSHED_BYTES} bytes of rows in a step to one shard",
    ),
    "a clock too far": (lambda: assign(clock=2), OutOfOrder, "worker 0 pushed clock 2 where 1 comes next"),
    "an old clock": (lambda: assign(clock=0), OutOfOrder, "joined at clock 0, and a push of clock 0 came"),
    "another worker": (lambda: assign(rank=1), UnknownWorker, "1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_and_changes_nothing(case: str) -> None:
    make, error, message = REFUSED[case]
    job = running()
    if case != "too many":
        send(job, replace(assign(HERE[3:5]), first=6, total=8))
    before = image(job)
    with pytest.raises(error, match=message):
        send(job, make())
    assert image(job) == before


def test_of_several_workers_those_wait_that_nothing_awaits() -> None:
    job = running("async", workers=2, limit=60)
    send(job, assign(HERE[:8]))  # one worker's always fit
    with pytest.raises(Backlogged, match="128 bytes are assigned here and wait for their workers' steps"):
        send(job, assign(rank=1))
    send(job, step())
    send(job, assign(rank=1))


def test_an_exchange_assigns_nothing() -> None:
    request = rows_pb2.ExchangeRowsRequest(push=rows_pb2.PushRowsRequest(kind=rows_pb2.ROW_PUSH_KIND_ASSIGN))
    with pytest.raises(InvalidRequest, match="an exchange pushes all rows of a step"):
        row_messages.read_exchange(request.SerializeToString())
