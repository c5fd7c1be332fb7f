"""Combines what the members of a group hold into one job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ps_protocol.convert import job_spec_data, job_spec_from_data
from ps_protocol.errors import InvalidRequest, JobMismatch, Unsupported
from ps_protocol.job import JobSpec, difference
from ps_protocol.layout import ParameterSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_worker.group import Group


def check_group(spec: JobSpec) -> None:
    """Raises Unsupported for a job that groups cannot train yet, with what to use instead."""
    if spec.local is not None and (spec.local.fragments is not None or spec.local.seconds is not None):
        raise Unsupported(
            "a worker that is a group of processes trains in mode sync, ssp:K, async or local:H, and the mode is "
            f"{spec.mode}"
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
    told = group.gather(json.dumps(job_spec_data(spec)).encode())
    combined = _combined(told)
    return combined, _tensors(combined, spec.parameters, tensors, group.member)


def _combined(told: Sequence[bytes]) -> JobSpec:
    """Returns the job of a group: the pieces of all members, and the whole tensors of the first one. What several hold
    alike is once there, as the lowest one's.
    """
    specs = [job_spec_from_data(json.loads(each)) for each in told]
    parameters: dict[tuple[object, ...], ParameterSpec] = {}
    for member, spec in enumerate(specs):
        unlike = difference(replace(specs[0], parameters=()), replace(spec, parameters=()))
        if unlike is not None:
            raise JobMismatch(f"members 0 and {member} of this worker's group describe unlike jobs: {unlike}")
        wholes = [each for each in spec.parameters if each.piece is None]
        if wholes != [each for each in specs[0].parameters if each.piece is None]:
            raise JobMismatch(
                f"members 0 and {member} of this worker's group have unlike tensors that are not sharded: "
                "parameters and buffers of a model are the same in all of its processes"
            )
        for each in spec.parameters:
            found = parameters.setdefault((each.key, each.shape), replace(each, member=member))
            _check_alike(found, replace(each, member=member))
    return replace(specs[0], parameters=tuple(parameters.values()))


def _check_alike(found: ParameterSpec, each: ParameterSpec) -> None:
    """Raises JobMismatch if members that hold the same of a parameter describe it in unlike ways."""
    others = vars(each)
    unlike = [
        f"{name} is {one!r} and {others[name]!r}"
        for name, one in vars(found).items()
        if name != "member" and one != others[name]
    ]
    if unlike:
        raise JobMismatch(
            f"members {found.member} and {each.member} of this worker's group hold the same of {found.name}, and "
            f"describe it in unlike ways: {', '.join(unlike)}"
        )


def _tensors(
    spec: JobSpec, parameters: Sequence[ParameterSpec], tensors: Sequence[torch.Tensor], member: int
) -> list[torch.Tensor]:
    """Returns the tensors of a group's job as one member has them: in the place of pieces that it has not, tensors
    without memory.

    parameters, tensors: of this member
    """
    own = {each.key: tensor for each, tensor in zip(parameters, tensors, strict=True)}
    found = []
    for each in spec.parameters:
        if each.key in own:
            found.append(own[each.key])
        elif each.piece is None or each.member == member:
            raise InvalidRequest(f"{each.name} is not in this process")
        else:
            found.append(torch.empty(each.shape, dtype=TORCH_DTYPES[each.dtype], device="meta"))
    return found
