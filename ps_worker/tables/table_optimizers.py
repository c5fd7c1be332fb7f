"""Optimizers only for tables. Without one, the script's optimizer that has a table's handle steps the table."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.numpy_numbers import as_python
from ps_protocol.row_optimizers import TABLE_OPTIMIZERS, check_row_optimizer

_ADAGRAD, _FTRL = TABLE_OPTIMIZERS["RowWiseAdagrad"], TABLE_OPTIMIZERS["Ftrl"]


@dataclass(frozen=True)
class TableOptimizer:
    """The optimizer of one table: its name in ps_tables, and its hyper-parameters."""

    name: str
    values: HyperParameters

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {key: as_python(value) for key, value in self.values.items()})
        check_row_optimizer(self.name, self.values)


def RowWiseAdagrad(
    lr: float = _ADAGRAD["lr"],
    eps: float = _ADAGRAD["eps"],
    initial_accumulator_value: float = _ADAGRAD["initial_accumulator_value"],
) -> TableOptimizer:
    """Returns row-wise Adagrad: one accumulator a row, which sums the mean square of the row's gradients.

    Its state is 1/dim of Adagrad's. FBGEMM has the same method as EXACT_ROWWISE_ADAGRAD.

    Args:
        lr: The learning rate.
        eps: The term that keeps the divisor above 0.
        initial_accumulator_value: The first value of the accumulator.

    Raises:
        InvalidRequest: A value is out of range.

    Example:
        item = ps_torch.Embedding(8, optimizer=ps_torch.RowWiseAdagrad(lr=0.05))
    """
    values = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
    return TableOptimizer("RowWiseAdagrad", values)


def Ftrl(
    lr: float = _FTRL["lr"], beta: float = _FTRL["beta"], l1: float = _FTRL["l1"], l2: float = _FTRL["l2"]
) -> TableOptimizer:
    """Returns FTRL-Proximal, whose l1 makes weights exactly 0.

    McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013 (https://doi.org/10.1145/2487575.2488200).

    Args:
        lr: The paper's alpha.
        beta: The paper's beta.
        l1: The paper's lambda 1.
        l2: The paper's lambda 2.

    Raises:
        InvalidRequest: A value is out of range.
    """
    return TableOptimizer("Ftrl", {"lr": lr, "beta": beta, "l1": l1, "l2": l2})
