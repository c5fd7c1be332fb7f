"""What trains a bucket from some step on: the stages of a script that goes on with other optimizers.

A job is registered with the optimizers that the script begins with: stage 0. When the script hands over others, a stage
begins, and each bucket is told what steps its slices from then on. The layout of the job, its buckets and clocks stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec

MAX_STAGES = 256  # that a job may come to: each bucket keeps what trains it in each


@dataclass(frozen=True)
class StageSpec:
    """What trains one bucket in one stage.

    number:    of the stage, 0 being that of the registered job
    optimizer: the name of a torch.optim class
    members:   by slice, its group; None: no optimizer has it, and it stays as it is
    groups:    the hyper-parameters of these groups when the stage begins
    kept:      the positions of slices whose optimizer state goes on from the stage before; others begin without any
    """

    number: int
    optimizer: str
    members: tuple[int | None, ...]
    groups: Mapping[int, HyperParameters] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()

    @property
    def trained(self) -> frozenset[int]:
        """The positions of the slices that an optimizer has."""
        return frozenset(position for position, group in enumerate(self.members) if group is not None)

    def of(self, position: int) -> HyperParameters:
        """Returns the hyper-parameters of the group that has a slice, when the stage begins."""
        group = self.members[position]
        return {} if group is None else self.groups[group]


def first_stage(spec: JobSpec, bucket: BucketSpec) -> StageSpec:
    """Returns what trains a bucket as its job is registered."""
    members = tuple(spec.parameters[part.parameter].group for part in bucket.slices)
    groups = {group: spec.groups[group] for group in dict.fromkeys(members) if group is not None}
    return StageSpec(0, spec.optimizers[bucket.optimizer], members, groups)


def stage_difference(known: StageSpec, offered: StageSpec) -> str | None:
    """Returns in words in what two descriptions of one stage differ; None where they are the same.

    Values of hyper-parameters are no part of it: a schedule may have moved them.
    """
    if known.optimizer != offered.optimizer:
        return f"the optimizer is {known.optimizer}, and this worker's is {offered.optimizer}"
    if known.members != offered.members:
        return f"the groups of its slices are {known.members}, and this worker's are {offered.members}"
    return None
