"""Clusters in virtual time keep their promises under every seed, where workers need not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.cluster import Cluster
from tests.tools.cases import cases

SEEDS = cases([[0, 1, 3]], [[2, *range(4, 40)]])  # with 3, shards have disks of their own


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("mode", ["ssp:2", "async"])
def test_no_seed_breaks_a_promise(mode: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE={mode}"
