"""A run: a job from its registration to its end, as its user knows it, and the lives of the workers in it.

Each run begins with weights of its own: a mark in a row that is its own. So the weights tell whether they are of one
run alone.
"""

from __future__ import annotations

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
SHAPE = Shape(buckets=3, rows=56, columns=7)


class Run:
    """One run. Its name is that of the others.

    workers: by rank, the process that was started last
    target:  the clock at which all of them hold; None: they train on
    may_end: why the job may be lost; empty: it may not
    over:    its user knows that it is over
    """

    def __init__(self, number: int, mode: str) -> None:
        self.number, self.name, self.shape = number, "cells", SHAPE
        self.rules = Rules.of(mode, WORKERS, SHAPE)
        self.spec, self.buckets = _spec(self.name, mode), range(SHAPE.buckets)
        self.lives: list[Life] = []
        self.workers: dict[int, Worker] = {}
        self.everybody: list[Worker] = []
        self.gone: set[int] = set()  # ranks that are not started again
        self.target: int | None = None
        self.may_end, self.over = "", False
        self.identity = ""  # by which the servers tell it from others
        # In sync the mark is that of a clock 0, of which each life knows that it was acknowledged.
        self._mark = Life(number, 0, [0], {0: 0})
        self.initial = torch.zeros(SHAPE.rows, 1 + SHAPE.columns)
        self.initial[number, :2] = self.rules.unit

    def row(self, life: int, rank: int) -> int:
        """Returns the row in which a worker counts."""
        return RUNS + (self.number * WORKERS + rank if self.rules.averaged else life)

    def furthest(self) -> int:
        """Returns the highest clock that a step was acknowledged at: after a rollback, steps are made once more."""
        return max((clock for life in self.lives for clock in life.done.values()), default=0)

    def judge(self, view: torch.Tensor, lossy: dict[int, float]) -> list[Violation]:
        """Returns what is wrong with the weights after everybody has finished. lossy: when buckets were rolled back."""
        buckets = frozenset(() if self.rules.averaged else lossy)
        until = {bucket: lossy.get(bucket) for bucket in self.buckets}
        return [
            *judge(view, [self._mark, *self.lives], self.rules, buckets),
            *too_stale(self.lives, self.rules, until),
        ]


def _spec(name: str, mode: str) -> JobSpec:
    consistency = parse_mode(mode)
    assert consistency is not None
    size = SHAPE.rows, 1 + SHAPE.columns
    parameters = tuple(ParameterSpec(f"bucket{index}", size, "float32", 0) for index in range(SHAPE.buckets))
    spec = JobSpec(name, parameters, "SGD", ({"lr": 1.0},), consistency, SHAPE.bucket_bytes, WORKERS)
    assert len(bucket_layout(spec.parameters, spec.bucket_bytes).buckets) == SHAPE.buckets
    return spec
