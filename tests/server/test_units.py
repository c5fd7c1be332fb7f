"""A bucket and a table are units of a job, with one rule for what waits: each promise is shown for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from ps_protocol.batches import DataRange
from ps_protocol.errors import Backlogged, LimitExceeded
from ps_protocol.identity import Identity
from ps_protocol.tables import Initializer, JobTable, TableSpec, assigned_bytes
from ps_server.core import data_commits
from ps_server.core.budget import PrincipalBudget
from ps_server.core.commands import AddWorker, Assign, AssignRows, DraftGradient, PushCommand, StageGradient, StageRows
from ps_server.core.consistency import Add
from ps_server.core.dense import Assignment, Gradient
from ps_server.core.partition import JobPartition
from ps_tables.contributions import RowGradients, RowValues
from tests.tools.partitions import initial, job_spec, stage

DIM, ROWS = 4, 8
BYTES = ROWS * DIM * 4  # of what one worker pushes to a unit, or sets in a bucket


@dataclass(frozen=True)
class Kind:
    """One kind of unit: its index, how a worker pushes to it and sets something in it, and the bytes of that."""

    index: int
    set_bytes: int
    push: Callable[[int, int], PushCommand]
    assign: Callable[[int, int], PushCommand]

    def with_ranges(self, command: PushCommand, *ranges: DataRange) -> PushCommand:
        return replace(command, ranges=ranges)  # type: ignore[call-arg]


def who(rank: int, unit: int) -> tuple[Identity, int]:
    return Identity("job", rank, rank + 1), unit


def pushed(rank: int, clock: int, bucket: int = 0) -> PushCommand:
    return StageGradient(*who(rank, bucket), clock, Gradient(torch.ones(ROWS * DIM)), principal=f"p{rank}")


def assigned(rank: int, clock: int, bucket: int = 0) -> PushCommand:
    return Assign(*who(rank, bucket), clock, Assignment({0: torch.ones(ROWS * DIM)}), principal=f"p{rank}")


def rows_pushed(rank: int, clock: int) -> PushCommand:
    rows = RowGradients(np.arange(ROWS), np.ones(ROWS, np.int64), torch.ones(ROWS, DIM))
    return StageRows(*who(rank, 3), clock, rows, 0, ROWS, ROWS, principal=f"p{rank}")


def rows_assigned(rank: int, clock: int) -> PushCommand:
    rows = RowValues(np.arange(ROWS), torch.ones(ROWS, DIM))
    return AssignRows(*who(rank, 3), clock, rows, 0, ROWS, 1, principal=f"p{rank}")


KINDS = {
    "bucket": Kind(0, BYTES, pushed, assigned),
    "table": Kind(3, assigned_bytes(DIM, ROWS), rows_pushed, rows_assigned),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def running(mode: str, limit: int | None = None, principals: PrincipalBudget | None = None) -> JobPartition:
    """Three buckets, of which the third is frozen, and a table; two workers."""
    table = JobTable(TableSpec("t", DIM, Initializer("constant", 0.0)), "SGD", {"lr": 1.0})
    spec = replace(job_spec(mode), tables=(table,))
    job = JobPartition(spec, [0, 1, 2], limit, principals=principals)
    for rank in range(3):
        job.execute(AddWorker(rank, rank + 1, 0))
    for index in job.buckets:
        stage(job, initial(index))
    return job


def apply(job: JobPartition) -> None:
    for index, rule in job.rules.items():
        while (work := rule.next()) is not None:
            if isinstance(work, Add):
                job.units[index].weights.add(work.contribution)
            else:
                job.units[index].weights.step()
            job.done(index, work)


@each_kind
def test_what_scripts_set_counts_for_their_principals(kind: Kind) -> None:
    principals = PrincipalBudget(10 * BYTES)
    job = running("async", principals=principals)
    job.execute(kind.assign(0, 1))
    assert principals.bytes_of("p0") == kind.set_bytes
    job.execute(kind.push(0, 1))
    assert principals.bytes_of("p0") == BYTES, "of the contribution alone, which it went along with"


@each_kind
def test_a_limit_of_what_is_staged_is_one_of_what_scripts_set(kind: Kind) -> None:
    job = running("async", limit=kind.set_bytes)
    job.execute(kind.assign(0, 1))
    with pytest.raises(Backlogged, match=f"{kind.set_bytes} bytes are assigned here and wait for their workers' steps"):
        job.execute(kind.assign(1, 1))
    job.execute(kind.push(0, 1))
    assert job.execute(kind.assign(1, 1)).kept


def test_of_workers_that_have_set_a_part_the_first_goes_on() -> None:
    job = running("async", limit=2 * BYTES)
    job.execute(assigned(0, 1, bucket=0))
    job.execute(assigned(1, 1, bucket=0))
    with pytest.raises(Backlogged):
        job.execute(assigned(1, 1, bucket=1))
    assert job.execute(assigned(0, 1, bucket=1)).kept, "or neither would ever make its step"
    for index in (0, 1):
        job.execute(pushed(0, 1, index))
        apply(job)
    assert job.execute(assigned(1, 1, bucket=1)).kept


@each_kind
def test_in_sync_contributions_that_none_awaits_have_the_room_that_drafts_leave(kind: Kind) -> None:
    job = running("sync", limit=2 * BYTES)
    for bucket in (0, 1):
        job.execute(DraftGradient(*who(2, bucket), 1, Gradient(torch.ones(ROWS * DIM))))
    job.execute(pushed(1, 1, bucket=1))
    with pytest.raises(Backlogged, match=f"{2 * BYTES} are here before their step"):
        job.execute(kind.push(1, 1))
    job.execute(kind.push(0, 1))  # which the update that comes next waits for


@each_kind
def test_a_contribution_that_is_refused_for_its_data_changes_nothing(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running("async")
    monkeypatch.setattr(data_commits, "MAX_FRAGMENTS", 1)
    job.execute(kind.with_ranges(kind.push(1, 1), DataRange(0, 0, 0, 1)))
    before = job._room.bytes
    with pytest.raises(LimitExceeded, match="what is committed lies in 1 pieces"):
        job.execute(kind.with_ranges(kind.push(0, 1), DataRange(0, 0, 8, 9)))
    assert (job._room.bytes, job.units[kind.index].pending) == (before, {})
    again = job.execute(kind.push(0, 1))
    assert (again.duplicate, again.kept) == (False, False), "it can be sent without"
