"""Optimizer state of parameters of which a member of a group holds no element.

The job has no piece of such a parameter on this member, and so no state. torch keeps state for it nevertheless: sharded
tensors, and numbers. All members must have this state, or a collective on it, such as `full_tensor`, would hang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ps_worker.group import Group
from ps_worker.model.optimizer import ParameterStates
from ps_worker.model.sharded import is_sharded, like, local

Described = Mapping[str, float | None]  # by the name of a state, its number; None: it is a tensor


def with_empty_shards(
    group: Group | None, parameters: Sequence[torch.Tensor], states: ParameterStates
) -> dict[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Returns an optimizer's state, completed for parameters of which this member has no element: as on the other
    members. A call of all members.

    parameters: the optimizer's, the same on all members among which torch has cut them
    """
    found = dict(states)
    if group is None:
        return found
    own = {_place(i, each): _described(each, states[each]) for i, each in enumerate(parameters) if each in states}
    gathered: list[dict[str, Described]] = [json.loads(each) for each in group.gather(json.dumps(own).encode())]
    for position, parameter in enumerate(parameters):
        if parameter not in found and is_sharded(parameter) and not local(parameter).numel():
            place = _place(position, parameter)
            described = next((each[place] for each in gathered if each.get(place)), {})
            if described:
                found[parameter] = {name: _state(parameter, number) for name, number in described.items()}
    # In the same order on all members: `full_tensor` on these is a collective each.
    return {each: dict(sorted(found[each].items())) for each in parameters if each in found}


def _place(position: int, parameter: torch.Tensor) -> str:
    """Returns a key of a parameter, equal on all members among which it is cut. Members of another pipeline stage have
    another parameter at this position, with another key.
    """
    mesh: Any = parameter.device_mesh.mesh if is_sharded(parameter) else None  # type: ignore[attr-defined]
    return f"{position} of {[] if mesh is None else sorted(mesh.flatten().tolist())}"


def _described(parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Described:
    if not is_sharded(parameter):
        return {}
    return {name: None if is_sharded(value) else float(value) for name, value in state.items()}


def _state(parameter: torch.Tensor, number: float | None) -> torch.Tensor:
    return like(parameter, torch.empty_like(local(parameter))) if number is None else torch.tensor(number)
