"""Makes the pushes of a step, from the first gradient of backward to `optimizer.step()`.

backward   Each gradient moves into the flat buffers; a bucket that is full leaves as a draft, if it may (`Overlap`).
end        `optimizer.step()` reads hyper-parameters and checks the gradients: which are there, whether the script has
           changed them since, whether all are finite. A step that must not be pushed raises here.
pushes     Each bucket that trains gets one. A script with several optimizers steps one of them: the buckets of the
           others get empty pushes, because a step has one clock over all buckets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from ps_protocol.batches import DataRange
from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.messages.data import BucketPush
from ps_protocol.optimizers import check_hyper_parameters, hyper_parameter_names, hyper_parameters, optimizer_name
from ps_runtime.troubles import Troubles
from ps_worker.metrics import PUSH, WorkerMetrics, named
from ps_worker.model.flat import FlatModel
from ps_worker.model.script_stages import ScriptStage, next_stage, stage_of_job
from ps_worker.tables.server_rows import ServerTables, TableStep
from ps_worker.timeline.recording import Timeline

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class EndedStep:
    """The content of a step, apart from its gradients.

    optimizer:   the number of the optimizer that steps; None: none does
    absent:      its parameters without a gradient
    groups:      the hyper-parameters of each group of the job
    drafts_hold: the drafts sent during backward are unchanged, and count
    rows:        the step's push to each table
    weight:      the step's weight in the mean; 0: all steps weigh the same
    """

    optimizer: int | None
    absent: Set[int]
    groups: Sequence[HyperParameters]
    drafts_hold: bool
    rows: Sequence[TableStep]
    weight: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the step has no gradient."""
        return self.optimizer is None and all(push.rows is None for push in self.rows)


# -- sending during backward -------------------------------------------------------------------------------------------

# A bucket is full when backward has finished every gradient in it. It is then sent as a draft, which counts only if
# `optimizer.step()` confirms it: a script may still clip, scale or drop gradients, run backward again, or skip the
# step. If it does, the drafts are dropped and the whole step is sent in `step()`. That costs bytes. So a script is
# watched for a few steps before the first draft, and for longer after each such surprise.
WATCHED_STEPS = 2
LONGEST_WATCH_STEPS = 4096


class Overlap:
    """Which gradients of one optimizer's step are finished, and which buckets are sent early.

    buckets:    the buckets of its parameters. One that also has other parameters is never sent early
    wanted:     True: send early in every step; False: never; None: after some steps without a surprise
    parameters: the parameters that the optimizer steps; None: all in these buckets. Afterwards those that are in them
    """

    def __init__(self, buckets: Sequence[BucketSpec], wanted: bool | None, parameters: Set[int] | None = None) -> None:
        self.spaces = {bucket.space for bucket in buckets}
        self._buckets = {bucket.index: bucket for bucket in buckets}
        everything = {b.index: {part.parameter for part in b.slices} for b in buckets}
        members = {
            index: each if parameters is None else each.intersection(parameters) for index, each in everything.items()
        }
        self._counts = {index: len(each) for index, each in members.items()}  # by bucket, its parameters
        self._shared = {index for index, each in everything.items() if each != members[index]}
        self._of: dict[int, list[int]] = {}  # by parameter, the buckets it lies in
        for index, each in members.items():
            for parameter in each:
                self._of.setdefault(parameter, []).append(index)
        self.parameters: Set[int] = self._of.keys()
        self._wanted = wanted
        self._quiet_steps = 0
        self._watched_steps = WATCHED_STEPS
        self.paused = False  # inside no_sync
        self._begin()

    def _begin(self) -> None:
        self._missing = dict(self._counts)  # by bucket, the parameters whose gradients backward has not finished
        self._seen: set[int] = set()
        self._repeated = False
        self._marks: list[int] | None = None

    def abandon(self) -> None:
        """Forgets the current step: the next backward begins a new one."""
        self._begin()

    def watch_anew(self) -> None:
        """Sends nothing early until some more steps were without a surprise, unless it was wanted in every step."""
        self._quiet_steps = 0

    @property
    def active(self) -> bool:
        """Whether full buckets are sent during backward."""
        return self._wanted is True or (self._wanted is None and self._quiet_steps >= self._watched_steps)

    def ready(self, parameter: int, marks: list[int]) -> list[BucketSpec]:
        """Records that backward has finished a parameter's gradient. Returns the buckets to send now.

        marks: Gradients.marks at this moment
        """
        self._marks = marks
        if self.paused:
            return []
        if parameter in self._seen:  # a second backward changes buckets that may have been sent
            self._repeated = True
            return []
        self._seen.add(parameter)
        full = []
        for index in self._of.get(parameter, ()):
            self._missing[index] -= 1
            is_full = self._missing[index] == 0 and index not in self._shared
            if is_full and self.active and not self._repeated:
                full.append(self._buckets[index])
        return full

    def finish(self, marks: list[int], absent: Set[int] = frozenset()) -> tuple[bool, bool]:
        """Ends the step. Returns whether gradients were changed since backward, and whether drafts are still valid.

        marks:  Gradients.marks at this moment
        absent: the parameters without a gradient. If backward had made one, the script has removed it
        """
        changed = (self._marks is not None and marks != self._marks) or not self._seen.isdisjoint(absent)
        surprised = changed or self._repeated
        if surprised and self.active and self._wanted is None:
            self._watched_steps = min(2 * self._watched_steps, LONGEST_WATCH_STEPS)
            log.info(
                "gradients changed after backward: for the next %d steps all of them leave at optimizer.step()",
                self._watched_steps,
            )
        self._quiet_steps = 0 if surprised else self._quiet_steps + 1
        self._begin()
        return changed, not surprised


