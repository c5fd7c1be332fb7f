"""The oracle of rows finds each kind of damage, done to tables by hand, and nothing where none is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_protocol.row_ids import shards_of
from tests.chaos.oracle import Life, Rules, Shape, judge
from tests.simulation.row_oracle import Content, Pulled, RowWitness, in_counting_order, wrong_tables
from tests.simulation.rows import (
    COLUMNS,
    COUNTS,
    FRESH,
    LIVES,
    NEVER,
    PASSING,
    START,
    Table,
    draw_tables,
    has_fresh,
    id_of,
    meaning,
)

STEPS, WORKERS = 12, (3, 4)  # the workers' rows
RULES = {mode: Rules.of(mode, 3, Shape(2, LIVES, COLUMNS)) for mode in ("sync", "async")}
SHARD = 1


def trained(table: Table, mode: str, unit: int | None = None) -> Content:
    """The table on one shard after so many steps of each worker. unit: that they add; None: that of the mode"""
    content, used = Content({}, {}, {}, 0), dict[int, int]()
    each = [[(row, step) for row in WORKERS] for step in range(1, STEPS + 1)]
    updates = each if mode == "sync" else [[one] for many in each for one in many]
    for update in updates:
        parts = [table.pushed(SHARD, row, step, unit or RULES[mode].unit) for row, step in update]
        in_mean = sum(part.in_mean for part in parts)
        if not any(part.present for part in parts):
            continue
        content = replace(content, version=content.version + 1)
        sums: dict[int, np.ndarray] = {}
        occurrences = Counter[int]()
        for part in parts:
            for number, count, gradient in zip(part.ids, part.occurrences, part.gradients, strict=True):
                sums[number] = sums.get(number, 0) + gradient
                occurrences[number] += count
        for number, gradient in sums.items():
            used[number] = content.version
            count = content.waiting.pop(number, 0) + occurrences[number]
            if number not in content.rows and count < table.admit_after:
                content.waiting[number] = count
                continue
            content.rows[number] = content.rows.get(number, 0) - gradient / max(1, in_mean)
            content.last[number] = content.version
        for number in [*used] if table.expire_after else []:
            if used[number] < content.version - table.expire_after:
                for each in (used, content.rows, content.last, content.waiting):
                    each.pop(number, None)
    return content


def lives(mode: str) -> dict[int, list[Life]]:
    found = {}
    for place, row in enumerate(WORKERS):
        steps = range(1, STEPS + 1)
        at = {step: step + place / 10 for step in steps}
        found[row] = [Life(row, place, [*steps], {step: step for step in steps}, at)]
    return found


def kinds(table: Table, content: Content, mode: str, lossy: bool = False) -> set[str]:
    elsewhere = Content({}, {}, {}, 0)  # a shard that was rolled back to its beginning
    found = wrong_tables(table, [elsewhere, content], lives(mode), RULES[mode], [mode == "async", lossy])
    return {violation.kind for violation in found if violation.where["shard"] == SHARD}


TABLES = [
    Table(COUNTS),
    Table(COUNTS, admit_after=3),
    Table(PASSING),
    Table(PASSING, admit_after=3),
    Table(PASSING, admit_after=3, expire_after=8),
    Table(PASSING, max_rows=120),
]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("table", TABLES)
def test_tables_that_are_right_pass(table: Table, mode: str) -> None:
    content = trained(table, mode)
    assert content.rows
    assert kinds(table, content, mode) == set()
    if table.number == COUNTS:
        view = in_counting_order(content.in_order(SHARD))
        assert judge(torch.stack([view]), [life for each in lives(mode).values() for life in each], RULES[mode]) == []


def shifted(content: Content) -> None:
    """One row has what belongs to another one, too."""
    one, other = [number for number in content.rows if meaning(number).kind == FRESH][:2]
    content.rows[one] = content.rows[one] + content.rows[other]


def torn(content: Content) -> None:
    """The second half of a row is as it was before its step."""
    number = next(number for number in content.rows if meaning(number).kind == FRESH)
    content.rows[number] = content.rows[number] * [1, 1, 0, 0]


def torn_counts(content: Content) -> None:
    content.rows[id_of(SHARD, 0)][LIVES] -= 6


def doubled(content: Content) -> None:
    number = next(number for number in content.rows if meaning(number).kind == FRESH)
    content.rows[number] = 2 * content.rows[number]


def made_by_a_pull(content: Content) -> None:
    number = id_of(SHARD, NEVER, WORKERS[0], 1)
    content.rows[number], content.last[number] = np.zeros(4, np.float32), content.version


def of_another_run(content: Content) -> None:
    number = id_of(SHARD, FRESH, 20, 1)
    content.rows[number] = -Table(PASSING).pushed(SHARD, 20, 1, 1).gradients[0]
    content.last[number] = content.version


def lost(content: Content) -> None:
    """The last step's row, which nothing has had forgotten."""
    number = next(number for number in reversed(content.rows) if meaning(number).kind == FRESH)
    del content.rows[number], content.last[number]


