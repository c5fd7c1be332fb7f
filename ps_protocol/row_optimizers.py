"""The optimizers of tables: those of torch.optim that can step rows, and two that only tables have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizer_state import FOR_TABLES, tensors_kept
from ps_protocol.optimizers import check_hyper_parameters

TORCH_OPTIMIZERS = FOR_TABLES  # torch.optim's that can step rows
# The hyper-parameters with their defaults; each must be finite and at least 0.
TABLE_OPTIMIZERS: Mapping[str, Mapping[str, float]] = {
    "RowWiseAdagrad": {"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0},
    "Ftrl": {"lr": 0.05, "beta": 0.0, "l1": 0.0, "l2": 0.0},
}
ROW_OPTIMIZERS = (*TORCH_OPTIMIZERS, *TABLE_OPTIMIZERS)


def check_row_optimizer(name: str, values: HyperParameters) -> None:
    """Raises InvalidRequest unless an optimizer can step rows with these hyper-parameters."""
    if name in TORCH_OPTIMIZERS:
        check_hyper_parameters(name, values)
        return
    known = TABLE_OPTIMIZERS.get(name)
    if known is None:
        raise InvalidRequest(f"a table's optimizer is one of {', '.join(ROW_OPTIMIZERS)}, got {name[:80]!r}")
    for key, value in values.items():
        if key not in known:
            raise InvalidRequest(f"{name} takes {', '.join(known)}, got {key[:80]!r}")
        if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < math.inf:
            raise InvalidRequest(f"{name}: {key} must be a finite number from 0, got {value!r}")
    if name == "Ftrl" and not values.get("lr", known["lr"]):
        raise InvalidRequest("Ftrl: lr must be above 0, because it is divided by")


def numbers_kept(name: str, values: HyperParameters, dim: int) -> int:
    """Returns the count of numbers that an optimizer keeps for a row of `dim` elements."""
    return sum(state_kept(name, values, dim).values())


def state_kept(name: str, values: HyperParameters, dim: int) -> dict[str, int]:
    """Returns the state that an optimizer keeps for a row of `dim` elements: the names in order, each with its size."""
    if name == "RowWiseAdagrad":
        return {"sum": 1}
    return dict.fromkeys(("z", "n") if name == "Ftrl" else tensors_kept(name, values), dim)
