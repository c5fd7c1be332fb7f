"""A run: a job from its registration to its end, as its user knows it, and the lives of the workers in it.

Each run begins with weights of its own: a mark in a row that is its own. So the weights tell whether they are of one
run alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import parse_mode
from tests.chaos.oracle import Life, Rules, Shape, Violation, judge, too_stale

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

WORKERS = 3
RUNS = 3  # that one simulation has, at most
NAME, BESIDE = "cells", "beside"  # of the job under test, and of the one beside it


@dataclass(frozen=True)
class Job:
    """A job, of which a cluster has several runs, one after the other. workers: that it declares"""

    name: str
    mode: str
    shape: Shape
    workers: int

    def rules(self) -> Rules:
        """Returns what its weights must obey."""
        return Rules.of(self.mode, self.workers, self.shape)

    @functools.cache  # noqa: B019 (there are a few jobs)
    def spec(self) -> JobSpec:
        """Returns it as its workers register it."""
        consistency, shape = parse_mode(self.mode), self.shape
        assert consistency is not None
        size = shape.rows, 1 + shape.columns
        parameters = tuple(ParameterSpec(f"bucket{index}", size, "float32", 0) for index in range(shape.buckets))
        spec = JobSpec(self.name, parameters, "SGD", ({"lr": 1.0},), consistency, shape.bucket_bytes, self.workers)
        assert len(bucket_layout(spec.parameters, spec.bucket_bytes).buckets) == shape.buckets
        return spec


def job_under_test(mode: str) -> Job:
    """Returns the job that the faults are for: it has buckets on every shard."""
    return Job(NAME, mode, Shape(buckets=3, rows=56, columns=7), WORKERS)


def job_beside(mode: str) -> Job:
    """Returns a small job whose only bucket is on shard 0: what happens to the others is no matter of its."""
    return Job(BESIDE, mode, Shape(buckets=1, rows=8, columns=7), 2)


class Run:
    """One run of a job.

    identity: by which the servers tell it from others
    workers:  by rank, the process that was started last
    gone:     ranks that are not started again
    target:   the clock at which all of them hold; None: they train on
    may_end:  why the job may be lost; empty: it may not
    over:     its user knows that it is over
    saved:    it has had a checkpoint: it goes back to one, whatever dies
    lossy:    by bucket, when its shard died first
    """

    def __init__(self, number: int, job: Job) -> None:
        self.number, self.job = number, job
        self.rules, self.spec, self.buckets = job.rules(), job.spec(), range(job.shape.buckets)
        self.lives: list[Life] = []
        self.workers: dict[int, Worker] = {}
        self.everybody: list[Worker] = []
        self.gone: set[int] = set()
        self.target: int | None = None
        self.may_end, self.over, self.saved = "", False, False
        self.identity = ""
        self.placement: list[int] = []
        self.lossy: dict[int, float] = {}
        # In sync the mark is that of a clock 0, of which each life knows that it was acknowledged.
        self._marks = [Life(number, 0, [0], {0: 0})]
        self.initial = torch.zeros(job.shape.rows, 1 + job.shape.columns)
        self.initial[number, :2] = self.rules.unit

    @property
    def name(self) -> str:
        """The job's."""
        return self.job.name

    @property
    def is_beside(self) -> bool:
        """Whether it is the one beside the job under test."""
        return self.job.name == BESIDE

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
        holds = all(worker.holds and worker.host.alive for worker in staying)
        is_there = target is not None and all(worker.clock >= target for worker in staying)
        return len(self.workers) == self.job.workers and holds and is_there

    def go_on_from(self, earlier: Run) -> None:
        """Takes what an earlier launch has trained for its own beginning: the servers still had that job.

        A launch whose workers are all gone may not have been the job's end: the next one then continues it. Either may
        have come first with its initial value, for each bucket.
        """
        self.lives[:0] = earlier.lives
        self._marks = [Life(mark.number, 0, [0]) for mark in (*earlier._marks, *self._marks)]
        self.lossy = earlier.lossy | self.lossy
        self.saved, self.may_end = self.saved or earlier.saved, self.may_end or earlier.may_end

    def shard_died(self, index: int, now: float) -> None:
        """Notes what the death of a shard may cost."""
        for bucket, home in enumerate(self.placement):
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

    def judge(self, view: torch.Tensor) -> list[Violation]:
        """Returns what is wrong with the weights after all have finished."""
        buckets = frozenset(() if self.rules.averaged else self.lossy)
        until = {bucket: self.lossy.get(bucket) for bucket in self.buckets}
        return [
            *judge(view, [*self._marks, *self.lives], self.rules, buckets),
            *too_stale(self.lives, self.rules, until),
        ]
