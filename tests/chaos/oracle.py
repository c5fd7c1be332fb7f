"""The counting oracle: training whose weights tell which pushes are in them.

Weights start at zero, SGD has lr 1, and a step's gradient is -1 in two cells of every bucket and 0 elsewhere: in the
cell that counts its worker's steps, and in a cell of the step's own. So each push adds exactly 1 to both, and what is
read from a pull says what was lost, doubled or torn, and how far behind the reader is. Checking is linear in the cells.

                    ssp, async                          sync
    a row is        one life of a worker process        one rank
    a step's column number of the life's step           clock
    a push adds     1                                   UNIT / n, when n workers are in the mean: together, UNIT

A bucket is [rows, 1 + columns]: column 0 counts, the others take turns. A push that was acknowledged must be in, once;
one whose worker died over it may be in, once, or not.

In sync a step whose worker has lost its place is late: its marks are in the column of its own clock, and in the update
of a later one. Workers write down when they push a step again (`Life.late`); nobody else's step may be late.

With a quorum rows and columns are as in async. An update is a mean of any number of pushes there, so the optimizer
takes the sign of what it gets: each push adds 1 to its cells, however many are in its update. And a worker's own last
step may be missing in what it pulls, because it came late; the one before must be in.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

LATE = "late step"  # a kind of violation, unless the worker has written down that it pushed a step again

# RMSprop that forgets at once divides a gradient by its own size.
SIGNS = {"lr": 1.0, "alpha": 0.0, "eps": 1e-30}


@dataclass(frozen=True)
class Shape:
    """The size of the weights: each bucket is a float32 tensor of [rows, 1 + columns]."""

    buckets: int = 6
    rows: int = 512
    columns: int = 15

    @property
    def bucket_bytes(self) -> int:
        """What makes every tensor a bucket of its own: a multiple of 64."""
        return -(-4 * self.rows * (1 + self.columns) // 64) * 64


@dataclass(frozen=True)
class Rules:
    """What a job's weights must obey.

    averaged: an update is a mean over workers (sync); `unit` is then what all of them add together
    bound:    how many clocks a pull may lie behind a live worker; None: any number
    late:     there is a quorum: a worker's last step may be in a later update than the one that it waits for
    """

    shape: Shape
    averaged: bool
    unit: int
    bound: int | None
    late: bool = False

    @classmethod
    def of(cls, mode: str, workers: int, shape: Shape) -> Rules:
        """Those of a mode, with at most so many workers: every mean of theirs is then a whole number, and in int4 so is
        the scale of a block, of which it is the seventh part: nothing is rounded off."""
        if "quorum" in mode:
            return cls(shape, False, 1, None, late=True)
        if mode.startswith(("sync", "local:")):
            return cls(shape, True, math.lcm(*range(1, workers + 1)) * (7 if "int4" in mode else 1), 0)
        return cls(shape, False, 1, int(mode.partition(":")[2]) if mode.startswith("ssp") else None)


@dataclass(frozen=True)
class Violation:
    """One promise that the data shows broken; `where` names the place: bucket, row, column, clock, and so on."""

    kind: str
    said: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


class Cells(nn.Module):
    """The weights: zeros."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.rows, 1 + shape.columns
        self.buckets = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(shape.buckets))

    def optimizer(self, signs: bool = False) -> torch.optim.Optimizer:
        """SGD with lr 1. signs: what steps by 1 against the sign of each gradient"""
        if signs:
            return torch.optim.RMSprop(self.parameters(), **SIGNS)
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def view(self) -> torch.Tensor:
        """A copy of all weights: [buckets, rows, 1 + columns]."""
        return torch.stack([bucket.detach() for bucket in self.buckets])


