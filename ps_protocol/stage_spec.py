"""Stages of a script that changes its optimizers: the optimizer of a bucket in each stage.

A job is registered with the optimizers that the script begins with: stage 0. `session.prepare` with other optimizers
begins the next stage. A stage tells each bucket the optimizer and the groups of its slices. The job's layout, buckets
and clocks stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec

MAX_STAGES = 256  # the most stages of a job: each bucket keeps the specification of every stage


@dataclass(frozen=True)
class StageSpec:
    """The optimizer of one bucket in one stage.

    number: of the stage; 0 is that of the registered job
    optimizer: the name of a torch.optim class
    group_of_slice: for each slice its parameter group; None: no optimizer steps it
    groups: the hyper-parameters of these groups at the beginning of the stage
    kept: the positions of slices that keep their optimizer state from the stage before; the others begin without state
    """

    number: int
    optimizer: str
    group_of_slice: tuple[int | None, ...]
    groups: Mapping[int, HyperParameters] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()

    @property
    def trained(self) -> frozenset[int]:
        """The positions of the slices that an optimizer steps."""
        return frozenset(position for position, group in enumerate(self.group_of_slice) if group is not None)

    def of(self, position: int) -> HyperParameters:
        """Returns the hyper-parameters of a slice's group at the beginning of the stage."""
        group = self.group_of_slice[position]
        return {} if group is None else self.groups[group]


def first_stage(spec: JobSpec, bucket: BucketSpec) -> StageSpec:
    """Returns the stage of a bucket as its job is registered."""
    members = tuple(spec.parameters[part.parameter].param_group for part in bucket.slices)
    groups = {group: spec.param_groups[group] for group in dict.fromkeys(members) if group is not None}
    return StageSpec(0, spec.optimizers[bucket.optimizer], members, groups)


def stage_difference(known: StageSpec, offered: StageSpec) -> str | None:
    """Describes the first difference between two descriptions of one stage; None if they are the same.

    Values of hyper-parameters are not compared: a schedule may have changed them.
    """
    if known.optimizer != offered.optimizer:
        return f"the optimizer is {known.optimizer}, and this worker's is {offered.optimizer}"
    if known.group_of_slice != offered.group_of_slice:
        return f"the groups of its slices are {known.group_of_slice}, and this worker's are {offered.group_of_slice}"
    return None
