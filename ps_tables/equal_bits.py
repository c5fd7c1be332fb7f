"""Tests which compiled loops give the same bits as torch and numpy. torch's rounding depends on version and processor.

The test takes some milliseconds when the loops are loaded. Loops over ids use integers, so they need no test.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ps_tables.memory import RowArray
from ps_tables.native.loops import ADD, ADD_SCALED, OF_FLOATS, SGD, SGD_FUSED, Loops
from ps_tables.optimizers import RowOptimizer, row_optimizer
from ps_tables.sums import added_up_in_torch

_ROWS, _DIMS, _COUNTS = 192, (1, 5, 24), (1, 3)
_LR = 0.07
_SPECIAL = (0.0, -0.0, 1e-40, -3e-39, 1e38, -3e38, float("inf"), -float("inf"), float("nan"))


def with_equal_bits(loops: Loops) -> Loops:
    """Returns the loops without those that give other bits. If torch's SGD rounds once (a fused multiply-add), the
    fused loop is used, provided that it is not slower."""
    tried = {name: loops.only(frozenset({name})) for name in OF_FLOATS if name != SGD_FUSED or loops.has_fused}
    return loops.only(frozenset(name for name, alone in tried.items() if _TRIALS[name](alone)))


def special_numbers(count: int, dim: int, seed: int) -> torch.Tensor:
    """Returns rows of numbers of all magnitudes, some of them zero, subnormal or not finite: [count, dim]."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((count, dim)) * 10.0 ** random.integers(-12, 6, (count, dim))
    chosen = random.random((count, dim)) < 0.1
    numbers[chosen] = random.choice(_SPECIAL, int(chosen.sum()))
    return torch.from_numpy(numbers.astype(np.float32))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits; NaN is NaN, whatever its bits."""
    equal = first.view(torch.int32) == second.view(torch.int32)
    return bool((equal | (first.isnan() & second.isnan())).all())


def _steps(name: str, loops: Loops) -> bool:
    """Whether an optimizer's steps are the same in loops and in torch."""
    rows = np.random.default_rng(1).permutation(_ROWS)
    for dim in _DIMS:
        made = [_made(name, dim) for _ in range(2)]
        for version, count in enumerate(_COUNTS, 1):
            sums = special_numbers(_ROWS, dim, version)
            (weights, in_torch), (others, in_loops) = made
            in_torch.step_in_torch(weights, rows, sums, count, {"lr": _LR}, version)
            if not in_loops.step_in_loops(loops, others, rows, sums, count, {"lr": _LR}):
                return False
        pairs = [(weights, others), *zip(in_torch.state.values(), in_loops.state.values(), strict=True)]
        if not all(same(torch.from_numpy(a.elements), torch.from_numpy(b.elements)) for a, b in pairs):
            return False
    return True


def _made(name: str, dim: int) -> tuple[RowArray, RowOptimizer]:
    weights, rows = RowArray(_ROWS, dim), np.arange(_ROWS)
    weights.write(rows, special_numbers(_ROWS, dim, 0))
    optimizer = row_optimizer(name, {"lr": _LR}, _ROWS, dim)
    optimizer.reset(rows, {})
    return weights, optimizer


def _sums(loops: Loops) -> bool:
    """Whether sums by places are the same in a loop and in torch's two ways."""
    for dim in _DIMS:
        values, places = special_numbers(_ROWS, dim, 2), np.random.default_rng(2).integers(0, _ROWS // 4, _ROWS)
        found = torch.zeros(_ROWS // 4, dim, dtype=torch.float32, device="cpu")
        by_index = torch.zeros_like(found).index_add_(0, torch.from_numpy(places), values)
        loops.add(found.numpy(), places, values.numpy())
        if not same(found, added_up_in_torch(values, places, len(found))) or not same(found, by_index):
            return False
    return True


_TRIALS: dict[str, Callable[[Loops], bool]] = {
    SGD: lambda loops: _steps("SGD", loops),
    SGD_FUSED: lambda loops: _steps("SGD", loops),
    ADD_SCALED: lambda loops: _steps("RowWiseAdagrad", loops),
    ADD: _sums,
}