class Witness:
    """One worker: marks its steps, and looks at what it pulls.

    row: the worker's own, see the table above
    """

    def __init__(self, rules: Rules, row: int) -> None:
        self.rules = rules
        self.row = row
        self._before: torch.Tensor | None = None  # the last view, if nothing happened since that it cannot explain
        self._number = 0
        self._late: list[bool | None] = []  # by bucket, whether the last view was without the own last step

    def column(self, number: int) -> int:
        """Where a step marks: `number` is the life's step, or in sync the clock."""
        return 1 + number % self.rules.shape.columns

    def gradient(self, number: int) -> torch.Tensor:
        """Returns the gradient of every bucket in one step: [rows, 1 + columns]."""
        gradient = torch.zeros(self.rules.shape.rows, 1 + self.rules.shape.columns)
        gradient[self.row, 0] = gradient[self.row, self.column(number)] = -self.rules.unit
        return gradient

    def mark(self, model: Cells, number: int) -> None:
        """Sets the gradients of one step."""
        gradient = self.gradient(number)
        for bucket in model.buckets:
            bucket.grad = gradient.clone()

    def lost_track(self) -> None:
        """Something happened between two steps (a new place in the job, a restored shard): the next view is a first."""
        self._before, self._late = None, []

    def check(self, view: torch.Tensor, number: int) -> list[Violation]:
        """What is wrong with a view, [buckets, rows, 1 + columns], taken when step `number` had been acknowledged."""
        found = [*whole(view, self.rules), *(self._own_update(view, number) if not self.rules.late else ())]
        if self._before is not None and number == self._number + 1:
            found += self._since(view, view - self._before, number)
        self._before, self._number = view, number
        return found

    def _own_update(self, view: torch.Tensor, number: int) -> list[Violation]:
        """A worker's own update is in every bucket that it pulls."""
        cells = view[:, self.row, self.column(number)]
        if bool((cells >= 1).all()):
            return []
        return [
            Violation("own update missing", "a worker does not see its own push", self._place(bucket, number))
            for bucket in (cells < 1).nonzero().flatten().tolist()
        ]

    def _since(self, view: torch.Tensor, grown: torch.Tensor, number: int) -> list[Violation]:
        """What one more step of this worker may have changed."""
        column = self.column(number)
        found: list[Violation] = []
        if self.rules.late:
            return self._since_late(grown, number)
        if self.rules.averaged:
            # Exactly one update: the marks of who is in the mean, all equal, together UNIT, in this clock's column, or
            # of a late step in an earlier one's.
            for bucket, change in enumerate(grown):
                rows, columns = (place.tolist() for place in change[:, 1:].nonzero(as_tuple=True))
                present = change[:, 1:][change[:, 1:] != 0]
                late = [(row, 1 + at) for row, at in zip(rows, columns, strict=True) if 1 + at != column]
                is_one = present.sum() == self.rules.unit and len(set(present.tolist())) == 1
                if not is_one or len(set(rows)) < len(rows) or self.row in dict(late):
                    said = f"one update was expected, together {self.rules.unit}: {_changes(change)}"
                    found.append(Violation("wrong update", said, self._place(bucket, number)))
                    continue
                for row, at in late:
                    where = {**self._place(bucket, number), "late": row, "column": at}
                    found.append(Violation(LATE, f"it has an earlier step: {_changes(change)}", where))
            return found
        expected = torch.zeros(1 + self.rules.shape.columns)
        expected[0] = expected[column] = 1
        own = grown[:, self.row]
        if torch.equal(own, expected.expand_as(own)) and bool((grown >= 0).all()):
            return []
        for bucket, change in enumerate(grown):
            if not torch.equal(change[self.row], expected):
                kind = "doubled" if bool((change[self.row] > expected).any()) else "lost"
                said = f"own row changed by {_changes(change[self.row : self.row + 1])} in one step"
                found.append(Violation(kind, said, self._place(bucket, number)))
            if bool((change < 0).any()):
                said = f"an older state than the one before: {_changes(change)}"
                found.append(Violation("went back", said, self._place(bucket, number)))
        return found

    def _since_late(self, grown: torch.Tensor, number: int) -> list[Violation]:
        """With a quorum, the step before is in by now, if it was not yet, and the last may be."""
        found, late = [], self._late or [None] * len(grown)
        for bucket, change in enumerate(grown):
            own = change[self.row]
            last, before = int(own[self.column(number)]), int(own[self.column(number - 1)])
            allowed = (0, 1) if late[bucket] is None else (int(late[bucket] or 0),)
            if last not in (0, 1) or before not in allowed or own.abs().sum() != 2 * (last + before):
                said = f"own row changed by {_changes(own[None])} in one step, and {allowed} of the step before"
                kind = "doubled" if last > 1 or before > max(allowed) else "lost"
                found.append(Violation(kind, said, self._place(bucket, number)))
            if bool((change < 0).any()):
                said = f"an older state than the one before: {_changes(change)}"
                found.append(Violation("went back", said, self._place(bucket, number)))
            late[bucket] = not last
        self._late = late
        return found

    def _place(self, bucket: int, number: int) -> dict[str, int]:
        return {"bucket": bucket, "row": self.row, "step": number}


