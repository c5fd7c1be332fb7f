"""A copy that takes what changed after a version, and what was removed, is the table: full + changes + removed ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from ps_protocol.modes import Consistency
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import JobTable
from ps_server.core.table_rows import TableRows
from ps_tables.changed_rows import RowWalk
from ps_tables.entries import Entries
from ps_tables.removed import LEAST_KEPT, RemovedIds
from tests.tools.cases import cases, crossed
from tests.tools.row_gradients import summed
from tests.tools.table_shards import DIM, SPEC, SYNC, WORKERS, TableShard

RULES = {
    "plain": {},
    "expiry": {"expire_after": 12},
    "full": {"max_rows": 60},
    "admission": {"admit_after": 4},
    "all": {"admit_after": 2, "expire_after": 20, "max_rows": 60},
}
MODES = {"sync": SYNC, "async": Consistency(None)}
STEPS = 40


@dataclass
class Copy:
    """What a reader has of one shard's table: it takes each walk in steps."""

    rows: dict[int, list[float]] = field(default_factory=dict)
    since: int | None = None
    walk: RowWalk | None = None
    came: set[int] = field(default_factory=set)

    def begin(self, table: TableRows) -> RowWalk:
        self.walk, self.came = table.changes(self.since), set()
        while self.walk.has_removed:
            for number in self.walk.take_removed(3).tolist():
                self.rows.pop(number, None)
        return self.walk

    def step(self, most: int) -> None:
        assert self.walk is not None
        ids, values = self.walk.take(most)
        assert len(ids) <= most
        self.rows |= dict(zip(ids.tolist(), values.tolist(), strict=True))
        self.came |= set(ids.tolist())
        if self.walk.is_over:
            if self.walk.full:
                self.rows = {number: row for number, row in self.rows.items() if number in self.came}
            self.since, self.walk = self.walk.version, None

    def round(self, table: TableRows, most: int = 7) -> None:
        self.begin(table)
        while self.walk is not None:
            self.step(most)


def rows_of(table: TableRows) -> dict[int, list[float]]:
    tensors = table.snapshot()
    return dict(zip(tensors["ids"].tolist(), tensors["weights"].tolist(), strict=True))


def trained(
    each: list[TableShard], seed: int, steps: range, before: Callable[[int], None] = lambda number: None
) -> Iterator[int]:
    """Trains all shards; yields after each push, with its clock. Popular ids move on."""
    for clock in steps:
        for rank in range(WORKERS):
            random = np.random.default_rng((seed, clock, rank))
            ids = (random.zipf(1.3, 24) % 100 + clock * 2) * 7919 - 300
            gradients = torch.from_numpy(random.standard_normal((24, DIM)).astype(np.float32))
            contribution = summed(ids.astype(np.int64), gradients)
            of = shards_of(contribution.ids, len(each))
            for number, shard in enumerate(each):
                shard.push(rank, clock, contribution.part(of == number))
            yield clock


def shards(rules: dict[str, int], mode: Consistency, count: int) -> list[TableShard]:
    table = JobTable(replace(SPEC, **rules), "RowWiseAdagrad", {"lr": 0.1})  # type: ignore[arg-type]
    return [TableShard(table, mode, number, count) for number in range(count)]


@pytest.mark.parametrize(("rules", "mode"), crossed(RULES, MODES))
@pytest.mark.parametrize("seed", cases([0], range(1, 4)))
def test_full_and_changes_and_removed_ids_are_the_table(rules: str, mode: str, seed: int) -> None:
    """Walks in steps of any size, between which the table is trained; a round without training in between is exact."""
    random = np.random.default_rng((seed, 1))
    each = shards(RULES[rules], MODES[mode], 2)
    copies = [Copy() for _ in each]
    at_begin: list[dict[int, list[float]]] = [{}, {}]
    rounds = 0
    for clock in trained(each, seed, range(1, STEPS + 1)):
        for number, (shard, copy) in enumerate(zip(each, copies, strict=True)):
            if copy.walk is None and random.random() < 0.3:
                assert copy.begin(shard.table).full is (copy.since is None), "nothing was forgotten of what was removed"
                at_begin[number] = rows_of(shard.table)
            if copy.walk is not None and random.random() < 0.7:
                version = copy.walk.version
                copy.step(int(random.integers(1, 20)))
                if copy.walk is None:
                    check_untouched(shard.table, copy, at_begin[number], version)
                    rounds += 1
        if clock % 10 == 0:
            copy, shard = copies[clock % 2], each[clock % 2]
            while copy.walk is not None:
                copy.step(5)
            copy.round(shard.table)
            assert copy.rows == rows_of(shard.table)
    assert rounds > 10
    assert all(len(shard.table) > 10 for shard in each)


