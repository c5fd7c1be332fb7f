"""The tables of the job under test: which rows a step pushes, and what rows must then be. No code of the servers.

Two tables, in which rows begin at START and SGD with lr 1 trains them, so that each push can be read in the rows.

"counts" is the counting oracle's job (tests/chaos/oracle.py) turned over: an element of a row is a worker's row there,
and a row is a column there. So the rows on one shard are a bucket more of that oracle, which finds what is lost,
doubled, torn, wrong in a mean, or too old. A last element has the sum of all others times the id's own code: a gradient
that comes to another id is found, and a row of which a part is of another version.

"passing" has rows of one step each, which the table may admit, forget by age, and forget for others. A row is as its
one step made it, or as rows begin: one number more or less, and another row's gradient, are found.

"counts" begins with a few rows that rank 0 brings, and that nothing trains: they tell which run has begun it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ps_protocol.tables import Initializer, JobTable, TableSpec
from tests.simulation.supervision import SHARDS
from tests.tools.row_ids import mixed

SHARE = 0.13  # of the seeds: their jobs have tables
START = 2.0
UPDATES_BEFORE = 3  # that have trained the rows of the beginning
ROOM = 4096  # rows, where a table has room for all: what is reserved for more takes longer to get than a simulation has
WORKERS = 3  # of the job under test
COLUMNS, LIVES = 7, 56  # of the counting oracle there: its columns, and its rows
COUNTS, PASSING = 0, 1  # the tables, by number
FIRST_ROWS = 3  # on each shard
ABSENT, LEFT_OUT = 5, 9  # of each eleven steps: for "passing" a term of zeros in a mean, and none
NO_STEP = 0
# What an id is for. The first three are of "counts", as columns of the counting oracle; REFUSED never occurs often
# enough to become a row; FRESH is of one step; TWICE becomes a row in the second of two steps; NEVER is never pushed;
# FIRST is there from the beginning.
COUNT, MARK, OWN, REFUSED, FRESH, TWICE, NEVER, FIRST = range(8)

Rows = npt.NDArray[np.float32]


# -- ids -------------------------------------------------------------------------------------------------------------


def shard_of(number: int) -> int:
    """Returns the shard of an id, as rows.proto says."""
    return (mixed(number) >> 32) * SHARDS >> 32


@dataclass(frozen=True)
class Meaning:
    """What an id is for. row: of the counting oracle, whose worker pushes it; step: in which, or which column"""

    kind: int
    row: int = 0
    step: int = NO_STEP


@cache
def id_of(shard: int, kind: int, row: int = 0, step: int = NO_STEP) -> int:
    """Returns the id on a shard that has this meaning: every other one is negative."""
    first = ((kind * 64 + row) * 4096 + step) * 64
    return next(each for n in range(first, first + 64) if shard_of(each := -1 - n if step % 2 else n) == shard)


def meaning(number: int) -> Meaning:
    """Returns what an id is for."""
    rest, step = divmod((number if number >= 0 else -1 - number) // 64, 4096)
    kind, row = divmod(rest, 64)
    return Meaning(kind, row, step)


def code_of(number: int) -> int:
    """Returns the code of an id: others mostly have another one."""
    return 1 + number % 61


# -- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a step pushes to a table on one shard. present: it has gradients, maybe of no row here; in_mean: if not, it
    is a term of zeros"""

    ids: tuple[int, ...]
    occurrences: tuple[int, ...]
    gradients: Rows
    present: bool = True
    in_mean: bool = True


