"""Makes the pushes of a step, from the first gradient of backward to `optimizer.step()`.

backward   Each gradient moves into the flat buffers; a bucket that is full leaves as a draft, if it may (overlap.py).
end        `optimizer.step()` reads hyper-parameters and checks the gradients: which are there, whether the script has
           changed them since, whether all are finite. A step that must not be pushed raises here.
pushes     Each bucket that trains gets one. A script with several optimizers steps one of them: the buckets of the
           others get empty pushes, because a step has one clock over all buckets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ps_protocol.data import DataRange
from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.optimizers import check_hyper_parameters, hyper_parameters
from ps_runtime.troubles import Troubles
from ps_worker.metrics import WorkerMetrics
from ps_worker.model.flat import FlatModel
from ps_worker.model.overlap import Overlap
from ps_worker.tables.server_rows import RowsPush, ServerTables
from ps_worker.timeline.profiler import PUSH, named
from ps_worker.timeline.recording import Timeline
from ps_worker.values import BucketPush

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class EndedStep:
    """A step as it is pushed, besides the gradients themselves.

    optimizer:   the one that steps, by number; None: none does
    absent:      its parameters that have no gradient
    groups:      the hyper-parameters of each group of the job
    drafts_hold: the gradients that left during backward are unchanged, and count
    rows:        what it does to each table
    weight:      what it weighs in the mean; 0: all weigh the same
    """

    optimizer: int | None
    absent: Set[int]
    groups: Sequence[HyperParameters]
    drafts_hold: bool
    rows: Sequence[RowsPush]
    weight: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether it has no gradient."""
        return self.optimizer is None and all(push.rows is None for push in self.rows)


