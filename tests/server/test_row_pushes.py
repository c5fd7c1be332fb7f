"""What a shard takes of rows that are pushed and pulled, and what it refuses: then it is as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import (
    Backlogged,
    Fenced,
    InvalidRequest,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    OutOfOrder,
    PSError,
    UnknownWorker,
)
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.messages.rows import RowPushKind, RowsPull, RowsPush
from ps_protocol.modes import parse_mode
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import Initializer, JobTable, TableSpec
from ps_server.core.commands import AddWorker, RemoveWorker, Staged
from ps_server.core.consistency import Add
from ps_server.core.limits import DEFAULTS
from ps_server.core.partition import JobPartition
from ps_server.core.placement import TableShare
from ps_server.core.table_rows import table_size
from ps_server.core.validation import check_job_spec
from ps_tables.sizes import index_bytes
from tests.tools.partitions import changed

DIM = 2
HERE = np.array([each for each in range(200) if shards_of(np.array([each]), 2)[0] == 0][:8])
ELSEWHERE = np.array([each for each in range(200) if shards_of(np.array([each]), 2)[0] == 1][:8])
ROW_BYTES = 8 + 4 + 4 * DIM


def job_spec(mode: str = "sync", **more: Any) -> JobSpec:
    rows = TableSpec("items", DIM, Initializer("constant", 1.0))
    table = JobTable(rows, "SGD", {"lr": 1.0, "momentum": 0.0})
    rule = parse_mode(mode)
    assert rule is not None
    return JobSpec("job", (), "SGD", ({"lr": 1.0},), rule, 64, 2, tables=(table, table), **more)


def running(mode: str = "sync", workers: int = 1, limit: int | None = None, **more: Any) -> JobPartition:
    """A job of two tables, shard 0 of 2."""
    norm = more.pop("norm_limit", math.inf)
    job = JobPartition(job_spec(mode, **more), [], limit, norm, share=TableShare(0, 2, 2**20))
    for rank in range(workers):
        job.execute(AddWorker(rank, rank + 1, 0))
    return job


def payload(ids: np.ndarray, value: float = 1.0, counts: np.ndarray | None = None, dtype: Any = np.float32) -> bytes:
    counted = np.ones(len(ids)) if counts is None else counts
    gradients = np.full((len(ids), DIM), value, dtype)
    return ids.astype("<i8").tobytes() + counted.astype("<u4").tobytes() + gradients.tobytes()


def push(ids: np.ndarray = HERE[:3], value: float = 1.0, clock: int = 1, rank: int = 0, **more: Any) -> RowsPush:
    made = RowsPush(
        Identity("job", rank, rank + 1), 0, clock, RowPushKind.GRADIENT, payload(ids, value), 0, len(ids), len(ids), {}
    )
    return changed(made, **more)


def skip(clock: int = 1, rank: int = 0, kind: RowPushKind = RowPushKind.SKIP) -> RowsPush:
    return replace(push(HERE[:0], clock=clock, rank=rank), kind=kind)


def send(job: JobPartition, one: RowsPush) -> Staged:
    """Checks and stages, and does what there is to do then."""
    staged = job.execute(job.row_checker.push(one))
    for index, rule in job.rules.items():
        while (work := rule.next()) is not None:
            rows = job.tables[index].weights
            if isinstance(work, Add):
                rows.add(work.contribution)
            else:
                rows.step()
            job.done(index, work)
    return staged


def weights(job: JobPartition, ids: np.ndarray = HERE[:3], table: int = 0) -> list[float]:
    out = torch.empty(len(ids), DIM)
    job.tables[table].weights.pull(ids, out)
    return out[:, 0].tolist()


def image(job: JobPartition) -> list[object]:
    """All that a push could change."""
    found: list[object] = [dict(job.roster), job.staged_bytes, job._room.staged.bytes]
    for table in job.tables.values():
        rule = table.rule
        found += [rule.version, dict(rule.staged), dict(rule.applied), list(rule.waiting), list(rule.added)]
        found += [
            len(table.weights),
            {rank: sorted(each.step.parts) for rank, each in table.pending.items() if each.step},
        ]
    return [*found, weights(job, HERE), weights(job, HERE, 1)]


def test_rows_are_stepped_with_the_mean_of_all_who_take_part() -> None:
    job = running(workers=2)
    send(job, push(HERE[:3], 2.0, rank=1))
    assert weights(job) == [1.0] * 3, "rank 0 is awaited"
    send(job, push(HERE[1:4], 4.0))
    assert weights(job, HERE[:5]) == [0.0, -2.0, -2.0, -1.0, 1.0]
    assert len(job.tables[0].weights) == 4


def test_a_worker_without_a_gradient_is_a_term_of_zeros_and_one_that_skips_is_none() -> None:
    for kind, expected in ((RowPushKind.NO_GRADIENT, 0.0), (RowPushKind.SKIP, -1.0)):
        job = running(workers=2)
        send(job, push(HERE[:1], 2.0))
        send(job, skip(rank=1, kind=kind))
        assert weights(job, HERE[:1]) == [expected]


def test_an_update_without_any_gradient_is_none_of_the_table() -> None:
    job = running()
    send(job, skip(kind=RowPushKind.NO_GRADIENT))
    send(job, push(clock=2))
    assert job.rules[0].version == 2
    assert int(job.tables[0].weights.snapshot()["version"]) == 1, "the expiry of rows counts those with a gradient"
    send(job, push(HERE[:0], clock=3))
    assert int(job.tables[0].weights.snapshot()["version"]) == 2, "other shards have rows of this one"


def parts(clock: int = 1, rank: int = 0) -> list[RowsPush]:
    return [replace(push(HERE[a:b], clock=clock, rank=rank), first=a, total=8) for a, b in ((0, 3), (3, 4), (4, 8))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 2, 2, 0, 0)])
def test_a_push_counts_when_all_its_messages_are_here(order: tuple[int, ...]) -> None:
    job, messages = running("async"), parts()
    answers = []
    for place, number in enumerate(order):
        answers.append(send(job, messages[number]))
        missing = len(set(order[: place + 1])) < 3
        assert weights(job, HERE) == ([1.0] * 8 if missing else [0.0] * 8)
    assert [answer.duplicate for answer in answers] == [number in order[:at] for at, number in enumerate(order)]
    assert send(job, messages[0]).duplicate
    assert (job._room.staged.bytes, job.tables[0].pending) == (0, {})


def test_the_messages_of_a_worker_that_is_gone_are_dropped() -> None:
    job = running(workers=2)
    send(job, parts()[0])
    before = job._room.staged.bytes
    job.execute(RemoveWorker(0, 1))
    assert (before, job._room.staged.bytes, job.tables[0].pending) == (8 * 4 * DIM, 0, {})
    job.execute(AddWorker(0, 5, 0))
    for message in parts():
        send(job, changed(message, incarnation=5))
    send(job, skip(rank=1))
    assert weights(job, HERE) == [0.0] * 8


def test_messages_of_an_earlier_clock_are_dropped_for_those_of_the_next() -> None:
    """Of a worker that was fenced in the middle of a step and came back further on."""
    job = running("async")
    send(job, parts()[0])
    job.execute(AddWorker(0, 7, 3))
    send(job, changed(push(clock=4), incarnation=7))
    assert weights(job, HERE) == [0.0] * 3 + [1.0] * 5


def broken() -> dict[str, tuple[RowsPush, type[PSError], str]]:
    """Pushes that no shard takes."""
    ids, more = HERE[:3], HERE[:4]
    return {
        "twice": (push(np.array([HERE[0]] * 2)), InvalidRequest, f"each id once, got {HERE[0]} twice"),
        "of another shard": (push(ELSEWHERE[:2]), InvalidRequest, "is on shard 1, and came to shard 0 of 2"),
        "too short": (push(payload=payload(ids)[:-1]), InvalidRequest, f"expected {3 * ROW_BYTES} bytes"),
        "too long": (push(payload=payload(more)), InvalidRequest, f"got {4 * ROW_BYTES}"),
        "of 2 GiB": (push(count=2**30, total=2**30), InvalidRequest, f"expected {2**30 * ROW_BYTES} bytes"),
        "more than all": (push(total=2), InvalidRequest, "rows 0 to 3 came of 2 in all"),
        "nothing of some": (push(HERE[:0], total=2), InvalidRequest, "rows 0 to 0 came of 2 in all"),
        "behind the end": (push(first=1), InvalidRequest, "rows 1 to 4 came of 3 in all"),
        "too many": (push(total=2**40), LimitExceeded, "bytes of gradients in a step"),
        "NaN": (push(value=math.nan), NonFiniteGradient, "table 'items' from worker 0 is not finite"),
        "infinite": (push(value=math.inf), NonFiniteGradient, "is not finite"),
        "no table": (push(table=2), NotFound, "has 2 tables, and table 2 is asked for"),
        "never occurred": (push(payload=payload(ids, counts=np.zeros(3))), InvalidRequest, "got a count of 0"),
        "a skip with rows": (push(kind=RowPushKind.SKIP), InvalidRequest, "only a push of gradients has rows"),
        "another format": (push(wire_format="bfloat16"), InvalidRequest, "expected elements as float32, got bfloat16"),
        "unknown value": (push(values={"speed": 1.0}), InvalidRequest, "got 'speed'"),
        "bad value": (push(values={"lr": -1.0}), InvalidRequest, "Invalid learning rate"),
        "more state": (push(values={"momentum": 0.9}), InvalidRequest, "cannot be switched on in a running job"),
        "next but one": (push(clock=3), OutOfOrder, "pushed clock 3 where 2 comes next"),
        "of no worker here": (push(rank=9), UnknownWorker, "worker 9"),
        "replaced": (push(incarnation=0), Fenced, "was replaced: incarnation 1 is live"),
    }


@pytest.mark.parametrize("name", broken())
def test_what_is_refused_changes_nothing(name: str) -> None:
    job = running("async", workers=2)
    send(job, push(HERE[:2]))
    send(job, push(HERE[:2], clock=2))
    send(job, parts(rank=1)[0])
    bad, error, said = broken()[name]
    bad = replace(bad, clock=3 if bad.clock == 1 else 4)
    said = said.replace("clock 3 where 2", "clock 4 where 3")
    before = image(job)
    with pytest.raises(error, match=said):
        send(job, bad)
    assert image(job) == before
    send(job, push(HERE[:2], clock=3))
    assert weights(job) == [-2.0, -2.0, 1.0], "the one that is right is taken after it"


def test_messages_that_contradict_each_other_are_refused() -> None:
    job = running("async")
    send(job, parts()[0])
    with pytest.raises(InvalidRequest, match="says that clock 1 has 9 rows here, and another 8"):
        send(job, replace(parts()[1], total=9))
    for message in parts()[1:]:
        send(job, message)
    assert weights(job, HERE) == [0.0] * 8


def test_a_gradient_that_is_not_finite_is_left_out_or_taken_as_the_job_says() -> None:
    job = running(workers=2, non_finite=NonFinite.SKIP)
    send(job, push(value=math.nan))
    send(job, push(HERE[:3], 2.0, rank=1))
    assert weights(job) == [-1.0] * 3, "the mean is that of the other"
    job = running("async", non_finite=NonFinite.SKIP)
    first, *rest = parts()
    send(job, replace(first, payload=payload(HERE[:3], math.inf)))
    for message in rest:
        send(job, message)
    assert weights(job, HERE) == [1.0] * 8, "all of it"
    job = running("async", non_finite=NonFinite.ALLOW)
    send(job, push(value=math.inf))
    assert weights(job) == [-math.inf] * 3


def test_a_norm_past_the_limit_is_refused() -> None:
    job = running(norm_limit=3.0)
    before = image(job)
    with pytest.raises(LimitExceeded, match=r"has norm 4\.89"):
        send(job, push(value=2.0))
    assert image(job) == before
    send(job, push(value=1.0))


def test_rows_that_wait_for_others_have_a_budget_and_those_that_are_awaited_have_none() -> None:
    job = running(workers=3, limit=3 * 4 * DIM)
    send(job, push(rank=1))
    with pytest.raises(Backlogged, match="max-staged-bytes is 24"):
        send(job, push(rank=2))
    send(job, push(rank=0))
    send(job, push(rank=2))
    assert weights(job) == [0.0] * 3
    assert job._room.staged.bytes == 0


def test_half_types_on_the_wire_are_widened() -> None:
    job = running(gradient_wire="float16")
    send(job, push(payload=payload(HERE[:3], 0.5, dtype=np.float16), wire_format="float16"))
    assert weights(job) == [0.5] * 3


def test_hyper_parameters_hold_from_their_push_on() -> None:
    job = running()
    send(job, push(values={"lr": 0.5}))
    send(job, push(clock=2))
    assert weights(job) == [0.0] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"payload": ELSEWHERE[:1].astype("<i8").tobytes()}, "came to shard 0 of 2"),
        ({"payload": b"123"}, "expected ids of 8 bytes each, got 3 bytes"),
        ({"table": 7}, "has 2 tables, and table 7 is asked for"),
    ],
)
def test_pulls_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    job = running()
    with pytest.raises((InvalidRequest, NotFound), match=said):
        job.row_checker.wanted(changed(RowsPull(Identity("job", 0, 1), 0, 0, b""), **change))


def test_how_far_a_job_is_counts_its_tables() -> None:
    job = running("async")
    read: Callable[[], object] = lambda: (job.reached.clocks(), job.reached.pushed(0), job.reached.frontier())  # noqa: E731
    assert read() == ({0: 0}, 0, 0)
    send(job, push())
    assert read() == ({0: 0}, 0, 1), "of the other table nothing has come"
    send(job, push(table=1))
    assert read() == ({0: 1}, 1, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "LBFGS"}, "a table's optimizer is one of SGD, .*, got 'LBFGS'"),
        ({"values": {"lr": -1.0}}, "Invalid learning rate"),
        ({"optimizer": "Ftrl", "values": {"lr": 0.0}}, "lr must be above 0"),
        ({"optimizer": "RowWiseAdagrad", "values": {"momentum": 0.9}}, "takes lr, eps, initial_accumulator_value, got"),
        ({"rows": TableSpec("", 2)}, "a table's name has 1 to 512 characters, got 0"),
        ({"rows": TableSpec("a\nb", 2)}, "printable characters only"),
        ({"rows": TableSpec("items", 0)}, "dim must be from 1 to 4096, got 0"),
        ({"rows": TableSpec("items", 2, Initializer("cauchy"))}, "rows begin as one of constant, uniform, normal"),
        ({"rows": TableSpec("items", 2, Initializer("normal", math.nan))}, "must be finite, and from 0 on, got nan"),
    ],
)
def test_tables_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    spec = job_spec()
    with pytest.raises(InvalidRequest, match=said):
        check_job_spec(replace(spec, tables=(replace(spec.tables[0], **change),)), DEFAULTS)
    with pytest.raises(InvalidRequest, match="names of parameters and tables must be unique, got 'items' twice"):
        check_job_spec(spec, DEFAULTS)
    check_job_spec(replace(spec, tables=spec.tables[:1]), DEFAULTS)
    with pytest.raises(LimitExceeded, match="up to 1024 tables, got 1025"):
        check_job_spec(replace(spec, tables=spec.tables[:1] * 1025), DEFAULTS)


def test_a_table_has_its_share_of_max_rows_and_no_more_than_memory_holds() -> None:
    rows = TableSpec("items", DIM, max_rows=101)
    table = JobTable(rows, "SGD", {"lr": 1.0})
    assert [table_size(table, TableShare(shard, 2, 2**20)).rows for shard in range(2)] == [51, 51]
    without = replace(table, rows=replace(rows, max_rows=0))
    for memory in (400, 4_000, 50_000):
        most = table_size(without, TableShare(0, 2, memory))
        assert most.rows * 4 * DIM + index_bytes(most.rows) == most.nbytes <= memory
        assert (most.rows + 1) * 4 * DIM + index_bytes(most.rows + 1) > memory
        assert table_size(table, TableShare(0, 2, memory)).rows == min(51, most.rows)


def test_a_table_with_a_file_has_no_more_rows_than_both_hold() -> None:
    rows = TableSpec("items", 100)
    table = JobTable(rows, "SGD", {"lr": 1.0})
    memory, disk = 43_200, 40_000  # 400 bytes a row, here or there; its place and the index are in memory
    assert 95 <= table_size(table, TableShare(0, 2, memory)).rows <= 100
    both = table_size(table, TableShare(0, 2, memory, file_bytes=disk))
    least, most = (404 * rows + index_bytes(rows) for rows in (both.rows, both.rows + 1))
    assert least <= memory + disk < most
    assert both.in_file == 100
    assert both.nbytes <= memory
    assert both.in_memory * 400 + both.rows * 4 + index_bytes(both.rows) <= memory
    assert both.rows <= both.in_memory + both.in_file
    large = table_size(table, TableShare(0, 2, memory, file_bytes=2**40))
    assert large.rows * 4 + index_bytes(large.rows) <= 3 * memory // 4
    assert large.in_memory * 400 > memory // 5
    fits = replace(table, rows=replace(rows, max_rows=180))
    assert table_size(fits, TableShare(0, 2, memory, file_bytes=disk)).in_file == 0
