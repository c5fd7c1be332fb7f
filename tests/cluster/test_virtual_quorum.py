"""Clusters in virtual time keep their promises under every seed, where updates wait for a quorum of workers."""

from __future__ import annotations

import pytest

from tests.simulation.cluster import QUORUM_MODES, Cluster
from tests.tools.cases import cases

SEEDS = cases([range(2)], [range(2, 20)])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("mode", cases([QUORUM_MODES[0]], QUORUM_MODES[1:]))
def test_no_seed_breaks_a_promise(mode: str, seeds: range) -> None:
    for seed in seeds:
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE='{mode}'"