@dataclass(frozen=True)
class Table:
    """One table of the job under test. The limits are those of ps_protocol.tables.TableSpec."""

    number: int
    admit_after: int = 0
    expire_after: int = 0
    max_rows: int = 0

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return LIVES + 1 if self.number == COUNTS else 4

    @property
    def name(self) -> str:
        """What it is called."""
        return ("counts", "passing")[self.number]

    def registered(self) -> JobTable:
        """Returns it as its workers register it."""
        start = Initializer("constant", START)
        limits = self.admit_after, self.expire_after, self.max_rows or ROOM
        return JobTable(TableSpec(self.name, self.dim, start, *limits, initial_rows=True), "SGD", {"lr": 1.0})

    @property
    def expires_within(self) -> int:
        """Updates without a row after which it is certainly gone; 0: it stays."""
        return self.expire_after + max(1, self.expire_after // 16) if self.expire_after else 0

    @property
    def capacity(self) -> int:
        """Rows on one shard; 0: any number."""
        return -(-self.max_rows // SHARDS)

    def keeps(self, updates: int, workers: int) -> bool:
        """Whether a row is certainly there so many updates later. workers: of which an update has a step, at most"""
        new = 2 * workers  # rows that one update makes
        room = not self.capacity or (updates + 2) * new + max(new, self.capacity // 16) <= self.capacity
        return room and (not self.expire_after or updates <= self.expire_after)

    def first(self, shard: int, run: int) -> dict[int, Rows]:
        """Returns the rows, less START, that rank 0 of a run brings to one shard, by id."""
        if self.number != COUNTS:
            return {}
        ids = [id_of(shard, FIRST, run, number) for number in range(FIRST_ROWS)]
        return {number: first_row(number) for number in ids}

    def pushed(self, shard: int, row: int, step: int, unit: int) -> Part:
        """Returns what a step of the worker that counts in a row pushes to one shard."""
        if self.number == COUNTS:
            ids = [id_of(shard, COUNT), id_of(shard, MARK, 0, column(step)), id_of(shard, OWN, row)]
            occurrences = [self.admit_after or 1] * 3
            if self.admit_after:
                ids.append(id_of(shard, REFUSED, row, step))
                occurrences.append(1)
            gradients = np.zeros((len(ids), self.dim), np.float32)
            gradients[:, row] = -unit
            gradients[:, LIVES] = [-unit * code_of(each) for each in ids]
            return Part(tuple(ids), tuple(occurrences), gradients)
        kind = (step + row) % 11
        if kind in (ABSENT, LEFT_OUT):
            return Part((), (), np.empty((0, self.dim), np.float32), False, kind == ABSENT)
        found = dict(self._passing(shard, row, step))
        gradients = np.array([vector(each, row, step, unit) for each in found], np.float32).reshape(-1, self.dim)
        return Part(tuple(found), tuple(found.values()), -gradients)

    def _passing(self, shard: int, row: int, step: int) -> Iterator[tuple[int, int]]:
        """Yields the ids of one step, and how often each occurs in it."""
        if has_fresh(shard, row, step):
            yield id_of(shard, FRESH, row, step), max(1, self.admit_after)
        if self.admit_after and has_twice(row, step):
            yield id_of(shard, TWICE, row, step // 2), 1 if step % 2 else self.admit_after - 1

    def asked(self, shard: int, row: int, step: int) -> list[int]:
        """Returns the ids that are looked at after a step: rows, and what is none.

        The first 1 + COLUMNS of "counts" are those of the counting oracle.
        """
        if self.number == COUNTS:
            marks = [id_of(shard, MARK, 0, each) for each in range(COLUMNS)]
            return [id_of(shard, COUNT), *marks, id_of(shard, OWN, row), id_of(shard, REFUSED, row, step)]
        steps = [each for each in (step, step - 1, step - 20) if each > 0]
        fresh = [id_of(shard, FRESH, row, each) for each in steps]
        return [*fresh, id_of(shard, TWICE, row, step // 2), id_of(shard, NEVER, row, step)]


def nothing(table: Table) -> Part:
    """Returns what a push has that leaves a table out."""
    return Part((), (), np.empty((0, table.dim), np.float32), present=False, in_mean=False)


def column(step: int) -> int:
    """Returns where a step marks, from 0."""
    return step % COLUMNS


def is_present(row: int, step: int) -> bool:
    """Whether a step has gradients for "passing", on any shard."""
    return (step + row) % 11 not in (ABSENT, LEFT_OUT)


def is_in_mean(row: int, step: int) -> bool:
    """Whether a step is a term of a mean of "passing", maybe of zeros."""
    return (step + row) % 11 != LEFT_OUT


def has_fresh(shard: int, row: int, step: int) -> bool:
    """Whether a step has a row of its own on a shard."""
    return is_present(row, step) and (step + shard + row) % 3 != 0


def has_twice(row: int, step: int) -> bool:
    """Whether a step is one of the two that have a row together."""
    return is_present(row, step - step % 2) and is_present(row, step - step % 2 + 1)


def vector(number: int, row: int, step: int, unit: int) -> list[int]:
    """Returns what one step of one worker adds to a row of "passing", if no other one is in the mean."""
    return [unit, unit * code_of(number), unit * (row + 1), unit * step]


def first_row(number: int) -> Rows:
    """Returns a row of "counts" from the beginning, less START."""
    row = np.zeros(LIVES + 1, np.float32)
    row[meaning(number).row], row[LIVES] = 1, code_of(number)
    return row


def draw_tables(mode: str, seed: int, always: bool) -> tuple[Table, ...]:
    """Returns the tables of a seed's job: none in most.

    always: it has some

    They are drawn beside the world's own chance, so that seeds without tables stay what they were.
    """
    draw = random.Random(f"tables {mode} {seed}")
    if draw.random() >= SHARE and not always:
        return ()
    counts = Table(COUNTS, draw.choice([0, 3]))
    passing = Table(PASSING, draw.choice([0, 3]), draw.choice([0, 8, 34]), draw.choice([0, 0, 60, 120]))
    return (counts, passing) if draw.random() < 0.5 else (counts,)