def counted_twice(content: Content) -> None:
    number = next(iter(content.waiting))
    content.waiting[number] *= 2


def stays(content: Content) -> None:
    number = id_of(SHARD, FRESH, WORKERS[0], next(s for s in (1, 2, 3) if has_fresh(SHARD, WORKERS[0], s)))
    content.rows[number] = -Table(PASSING).pushed(SHARD, WORKERS[0], meaning(number).step, 1).gradients[0]
    content.last[number] = content.version  # as its shard says


def waits_without_a_step(content: Content) -> None:
    """The counts of ids are of another moment than the rows."""
    content.waiting.pop(next(iter(content.waiting)))


@pytest.mark.parametrize(
    ("damage", "table", "found"),
    [
        (shifted, Table(PASSING), {"wrong row"}),
        (torn, Table(PASSING), {"wrong row"}),
        (torn_counts, Table(COUNTS), {"wrong row"}),
        (doubled, Table(PASSING), {"wrong row"}),
        (made_by_a_pull, Table(PASSING), {"unknown row"}),
        (of_another_run, Table(PASSING), {"unknown row"}),
        (lost, Table(PASSING), {"lost row"}),
        (lost, Table(PASSING, expire_after=34), {"lost row"}),
        (counted_twice, Table(COUNTS, admit_after=3), {"doubled"}),
        (stays, Table(PASSING, expire_after=8), {"row stays"}),
        (waits_without_a_step, Table(COUNTS, admit_after=3), {"lost row", "wrong row"}),
    ],
)
def test_what_is_damaged_is_found(damage: Callable[[Content], None], table: Table, found: set[str]) -> None:
    content = trained(table, "async")
    damage(content)
    assert kinds(table, content, "async") == found


def test_what_a_rollback_costs_is_no_damage_and_the_rest_is() -> None:
    table = Table(COUNTS, admit_after=3)
    content = trained(table, "async")
    waits_without_a_step(content)
    assert kinds(table, content, "async", lossy=True) == {"wrong row"}
    table = Table(PASSING)
    content = trained(table, "async")
    lost(content)
    assert kinds(table, content, "async", lossy=True) == set()


def test_a_mean_of_too_few_is_found() -> None:
    table = Table(PASSING)
    content = trained(table, "sync")
    number = next(number for number, row in content.rows.items() if row[0] == RULES["sync"].unit / 2)
    content.rows[number] = 2 * content.rows[number]
    assert kinds(table, content, "sync") == {"wrong update"}


def test_more_rows_than_there_is_room_for_are_found() -> None:
    table = Table(PASSING, max_rows=120)
    content = trained(table, "async")
    assert kinds(replace(table, max_rows=2 * len(content.rows) - 2), content, "async") == {"row stays"}


def test_a_worker_sees_that_its_own_row_is_missing_and_what_a_pull_says_wrongly() -> None:
    table, row = Table(PASSING, admit_after=3), WORKERS[0]
    step = next(step for step in range(2, STEPS) if has_fresh(SHARD, row, step))
    content = trained(table, "async")

    def found(trained: int = 0) -> set[str]:
        """What two steps of a worker show; the second one is `step`."""
        witness = RowWitness(RULES["async"], row)
        for each in (step - 1, step):
            ids = table.asked(SHARD, row, each)
            rows = np.array([content.rows.get(number, np.zeros(4)) for number in ids], np.float32) + START
            there = sum(number in content.rows for number in ids) + (trained if each == step else 0)
            wrong = [*witness.check(table, SHARD, Pulled(ids, rows, there, 2 * each), each)]
        return {violation.kind for violation in wrong}

    assert found() == set()
    assert found(trained=1) == {"wrong row"}
    del content.rows[id_of(SHARD, FRESH, row, step)]
    assert found() == {"lost row"}


def test_ids_are_on_the_shards_that_the_contract_names_and_tell_what_they_are_for() -> None:
    for shard in range(2):
        for kind in range(7):
            for row, step in ((0, 0), (5, 17), (55, 800)):
                number = id_of(shard, kind, row, step)
                what = meaning(number)
                assert (what.kind, what.row, what.step) == (kind, row, step)
                assert shards_of(np.array([number]), 2)[0] == shard


def test_some_seeds_have_tables_and_those_of_each_kind() -> None:
    drawn = [draw_tables("sync", seed, False) for seed in range(1000)]
    assert 80 < sum(bool(tables) for tables in drawn) < 160
    assert all(draw_tables("sync", seed, True) == tables for seed, tables in enumerate(drawn) if tables)
    passing = [tables[1] for seed in range(200) if len(tables := draw_tables("ssp:0", seed, True)) > 1]
    for limit in ("admit_after", "expire_after", "max_rows"):
        assert len({getattr(table, limit) for table in passing}) > 1
