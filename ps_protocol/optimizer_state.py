"""The state that torch.optim's optimizers keep for each parameter, and which have fused kernels, by name.

This file needs no torch. optimizers.py has the optimizers themselves.
"""

from __future__ import annotations

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters

# The state of each optimizer for a parameter, as its state_dict has it: tensors of the parameter's shape and type, and
# single float32 numbers.
_ELEMENTWISE_STATE: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adagrad": ("sum",),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
}
_SCALAR_STATE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ELEMENTWISE_STATE, ("step",)),
    "SGD": (),
    "NAdam": ("step", "mu_product"),
}

KNOWN = tuple(_ELEMENTWISE_STATE)  # the optimizers that shards run
FUSED_ON_CPU = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})  # torch implements `fused` on a CPU for these, in float32
# The optimizers that tables can run, too. A table keeps tensors of row size alone, and counts its steps itself, so an
# optimizer with another number for a parameter is left out. NAdam has one, a product over all of the parameter's steps
# (mu_product), and rows do not take part in every step.
FOR_TABLES = tuple(name for name in KNOWN if set(_SCALAR_STATE[name]) <= {"step"})


def is_scalar_state(optimizer: str, state: str) -> bool:
    """Returns whether a state is one float32 number for a parameter, and not a tensor of the parameter's shape.

    Raises InvalidRequest for a state that the optimizer does not have.
    """
    if state in _SCALAR_STATE[optimizer]:
        return True
    if state not in _ELEMENTWISE_STATE[optimizer]:
        known = ", ".join((*_SCALAR_STATE[optimizer], *_ELEMENTWISE_STATE[optimizer]))
        raise InvalidRequest(f"the state of {optimizer} is {known}, got {state[:80]!r}")
    return False


def required_state(optimizer: str, values: HyperParameters) -> frozenset[str]:
    """Returns the names that a parameter's state must have, unless it is empty, for an optimizer to continue."""
    required = {*_SCALAR_STATE[optimizer], *_ELEMENTWISE_STATE[optimizer]}
    if not values.get("amsgrad"):
        required.discard("max_exp_avg_sq")
    if not values.get("centered"):
        required.discard("grad_avg")
    if not values.get("momentum") or optimizer == "SGD":
        required.discard("momentum_buffer")
    return frozenset(required)


def tensors_kept(optimizer: str, values: HyperParameters) -> tuple[str, ...]:
    """Returns the names of the parameter-shaped tensors that an optimizer keeps once it has stepped a parameter."""
    required = required_state(optimizer, values)
    has_momentum = optimizer == "SGD" and bool(values.get("momentum"))
    return tuple(name for name in _ELEMENTWISE_STATE[optimizer] if name in required or has_momentum)
