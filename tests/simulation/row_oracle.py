"""Says what is wrong with rows: with those that a worker pulls after a step, and with whole tables at the end.

It knows what was pushed and acknowledged (Life), and what a step adds to which row (rows.py), and nothing else.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.chaos.oracle import Life, Rules, Violation
from tests.simulation.rows import (
    COLUMNS,
    COUNT,
    COUNTS,
    FIRST,
    FRESH,
    LIVES,
    MARK,
    OWN,
    REFUSED,
    START,
    TWICE,
    WORKERS,
    Rows,
    Table,
    code_of,
    column,
    first_row,
    has_fresh,
    has_twice,
    id_of,
    is_in_mean,
    is_present,
    meaning,
    vector,
)

LOOKED_BACK = 12  # steps of each life whose rows are looked for where rows are forgotten
Writers = Mapping[int, Sequence[Life]]  # by row of the counting oracle


@dataclass
class Pulled:
    """Rows that came of one pull: ids [n], rows [n, dim], how many are trained, and the version of the table there."""

    ids: list[int]
    rows: Rows
    trained: int = 0
    version: int = 0


@dataclass(frozen=True)
class Content:
    """A whole table on one shard, by id.

    rows:    less START; last: the update that trained each last
    waiting: how often each id has occurred that is no row yet
    """

    rows: dict[int, Rows]
    last: dict[int, int]
    waiting: dict[int, int]
    version: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Content:
        """Returns what a shard has sent."""
        ids = tensors["ids"].tolist()
        rows = dict(zip(ids, tensors["weights"].numpy() - START, strict=True))
        last = dict(zip(ids, tensors["last"].tolist(), strict=True))
        waiting = [tensors[f"waiting.{name}"].tolist() if f"waiting.{name}" in tensors else [] for name in _WAITING]
        return cls(rows, last, dict(zip(*waiting, strict=True)), int(tensors["version"]))

    def in_order(self, shard: int) -> Rows:
        """Returns the rows of "counts" that are the counting oracle's: as they begin where there are none."""
        ids = [id_of(shard, COUNT), *(id_of(shard, MARK, 0, column) for column in range(COLUMNS))]
        return np.stack([self.rows.get(number, np.zeros(LIVES + 1, np.float32)) for number in ids])


_WAITING = "ids", "counts"


def in_counting_order(rows: Rows) -> torch.Tensor:
    """Returns the first rows of "counts", less START, as a bucket of the counting oracle: [LIVES, 1 + COLUMNS]."""
    return torch.from_numpy(np.ascontiguousarray(rows[: 1 + COLUMNS, :LIVES].T))


# -- any row, at any time --------------------------------------------------------------------------------------------


def step_of(number: int) -> int:
    """Returns the step that makes an id of "passing" a row."""
    what = meaning(number)
    return 2 * what.step + 1 if what.kind == TWICE else what.step


def wrong_row(table: Table, number: int, row: Rows, rules: Rules) -> Violation | None:
    """Returns what is wrong with a row by itself: [dim], less START; None: it may be so."""
    if not row.any():
        return None
    what, values = meaning(number), row.tolist()
    where = {"table": table.name, "kind": what.kind, "row": what.row, "step": what.step}
    if table.number == COUNTS:
        if what.kind == FIRST and not np.array_equal(row, first_row(number)):
            return Violation("wrong row", f"a row that nothing trains is not as it came: {values}", where)
        if what.kind not in (COUNT, MARK, OWN, FIRST):
            return Violation("unknown row", f"an id that may not be one is a row: {values}", where)
        if values[LIVES] != code_of(number) * sum(values[:LIVES]):
            said = f"its elements are {sum(values[:LIVES])} together, and the last is not {code_of(number)} times that"
            return Violation("wrong row", f"{said}: {values[LIVES]}", where)
        if what.kind == OWN and any(value for other, value in enumerate(values[:LIVES]) if other != what.row):
            return Violation("wrong row", f"a row of one worker has gradients of others: {values}", where)
        return None
    if what.kind not in (FRESH, TWICE):
        return Violation("unknown row", f"an id that may not be one is a row: {values}", where)
    step = step_of(number)
    expected = vector(number, what.row, step, rules.unit)
    averages = rules.averaged
    means = range(1, WORKERS + 1) if averages else (1,)
    if not any(values == [each / n for each in expected] for n in means):
        said = f"{values}, where step {step} alone makes it {expected}"
        return Violation("wrong row", said + (", or a part of that" if averages else ""), where)
    return None


