"""Clusters in virtual time keep their promises under every seed, in rounds of local steps and with int4 on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.cluster import NARROW_MODES, Cluster
from tests.tools.cases import cases

# With 3, workers are killed and leave in each mode, and shards have disks of their own. `make simulate` runs more.
SEEDS = cases([[3]], [[0, 1, 2, 4, 5]])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("mode", NARROW_MODES)
def test_no_seed_breaks_a_promise(mode: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE='{mode}'"