class StepMaker:
    """Makes the steps of one job's model, one after the other.

    Gradients become ready on autograd's thread, while the training thread waits in backward; all else is called by the
    training thread.

    tables:  of the model
    overlap: as in PrepareOptions
    draft:   sends a bucket that is full; returns how many bytes of it its shard keeps until the step counts
    """

    def __init__(
        self,
        spec: JobSpec,
        tensors: Sequence[torch.Tensor],
        layout: Layout,
        optimizers: Sequence[tuple[str, torch.optim.Optimizer]],
        tables: ServerTables,
        overlap: bool | None,
        metrics: WorkerMetrics,
        draft: Callable[[BucketSpec], int],
        timeline: Timeline,
    ) -> None:
        self.tables = tables
        self.model = FlatModel(spec, tensors, layout, self._gradient_ready)
        self._trained = [bucket for bucket in layout.buckets if not bucket.frozen]
        self._spec = spec
        self._overlaps = [
            Overlap([bucket for bucket in self._trained if bucket.optimizer == index], overlap)
            for index in range(len(optimizers))
        ]
        self._groups = LiveGroups(optimizers)
        self._metrics = metrics
        self._draft = draft
        self._timeline = timeline
        self._draft_room = 0.0  # bytes that may still leave as drafts in this step
        self._skipped = Troubles(log, None)  # ps_worker_non_finite_total counts them

    def parameters_of(self, optimizer: int) -> Set[int]:
        """Returns the parameters that one optimizer steps, by index in the job."""
        return self._overlaps[optimizer].parameters

    def allow_drafts(self, rank: int, ranks: Sequence[int]) -> None:
        """Lets buckets of the next step leave during backward, as many as the shards have room for.

        In sync the drafts of the lowest rank become the open sum; the others share as much as the weights. In ssp and
        async all do. ranks: those that take part, this worker's `rank` among them
        """
        aggregate = self._spec.consistency.one_clock
        if aggregate and rank == min(ranks, default=rank):
            self._draft_room = math.inf
        else:
            sharing = max(1, len(ranks) - 1 if aggregate else len(ranks))
            self._draft_room = sum(bucket.nbytes for bucket in self._trained) / sharing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients only add up inside; nothing leaves before the next backward outside, or the step."""
        before = [overlap.paused for overlap in self._overlaps]
        for overlap in self._overlaps:
            overlap.paused = True
        try:
            yield
        finally:
            for overlap, paused in zip(self._overlaps, before, strict=True):
                overlap.paused = paused

    def end(self, optimizer: int) -> EndedStep:
        """Ends the step of one optimizer. Raises InvalidRequest or NonFiniteGradient if it must not be pushed."""
        rows = self.tables.take()
        overlap, gradients = self._overlaps[optimizer], self.model.gradients
        absent = gradients.gather(overlap.parameters)
        groups = self._groups.read()
        changed, drafts_hold = overlap.finish(gradients.marks(overlap.spaces), absent)
        name = gradients.not_finite(overlap.parameters - absent, changed) or self.tables.not_finite(rows)
        if name is not None:
            self._refuse_or_skip(optimizer, name)
            return EndedStep(None, set(), groups, drafts_hold=False, rows=self.tables.left_out())
        self._skipped.over(optimizer)
        return EndedStep(optimizer, absent, groups, drafts_hold, rows)

    def end_empty(self) -> EndedStep:
        """Ends a step that counts as none, whatever gradients there are."""
        self.abandon()
        return EndedStep(None, set(), self._groups.read(), drafts_hold=False, rows=self.tables.left_out())

    def abandon(self) -> None:
        """Forgets the step at hand: the next backward begins a new one."""
        self.tables.take()
        self.tables.sent()
        for overlap in self._overlaps:
            overlap.abandon()

    def pushes(self, step: EndedStep, clock: int, ranges: Sequence[DataRange]) -> list[BucketPush]:
        """Returns the pushes of a step, of every bucket that trains. ranges: of leased data, that the step used"""
        return [self._push(bucket, step, clock, ranges) for bucket in self._trained]

    def _push(self, bucket: BucketSpec, step: EndedStep, clock: int, ranges: Sequence[DataRange]) -> BucketPush:
        skip = bucket.optimizer != step.optimizer
        absent = [] if skip else [p for p, slice_ in enumerate(bucket.slices) if slice_.parameter in step.absent]
        groups = {self._spec.parameters[slice_.parameter].group for slice_ in bucket.slices}
        return BucketPush(
            bucket=bucket,
            clock=clock,
            absent=absent,
            empty=skip or len(absent) == len(bucket.slices),
            groups={group: step.groups[group] for group in groups if group is not None},
            ranges=ranges,
            weight=step.weight,
        )

    def _gradient_ready(self, parameter: int) -> None:
        """Has the buckets leave that are full with this gradient, if they may. Runs on autograd's thread."""
        self._metrics.timer.gradient()
        self._timeline.step.gradient(parameter)
        overlap = self._overlaps[self._spec.parameters[parameter].optimizer]
        for bucket in overlap.ready(parameter, self.model.gradients.marks(overlap.spaces)):
            if self._draft_room > 0 and not self.model.gradients.saw_not_finite(bucket):
                with named(PUSH):
                    self._draft_room -= self._draft(bucket)

    def _refuse_or_skip(self, optimizer: int, name: str) -> None:
        """Raises NonFiniteGradient, for the parameter of that name, unless such steps are left out."""
        self._metrics.not_finite()
        if self._spec.non_finite is NonFinite.REFUSE:
            raise NonFiniteGradient(
                f"the gradient of {name} is not finite; it was not pushed "
                "(prepare(..., non_finite='skip') leaves out such steps instead)"
            )
        self._skipped.met(optimizer, "the gradient of %s is not finite; this step is skipped", name)


class LiveGroups:
    """The hyper-parameters of the script's optimizers, which schedulers change."""

    def __init__(self, optimizers: Sequence[tuple[str, torch.optim.Optimizer]]) -> None:
        """optimizers: each with its name. Groups that are added to one later do not belong to this."""
        self._optimizers = [(name, optimizer, len(optimizer.param_groups)) for name, optimizer in optimizers]
        self._checked: list[HyperParameters] = []

    def read(self) -> list[HyperParameters]:
        """Returns those of each group now. Raises InvalidRequest for values that the shards would refuse."""
        for name, optimizer, count in self._optimizers:
            if len(optimizer.param_groups) < count:
                raise InvalidRequest(
                    f"{name} had {count} parameter groups at prepare and has {len(optimizer.param_groups)} now: groups "
                    "cannot be taken away; set requires_grad=False on their parameters, or lr to 0"
                )
        named = [
            (name, group) for name, optimizer, count in self._optimizers for group in optimizer.param_groups[:count]
        ]
        groups = [hyper_parameters(name, group) for name, group in named]
        if groups != self._checked:
            for (name, _), values in zip(named, groups, strict=True):
                check_hyper_parameters(name, values)
            self._checked = groups
        return groups
