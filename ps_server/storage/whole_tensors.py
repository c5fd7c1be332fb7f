"""Whole tensors out of the pieces that members of a group hold, for an export.

The pieces of a parameter share its name. While the tensors of a checkpoint are collected, each has a name of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.pieces import pieces_by_name, whole_parameters

_SEPARATOR = "\0"  # which no name of a parameter has


def with_names_of_pieces(spec: JobSpec) -> JobSpec:
    """Returns a job in which each piece of a parameter has a name of its own."""
    return replace(
        spec,
        parameters=tuple(
            each if each.piece is None else replace(each, name=f"{each.name}{_SEPARATOR}{index}")
            for index, each in enumerate(spec.parameters)
        ),
    )


def in_whole_tensors(
    spec: JobSpec,
    model: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
) -> tuple[JobSpec, dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Returns a job and its tensors with the parameters whole, under their own names.

    spec:   with names of pieces
    model:  by name
    state:  the optimizer's, `INDEX/NAME`: INDEX by the order of the groups, and in each of the parameters
    groups: the optimizer's; "params" has these numbers
    """
    renamed = tuple(replace(each, name=each.name.partition(_SEPARATOR)[0]) for each in spec.parameters)
    own_name = {id(new): old.name for new, old in zip(renamed, spec.parameters, strict=True)}
    wholes, pieces = whole_parameters(renamed), pieces_by_name(renamed)
    if not pieces:
        return spec, dict(model), dict(state), [dict(group) for group in groups]
    before = _numbers(spec.parameters, len(groups))
    after = _numbers(wholes, len(groups))
    of_parameter: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        index, name = key.split("/")
        of_parameter.setdefault(int(index), {})[name] = tensor
    whole_model: dict[str, torch.Tensor] = {}
    whole_state: dict[str, torch.Tensor] = {}
    for whole in wholes:
        parts = pieces.get(whole.name, ())
        names = [own_name[id(each)] for each in parts] or [whole.name]
        if all(name in model for name in names):
            whole_model[whole.name] = _joined(parts, [model[name] for name in names])
        states = [of_parameter.get(before[name], {}) if name in before else {} for name in names]
        for kind in states[0]:
            if all(kind in each for each in states):
                joined = _joined(parts, [each[kind] for each in states])
                whole_state[f"{after[whole.name]}/{kind}"] = joined
    numbered = [
        {**group, "params": [after[each.name] for each in wholes if each.group == index]}
        for index, group in enumerate(groups)
    ]
    return replace(spec, parameters=wholes, group_size=1), whole_model, whole_state, numbered


def _numbers(parameters: Sequence[ParameterSpec], groups: int) -> dict[str, int]:
    """Returns the number of each parameter that an optimizer steps: in the order of its groups."""
    order = [each for group in range(groups) for each in parameters if each.group == group]
    return {each.name: number for number, each in enumerate(order)}


def _joined(pieces: Sequence[ParameterSpec], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the whole of tensors that are the pieces of a parameter, or have one number for each of them."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if tuple(first.shape) != pieces[0].shape:
        return torch.stack(list(tensors)).amax(0)  # a count of steps: the same for each
    whole = pieces[0].piece
    assert whole is not None
    cut = next(d for d, size in enumerate(whole.whole_shape) if pieces[0].shape[d] != size)
    return torch.cat(list(tensors), dim=cut)
