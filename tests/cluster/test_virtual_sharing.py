"""Virtual clusters whose workers share memory with shards keep their promises; what is broken there is found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation.cluster import MODES, NARROW_MODES, QUORUM_MODES, Cluster
from tests.simulation.mutations import Mutation
from tests.simulation.sharing_mutations import SHARED
from tests.tools.cases import cases

FIRST = [("sync", True), ("async", False), (QUORUM_MODES[0], False), ("local:4", False)]
OTHERS = [(mode, tables) for mode in MODES for tables in (False, True) if (mode, tables) not in FIRST]
OTHERS += [(mode, False) for mode in (*QUORUM_MODES, *NARROW_MODES) if (mode, False) not in FIRST]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "tables", "seeds"),
    cases(
        [(*each, range(2)) for each in FIRST],
        [*((*each, range(2, 20)) for each in FIRST), *((*each, range(10)) for each in OTHERS)],
    ),
    ids=str,
)
def test_no_seed_breaks_a_promise(mode: str, tables: bool, seeds: Sequence[int]) -> None:
    for seed in seeds:
        found = Cluster(mode, seed, tables=tables, sharing=True, wholesale=seed % 3 == 0).run()
        more = "TABLES=1 " if tables else ""
        assert found == [], f"replay: make simulate SEED={seed} MODE='{mode}' {more}SHARING=1"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", SHARED, ids=lambda mutation: mutation.name)
def test_what_is_broken_in_shared_memory_is_found_out(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed that is written down; by one of the next where a change has moved what happens in that one."""
    assert mutation.known is not None
    mode, first = mutation.known
    assert any(mutation.finds(monkeypatch, mode, seed, mutation.faults) for seed in range(first, first + 20))
