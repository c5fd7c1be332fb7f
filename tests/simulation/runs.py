"""A run: a job from its registration to its end, as its user knows it, and the lives of the workers in it.

Each run begins with weights of its own: a mark in a row that is its own. So the weights tell whether they are of one
run alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.local import Local
from ps_protocol.modes import local_rounds
from ps_protocol.optimizers import hyper_parameters
from ps_server.core.membership import RETURN_LEASES
from tests.chaos.oracle import Cells, Life, Rules, Shape, Violation, judge, too_stale
from tests.simulation.row_oracle import Content, in_counting_order, wrong_beginning, wrong_tables
from tests.simulation.rows import COLUMNS, COUNTS, LIVES, WORKERS, Table
from tests.simulation.saving import Acknowledged
from tests.simulation.supervision import SHARDS
from tests.simulation.whole_steps import WholeSteps
from tests.tools.modes import consistency, wire_of

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

BUCKETS_WITH_TABLES = 2
WARM_UP = 3  # rounds of one step, in jobs of local:H
RUNS = 3  # that one simulation has, at most
NAME, BESIDE = "cells", "beside"  # of the job under test, and of the one beside it
FROZEN, BUFFER = "frozen", "buffer"  # what no optimizer steps of a job that is followed


@dataclass(frozen=True)
class Job:
    """A job, of which a cluster has several runs, one after the other.

    shape:   of its buckets
    workers: that it declares
    members: of each worker: more than one where workers are groups
    followed: readers follow it: it has a frozen parameter and a buffer, too, each in a bucket of its own
    """

    name: str
    mode: str
    shape: Shape
    workers: int
    tables: tuple[Table, ...] = ()
    members: int = 1
    followed: bool = False

    def rules(self) -> Rules:
        """Returns what its weights must obey. The rows of "counts" on a shard are a bucket more, behind its own."""
        more = SHARDS if self.tables else 0
        return Rules.of(self.mode, self.workers, replace(self.shape, buckets=self.shape.buckets + more))

    def local(self) -> Local | None:
        """Returns how its workers step by themselves. The outer learning rate changes after the warm-up, so that it
        matters which round's counts; without momentum each update is its own."""
        rounds = local_rounds(self.mode.split()[0])
        return None if rounds is None else replace(rounds, warm_up=WARM_UP, lr=0.5, momentum=0.0, nesterov=False)

    @functools.cache  # noqa: B019 (there are a few jobs)
    def spec(self) -> JobSpec:
        """Returns it as its workers register it."""
        shape = self.shape
        size = shape.rows, 1 + shape.columns
        each = (ParameterSpec(f"bucket{index}", size, "float32", 0) for index in range(shape.buckets))
        trained = [replace(spec, member=index % self.members) for index, spec in enumerate(each)]
        untrained = [ParameterSpec(name, size, "float32", None) for name in (FROZEN, BUFFER) if self.followed]
        parameters = (*trained, *untrained)
        tables = tuple(table.registered() for table in self.tables)
        optimizer = ("RMSprop", with_signs()) if self.rules().late else ("SGD", {"lr": 1.0})
        local = self.local()
        if local is not None:
            optimizer = "SGD", local.outer(local.warm_up + 1)
        how = optimizer[0], (optimizer[1],), consistency(self.mode), shape.bucket_bytes, self.workers
        wires = dict.fromkeys(("gradient_wire", "weight_wire"), wire_of(self.mode))
        spec = JobSpec(self.name, parameters, *how, tables=tables, local=local, group_size=self.members, **wires)
        assert len(bucket_layout(spec.parameters, spec.bucket_bytes).buckets) == shape.buckets + len(untrained)
        return spec


def moved_in(local: Local | None, round_number: int) -> float:
    """Returns what of its gradient a worker's weights have to move in a round for the outer step to make it 1."""
    return 1.0 if local is None else 1 / float(local.outer(round_number)["lr"])  # type: ignore[arg-type]


def with_signs() -> HyperParameters:
    """Returns the hyper-parameters of the optimizer that counts pushes, however many are in an update."""
    [group] = Cells(Shape(1, 1, 1)).optimizer(signs=True).param_groups
    return hyper_parameters("RMSprop", group)


def job_under_test(mode: str, tables: tuple[Table, ...], members: int = 1, followed: bool = False) -> Job:
    """Returns the job that the faults are for: it has buckets on every shard."""
    buckets = BUCKETS_WITH_TABLES if tables else 3
    return Job(NAME, mode, Shape(buckets, LIVES, COLUMNS), WORKERS, tables, members, followed)


def job_beside(mode: str) -> Job:
    """Returns a small job whose only bucket is on shard 0: what happens to the others is no matter of its."""
    return Job(BESIDE, mode, Shape(buckets=1, rows=8, columns=7), 2)