# -- the step ----------------------------------------------------------------------------------------------------------


class StepMaker:
    """Makes the steps of one job's model, one after the other.

    Gradients become ready on autograd's thread, while the training thread waits in backward. All else is for the
    training thread.

    tables:  the model's tables
    overlap: as in PrepareOptions
    draft:   sends a full bucket; returns the bytes that its shard keeps until the step counts
    is_late: gradients may change after backward undetected: torch does not count the writes of a collective. Then none
             is sent early, and all are checked in the step. In a pipeline none could be sent early anyway, as each
             microbatch adds to all of them
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
        is_late: bool = False,
    ) -> None:
        self.tables = tables
        self.model = FlatModel(spec, tensors, layout, self._gradient_ready)
        self._trained = layout.trained
        self._spec, self._one_clock = spec, spec.consistency.one_clock
        self._is_late, self._wanted_overlap = is_late, False if is_late else overlap
        self._overlaps: dict[int, Overlap] = {}  # by the optimizer's number
        # By bucket and optimizer with slices in it, the positions of the bucket's other slices.
        self._others: dict[tuple[int, int | None], list[int]] = {}
        self._layout = layout
        self._indices = {id(tensor): i for i, tensor in enumerate(tensors) if layout.trains(spec.parameters[i])}
        self.enter(stage_of_job(spec, layout, [optimizer for _, optimizer in optimizers]))
        self._metrics = metrics
        self._draft = draft
        self._timeline = timeline
        self._draft_room = 0.0  # bytes that may still leave as drafts in this step
        self._skipped = Troubles(log, None)  # ps_worker_non_finite_total counts them

    def following(self, optimizers: Mapping[int, torch.optim.Optimizer], new: Collection[int]) -> ScriptStage:
        """Returns the stage after the current one, without entering it. Raises as `next_stage`.

        optimizers: by number, all optimizers that step in it
        new:        the numbers of those that begin with it
        """
        return next_stage(self.stage, self._layout, self._indices, optimizers, new)

    def enter(self, stage: ScriptStage) -> None:
        """Enters a stage. No step may be under way."""
        self.stage, self._groups = stage, LiveGroups(stage)
        self._overlaps, self._others = {}, {}
        for number in stage.optimizers:
            own = stage.parameters_of(number)
            buckets = [each for each in self._trained if any(part.parameter in own for part in each.slices)]
            self._overlaps[number] = Overlap(buckets, self._wanted_overlap, own)
            for bucket in buckets:
                others = [position for position, part in enumerate(bucket.slices) if part.parameter not in own]
                self._others[bucket.index, number] = others

    def read_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Reads hyper-parameters from these groups from now on: for a job that trains only some parameters of an
        optimizer.
        """
        self._groups.read_from(groups)

    def parameters_of(self, optimizer: int) -> Set[int]:
        """Returns the parameters that one optimizer steps, by index in the job."""
        return self.stage.parameters_of(optimizer)

    def allow_drafts(self, rank: int, ranks: Sequence[int] | None) -> None:
        """Sets how many bytes of the next step may be sent during backward: as many as the shards have room for.

        In sync the drafts of the lowest rank become the open sum; the others together get the size of the weights. In
        ssp and async all workers together do.

        ranks: the live ranks, including `rank`; None: no transport can use drafts
        """
        self._copy_late(ranks is None or self._wanted_overlap is False)
        if ranks is None:
            self._draft_room = 0
            return
        if self._one_clock and rank == min(ranks, default=rank):
            self._draft_room = math.inf
        else:
            sharing = max(1, len(ranks) - 1 if self._one_clock else len(ranks))
            self._draft_room = sum(bucket.nbytes for bucket in self._trained) / sharing

    def _copy_late(self, late: bool) -> None:
        """Has the step alone copy the gradients of DTensors, if `late`. Nothing is known of changes after backward in
        such steps, so the script is watched before the first draft after them.
        """
        gradients, late = self.model.gradients, late and self.model.has_sharded
        if gradients.are_late and not late:
            for overlap in self._overlaps.values():
                overlap.watch_anew()
        gradients.are_late = late

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` block in which backward only accumulates gradients. The next backward outside, or the step, sends
        them.
        """
        before = [(overlap, overlap.paused) for overlap in self._overlaps.values()]
        for overlap, _ in before:
            overlap.paused = True
        try:
            yield
        finally:
            for overlap, paused in before:
                overlap.paused = paused

    def end(self, optimizer: int) -> EndedStep:
        """Ends the step of one optimizer. Raises InvalidRequest or NonFiniteGradient if it must not be pushed."""
        rows = self.tables.take() if self.tables.are_some else []
        overlap, gradients = self._overlaps[optimizer], self.model.gradients
        parameters = overlap.parameters
        absent = gradients.gather(parameters)
        groups = self._groups.read()
        changed, drafts_hold = overlap.finish(gradients.marks(overlap.spaces), absent)
        name = gradients.not_finite(parameters - absent, changed or self._is_late)
        if name is None and rows:
            name = self.tables.not_finite(rows)
        if name is not None:
            self._refuse_or_skip(optimizer, name)
            return EndedStep(None, set(), groups, drafts_hold=False, rows=self.tables.left_out())
        if self._skipped.open:
            self._skipped.over(optimizer)
        return EndedStep(optimizer, absent, groups, drafts_hold, rows)

    def end_empty(self) -> EndedStep:
        """Ends a step that the mean leaves out. Gradients are ignored."""
        self.abandon()
        return EndedStep(None, set(), self._groups.read(), drafts_hold=False, rows=self.tables.left_out())

    def abandon(self) -> None:
        """Forgets the current step: the next backward begins a new one."""
        self.tables.take()
        self.tables.sent()
        for overlap in self._overlaps.values():
            overlap.abandon()

    def drop(self) -> None:
        """Removes all gradients, of lookups too: they count in no step."""
        self.model.gradients.drop()
        self.tables.drop()
        self.abandon()

    def place_lost(self) -> None:
        """Forgets what was sent early of the current step, and asked for ahead: the next place gets all of it."""
        self.tables.sent()
        self.tables.forget_ahead()
        for overlap in self._overlaps.values():
            overlap.abandon()

    def pushes(
        self, step: EndedStep, clock: int, ranges: Sequence[DataRange], buckets: Sequence[BucketSpec] | None = None
    ) -> list[BucketPush]:
        """Returns the pushes of a step.

        ranges:  the leased data that the step used
        buckets: the buckets to push; None: all that train
        """
        trained = self._trained if buckets is None else buckets
        return [self._push(bucket, step, clock, ranges) for bucket in trained]

    def _push(self, bucket: BucketSpec, step: EndedStep, clock: int, ranges: Sequence[DataRange]) -> BucketPush:
        others = self._others.get((bucket.index, step.optimizer))
        skip, absent = others is None, set(others or ())
        if not skip and step.absent:
            absent.update(p for p, part in enumerate(bucket.slices) if part.parameter in step.absent)
        return BucketPush(
            bucket=bucket,
            clock=clock,
            absent=sorted(absent),
            empty=skip or len(absent) == len(bucket.slices),
            groups={group: step.groups[group] for group in self.stage.buckets[bucket.index].groups},
            ranges=ranges,
            weight=step.weight,
            stage=self.stage.number,
        )

    def _gradient_ready(self, parameter: int) -> None:
        """Sends the buckets that are complete with this gradient, if permitted. Runs on autograd's thread."""
        if self._metrics.timer.phase != "backward":
            self._metrics.timer.gradient()
        if self._timeline.step is not None:
            self._timeline.step.gradient(parameter)
        overlap = self._overlaps.get(self.stage.owner.get(parameter, -1))
        if overlap is None:  # no optimizer of this stage has it
            return
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


_MISSING = object()
_CONSTANTS = frozenset({float, int, bool, type(None)})  # types of hyper-parameters that no script can change in place


class LiveGroups:
    """Reads the current hyper-parameters of the script's optimizers, which schedulers change.

    They are converted and checked only in a step before which the script has set one of them. A tensor or a list can be
    changed in place, so a script that has one is read anew in each step.
    """

    def __init__(self, stage: ScriptStage) -> None:
        """Groups that are added to an optimizer later are not included."""
        self._optimizers = [
            (optimizer_name(each), each, sum(number == index for number, _ in stage.groups))
            for index, each in stage.optimizers.items()
        ]
        self._names = {name: hyper_parameter_names(name) for name, _, _ in self._optimizers}
        self._checked: list[HyperParameters] = []
        self._given: list[object] = []  # the script's own values, from which `_checked` was made; empty: read anew
        self._live: Sequence[dict[str, Any]] | None = None  # groups that replace the optimizers' own

    def read_from(self, groups: Sequence[dict[str, Any]]) -> None:
        """Reads hyper-parameters from these groups from now on, in place of the optimizers' own."""
        self._live = groups

    def read(self) -> list[HyperParameters]:
        """Returns the current hyper-parameters of each group. Raises InvalidRequest for values that the shards would
        refuse.
        """
        for name, optimizer, count in self._optimizers:
            if len(optimizer.param_groups) < count:
                raise InvalidRequest(
                    f"{name} had {count} parameter groups at prepare and has {len(optimizer.param_groups)} now: groups "
                    "cannot be taken away; set requires_grad=False on their parameters, or lr to 0"
                )
        named = [
            (name, group) for name, optimizer, count in self._optimizers for group in optimizer.param_groups[:count]
        ]
        if self._live is not None:
            named = [(name, group) for (name, _), group in zip(named, self._live, strict=True)]
        given = [group.get(key, _MISSING) for name, group in named for key in self._names[name]]
        if len(given) == len(self._given) and given and all(map(is_, given, self._given)):
            return self._checked
        groups = [hyper_parameters(name, group) for name, group in named]
        if groups != self._checked:
            for (name, _), values in zip(named, groups, strict=True):
                check_hyper_parameters(name, values)
            self._given = []  # first: an interrupt may come at any line
            self._checked = groups
        self._given = given if all(map(_is_constant, given)) else []
        return groups


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(type(each) in _CONSTANTS for each in value)
    return value is _MISSING or type(value) in _CONSTANTS
