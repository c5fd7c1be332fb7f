"""The arguments of `prepare`: sorted by what they are, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import WIRES, NonFinite


@dataclass(frozen=True)
class SortedThings:
    """The arguments of `prepare`, sorted; `others` have a state."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    loaders: list[DataLoader[Any]]
    others: list[Any]


def sort_given(things: Sequence[Any]) -> SortedThings:
    """Returns the arguments of `prepare`, sorted. Raises InvalidRequest for one that it cannot take."""
    given = SortedThings([], [], [], [])
    for thing in things:
        _refuse_framework_optimizer(thing)
        if isinstance(thing, nn.Module):
            given.models.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            given.optimizers.append(thing)
        elif isinstance(thing, DataLoader):
            given.loaders.append(thing)
        elif _has_state(thing):
            given.others.append(thing)
        else:
            raise InvalidRequest(
                "prepare takes a model, its optimizer, DataLoaders, and what has a state_dict (schedulers), got "
                f"{type(thing).__name__}{_advice(thing)}"
            )
    return given


def check_pairs(given: SortedThings) -> None:
    """Raises InvalidRequest for models without optimizers, or optimizers without models, if none were prepared
    before.
    """
    if bool(given.models) != bool(given.optimizers):
        raise InvalidRequest(
            "prepare takes models together with their optimizers, all in one call, got "
            f"{len(given.models)} models and {len(given.optimizers)} optimizers"
        )


def _advice(thing: Any) -> str:
    """Returns the advice, in an error, for a loader that is not torch's."""
    if not callable(getattr(thing, "__iter__", None)):
        return ""
    where = ": use it as it is, without prepare, and have it read this worker's part of the data: "
    if any(kind.__module__.partition(".")[0] == "webdataset" for kind in type(thing).__mro__):
        return f"{where}WebDataset(urls[session.rank :: session.world_size]), or split_by_node as its nodesplitter"
    return f"{where}part session.rank of session.world_size"


def check_own(own: Sequence[Any], others: Sequence[Any]) -> None:
    """Raises InvalidRequest if an object in `own` is not among the objects with a state that prepare was given."""
    for thing in own:
        if not any(thing is each for each in others):
            raise InvalidRequest(
                "prepare(..., own=[...]) names things with a state_dict that are handed over in the same call, but no "
                f"model, optimizer or loader; got {type(thing).__name__}"
            )


def _refuse_framework_optimizer(thing: Any) -> None:
    """Raises InvalidRequest for the optimizer that Accelerate or Lightning made of the user's own."""
    inner = getattr(thing, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(thing, "param_groups"):  # a scheduler has no groups
        return
    if "_optimizer_step_pre_hooks" not in getattr(thing, "__dict__", {}):  # Optimizer.__init__ makes them
        raise InvalidRequest(
            f"{type(thing).__name__} is a framework's wrapper of the optimizer {type(inner).__name__}: hand the plain "
            "optimizer to prepare, before accelerator.prepare or its like"
        )


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def non_finite_named(name: str) -> NonFinite:
    """Returns the handling of gradients that are not finite, by its name. Raises InvalidRequest for an unknown one."""
    try:
        return NonFinite(name)
    except ValueError:
        raise InvalidRequest(f"non_finite must be 'refuse', 'skip' or 'allow', got {name!r}") from None


def wire_named(name: str) -> str:
    """Returns the name of a wire format. Raises InvalidRequest for an unknown one."""
    if name not in WIRES:
        raise InvalidRequest(f"a wire format is one of {', '.join(WIRES)}, got {name!r}")
    return name