def check_untouched(table: TableRows, copy: Copy, begin: dict[int, list[float]], version: int) -> None:
    """After a walk the copy is the table at its beginning, but for ids that were trained or removed since."""
    tensors = table.snapshot()
    touched = set(tensors["ids"][tensors["last"] > version].tolist())
    untouched = rows_of(table).keys() - touched
    assert all(copy.rows[number] == begin[number] for number in untouched)
    gone = set(table.changes(version).take_removed(len(table) + LEAST_KEPT).tolist())
    assert copy.rows.keys() - touched - gone == untouched


def test_a_copy_that_is_up_to_date_is_told_of_nothing() -> None:
    [shard] = shards({}, SYNC, 1)
    for _ in trained([shard], 0, range(1, 4)):
        pass
    copy = Copy()
    copy.round(shard.table)
    walk = copy.begin(shard.table)
    assert walk.is_over
    assert not walk.full
    assert not walk.has_removed
    assert not copy.came


def test_removed_ids_come_a_few_at_a_time_from_the_arrays_of_the_table() -> None:
    """Readers that are slow have no copies of them: there may be a quarter as many as rows."""
    [shard] = shards({"max_rows": 60}, SYNC, 1)
    for _ in trained([shard], 0, range(1, 30)):
        pass
    version = shard.table.version
    for _ in trained([shard], 0, range(30, 41)):
        pass
    kept = shard.table._table._removed.after(version)
    walk = shard.table.changes(version)
    assert kept is not None
    assert sum(map(len, kept)) > 3
    assert all(held is array for held, array in zip(walk._removed, kept, strict=True))
    came = []
    while walk.has_removed:
        came.append(walk.take_removed(3).tolist())
    assert {len(each) for each in came[:-1]} == {3}
    assert [number for each in came for number in each] == np.concatenate(kept).tolist()


def test_where_removed_ids_are_forgotten_the_copy_begins_anew() -> None:
    [shard] = shards({"max_rows": 60}, SYNC, 1)
    for _ in trained([shard], 0, range(1, 4)):
        pass
    copy = Copy()
    copy.round(shard.table)
    for _ in trained([shard], 0, range(4, 60)):
        pass
    log = shard.table._table._removed
    assert log.after(copy.since or 0), "rows had to make room"
    log.add(10**9, np.arange(1_024), 0)  # a flood: what was before is forgotten
    assert copy.begin(shard.table).full
    assert log.nbytes == 8 * 1_024
    while copy.walk is not None:
        copy.step(100)
    assert copy.rows == rows_of(shard.table)


def test_a_table_that_was_restored_begins_anew() -> None:
    first, then = shards({"expire_after": 12}, SYNC, 1)[0], shards({"expire_after": 12}, SYNC, 1)[0]
    for _ in trained([first], 0, range(1, 30)):
        pass
    then.restore([first.partition.tables[0].snapshot()])
    copy = Copy(since=then.partition.tables[0].weights.changes(None).version - 1)
    copy.round(then.table)
    assert copy.rows == rows_of(then.table)


def test_a_quarter_as_many_removed_ids_as_rows_are_kept() -> None:
    log = RemovedIds(32 * LEAST_KEPT)
    for version in range(1, 9):
        log.add(version, np.arange(LEAST_KEPT), 16 * LEAST_KEPT)
    assert (log.since, log.nbytes) == (4, 8 * 4 * LEAST_KEPT)
    assert log.after(3) is None
    assert [len(ids) for ids in log.after(6) or ()] == [LEAST_KEPT] * 2
    log.add(9, np.arange(4 * LEAST_KEPT + 1), 16 * LEAST_KEPT)
    assert log.nbytes == 0, "more than a quarter at once: a full copy costs little more"
    assert log.after(8) is None
    small = RemovedIds(2_000)
    small.add(1, np.arange(1_200), 800)
    small.add(2, np.arange(1_200), 800)
    assert (small.since, small.nbytes) == (1, 8 * 1_200), "not more than there is room for rows"
    assert log.after(9) == []


def test_a_walk_looks_at_a_bounded_number_of_rows_at_a_time() -> None:
    entries = Entries(10**6)
    entries.add(np.arange(300_000), 1)
    entries.expire(2)
    entries.add(np.arange(5), 3)
    assert len(entries.used_since(0, 0, 10**6)[0]) == 5
    entries.sweep()
    assert len(entries.add(np.arange(300_000, 310_000), 4)) == 10_000
    ids, numbers = entries.used_since(3, 0, 10**6)
    assert sorted(ids.tolist()) == list(range(300_000, 310_000))
    assert numbers.max() < 300_000, "what was swept is used again"