def whole(view: torch.Tensor, rules: Rules) -> list[Violation]:
    """Signs of an update that was torn: [buckets, rows, 1 + columns] with a fraction, or a count unlike its marks."""
    sums = view[:, :, 1:].sum(dim=2)
    if torch.equal(view, view.round()) and torch.equal(view[:, :, 0], sums):
        return []
    found = []
    broken = view != view.round()
    for bucket, row, column in broken.nonzero().tolist():
        where = {"bucket": bucket, "row": row, "column": column}
        found.append(Violation("torn", f"{view[bucket, row, column].item()} is no whole number", where))
    unequal = view[:, :, 0] != sums
    for bucket, row in unequal.nonzero().tolist():
        said = f"the count is {view[bucket, row, 0].item()}, the marks are {view[bucket, row, 1:].sum().item()}"
        found.append(Violation("torn", said, {"bucket": bucket, "row": row}))
    return found


def _changes(change: torch.Tensor) -> str:
    cells = change.nonzero().tolist()
    shown = ", ".join(f"[{row}, {column}] {change[row, column].item():+g}" for row, column in cells[:12])
    return shown + (f" and {len(cells) - 12} more" if len(cells) > 12 else "") if cells else "nothing"


# -- all workers together, afterwards --------------------------------------------------------------------------------


@dataclass
class Life:
    """What one worker process did: a row of its own in ssp and async.

    attempted: the numbers of the steps that it began (in sync, their clocks)
    done:      of those that were acknowledged, the clock after them; `at`: when
    seen:      after each of those, its clock, the counts of the rows that had changed (by row, one a bucket), and when
    late:      in sync, the steps that it pushed again, because it had lost its place, each with the clock of the update
               that has what was missing
    found:     of those that were done, the ones whose place was lost before, and which shards had had, as they said
               when it took the next one
    """

    number: int
    rank: int
    attempted: list[int] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)
    seen: list[tuple[int, dict[int, list[int]], float]] = field(default_factory=list)
    late: list[tuple[int, int]] = field(default_factory=list)
    found: set[int] = field(default_factory=set)

    @property
    def unsure(self) -> set[int]:
        """Steps of which nobody knows whether they are in."""
        return set(self.attempted) - self.done.keys()


def unexplained(found: Iterable[Violation], lives: Sequence[Life], rules: Rules) -> list[Violation]:
    """Returns what is wrong of what workers saw, without the late steps that others have written down."""
    late = {
        (row, 1 + number % rules.shape.columns, clock)
        for life in lives
        for number, clock in life.late
        for row in (life.number, life.rank)
    }
    return [
        violation
        for violation in found
        if violation.kind != LATE
        or (violation.where["late"], violation.where["column"], violation.where["step"]) not in late
    ]


def judge(
    view: torch.Tensor, lives: Sequence[Life], rules: Rules, lossy: frozenset[int] = frozenset()
) -> list[Violation]:
    """What is wrong with the weights, [buckets, rows, 1 + columns], after everybody has finished.

    lossy: in ssp and async, buckets that were rolled back to a checkpoint: there, steps may be missing; see `missing`
    """
    if rules.averaged:
        return [*whole(view, rules), *_judge_means(view, lives, rules)]
    least, most = _expected(view, lives, rules)
    found = whole(view, rules)
    for kind, wrong in (("lost", view < least), ("doubled", view > most)):
        for bucket, row, column in wrong.nonzero().tolist():
            if kind == "doubled" or bucket not in lossy:
                limit = (least if kind == "lost" else most)[row, column].item()
                said = f"{view[bucket, row, column].item():g} pushes are in, expected {limit:g}"
                found.append(Violation(kind, said, {"bucket": bucket, "life": row, "column": column}))
    return found


def judge_saved(
    saved: Mapping[str, torch.Tensor], lives: Sequence[Life], rules: Rules, lossy: frozenset[int] = frozenset()
) -> list[Violation]:
    """What is wrong with what rank 0 has saved after the last step of all workers. The rest is as for `judge`."""
    cells = Cells(rules.shape)
    cells.load_state_dict(dict(saved))
    return [
        Violation("saved", f"rank 0 has saved the weights: {each.kind}: {each.said}", each.where)
        for each in judge(cells.view(), lives, rules, lossy)
    ]


def missing(view: torch.Tensor, lives: Sequence[Life], rules: Rules) -> int:
    """How many acknowledged steps are not in the bucket that lacks most of them; in sync none ever is."""
    if rules.averaged:
        return 0
    least, _ = _expected(view, lives, rules)
    return int((least - view)[:, :, 0].clamp(min=0).sum(dim=1).max())


