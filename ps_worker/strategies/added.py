"""Parameters that an optimizer is given after `prepare`: `optimizer.add_param_group`, to unfreeze layers for example.

A job's parameters are fixed when it is registered. So what is added later is a job of its own beside it, with the same
workers: `NAME.added1` for the first group that is added to job NAME, and so on. Its clock counts the steps since then.
Everything that is neither weights nor optimizer state stays with the first job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec


def checked_group(
    group: Mapping[str, Any], spec: JobSpec, indices: Mapping[int, int], taken: set[int]
) -> list[nn.Parameter]:
    """The parameters of a group that is to be added.

    indices: by the id of a tensor, its index in the job. taken: indices that other groups have since `prepare`
    Raises InvalidRequest or Unsupported for what cannot be added.
    """
    found = group["params"]
    parameters: list[Any] = [found] if isinstance(found, torch.Tensor) else list(found)
    if not parameters:
        raise InvalidRequest("expected at least one parameter in the group, got none")
    for parameter in parameters:
        index = indices.get(id(parameter))
        if index is None or not isinstance(parameter, nn.Parameter):
            raise Unsupported(
                "add_param_group takes parameters of the models that were handed to prepare, got a tensor of "
                f"{tuple(parameter.shape)} that is in none of them"
            )
        if spec.parameters[index].group is not None or index in taken:
            raise InvalidRequest(f"{spec.parameters[index].name} is in an optimizer already")
    return parameters


def holder(spec: JobSpec, indices: Mapping[int, int], parameters: list[nn.Parameter]) -> nn.Module:
    """A module with these parameters under the names that they have in the job."""
    root = nn.Module()
    for parameter in parameters:
        *path, name = spec.parameters[indices[id(parameter)]].name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, parameter)
    return root


def optimizer_of(wrapped: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer like another, of one of its live groups."""
    kind = type(wrapped)
    made = kind.__new__(kind)
    made.__dict__.update(wrapped.__dict__)
    made.__dict__["state"] = defaultdict(dict)
    made.__dict__["param_groups"] = [group]
    return made
