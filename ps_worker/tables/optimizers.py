"""Optimizers that only tables have. A table without one is stepped as its group of the script's optimizer is."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_optimizers import TABLE_OPTIMIZERS, check_row_optimizer

_ADAGRAD, _FTRL = TABLE_OPTIMIZERS["RowWiseAdagrad"], TABLE_OPTIMIZERS["Ftrl"]


@dataclass(frozen=True)
class TableOptimizer:
    """An optimizer of a table's own: the name by which ps_tables knows it, and its hyper-parameters."""

    name: str
    values: HyperParameters

    def __post_init__(self) -> None:
        check_row_optimizer(self.name, self.values)


def RowWiseAdagrad(
    lr: float = _ADAGRAD["lr"],
    eps: float = _ADAGRAD["eps"],
    initial_accumulator_value: float = _ADAGRAD["initial_accumulator_value"],
) -> TableOptimizer:
    """Returns Adagrad with one sum a row, of the means of its gradients' squares: a `dim`-th of the memory."""
    values = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
    return TableOptimizer("RowWiseAdagrad", values)


def Ftrl(
    lr: float = _FTRL["lr"], beta: float = _FTRL["beta"], l1: float = _FTRL["l1"], l2: float = _FTRL["l2"]
) -> TableOptimizer:
    """Returns FTRL-Proximal (McMahan et al., KDD 2013), whose l1 has weights become zero; lr is the paper's alpha."""
    return TableOptimizer("Ftrl", {"lr": lr, "beta": beta, "l1": l1, "l2": l2})
