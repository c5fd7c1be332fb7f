"""The torch.optim optimizers that a shard can run on slices of parameters, and their arguments.

A shard has slices of tensors, so it can run an optimizer that treats each element independently. Optimizers that need
whole tensors (norms, matrices, closures over the loss) are refused by name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.hyper_parameters import HyperParameters, HyperValue
from ps_protocol.job import JobSpec
from ps_protocol.numpy_numbers import as_python

ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__: cls
    for cls in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
    )
}

_INSTEAD = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it needs sparse gradients; use Adam or Adagrad",
    "Adafactor": "it factors whole matrices; use AdamW",
    "Muon": "it orthogonalises whole matrices; use AdamW",
    "ASGD": "its averages belong to whole tensors; use SGD",
    "Rprop": "it is meant for full-batch training; use RMSprop",
}


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Returns the optimizer's step without the decorators that torch puts around it.

    They serve torch's profiler, step hooks (a shard has none), its compiler, and gradients of gradients. Their overhead
    is as long as the step of a small bucket (measured).
    """
    step: Callable[[torch.optim.Optimizer], object] = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return functools.partial(step, optimizer)


# These change how an optimizer runs, not its result. Shards and workers choose them independently.
_EXECUTION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def hyper_parameter_names(name: str) -> tuple[str, ...]:
    """Returns the names of an optimizer's arguments, without parameters and switches of execution."""
    return tuple(_defaults(name))


@functools.cache
def _defaults(name: str) -> dict[str, object]:
    parameters = inspect.signature(ELEMENTWISE[name].__init__).parameters
    return {p: v.default for p, v in parameters.items() if p not in {"self", "params"} and p not in _EXECUTION}


def with_defaults(spec: JobSpec) -> JobSpec:
    """Returns a job whose groups name every hyper-parameter of their optimizers; missing ones get torch's default.

    A client that names only some hyper-parameters and a script that names all thus register equal jobs. A group of an
    unknown optimizer is not changed.
    """
    groups = tuple(
        {**_plain_defaults(spec.optimizer_of(index)), **group} for index, group in enumerate(spec.param_groups)
    )
    return replace(spec, param_groups=groups)


def _plain_defaults(name: str) -> HyperParameters:
    if name not in ELEMENTWISE:
        return {}
    return {
        key: _plain(key, default) for key, default in _defaults(name).items() if default is not inspect.Parameter.empty
    }


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name under which shards know an optimizer. Raises Unsupported, which names an alternative."""
    name = type(optimizer).__name__
    if ELEMENTWISE.get(name) is type(optimizer):
        return name
    if type(optimizer).__module__.startswith("torch.optim") and name in _INSTEAD:
        why = _INSTEAD[name]
    else:
        why = "shards run torch.optim's own classes on slices of parameters"
    raise Unsupported(f"optimizer {name} cannot run on a parameter server: {why} (known: {', '.join(ELEMENTWISE)})")


def hyper_parameters(name: str, group: Mapping[str, Any]) -> HyperParameters:
    """Returns the hyper-parameters of a live param_group as plain values. Raises InvalidRequest that names an invalid
    one."""
    return {
        key: value if type(value := group[key]) in _PLAIN else _plain(key, value)
        for key in _defaults(name)
        if key in group
    }


_PLAIN = frozenset({float, bool, type(None)})  # the types of values that stay as they are


def _plain(name: str, value: object) -> HyperValue:
    if type(value) is int:  # most of those that are no float
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    value = as_python(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, tuple | list):
        return tuple(float(v.item() if isinstance(v, torch.Tensor) else v) for v in value)
    raise InvalidRequest(f"hyper-parameter {name!r} must be a number, a switch, or a tuple of numbers, got {value!r}")


def check_hyper_parameters(name: str, values: HyperParameters) -> None:
    """Raises InvalidRequest unless the constructor of torch's optimizer accepts these values."""
    if name not in ELEMENTWISE:
        raise InvalidRequest(f"expected an optimizer out of {', '.join(ELEMENTWISE)}, got {name!r}")
    known = _defaults(name)
    for key, value in values.items():
        if key not in known:
            raise InvalidRequest(f"{name} takes {', '.join(known)}, got {key!r}")
        _check_kind(name, key, value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):  # torch lets a NaN pass
                raise InvalidRequest(f"hyper-parameter {key!r} of {name} must be finite, got {value}")
    try:
        ELEMENTWISE[name]([torch.zeros(1)], **values)  # type: ignore[arg-type]
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError) as error:
        raise InvalidRequest(f"{name} refuses {dict(values)}: {error}") from error


# Switches whose state torch creates only in a tensor's first step, and reads in every later one. Switched on later, the
# step would raise KeyError.
_ON_FROM_THE_FIRST_STEP = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("centered", "momentum")}


def check_change(name: str, registered: HyperParameters, values: HyperParameters) -> None:
    """Raises InvalidRequest if the optimizer of a running job cannot continue with these values."""
    for key in _ON_FROM_THE_FIRST_STEP.get(name, ()):
        if values.get(key) and not registered.get(key):
            raise InvalidRequest(f"hyper-parameter {key!r} of {name} cannot be switched on in a running job")


def _check_kind(name: str, key: str, value: HyperValue) -> None:
    """Raises InvalidRequest unless a value has the kind of torch's default: some other kinds fail only in a step."""
    default = _defaults(name)[key]
    if isinstance(default, bool):
        fits, expected = isinstance(value, bool), "True or False"
    elif isinstance(default, tuple):
        fits, expected = isinstance(value, tuple) and len(value) == len(default), f"{len(default)} numbers"
    else:
        fits, expected = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if not fits:
        raise InvalidRequest(f"hyper-parameter {key!r} of {name} must be {expected}, got {value}")