class Tries:
    """After how many rollbacks each step was tried last, and acknowledged: the last try decides whether it is in."""

    def __init__(self) -> None:
        self._begun: dict[int, int] = {}  # by step
        self._acknowledged: dict[tuple[int, int], int] = {}  # by life and step

    def begun(self, step: int, rollbacks: int) -> None:
        """Notes that somebody makes a step."""
        self._begun[step] = max(rollbacks, self._begun.get(step, 0))

    def acknowledged(self, life: int, step: int, rollbacks: int) -> None:
        """Notes that a life's step was acknowledged."""
        self._acknowledged[life, step] = rollbacks

    def follow(self, earlier: Tries) -> None:
        """Takes what an earlier launch tried."""
        for step, rollbacks in earlier._begun.items():
            self.begun(step, rollbacks)
        self._acknowledged = earlier._acknowledged | self._acknowledged

    def decided(self, life: Life) -> Life:
        """Returns a life without the steps that a rollback undid and that somebody has tried once more since: who did
        so may have died over it."""
        done = {
            step: clock
            for step, clock in life.done.items()
            if self._acknowledged.get((life.number, step), 0) >= self._begun.get(step, 0)
        }
        return replace(life, done=done)


class Comeback:
    """A launch that has died as a whole, and comes back one by one.

    missing:   the ranks that are not back
    is_judged: nothing else had gone wrong before, so that nobody could be taken for live who is not
    """

    def __init__(self, missing: set[int], died: float, is_judged: bool) -> None:
        self.missing, self.died, self.is_judged = missing, died, is_judged
        self._first = math.inf  # when the first was back

    def joined(self, rank: int, now: float) -> None:
        """Notes that a rank is back."""
        self.missing.discard(rank)
        self._first = min(self._first, now)

    def waits(self, now: float, lease: float) -> bool:
        """Whether those that are back have to wait for the others."""
        return self.is_judged and bool(self.missing) and now < self._first + (RETURN_LEASES - 1) * lease


