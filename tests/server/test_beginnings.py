"""What a shard takes of rows that a table begins with, in which order, and who waits for them meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import Fenced, InvalidRequest, LimitExceeded, NotFound, OutOfOrder, PSError
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages.rows import RowPushKind, RowsPush, TablePush
from ps_protocol.modes import parse_mode
from ps_protocol.tables import Beginning, Initializer, JobTable, TableSpec
from ps_server.core.commands import AddWorker, RemoveWorker, RestoreSnapshot, Staged
from ps_server.core.consistency import Add
from ps_server.core.partition import JobPartition
from ps_server.core.placement import TableShare
from ps_tables.beginning import encoded, row_columns
from ps_tables.initial import initial_rows
from ps_tables.sizes import index_bytes, record_bytes
from tests.tools.partitions import changed

DIM, SEED = 2, 77
ROWS = TableSpec("items", DIM, Initializer("uniform", 0.1, 1), admit_after=3, initial_rows=True)
TABLE = JobTable(ROWS, "Adagrad", {"lr": 1.0})
IDS, WAITING = torch.tensor([5, -7, 2**40, 8]), torch.tensor([100, 200])
WHOLE = {
    "ids": IDS,
    "last": torch.tensor([3, 4, 9, 9]),
    "weights": torch.arange(8.0).view(4, DIM),
    "state.Adagrad.sum": torch.arange(8.0).view(4, DIM) + 10,
    "waiting.ids": WAITING,
    "waiting.counts": torch.tensor([2, 1]),
    "waiting.last": torch.tensor([9, 8]),
}
BEGINS = Beginning(version=9, seed=SEED, rows=4, waiting=2, with_state=True)
COLUMNS = row_columns("Adagrad", TABLE.values, DIM, True)


def running(mode: str = "async", table: JobTable = TABLE, bytes_: int = 2**20) -> JobPartition:
    """A job of one table, which has not begun, with two workers."""
    rule = parse_mode(mode)
    assert rule is not None
    spec = JobSpec("job", (), "SGD", ({"lr": 1.0},), rule, 64, 2, tables=(table,))
    job = JobPartition(spec, [], share=TableShare(0, 1, bytes_))
    for rank in range(2):
        job.execute(AddWorker(rank, rank + 1, 0))
    return job


def rows(first: int, stop: int, **more: Any) -> TablePush:
    """A message with some of the rows."""
    part = {name: tensor[first:stop] for name, tensor in WHOLE.items()}
    made = TablePush(Identity("job", 0, 1), 0, BEGINS, first, stop - first, 0, False, encoded(part, COLUMNS))
    return changed(made, **more)


def waiting(**more: Any) -> TablePush:
    """The last message: the ids that wait."""
    return changed(rows(4, 4, payload=encoded(WHOLE, {}), waiting=2, last=True), **more)


def ask(**more: Any) -> TablePush:
    return changed(rows(0, 0), **more)


MESSAGES = (ask(), rows(0, 1), rows(1, 4), waiting())


def send(job: JobPartition, message: TablePush) -> Staged:
    staged = job.execute(job.row_checker.beginning(message))
    apply(job)
    return staged


def apply(job: JobPartition) -> None:
    """Does what there is to do."""
    while (work := job.rules[0].next()) is not None:
        if isinstance(work, Add):
            job.tables[0].weights.add(work.contribution)
        else:
            job.tables[0].weights.step()
        job.done(0, work)


def push(job: JobPartition, rank: int = 1, count: int = 1) -> None:
    """A gradient of ones for the first row."""
    ids, counts = IDS[:1].numpy(), np.full(1, count, np.uint32)
    payload = ids.tobytes() + counts.tobytes() + np.ones((1, DIM), np.float32).tobytes()
    message = RowsPush(Identity("job", rank, rank + 1), 0, 1, RowPushKind.GRADIENT, payload, 0, 1, 1, {})
    job.execute(job.row_checker.push(message))
    apply(job)


def image(job: JobPartition) -> list[object]:
    """All that a message could change."""
    table = job.tables[0]
    saved = {name: tensor.tolist() for name, tensor in table.weights.snapshot().items()}
    coming = table.coming.incarnation, table.coming.beginning, table.coming.came
    return [saved, coming, table.rule.initialised, table.weights.spec, table.rule.version]


def begun(job: JobPartition) -> dict[str, torch.Tensor]:
    for message in MESSAGES:
        send(job, message)
    return job.tables[0].weights.snapshot()


def test_a_table_begins_with_all_that_came() -> None:
    job = running()
    answers = [send(job, message) for message in MESSAGES]
    assert [(answer.kept, answer.duplicate) for answer in answers] == [(True, False)] * 3 + [(False, False)]
    found = job.tables[0].weights.snapshot()
    for prefix in ("", "waiting."):
        here, there = found[f"{prefix}ids"].argsort(), WHOLE[f"{prefix}ids"].argsort()
        for name in (name for name in WHOLE if name.startswith("waiting.") == bool(prefix)):
            assert torch.equal(found[name][here], WHOLE[name][there]), name
    assert int(found["version"]) == 9
    out, unseen = torch.empty(1, DIM), np.array([12345])
    job.tables[0].weights.pull(unseen, out)
    assert torch.equal(out, initial_rows(Initializer("uniform", 0.1, SEED), unseen, DIM)), "the seed came with them"


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_pulls_and_pushes_wait_until_all_rows_are_here(mode: str) -> None:
    job = running(mode)
    push(job)
    for message in MESSAGES[:-1]:
        send(job, message)
        [admission] = job.units[0].admit_all([(1, 0)])
        assert not admission.admitted
        assert admission.waiting_for == (0,)
        assert admission.reason == "rank 0 has not sent all rows yet that the table begins with"
        assert job.rules[0].version == 0, "what was pushed waits"
    send(job, MESSAGES[-1])
    assert job.units[0].admit_all([(1, 0)])[0].admitted
    if mode == "sync":
        push(job, rank=0)
    assert job.rules[0].version == 1
    out = torch.empty(1, DIM)
    job.tables[0].weights.pull(IDS[:1].numpy(), out)
    assert torch.equal(out, -1 / torch.sqrt(torch.tensor([[11.0, 12.0]])) + WHOLE["weights"][:1]), "with its state"


def test_messages_that_come_again_change_nothing() -> None:
    job, expected = running(), begun(running())
    for message in (MESSAGES[0], *MESSAGES[:2], *MESSAGES[:3]):
        send(job, message)
    before = image(job)
    assert send(job, MESSAGES[0]).kept, "it only asks"
    for message in MESSAGES[1:3]:
        assert send(job, message).duplicate
        assert image(job) == before
    send(job, MESSAGES[3])
    assert all(torch.equal(job.tables[0].weights.snapshot()[name], tensor) for name, tensor in expected.items())
    push(job)
    before = image(job)
    for message in (*MESSAGES, ask(beginning=Beginning(0, 1))):
        staged = send(job, message)
        assert (staged.duplicate, staged.kept) == (True, False), "it has begun"
        assert image(job) == before


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_rank_0_has_sent_that_is_gone_is_dropped(is_told: bool) -> None:
    job, expected = running(), begun(running())
    send(job, rows(0, 3))
    if is_told:
        job.execute(RemoveWorker(0, 1))
    job.execute(AddWorker(0, 9, 0))
    assert len(job.tables[0].weights) == 0
    with pytest.raises(Fenced):
        send(job, rows(3, 4))
    with pytest.raises(OutOfOrder, match="row 3 came where row 0 comes next"):
        send(job, rows(3, 4, incarnation=9))
    for message in MESSAGES[1:]:
        send(job, changed(message, incarnation=9))
    assert all(torch.equal(job.tables[0].weights.snapshot()[name], tensor) for name, tensor in expected.items())


def broken() -> dict[str, tuple[TablePush, type[PSError], str]]:
    """Messages that no shard takes, where one row has come."""
    late = {**WHOLE, "last": torch.tensor([3, 4, 10, 9])}
    never_trained = {**WHOLE, "last": torch.tensor([3, 0, 9, 9])}
    twice = {**WHOLE, "ids": torch.tensor([5, 8, 8, 9])}
    again = {**WHOLE, "ids": torch.tensor([1, 5, 8, 9])}
    never = {**WHOLE, "waiting.counts": torch.tensor([0, 1])}
    return {
        "of rank 1": (rows(1, 4, rank=1, incarnation=2), InvalidRequest, "are rank 0's to send, got them from rank 1"),
        "a gap": (rows(2, 4), OutOfOrder, "row 2 came where row 1 comes next"),
        "half a repeat": (rows(0, 2), InvalidRequest, "rows 0 to 2 came after 1 were here"),
        "not all": (rows(1, 3, last=True), InvalidRequest, "came with 3 of 6 rows and ids here"),
        "another whole": (
            rows(1, 4, beginning=replace(BEGINS, version=8)),
            InvalidRequest,
            "trained by updates 1 to 8",
        ),
        "another seed": (rows(1, 4, beginning=replace(BEGINS, seed=8)), InvalidRequest, "it begins with .* says "),
        "more than all": (
            rows(1, 4, beginning=replace(BEGINS, rows=3)),
            InvalidRequest,
            "3 rows and 0 ids came behind 1",
        ),
        "too many": (rows(1, 4, beginning=replace(BEGINS, rows=2**50)), InvalidRequest, "it begins with"),
        "too short": (rows(1, 4, payload=b"12345678"), InvalidRequest, r"expected 96 bytes \(3 rows of 32\), got 8"),
        "too long": (rows(1, 2, rows=0), InvalidRequest, r"expected 0 bytes \(0 rows of 32\), got 32"),
        "both": (rows(1, 4, waiting=1), InvalidRequest, "rows or ids that wait in one message, got both"),
        "after the end": (waiting(first=3), InvalidRequest, "0 rows and 2 ids came behind 3"),
        "of later updates": (
            rows(1, 4, payload=encoded({n: t[1:] for n, t in late.items()}, COLUMNS)),
            InvalidRequest,
            "by updates 1 to 9, got [0-9]+ to [0-9]+",
        ),
        "never trained": (
            rows(1, 4, payload=encoded({n: t[1:] for n, t in never_trained.items()}, COLUMNS)),
            InvalidRequest,
            "by updates 1 to 9, got [0-9]+ to [0-9]+",
        ),
        "twice in one": (
            rows(1, 4, payload=encoded({n: t[1:] for n, t in twice.items()}, COLUMNS)),
            InvalidRequest,
            "expected each id once, got 8 twice",
        ),
        "twice in two": (
            rows(1, 4, payload=encoded({n: t[1:] for n, t in again.items()}, COLUMNS)),
            InvalidRequest,
            "in two parts",
        ),
        "never occurred": (
            waiting(payload=encoded(never, {})),
            InvalidRequest,
            r"has occurred 1 to 2\^32 - 1 times, got 0 to ",
        ),
        "of no table": (rows(1, 4, table=1), NotFound, "has 1 tables, and table 1 is asked for"),
        "replaced": (rows(1, 4, incarnation=0), Fenced, "was replaced"),
    }


@pytest.mark.parametrize("name", broken())
def test_what_is_refused_changes_nothing(name: str) -> None:
    job = running()
    send(job, rows(0, 1))
    before = image(job)
    bad, error, said = broken()[name]
    with pytest.raises(error, match=said):
        send(job, bad)
    assert image(job) == before
    for message in MESSAGES[2:]:
        send(job, message)
    assert len(job.tables[0].weights) == 4, "those that are right are taken after it"


def test_more_rows_than_there_is_room_for_are_refused_before_any_is_taken() -> None:
    for_three = 3 * record_bytes(ROWS, "Adagrad", TABLE.values) + index_bytes(3, waits=True)
    for table, memory, said in (
        (replace(TABLE, rows=replace(ROWS, max_rows=3)), 2**20, r"room for 3 here \(of max_rows 3 on all\)"),
        (TABLE, for_three, "room for 3 here: raise max_rows, or give the shards more memory"),
    ):
        job = running(table=table, bytes_=memory)
        before = image(job)
        for message in MESSAGES[:2]:
            with pytest.raises(LimitExceeded, match=f"'items' has 4 rows from before on this shard, and has {said}"):
                send(job, message)
            assert image(job) == before


def test_ids_that_wait_come_where_the_table_has_admission_and_no_more_than_fit() -> None:
    job = running(table=replace(TABLE, rows=replace(ROWS, admit_after=1)))
    with pytest.raises(InvalidRequest, match="ids that wait only with admit_after above 1"):
        send(job, ask())
    job = running(table=replace(TABLE, rows=replace(ROWS, max_rows=4)))
    many = {
        "waiting.ids": torch.arange(9),
        "waiting.counts": torch.ones(9, dtype=torch.int64),
        "waiting.last": torch.full((9,), 9),
    }
    begins = replace(BEGINS, waiting=9)
    send(job, rows(0, 4, beginning=begins))
    for first, count in ((0, 3), (3, 6)):
        part = {name: tensor[first : first + count] for name, tensor in many.items()}
        send(job, waiting(beginning=begins, first=4 + first, waiting=count, payload=encoded(part, {}), last=first == 3))
    assert sorted(job.tables[0].weights.snapshot()["waiting.ids"].tolist())[:3] == [0, 1, 2]
    assert len(job.tables[0].weights.snapshot()["waiting.ids"]) == 4


def test_a_table_that_begins_with_nothing_has_the_updates_and_the_seed_that_came() -> None:
    job = running()
    send(job, ask(beginning=Beginning(9, SEED), last=True))
    assert job.rules[0].initialised
    assert job.tables[0].weights.version == 9, "bias correction and expiry count on"
    assert job.tables[0].weights.spec.initializer.seed == SEED


def test_a_snapshot_has_the_seed_and_a_job_that_is_restored_takes_no_rows() -> None:
    job = running()
    begun(job)
    snapshot = job.tables[0].snapshot()
    other = running()
    other.execute(RestoreSnapshot({}, 9, tables={0: snapshot}))
    other.execute(AddWorker(0, 10, 0))
    assert image(other)[0] == image(job)[0]
    assert other.tables[0].weights.spec.initializer.seed == SEED
    before = image(other)
    assert send(other, ask(incarnation=10)).duplicate
    assert image(other) == before