def _expected(view: torch.Tensor, lives: Sequence[Life], rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """By row and column, the least and the most marks: what was acknowledged once, what is unsure once or not."""
    columns = rules.shape.columns
    least, most = torch.zeros_like(view[0]), torch.zeros_like(view[0])
    for life in lives:
        for numbers, bounds in ((life.done, (least, most)), (life.unsure, (most,))):
            for column, count in Counter(1 + number % columns for number in numbers).items():
                for bound in bounds:
                    bound[life.number, column] += count
                    bound[life.number, 0] += count
    return least, most


def _judge_means(view: torch.Tensor, lives: Sequence[Life], rules: Rules) -> list[Violation]:
    """Each clock's update adds UNIT to its column: those that were acknowledged are in, the unsure may be.

    A late step moves a part of that to the column of its own clock, in some buckets or in all.
    """
    columns = rules.shape.columns
    late = {step for life in lives for step in life.late if step[0] != step[1]}
    done = {clock for life in lives for clock in life.done.values()}
    unsure = {clock for life in lives for clock in [*life.unsure, *(clock for _, clock in life.late)]} - done

    def check(total: float, least: int, most: int, is_whole: bool, where: dict[str, int]) -> None:
        least, most, is_torn = rules.unit * least, rules.unit * most, is_whole and bool(total % rules.unit)
        if not least <= total <= most or is_torn:
            kind = "torn" if is_torn else "lost" if total < least else "doubled"
            said = f"{total / rules.unit:g} updates are in, expected {least / rules.unit:g}"
            found.append(Violation(kind, said, where))

    found: list[Violation] = []
    for bucket, sums in enumerate(view[:, :, 1:].double().sum(dim=1).tolist()):
        for column, total in enumerate(sums):
            least, more, came, went = (
                sum(clock % columns == column for clock in clocks)
                for clocks in (done, unsure, [step for step, _ in late], [clock for _, clock in late])
            )
            where = {"bucket": bucket, "column": 1 + column}
            check(total, least - went, least + more + came, not (came or went), where)
        check(sum(sums), len(done), len(done) + len(unsure), True, {"bucket": bucket})
    return found


def too_stale(lives: Iterable[Life], rules: Rules, until: Mapping[int, float | None] | None = None) -> list[Violation]:
    """Pulls of ssp workers that missed an update of a live worker from more than `bound` clocks before.

    until: by bucket, when it was rolled back first: from then on its counts say nothing. None: never
    """
    lives = list(lives)
    if rules.averaged or rules.bound is None:
        return []
    ends = [(until or {}).get(bucket) or math.inf for bucket in range(rules.shape.buckets)]
    found = []
    for end in sorted(set(ends)):
        buckets = [bucket for bucket, its_end in enumerate(ends) if its_end >= end]
        begin = max((other for other in ends if other < end), default=-math.inf)
        # By life: at which clock each of its steps was. Clocks of after a set-back may be those of before once more.
        clocks = {
            life.number: sorted(c for n, c in life.done.items() if life.at.get(n, 0.0) < end and n not in life.found)
            for life in lives
        }
        # A worker that was removed is not waited for, though a push of it may be staged: it counts once that is heard.
        later = {life.number: [(life.done[n], life.at[n]) for n in life.found if life.at[n] < end] for life in lives}
        for reader in lives:
            seen: dict[int, list[int]] = {}
            for clock, counts, at in reader.seen:
                seen.update(counts)
                if begin <= at < end:
                    least = {
                        other: bisect.bisect_right(each, clock - rules.bound)
                        + sum(its <= clock - rules.bound and since <= at for its, since in later[other])
                        for other, each in clocks.items()
                    }
                    found += _behind(reader.number, clock, seen, least, buckets)
    return found


def _behind(
    reader: int,
    clock: int,
    seen: Mapping[int, list[int]],
    needs: Mapping[int, int],
    buckets: list[int],
) -> list[Violation]:
    """Of one pull, the lives of which it has too few steps in any of these buckets. needs: how many, by life"""
    found = []
    for other, needed in needs.items():
        least = min((seen[other][bucket] for bucket in buckets), default=0) if other in seen else 0
        if least < needed:
            said = f"at clock {clock} life {reader} saw {least} steps of life {other}, not {needed}"
            found.append(Violation("too stale", said, {"life": reader, "clock": clock, "other": other}))
    return found