# -- one worker ------------------------------------------------------------------------------------------------------


class RowWitness:
    """Looks at what one worker pulls. row: its own in the counting oracle"""

    def __init__(self, rules: Rules, row: int) -> None:
        self._rules, self._row = rules, row
        self._versions: dict[tuple[int, int], list[int]] = {}  # by table and shard, after each step since

    def lost_track(self) -> None:
        """Something happened between two steps: the next one is a first."""
        self._versions = {}

    def check(self, table: Table, shard: int, pulled: Pulled, step: int) -> Iterator[Violation]:
        """Yields what is wrong with what is `asked` for after a step, once it was acknowledged."""
        rows = dict(zip(pulled.ids, pulled.rows - START, strict=True))
        wrong = (wrong_row(table, number, row, self._rules) for number, row in rows.items())
        yield from (violation for violation in wrong if violation is not None)
        where = {"table": table.name, "shard": shard, "step": step}
        trained = sum(bool(row.any()) for row in rows.values())
        if trained != pulled.trained:
            yield Violation("wrong row", f"{pulled.trained} rows are said to be trained, and {trained} are", where)
        versions = self._versions.setdefault((table.number, shard), [])
        if table.number == COUNTS:
            own, count = rows[id_of(shard, OWN, self._row)][self._row], rows[id_of(shard, COUNT)][self._row]
            if own != count:
                said = f"a row that is trained in each step has {own}, and {count} is the count"
                yield Violation("wrong row", said, where)
        else:
            since = [pulled.version - each - 1 for each in reversed(versions[-2:])]
            for number in self._expected(table, shard, step, since):
                if not rows[number].any():
                    said = f"{meaning(number)} is no row, {since[0]} updates after its own at most"
                    yield Violation("lost row", said, where)
        versions.append(pulled.version)

    def _expected(self, table: Table, shard: int, step: int, since: list[int]) -> Iterator[int]:
        """Yields the ids that a step has made rows, and that are not forgotten.

        since: updates after that of this step at most, after that of the one before
        """
        row, workers = self._row, WORKERS if self._rules.averaged else 1
        if since and has_fresh(shard, row, step) and table.keeps(since[0], workers):
            yield id_of(shard, FRESH, row, step)
        admitted = table.admit_after and has_twice(row, step) and step % 2
        if admitted and len(since) > 1 and table.keeps(since[1], workers):
            yield id_of(shard, TWICE, row, step // 2)


# -- whole tables, at the end ----------------------------------------------------------------------------------------


class Course:
    """When all steps were that have gradients for "passing": how many updates came after that of one of them.

    A moment is a time; in sync, where each clock is an update, a clock.
    """

    def __init__(self, writers: Writers, averaged: bool) -> None:
        self._averaged = averaged
        ended: list[float] = []  # of steps that were begun: a moment at which their updates were made
        begun: list[float] = []  # of steps that were acknowledged: one before which they were not
        for row, lives in writers.items():
            for life in lives:
                ended += [self._end_of(life, step) for step in life.attempted if is_present(row, step)]
                begun += [self._begin_of(life, step) for step in life.done if is_present(row, step)]
        self._ended, self._begun = sorted(ended), sorted(begun)
        if averaged:
            self._ended, self._begun = sorted(set(ended)), sorted(set(begun))

    def at_most(self, life: Life, step: int) -> int:
        """Returns how many updates came after that of a step at the most."""
        return len(self._ended) - bisect.bisect_right(self._ended, self._begin_of(life, step)) - (not self._averaged)

    def at_least(self, life: Life, step: int) -> int:
        """Returns how many updates came after that of a step at the least."""
        find = bisect.bisect_right if self._averaged else bisect.bisect_left
        return len(self._begun) - find(self._begun, self._end_of(life, step))

    def _end_of(self, life: Life, step: int) -> float:
        return step if self._averaged else life.at.get(step, math.inf)

    def _begin_of(self, life: Life, step: int) -> float:
        """Returns when the last step before it was acknowledged."""
        if self._averaged:
            return step
        done = list(life.done)
        before = bisect.bisect_left(done, step)
        return life.at[done[before - 1]] if before else 0.0


def wrong_tables(
    table: Table,
    contents: Sequence[Content],
    writers: Writers,
    rules: Rules,
    lossy: Sequence[bool],
    staying: Writers | None = None,
) -> Iterator[Violation]:
    """Yields what is wrong with a table as all shards have it after all have finished, besides the counting oracle's.

    lossy: by shard, whether it was rolled back to a checkpoint, so that steps may be missing there; in sync they are
           made again, but by the workers that are there then
    staying: the lives that are there to the end: in sync they make all of theirs again
    """
    averages = rules.averaged
    course = Course(writers, averages) if table.expire_after or table.capacity else None
    for shard, content in enumerate(contents):
        is_lossy = any(lossy) if rules.averaged else lossy[shard]
        found = [*wrong_at_any_time(table, shard, content, writers, rules)]
        if table.number != COUNTS and averages:
            found += _wrong_means(table, content, writers, rules, is_lossy)
        if not is_lossy:
            found += _missing(table, shard, content, writers, course, WORKERS if averages else 1)
        elif rules.averaged and not averages:
            found += _missing(table, shard, content, staying or {}, None, 1)
        if not is_lossy and table.expire_after and course is not None:
            found += _staying(content, writers, course, table.expires_within)
        for violation in found:
            yield replace(violation, where={"table": table.name, "shard": shard, **violation.where})


def wrong_at_any_time(
    table: Table, shard: int, content: Content, writers: Writers, rules: Rules
) -> Iterator[Violation]:
    """Yields what is wrong with a table on one shard as of any one moment."""
    yield from _wrong_by_itself(table, content, writers, rules)
    if table.number == COUNTS and table.admit_after:
        yield from _counted_otherwise(shard, content, rules)


def wrong_beginning(table: Table, shard: int, content: Content, runs: Collection[int]) -> Iterator[Violation]:
    """Yields whether a table has other rows of its beginning on one shard than those of one of these runs."""
    found = {number for number in content.rows if meaning(number).kind == FIRST}
    if all(found != table.first(shard, run).keys() for run in runs):
        said = (
            f"it began with {[meaning(number) for number in found]}, and not with all rows of one of runs {set(runs)}"
        )
        yield Violation("wrong beginning", said, {"table": table.name, "shard": shard})


def _wrong_by_itself(table: Table, content: Content, writers: Writers, rules: Rules) -> Iterator[Violation]:
    """Yields what is wrong with one shard's rows, whatever became of steps."""
    for number, row in content.rows.items():
        wrong = wrong_row(table, number, row, rules)
        if wrong is not None or not row.any():
            yield wrong or Violation("unknown row", f"{meaning(number)} is a row without training")
    attempted = {row: {step for life in lives for step in life.attempted} for row, lives in writers.items()}
    for number in (*content.rows, *content.waiting):
        if not _was_pushed(number, attempted):
            yield Violation("unknown row", f"no worker of this run has pushed {meaning(number)}")
    for number, count in content.waiting.items():
        kind = meaning(number).kind
        if count != 1 and not (kind == TWICE and count == table.admit_after - 1):
            yield Violation("doubled", f"{meaning(number)} is said to have occurred {count} times")
    if 0 < table.capacity < len(content.rows):
        yield Violation("row stays", f"{len(content.rows)} rows, where {table.capacity} have room")
    for number, last in content.last.items() if table.expire_after else ():
        if content.version - last >= table.expires_within:
            said = f"{meaning(number)} was trained by version {last}, and the table is at {content.version}"
            yield Violation("row stays", said)


def _counted_otherwise(shard: int, content: Content, rules: Rules) -> Iterator[Violation]:
    """Yields how the rows of "counts" differ from what the ids say that have not occurred often enough for a row.

    Each step leaves one, whatever is rolled back. So they tell who is in which mean, and so what all rows are.
    """
    steps = [meaning(number) for number in content.waiting]
    workers = Counter(what.step for what in steps)
    expected = np.zeros((LIVES, 1 + COLUMNS), np.float32)
    for what in steps:
        expected[what.row, [0, 1 + column(what.step)]] += rules.unit / (workers[what.step] if rules.averaged else 1)
    rows = in_counting_order(content.in_order(shard)).numpy()
    for row in np.flatnonzero((rows != expected).any(axis=1)).tolist():
        said = f"worker {row} has {rows[row].tolist()}, and the ids that wait say {expected[row].tolist()}"
        yield Violation("wrong row", said)


def _wrong_means(table: Table, content: Content, writers: Writers, rules: Rules, is_lossy: bool) -> Iterator[Violation]:
    """Yields rows of "passing" whose mean is that of fewer workers than have a step of that clock, or of more."""
    begun, done = Counter[int](), Counter[int]()
    for row, lives in writers.items():
        begun.update({step for life in lives for step in life.attempted if is_in_mean(row, step)})
        done.update({step for life in lives for step in life.done if is_in_mean(row, step)})
    for number, row_of_id in content.rows.items():
        step = step_of(number)
        workers = rules.unit / row_of_id[0]
        if workers > begun[step] or (workers < done[step] and not is_lossy):
            said = f"{meaning(number)} is in a mean over {workers:g}, of {done[step]} to {begun[step]} workers"
            yield Violation("wrong update", said)


def _was_pushed(number: int, attempted: Mapping[int, set[int]]) -> bool:
    what = meaning(number)
    if what.kind in (COUNT, MARK, FIRST):
        return True
    steps = attempted.get(what.row, set())
    if what.kind == OWN:
        return bool(steps)
    return what.step in steps or (what.kind == TWICE and not steps.isdisjoint((2 * what.step, 2 * what.step + 1)))


def _missing(
    table: Table, shard: int, content: Content, writers: Writers, course: Course | None, workers: int
) -> Iterator[Violation]:
    """Yields acknowledged steps whose own ids are not there, although nothing has had them forgotten."""
    for row, lives in writers.items():
        for life in lives:
            for step in [*life.done] if course is None else [*life.done][-LOOKED_BACK:]:
                if table.number == COUNTS:
                    is_there = not table.admit_after or id_of(shard, REFUSED, row, step) in content.waiting
                else:
                    stays = course is None or table.keeps(course.at_most(life, step), workers)
                    is_due = stays and has_fresh(shard, row, step)
                    is_there = not is_due or id_of(shard, FRESH, row, step) in content.rows
                if not is_there:
                    said = f"nothing is there of step {step} of life {life.number}, which was acknowledged"
                    yield Violation("lost row", said, {"row": row})


def _staying(content: Content, writers: Writers, course: Course, limit: int) -> Iterator[Violation]:
    """Yields rows that should have expired. limit: updates without a row after which it is certainly gone"""
    for number in (*content.rows, *content.waiting):
        step, lives = step_of(number), writers.get(meaning(number).row, ())
        since = min((course.at_least(life, step) for life in lives if step in life.done), default=0)
        if since >= limit:
            yield Violation("row stays", f"{meaning(number)} is there {since} updates later, of {limit}")
