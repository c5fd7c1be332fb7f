"""Optimizers that step some rows of a table, with the state of each row.

torch.optim's own classes run over the rows of an update, gathered into one tensor: lazily, as torch.optim.SparseAdam
does, because rows that are not in an update do not move. Two more are in common use for tables: row-wise Adagrad, which
keeps one number a row (as in fbgemm's and TorchRec's tables), and FTRL-Proximal (McMahan et al., "Ad Click Prediction:
a View from the Trenches", KDD 2013).

A row's bits depend on its own gradients alone, not on which rows are stepped beside it. torch's fused kernels do not
give that by themselves: they round the last elements of a tensor, which fill no vector register, in another way. So
gathered rows are padded to full registers. Plain SGD and row-wise Adagrad do without torch: see steps.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizer_state import FUSED_ON_CPU, tensors_kept
from ps_protocol.optimizers import ELEMENTWISE, bare_step
from ps_protocol.row_optimizers import ROW_OPTIMIZERS, TABLE_OPTIMIZERS, TORCH_OPTIMIZERS
from ps_tables.row_arrays import RowArray, RowNumbers
from ps_tables.steps import BLOCK_ELEMENTS, row_wise_adagrad, sgd

_NOT_PLAIN = ("momentum", "weight_decay", "maximize", "nesterov")  # options with which torch steps, and not steps.py
PADDING = 64  # elements: whole vector registers of every processor, and of torch's unrolled loops


class RowOptimizer(ABC):
    """Steps rows of a table, and keeps their state.

    state: by name, an array with the state of each row: `dim` numbers a row, or one
    """

    def __init__(self, state: Mapping[str, RowArray]) -> None:
        self.state = state

    @abstractmethod
    def step(
        self,
        weights: RowArray,
        rows: RowNumbers,
        sums: torch.Tensor,
        count: int,
        values: HyperParameters,
        version: int,
    ) -> None:
        """Steps distinct rows with a mean gradient.

        rows:    [n]
        sums:    [n, dim] float32, contiguous: sums of gradients
        count:   the divisor of the mean
        values:  hyper-parameters
        version: the number of the table's update, from 1: it is the step of optimizers that count steps
        """

    def reset(self, rows: RowNumbers, values: HyperParameters) -> None:
        """Sets the state of rows to its initial values: zeros, unless the optimizer defines others."""
        for name, array in self.state.items():
            array.write(
                rows, torch.full((len(rows), array.dim), self._first(name, values), dtype=torch.float32, device="cpu")
            )

    def _first(self, name: str, values: HyperParameters) -> float:
        """Returns the initial value of a state."""
        # torch's Adagrad has the same default.
        return _number(values, "RowWiseAdagrad", "initial_accumulator_value") if name == "sum" else 0.0


class _Gathering(RowOptimizer):
    """Gathers the rows of an update, a block at a time, and steps the blocks."""

    def __init__(self, dim: int, state: Mapping[str, RowArray]) -> None:
        super().__init__(state)
        self._dim = dim
        self._block = max(1, BLOCK_ELEMENTS // dim)  # rows
        self._gathered: dict[str, torch.Tensor] = {}  # memory for a block of each array, used again and again

    def step(
        self,
        weights: RowArray,
        rows: RowNumbers,
        sums: torch.Tensor,
        count: int,
        values: HyperParameters,
        version: int,
    ) -> None:
        """Steps rows, block by block."""
        arrays = {"": weights, **self.state}
        for first in range(0, len(rows), self._block):
            block = rows[first : first + self._block]
            tensors = {name: self._gather(name, array, block) for name, array in arrays.items()}
            gradient = self._mean(sums[first : first + self._block], count)
            self._step(tensors, gradient, len(block), values, version)
            for name, array in arrays.items():
                array.write(block, tensors[name][: len(block) * array.dim])

    @abstractmethod
    def _step(
        self, tensors: dict[str, torch.Tensor], gradient: torch.Tensor, rows: int, values: HyperParameters, version: int
    ) -> None:
        """Steps one block in place.

        tensors: the weights under the empty name, and each state under its own; padded, as the gradient is
        """

    def _mean(self, sums: torch.Tensor, count: int) -> torch.Tensor:
        gradient = self._padded("gradient", len(sums), self._dim)
        torch.div(sums.view(-1), count, out=gradient[: len(sums) * self._dim])
        return gradient

    def _gather(self, name: str, array: RowArray, rows: RowNumbers) -> torch.Tensor:
        gathered = self._padded(name, len(rows), array.dim)
        array.read(rows, gathered[: len(rows) * array.dim])
        return gathered

    def _padded(self, name: str, rows: int, dim: int) -> torch.Tensor:
        """Returns memory for `rows` rows, padded to full registers with numbers that no step makes infinite."""
        numel = rows * dim
        length = -(-numel // PADDING) * PADDING
        memory = self._gathered.get(name)
        if memory is None or len(memory) < length:
            memory = self._gathered[name] = torch.zeros(length, dtype=torch.float32, device="cpu")
        memory[numel:length] = 0
        return memory[:length]


class _TorchOptimizer(_Gathering):
    """An optimizer of torch.optim, whose only parameter is the rows of a block."""

    def __init__(self, name: str, values: HyperParameters, capacity: int, dim: int) -> None:
        super().__init__(dim, {kept: RowArray(capacity, dim) for kept in tensors_kept(name, values)})
        self._parameter = torch.empty(0, dtype=torch.float32, device="cpu")
        fused = {"fused": True} if name in FUSED_ON_CPU else {}
        self._optimizer = ELEMENTWISE[name]([self._parameter], **values, **fused)  # type: ignore[arg-type]
        self._bare_step = bare_step(self._optimizer)
        self._steps = torch.zeros((), dtype=torch.float32, device="cpu")
        self._is_sgd = name == "SGD"

    def step(
        self,
        weights: RowArray,
        rows: RowNumbers,
        sums: torch.Tensor,
        count: int,
        values: HyperParameters,
        version: int,
    ) -> None:
        """Steps rows: plain SGD by steps.py, all else by torch."""
        group = self._optimizer.param_groups[0]
        group.update(values)
        if self._is_sgd and not (self.state or any(group[name] for name in _NOT_PLAIN)):
            sgd(weights, rows, sums.detach().numpy(), count, float(group["lr"]))
        else:
            super().step(weights, rows, sums, count, values, version)

    def _step(
        self, tensors: dict[str, torch.Tensor], gradient: torch.Tensor, rows: int, values: HyperParameters, version: int
    ) -> None:
        self._optimizer.param_groups[0].update(values)
        self._parameter.data, self._parameter.grad = tensors[""], gradient
        self._steps.fill_(version - 1)
        states = {name: tensor for name, tensor in tensors.items() if name}
        self._optimizer.state[self._parameter] = {**states, "step": self._steps}
        self._bare_step()
        self._parameter.grad = None


class _RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum for each row: the sum of the means of its squared gradients."""

    def __init__(self, capacity: int) -> None:
        super().__init__({"sum": RowArray(capacity, 1)})

    def step(
        self,
        weights: RowArray,
        rows: RowNumbers,
        sums: torch.Tensor,
        count: int,
        values: HyperParameters,
        version: int,
    ) -> None:
        """Steps rows by the arithmetic of steps.py."""
        lr, eps = (_number(values, "RowWiseAdagrad", key) for key in ("lr", "eps"))
        row_wise_adagrad(weights, self.state["sum"], rows, sums.detach().numpy(), count, lr, eps)