class Run:
    """One run of a job.

    untrained: its buckets that no optimizer steps
    identity: by which the servers tell it from others
    workers:  by rank, the process that was started last
    comeback: of its launch, which has died as a whole
    gone:     ranks that are not started again
    target:   the clock at which all of them hold; None: they train on
    may_end:  why the job may be lost; empty: it may not
    end_is_forgotten: the disk was full when the job ended, and the coordinator died: the next may go on with the job
    over:     its user knows that it is over
    nobody_at: when no worker that has joined was well last: each was dead, hung or was cut off
    saved:    it has had a checkpoint: it goes back to one, whatever dies
    lossy:    by bucket, when its shard died first
    writers:  by their row in the weights, the lives that count there
    marks:    what its weights begin with, as lives
    """

    def __init__(self, number: int, job: Job) -> None:
        self.number, self.job = number, job
        self.rules, self.spec, self.buckets = job.rules(), job.spec(), range(job.shape.buckets)
        self.untrained = bucket_layout(self.spec.parameters, self.spec.bucket_bytes).buckets[len(self.buckets) :]
        self.lives: list[Life] = []
        self.workers: dict[int, Worker] = {}
        self.everybody: list[Worker] = []
        self.tries = Tries()
        self.acknowledged = Acknowledged()
        self.whole_steps = WholeSteps()
        self.gone: set[int] = set()
        self.comeback: Comeback | None = None
        self.target: int | None = None
        self.may_end, self.over, self.saved = "", False, False
        self.nobody_at: float | None = None
        self.end_is_forgotten = False
        self.identity = ""
        self.placement: list[int] = []
        self.lossy: dict[int, float] = {}
        self.writers: dict[int, list[Life]] = {}
        # In sync the mark is that of a clock 0, of which each life knows that it was acknowledged.
        self.marks = [Life(number, 0, [0], {0: 0})]
        self.initial = torch.zeros(job.shape.rows, 1 + job.shape.columns)
        self.initial[number, :2] = self.rules.unit

    def look_for_anybody(self, now: float, but: Worker | None = None) -> None:
        """Notes whether no worker is well. but: one that does not count"""
        if not any(worker.is_well for worker in self.everybody if worker is not but):
            self.nobody_at = now

    def may_lack_a_step(self, clock: int, joined: float) -> bool:
        """Whether some parts of the weights may lack the step of a clock, which nobody can push to them any more, for a
        worker that joined then.

        Workers that were all killed, at once or one after the other, may have left the last one's step on some shards
        only (failures.md). Those that come back begin without it there, until one of them has made a step. One that
        hangs until its place is gone leaves it so when it runs again.
        """
        since = self.nobody_at
        made = (life.at[number] for life in self.lives for number, after in life.done.items() if after >= clock)
        return since is not None and not any(since < at <= joined for at in made)

    @property
    def name(self) -> str:
        """The job's."""
        return self.job.name

    @property
    def is_beside(self) -> bool:
        """Whether it is the one beside the job under test."""
        return self.job.name == BESIDE

    @property
    def begun_by(self) -> set[int]:
        """The runs of which one has brought what the job began with."""
        return {mark.number for mark in self.marks}

    def staying(self) -> list[Worker]:
        """Returns its workers, without those that are gone for good."""
        return [worker for rank, worker in self.workers.items() if rank not in self.gone]

    @property
    def has_ended(self) -> bool:
        """Whether its last worker was told that the job has ended with it."""
        return any(worker.ended for worker in self.everybody)

    def is_training(self) -> bool:
        """Whether all its workers have a place."""
        return len(self.workers) == self.job.workers and all(worker.is_there for worker in self.staying())

    def all_hold(self) -> bool:
        """Whether all its workers are at the target, and none was set back behind it since."""
        staying, target = self.staying(), self.target
        # With a quorum a worker may be in a step that others, which hold, do not end.
        holds = all((worker.holds or self.rules.late) and worker.host.alive for worker in staying)
        is_there = target is not None and all(worker.clock >= target for worker in staying)
        return len(self.workers) == self.job.workers and holds and is_there

    def go_on_from(self, earlier: Run) -> None:
        """Takes what an earlier launch has trained for its own beginning: the servers still had that job.

        A launch whose workers are all gone may not have been the job's end: the next one then continues it. Either may
        have come first with its initial value, for each bucket.
        """
        self.lives[:0] = earlier.lives
        self.tries.follow(earlier.tries)
        self.acknowledged.follow(earlier.acknowledged)
        self.whole_steps.follow(earlier.whole_steps)
        for row, lives in earlier.writers.items():
            self.writers.setdefault(row, [])[:0] = lives
        self.marks = [Life(mark.number, 0, [0]) for mark in (*earlier.marks, *self.marks)]
        self.lossy = earlier.lossy | self.lossy
        if earlier.end_is_forgotten and self.lossy:  # shards that stay drop a job when it ends: all of it goes back
            died, parts = min(self.lossy.values()), len(self.placement) + (SHARDS if self.job.tables else 0)
            self.lossy = dict.fromkeys(range(parts), died) | self.lossy
        self.saved, self.may_end = self.saved or earlier.saved, self.may_end or earlier.may_end

    def shard_died(self, index: int, now: float) -> None:
        """Notes what the death of a shard may cost."""
        for bucket, home in enumerate([*self.placement, *range(SHARDS if self.job.tables else 0)]):
            if home == index:
                self.lossy.setdefault(bucket, now)
        if not self.saved:
            self.may_end = self.may_end or "a shard is lost, and there is no checkpoint"

    def row(self, life: int, rank: int) -> int:
        """Returns the row in which a worker counts."""
        return RUNS + (self.number * self.job.workers + rank if self.rules.averaged else life)

    def furthest(self) -> int:
        """Returns the highest clock that a step was acknowledged at: after a rollback, steps are made once more."""
        return max((clock for life in self.lives for clock in life.done.values()), default=0)

    def _half_steps(self) -> Iterator[Violation]:
        """Yields the workers of which a part of a step counts, where their updates are means."""
        for worker in self.everybody if self.rules.averaged else ():
            if worker.unfinished:
                self.whole_steps.broken_off[self.row(worker.life.number, worker.rank)] += 1
        yield from self.whole_steps.judge()

    def judge(self, view: torch.Tensor, content: Mapping[tuple[int, int], Content]) -> list[Violation]:
        """Returns what is wrong with the weights after all have finished.

        content: the tables, by number and shard
        """
        buckets = self.job.shape.buckets
        lossy = frozenset(() if self.rules.averaged else self.lossy)
        until = {bucket: self.lossy.get(bucket) for bucket in range(self.rules.shape.buckets)}
        rows = [in_counting_order(content[COUNTS, shard].in_order(shard)) for shard in range(SHARDS) if content]
        lost = [buckets + shard in self.lossy for shard in range(SHARDS)]
        staying = {self.row(each.life.number, each.rank): [each.kept()] for each in self.staying() if each.host.alive}
        lives = [self.tries.decided(life) for life in self.lives] if self.rules.averaged else self.lives
        return [
            *judge(view, [*self.marks, *lives], self.rules, lossy),
            *(judge(torch.stack(rows), lives, self.rules, frozenset(b - buckets for b in lossy)) if rows else ()),
            *(
                violation
                for table in self.job.tables
                for each in [[content[table.number, shard] for shard in range(SHARDS)]]
                for violation in [
                    *wrong_tables(table, each, self.writers, self.rules, lost, staying),
                    *(wrong for at in range(SHARDS) for wrong in wrong_beginning(table, at, each[at], self.begun_by)),
                ]
            ),
            *too_stale(self.lives, self.rules, until),
            *self._half_steps(),
        ]
