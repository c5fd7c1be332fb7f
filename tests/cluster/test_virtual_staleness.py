"""Clusters in virtual time keep their promises under every seed, where workers need not wait for each other."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import Cluster
from tests.tools.cases import cases

SEEDS = cases([range(3)], [range(3, 40)])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("mode", ["ssp:2", "async"])
def test_no_seed_breaks_a_promise(mode: str, seeds: range) -> None:
    for seed in seeds:
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE={mode}"
