"""Rows are stepped as torch steps them, and each by its own gradients alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.optimizers import ELEMENTWISE
from ps_protocol.row_optimizers import ROW_OPTIMIZERS, TORCH_OPTIMIZERS
from ps_protocol.tables import TableSpec
from ps_tables import optimizing_rows
from ps_tables.beginning import row_columns
from ps_tables.optimizing_rows import RowOptimizer, row_optimizer
from ps_tables.row_arrays import RowArray
from ps_tables.table import Table
from tests.tools.cases import cases

pytestmark = pytest.mark.usefixtures("with_and_without_the_library")

CAPACITY = 3_000
# Beside the plain ones.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("RowWiseAdagrad", {"eps": 1e-3, "initial_accumulator_value": 0.5}),
    ("Ftrl", {"beta": 1.0, "l1": 0.01, "l2": 0.1}),
]
DIMS = [1, 3, 16, 17]
PLAIN: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ROW_OPTIMIZERS]


def rows_of(name: str, values: Mapping[str, Any], weights: torch.Tensor) -> tuple[RowArray, RowOptimizer]:
    array = RowArray(CAPACITY, weights.shape[1])
    optimizer = row_optimizer(name, values, CAPACITY, weights.shape[1])
    array.write(np.arange(len(weights)), weights)
    optimizer.reset(np.arange(len(weights)), values)
    return array, optimizer


def read(array: RowArray, count: int) -> torch.Tensor:
    out = torch.empty(count, array.dim)
    array.read(np.arange(count), out)
    return out


@pytest.mark.parametrize(
    ("name", "values", "dim"),
    cases(
        [(*rule, DIMS[number % 4]) for number, rule in enumerate(PLAIN + MORE)],
        [(*rule, dim) for number, rule in enumerate(PLAIN + MORE) for dim in DIMS if dim != DIMS[number % 4]],
    ),
    ids=str,
)
def test_the_bits_of_a_row_depend_on_its_own_gradients_alone(name: str, values: dict[str, Any], dim: int) -> None:
    """Not on how many rows are stepped beside it, nor in which order: so any number of shards ends with the same."""
    random = torch.Generator().manual_seed(dim)
    start = torch.randn(CAPACITY, dim, generator=random)
    sums = torch.randn(4, CAPACITY, dim, generator=random)
    values = {"lr": 0.1, **values}
    together, optimizer = rows_of(name, values, start)
    for version, gradients in enumerate(sums, 1):
        optimizer.step(together, np.arange(CAPACITY), gradients, 3, values, version)
    expected = read(together, CAPACITY)
    apart, optimizer = rows_of(name, values, start)
    cuts = np.cumsum([0, 1, 2, 5, 40, 1_000, 1, CAPACITY])
    for version, gradients in enumerate(sums, 1):
        order = np.random.default_rng(version).permutation(CAPACITY)
        for rows in np.split(order, cuts[1:-1]):
            optimizer.step(apart, rows, gradients[torch.from_numpy(rows)], 3, values, version)
    assert set(torch.unique(read(apart, CAPACITY) == expected).tolist()) == {True}


@pytest.mark.parametrize(("name", "values"), [each for each in PLAIN + MORE if each[0] in TORCH_OPTIMIZERS], ids=str)
def test_rows_that_are_all_in_each_update_are_stepped_as_a_parameter_is(name: str, values: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(1)
    start = torch.randn(50, 6, generator=random)
    parameter = torch.nn.Parameter(start.clone())
    theirs = ELEMENTWISE[name]([parameter], lr=0.1, **values)  # type: ignore[call-arg]
    array, ours = rows_of(name, {"lr": 0.1, **values}, start)
    for version in range(1, 8):
        gradients = torch.randn(50, 6, generator=random)
        parameter.grad = gradients / 2
        theirs.step()
        ours.step(array, np.arange(50), gradients, 2, {"lr": 0.1, **values}, version)
    assert torch.allclose(read(array, 50), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("name", "theirs", "difference"),
    [("SGD", torch.optim.SGD, 1e-6), ("Adagrad", torch.optim.Adagrad, 1e-6), ("Adam", torch.optim.SparseAdam, 1e-5)],
)
def test_rows_that_come_and_go_are_stepped_as_those_of_a_sparse_embedding(
    name: str, theirs: Callable[..., torch.optim.Optimizer], difference: float
) -> None:
    random = torch.Generator().manual_seed(1)
    embedding = torch.nn.Embedding(50, 6, sparse=True)
    array, ours = rows_of(name, {"lr": 0.1}, embedding.weight.detach())
    reference = theirs(embedding.parameters(), lr=0.1)
    for version in range(1, 20):
        ids = torch.randperm(50, generator=random)[: version % 9 + 1]
        gradients = torch.randn(len(ids), 6, generator=random)
        reference.zero_grad()
        embedding(ids).backward(gradients)
        reference.step()
        ours.step(array, ids.numpy(), gradients, 1, {"lr": 0.1}, version)
    assert float((read(array, 50) - embedding.weight.detach()).abs().max()) < difference


def test_row_wise_adagrad_keeps_the_sum_of_the_means_of_squares() -> None:
    start, values = torch.zeros(1, 4), {"lr": 0.5, "eps": 0.25}
    array, optimizer = rows_of("RowWiseAdagrad", values, start)
    total, expected = 0.0, np.zeros(4)
    for version, gradient in enumerate(([1.0, 2.0, 0.0, 2.0], [0.0, -4.0, 0.0, 0.0]), 1):
        optimizer.step(array, np.zeros(1, np.int64), torch.tensor([gradient]), 1, values, version)
        total += float(np.mean(np.square(gradient)))
        expected -= 0.5 * np.array(gradient) / (total**0.5 + 0.25)
    assert read(array, 1).numpy()[0] == pytest.approx(expected)
    assert read(optimizer.state["sum"], 1).tolist() == [[pytest.approx(total)]]


def test_ftrl_is_that_of_its_paper() -> None:
    values = {"lr": 0.5, "beta": 1.0, "l1": 0.3, "l2": 0.2}
    array, optimizer = rows_of("Ftrl", values, torch.zeros(1, 1))
    weight = z = n = 0.0
    seen = []
    for version, gradient in enumerate((0.2, 1.5, -0.4, 2.0, -3.0), 1):
        optimizer.step(array, np.zeros(1, np.int64), torch.tensor([[gradient]]), 1, values, version)
        sigma = ((n + gradient**2) ** 0.5 - n**0.5) / 0.5
        z += gradient - sigma * weight
        n += gradient**2
        weight = 0.0 if abs(z) <= 0.3 else -(z - np.sign(z) * 0.3) / ((1.0 + n**0.5) / 0.5 + 0.2)
        seen.append(weight)
        assert read(array, 1).item() == pytest.approx(weight, rel=1e-5)
    assert seen[0] == 0.0 != seen[1], "small gradients leave a weight at zero"


def test_a_learning_rate_that_changes_counts_from_the_next_step_on() -> None:
    for name in ROW_OPTIMIZERS:
        array, optimizer = rows_of(name, {"lr": 0.1}, torch.ones(1, 2))
        optimizer.step(array, np.zeros(1, np.int64), torch.ones(1, 2), 1, {"lr": 0.1}, 1)
        before = read(array, 1)
        optimizer.step(array, np.zeros(1, np.int64), torch.ones(1, 2), 1, {"lr": 1e-9}, 2)
        if name != "Ftrl":  # whose weights are a function of the rate, and of sums
            assert torch.allclose(read(array, 1), before, atol=1e-6), name


def test_large_updates_are_stepped_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (2**18, 100):
        monkeypatch.setattr(optimizing_rows, "BLOCK_ELEMENTS", elements)
        array, optimizer = rows_of("Adam", {}, torch.ones(500, 3))
        gradients = torch.randn(500, 3, generator=torch.Generator().manual_seed(1))
        optimizer.step(array, np.arange(500), gradients, 1, {}, 1)
        results.append(read(array, 500))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["NAdam", "LBFGS", "", "rowwiseadagrad"])
def test_an_optimizer_that_rows_cannot_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"a table's optimizer is one of SGD, .*RowWiseAdagrad, Ftrl, got"):
        row_optimizer(name, {}, 10, 2)


@pytest.mark.parametrize(("name", "values"), PLAIN + MORE, ids=str)
def test_what_travels_of_a_row_is_what_a_table_has_of_it(name: str, values: dict[str, Any]) -> None:
    """The contract names it in an order, and so do other programs."""
    snapshot = Table(TableSpec("rows", 3), name, {"lr": 0.1, **values}, 10, 0).snapshot()
    has = {column: tensor.shape[1] for column, tensor in snapshot.items() if tensor.ndim == 2}
    assert row_columns(name, {"lr": 0.1, **values}, 3, with_state=True) == has
