"""A row without training is a function of seed, id and column, and of nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ps_protocol.tables import Initializer
from ps_tables.initial import initial_rows
from tests.tools.row_ids import mixed

GOLDEN = 0x9E3779B97F4A7C15
IDS = np.concatenate([np.arange(-5_000, 5_000), [2**63 - 1, -(2**63)]])


@pytest.mark.parametrize("kind", ["constant", "uniform", "normal"])
def test_a_row_begins_alike_in_whatever_company_and_order(kind: str) -> None:
    start = Initializer(kind, 0.1, 7)
    together = initial_rows(start, IDS, 5)
    order = np.random.default_rng(1).permutation(len(IDS))
    assert torch.equal(initial_rows(start, IDS[order], 5), together[torch.from_numpy(order)])
    assert all(torch.equal(initial_rows(start, IDS[i : i + 1], 5)[0], together[i]) for i in (0, 17, 4_999))
    if kind != "constant":
        assert not torch.equal(together, initial_rows(Initializer(kind, 0.1, 8), IDS, 5)), "the seed counts"
        assert torch.equal(initial_rows(start, IDS, 3), together[:, :3]), "a column knows nothing of the others"


def element(kind: str, number: int, column: int) -> float:
    """One element, with whole numbers: [-1, 1) or of deviation 1, for seed 7."""
    start = mixed(number ^ 7)
    columns = [column] if kind == "uniform" else [2 * column - 1, 2 * column]
    words = [mixed(start + each * GOLDEN) for each in columns]
    if kind == "uniform":
        return (words[0] >> 40) / 2**23 - 1
    total = sum(word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48))
    return (total - 8 * 65535 / 2) / math.sqrt(8 * (2**32 - 1) / 12)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_the_numbers_stay_what_they_are(kind: str) -> None:
    """Checkpoints have only rows that were trained: the others come from here, also in a later release."""
    some = IDS[::500]
    rows = initial_rows(Initializer(kind, 0.5, 7), some, 3)
    expected = [[0.5 * element(kind, number, column) for column in (1, 2, 3)] for number in some.tolist()]
    assert np.allclose(rows.numpy(), expected, rtol=1e-6, atol=1e-7)


def test_the_numbers_look_as_random_as_they_should() -> None:
    uniform = initial_rows(Initializer("uniform", 0.5, 1), IDS, 64)
    assert -0.5 <= float(uniform.min()) < float(uniform.max()) < 0.5
    assert abs(float(uniform.mean())) < 0.002
    assert float(uniform.std()) == pytest.approx(1 / 12**0.5, rel=0.01)
    normal = initial_rows(Initializer("normal", 2.0, 1), IDS, 64)
    assert abs(float(normal.mean())) < 0.01
    assert float(normal.std()) == pytest.approx(2.0, rel=0.01)
    within = [float((normal.abs() < 2.0 * deviations).float().mean()) for deviations in (1, 2, 3)]
    assert within == pytest.approx([0.683, 0.954, 0.997], abs=0.01)
    for rows in (uniform, normal):
        related = torch.corrcoef(rows.T) - torch.eye(64)
        assert float(related.abs().max()) < 0.06, "columns are independent of each other"
        next_rows = torch.corrcoef(torch.stack([rows[:-1].reshape(-1), rows[1:].reshape(-1)]))
        assert abs(float(next_rows[0, 1])) < 0.01, "and so are neighbours"
