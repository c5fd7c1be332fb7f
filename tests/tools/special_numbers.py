"""Numbers that show how something rounds: of all magnitudes, subnormal, and not finite."""

from __future__ import annotations

import numpy as np
import torch

SPECIAL = (0.0, -0.0, 1e-40, -3e-39, 1e38, -3e38, float("inf"), -float("inf"), float("nan"))


def special_numbers(count: int, dim: int, seed: int) -> torch.Tensor:
    """Returns rows of numbers of all magnitudes, some of them zero, subnormal or not finite: [count, dim]."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((count, dim)) * 10.0 ** random.integers(-20, 15, (count, dim))
    chosen = random.random((count, dim)) < 0.1
    numbers[chosen] = random.choice(SPECIAL, int(chosen.sum()))
    return torch.from_numpy(numbers.astype(np.float32))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits; NaN is NaN, whatever its bits."""
    equal = first.view(torch.int32) == second.view(torch.int32)
    return bool((equal | (first.isnan() & second.isnan())).all())
