"""Combines the tensors of a group's members into one job: pieces of parameters, or the stages of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ps_protocol.convert import job_spec_data, job_spec_from_data
from ps_protocol.errors import InvalidRequest, JobMismatch, Unsupported
from ps_protocol.job import JobSpec, difference
from ps_protocol.layout import ParameterSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_worker.group import Group
from ps_worker.model.pipeline_stages import NAMES, Key, check_values

# Entries of a parameter group that members need not agree on: the parameters, and how a step is computed.
NOT_COMPARED = ("params", "param_names", "capturable", "differentiable", "foreach", "fused")


def check_group(spec: JobSpec) -> None:
    """Raises Unsupported for a job that groups cannot train yet, with what to use instead."""
    if spec.local is not None and spec.local.seconds is not None:
        raise Unsupported(
            "a worker that is a group of processes trains in mode sync, ssp:K, async, local:H or local:H/F, and the "
            f"mode is {spec.mode}"
        )
    if not spec.world_size:
        raise Unsupported(
            "an elastic job has workers of one process: name the number of groups, connect(world_size=...)"
        )
    if spec.tables:
        raise Unsupported(
            f"workers that are groups of processes have no tables of rows, and the model has "
            f"{spec.tables[0].rows.name!r}"
        )


def described_together(
    group: Group, describe: Callable[[], tuple[JobSpec, list[torch.Tensor]]]
) -> tuple[JobSpec, list[torch.Tensor]]:
    """Returns the job of a group, and this member's tensors for it.

    describe: returns the job with only the pieces of this member, and their tensors
    Raises what `describe` raises in any member; Unsupported; JobMismatch if members describe different jobs. All
    members raise the same error.
    """

    def own() -> tuple[JobSpec, list[torch.Tensor]]:
        spec, tensors = describe()
        check_group(spec)
        return replace(spec, group_size=group.size), tensors

    spec, tensors = group.all_through(own)
    gathered = [job_spec_from_data(json.loads(each)) for each in group.gather(json.dumps(job_spec_data(spec)).encode())]
    combined = _combined(gathered)
    held = {each.key: tensor for each, tensor in zip(spec.parameters, tensors, strict=True)}
    check_values(group, [each.parameters for each in gathered], held)
    return combined, _tensors(combined, held, group.member)


def _combined(specs: Sequence[JobSpec]) -> JobSpec:
    """Returns the job of a group: the parameters of all members. A parameter that several hold alike is in it once, as
    the lowest member's.
    """
    parameters: dict[tuple[object, ...], ParameterSpec] = {}
    for member, spec in enumerate(specs):
        _check_settings(specs[0], spec, member)
        for each in spec.parameters:
            place = (each.key, each.shape if each.piece is not None else None)
            found = parameters.setdefault(place, replace(each, member=member))
            _check_alike(found, replace(each, member=member))
    return replace(specs[0], parameters=tuple(parameters.values()))


def _check_settings(first: JobSpec, spec: JobSpec, member: int) -> None:
    """Raises JobMismatch unless two members of a group describe one job, apart from what they hold: its optimizers are
    the same on both, also where one of them holds nothing of a parameter group."""
    both = f"members 0 and {member} of this worker's group"
    if len(first.param_groups) != len(spec.param_groups):
        raise JobMismatch(
            f"{both} have {len(first.param_groups)} and {len(spec.param_groups)} parameter groups: the "
            "optimizer has the same ones in all members. One that holds no parameter of a group has "
            '{"params": [], ...} for it'
        )
    unlike = difference(replace(first, parameters=()), replace(spec, parameters=()))
    if unlike is not None:
        raise JobMismatch(f"{both} describe unlike jobs: {unlike}")
    for index, (ours, theirs) in enumerate(zip(first.param_groups, spec.param_groups, strict=True)):
        name = next((name for name in ours if ours[name] != theirs[name]), None)
        if name is not None:
            raise JobMismatch(
                f"{both} have {name} {ours[name]} and {theirs[name]} in parameter group {index}: it is one optimizer, "
                "with the same hyper-parameters in all members"
            )


def check_own_optimizers(group: Group, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises JobMismatch, on all members, unless they step with the same optimizers: of the same classes and
    hyper-parameters, in as many parameter groups. A call of all members.

    optimizers: this member's, which step in this process. The job does not describe them
    """
    own = [(type(each).__name__, [_described(params) for params in each.param_groups]) for each in optimizers]
    gathered = [json.loads(each) for each in group.gather(json.dumps(own).encode())]
    for member, each in enumerate(gathered):
        unlike = _unlike_optimizers(gathered[0], each)
        if unlike:
            raise JobMismatch(
                f"members 0 and {member} of this worker's group have {unlike}: the optimizer is one, with the same "
                "parameter groups and hyper-parameters in all members. One that holds no parameter of a group has "
                '{"params": [], ...} for it'
            )


def _described(params: Mapping[str, Any]) -> dict[str, str]:
    """Returns the hyper-parameters of a parameter group that are numbers, booleans or strings, or sequences of
    these.
    """
    found: dict[str, str] = {}
    for name, value in params.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if name not in NOT_COMPARED and isinstance(plain, int | float | str | tuple | list | None):
            found[name] = str(tuple(plain) if isinstance(plain, list) else plain)
    return found


def _unlike_optimizers(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Returns the first difference between the optimizers of two members; empty: there is none."""
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} optimizers"
    for number, ((name, groups), (other, more)) in enumerate(zip(ours, theirs, strict=True)):
        if name != other:
            return f"{name} and {other} as optimizer {number}"
        if len(groups) != len(more):
            return f"{len(groups)} and {len(more)} parameter groups in optimizer {number}"
        for index, (one, two) in enumerate(zip(groups, more, strict=True)):
            for key in sorted({*one, *two}):
                if one.get(key) != two.get(key):
                    return f"{key} {one.get(key)} and {two.get(key)} in parameter group {index} of optimizer {number}"
    return ""


def _check_alike(found: ParameterSpec, each: ParameterSpec) -> None:
    """Raises JobMismatch if members that hold the same of a parameter describe it differently."""
    others = vars(each)
    unlike = [
        f"{name} is {one!r} and {others[name]!r}"
        for name, one in vars(found).items()
        if name != "member" and one != others[name]
    ]
    if unlike:
        raise JobMismatch(
            f"members {found.member} and {each.member} of this worker's group hold the same of {found.name}, and "
            f"describe it in unlike ways: {', '.join(unlike)}{_advice(found)}"
        )


def _advice(parameter: ParameterSpec) -> str:
    return f". {NAMES}" if parameter.piece is None else ""


def _tensors(spec: JobSpec, own: Mapping[Key, torch.Tensor], member: int) -> list[torch.Tensor]:
    """Returns the tensors of a group's job on one member. For those that it does not hold, tensors without memory.

    own: the tensors that this member holds
    """
    found = []
    for each in spec.parameters:
        if each.key in own:
            found.append(own[each.key])
        elif each.member == member:
            raise InvalidRequest(f"{each.name} is not in this process")
        else:
            found.append(torch.empty(each.shape, dtype=TORCH_DTYPES[each.dtype], device="meta"))
    return found
