"""Which torch.optim optimizers a shard can run on slices of parameters, and what they are called with.

A shard holds slices of tensors, so an optimizer fits if it treats every element by itself. Those that look at whole
tensors (norms, matrices, closures over the loss) are refused by name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.hyper_parameters import HyperParameters, HyperValue
from ps_protocol.job import JobSpec

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

FUSED_ON_CPU = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})  # those that take `fused`, for float32


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Returns the optimizer's step, without what torch wraps around it: for its profiler and for hooks, of which there
    are none here, and for its compiler and gradients of gradients. That takes as long as a small bucket (measured)."""
    step: Callable[[torch.optim.Optimizer], object] = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return lambda: step(optimizer)


# How an optimizer runs, not what it computes: each end chooses these for itself.
_EXECUTION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def hyper_parameter_names(name: str) -> tuple[str, ...]:
    """Returns what the optimizer of that name is called with, besides parameters and switches of execution."""
    return tuple(_defaults(name))


@functools.cache
def _defaults(name: str) -> dict[str, object]:
    parameters = inspect.signature(ELEMENTWISE[name].__init__).parameters
    return {p: v.default for p, v in parameters.items() if p not in {"self", "params"} and p not in _EXECUTION}


def with_defaults(spec: JobSpec) -> JobSpec:
    """Returns a job whose groups name every hyper-parameter of their optimizers, those left out with torch's default.

    So a client that names those that it means and a script that has them all register equal jobs. A group of an
    optimizer that is not known stays as it is.
    """
    groups = tuple({**_plain_defaults(spec.optimizer_of(index)), **group} for index, group in enumerate(spec.groups))
    return replace(spec, groups=groups)


def _plain_defaults(name: str) -> HyperParameters:
    if name not in ELEMENTWISE:
        return {}
    return {
        key: _plain(key, default) for key, default in _defaults(name).items() if default is not inspect.Parameter.empty
    }


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name under which shards know this optimizer. Raises Unsupported, with what to use instead."""
    name = type(optimizer).__name__
    if ELEMENTWISE.get(name) is type(optimizer):
        return name
    if type(optimizer).__module__.startswith("torch.optim") and name in _INSTEAD:
        why = _INSTEAD[name]
    else:
        why = "shards run torch.optim's own classes on slices of parameters"
    raise Unsupported(f"optimizer {name} cannot run on a parameter server: {why} (known: {', '.join(ELEMENTWISE)})")


def hyper_parameters(name: str, group: dict[str, object]) -> HyperParameters:
    """Returns a live param_group's hyper-parameters as plain values. Raises InvalidRequest naming one that is not."""
    return {key: _plain(key, group[key]) for key in hyper_parameter_names(name) if key in group}


def _plain(name: str, value: object) -> HyperValue:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, tuple | list):
        return tuple(float(v.item() if isinstance(v, torch.Tensor) else v) for v in value)
    raise InvalidRequest(f"hyper-parameter {name!r} must be a number, a switch, or a tuple of numbers, got {value!r}")


def check_hyper_parameters(name: str, values: HyperParameters) -> None:
    """Raises InvalidRequest unless torch's own constructor takes these values."""
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


# State that torch makes in a tensor's first step, and only if this is on then; it looks for it in every later one.
_ON_FROM_THE_FIRST_STEP = {"Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("centered", "momentum")}


def check_change(name: str, registered: HyperParameters, values: HyperParameters) -> None:
    """Raises InvalidRequest if a running job's optimizer cannot continue with these values."""
    for key in _ON_FROM_THE_FIRST_STEP.get(name, ()):
        if values.get(key) and not registered.get(key):
            raise InvalidRequest(f"hyper-parameter {key!r} of {name} cannot be switched on in a running job")


def _check_kind(name: str, key: str, value: HyperValue) -> None:
    """Raises InvalidRequest unless a value is of the same kind as torch's default: some others fail only in a step."""
    default = _defaults(name)[key]
    if isinstance(default, bool):
        fits, expected = isinstance(value, bool), "True or False"
    elif isinstance(default, tuple):
        fits, expected = isinstance(value, tuple) and len(value) == len(default), f"{len(default)} numbers"
    else:
        fits, expected = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if not fits:
        raise InvalidRequest(f"hyper-parameter {key!r} of {name} must be {expected}, got {value}")
