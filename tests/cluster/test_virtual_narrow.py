"""Clusters in virtual time keep their promises under every seed, in rounds of local steps and with int4 on the wire."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import NARROW_MODES, Cluster
from tests.tools.cases import cases

SEEDS = cases([range(1)], [range(1, 6)])  # `make simulate` runs more


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("mode", NARROW_MODES)
def test_no_seed_breaks_a_promise(mode: str, seeds: range) -> None:
    for seed in seeds:
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE='{mode}'"
