"""Which optimizer steps each parameter of a job, in each stage of the script: `session.prepare(optimizer)` begins a
stage.

The job stays as it is registered, with its buckets, clocks and checkpoints. A stage has the optimizers, whose
hyper-parameters are sent with each push, and the StageSpec of each bucket (ps_protocol/stage_spec.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ps_protocol.errors import Unsupported
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.optimizers import check_hyper_parameters, hyper_parameters, optimizer_name
from ps_protocol.stage_spec import StageSpec, first_stage


@dataclass(frozen=True)
class ScriptStage:
    """One stage of one job.

    number:     from 0, which is the job as it was registered
    spec:       the job in this stage: its groups are those of the stage's optimizers, one after the other; in place of
                each registered optimizer, `optimizers` has the class that steps its buckets now
    optimizers: the optimizers that step, by number in the script
    groups:     for each group of `spec`: the number of the optimizer, and the index among its groups
    owner:      by parameter, the number of its optimizer; parameters that are missing keep their values
    since:      by parameter, the stage in which that optimizer began
    buckets:    by index, the StageSpec of each trained bucket
    """

    number: int
    spec: JobSpec
    optimizers: Mapping[int, torch.optim.Optimizer]
    groups: Sequence[tuple[int, int]]
    owner: Mapping[int, int]
    since: Mapping[int, int]
    buckets: Mapping[int, StageSpec]

    def parameters_of(self, optimizer: int) -> frozenset[int]:
        """Returns the parameters that one optimizer has, by index in the job."""
        return frozenset(index for index, owner in self.owner.items() if owner == optimizer)

    def name(self, optimizer: int) -> str:
        """Returns the name of an optimizer's class."""
        return optimizer_name(self.optimizers[optimizer])


def tensors_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters of an optimizer."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def stage_of_job(spec: JobSpec, layout: Layout, optimizers: Sequence[torch.optim.Optimizer]) -> ScriptStage:
    """Returns the stage that a job begins with."""
    owner = {i: each.optimizer for i, each in enumerate(spec.parameters) if layout.trains(each)}
    groups = [(number, place) for number, each in enumerate(optimizers) for place in range(len(each.param_groups))]
    trained = {bucket.index: first_stage(spec, bucket) for bucket in layout.trained}
    return ScriptStage(0, spec, dict(enumerate(optimizers)), groups, owner, dict.fromkeys(owner, 0), trained)


def next_stage(
    before: ScriptStage,
    layout: Layout,
    indices: Mapping[int, int],
    optimizers: Mapping[int, torch.optim.Optimizer],
    new: Collection[int],
) -> ScriptStage:
    """Returns the stage after `before`.

    indices:    by the id of a parameter in the job's buckets, its index
    optimizers: all optimizers that step in the stage, by number
    new:        the numbers of those that begin with it
    Raises Unsupported for optimizers that the shards cannot run on the job's buckets, InvalidRequest for
    hyper-parameters that they would refuse.
    """
    number = before.number + 1
    groups = [(index, place) for index, each in optimizers.items() for place in range(len(each.param_groups))]
    names = {index: optimizer_name(each) for index, each in optimizers.items()}
    members: dict[int, int] = {}
    for group, (index, place) in enumerate(groups):
        for tensor in optimizers[index].param_groups[place]["params"]:
            if id(tensor) in indices:
                members[indices[id(tensor)]] = group
    owner = {parameter: groups[group][0] for parameter, group in members.items()}
    since = {parameter: number if index in new else before.since[parameter] for parameter, index in owner.items()}
    values = [hyper_parameters(names[index], optimizers[index].param_groups[place]) for index, place in groups]
    for (index, _), each in zip(groups, values, strict=True):
        check_hyper_parameters(names[index], each)
    classes = _classes(before.spec, owner, names)
    spec = replace(
        before.spec,
        parameters=tuple(replace(each, param_group=members.get(i)) for i, each in enumerate(before.spec.parameters)),
        optimizer=classes[0],
        more_optimizers=classes[1:],
        param_groups=tuple(values),
        # By name alone: a group has the class of its own optimizer.
        param_group_optimizers=tuple(classes.index(names[i]) if names[i] in classes else 0 for i, _ in groups),
    )
    specs = {bucket.index: _spec_of(spec, bucket, number, since) for bucket in layout.buckets if not bucket.frozen}
    return ScriptStage(number, spec, optimizers, groups, owner, since, specs)


def _classes(spec: JobSpec, owner: Mapping[int, int], names: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the classes that step the buckets of each registered optimizer."""
    found: list[dict[str, int]] = [{} for _ in spec.optimizers]
    for parameter, index in owner.items():
        found[spec.parameters[parameter].optimizer].setdefault(names[index], parameter)
    for classes in found:
        if len(classes) > 1:
            one, other, *_ = classes.items()
            raise Unsupported(
                f"{spec.parameters[one[1]].name} would be stepped by {one[0]} and {spec.parameters[other[1]].name} by "
                f"{other[0]}, and one optimizer has had both: what it had is stepped by one class. Begin another job "
                "for that: session.close(), then connect(job=...) with another name, and prepare"
            )
    return tuple(next(iter(classes), before) for classes, before in zip(found, spec.optimizers, strict=True))


def _spec_of(spec: JobSpec, bucket: BucketSpec, number: int, since: Mapping[int, int]) -> StageSpec:
    named = first_stage(spec, bucket)
    kept = {p for p, part in enumerate(bucket.slices) if since.get(part.parameter, number) < number}
    return replace(named, number=number, kept=frozenset(kept))