class _FtrlProximal(_Gathering):
    """FTRL-Proximal, an element at a time: `z` and `n` are the paper's."""

    def __init__(self, capacity: int, dim: int) -> None:
        super().__init__(dim, {name: RowArray(capacity, dim) for name in ("z", "n")})

    def _step(
        self, tensors: dict[str, torch.Tensor], gradient: torch.Tensor, rows: int, values: HyperParameters, version: int
    ) -> None:
        weights, z, n = tensors[""], tensors["z"], tensors["n"]
        alpha, beta, l1, l2 = (_number(values, "Ftrl", key) for key in ("lr", "beta", "l1", "l2"))
        before = n.sqrt()
        n += gradient * gradient
        root = n.sqrt()
        z += gradient - (root - before) / alpha * weights
        # Where nothing was learnt yet, z is zero, and so is the weight; the divisor may be zero there, too.
        divisor = ((beta + root) / alpha + l2).clamp_(min=torch.finfo(torch.float32).tiny)
        weights.copy_(torch.where(z.abs() > l1, (z.sign() * l1 - z) / divisor, 0.0))


def row_optimizer(name: str, values: HyperParameters, capacity: int, dim: int) -> RowOptimizer:
    """Returns an optimizer with state for up to `capacity` rows. Raises InvalidRequest for an unknown name.

    values: hyper-parameters when the table is made
    """
    if name in TORCH_OPTIMIZERS:
        return _TorchOptimizer(name, values, capacity, dim)
    if name == "RowWiseAdagrad":
        return _RowWiseAdagrad(capacity)
    if name == "Ftrl":
        return _FtrlProximal(capacity, dim)
    raise InvalidRequest(f"a table's optimizer is one of {', '.join(ROW_OPTIMIZERS)}, got {name!r}")


def _number(values: HyperParameters, name: str, key: str) -> float:
    """Returns a hyper-parameter; the default of the optimizer with this name if it was not given."""
    value = values.get(key, TABLE_OPTIMIZERS[name][key])
    assert isinstance(value, float | int)
    return float(value)
