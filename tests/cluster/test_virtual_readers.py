"""What readers of a feed have keeps its promises in virtual clusters, whatever fails; broken feeds are found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.reader_mutations import BROKEN_FEEDS, BROKEN_RELAYS
from tests.tools.cases import cases

READERS = 3
RELAYS = 2  # at most
BROKEN = [(0, *each) for each in BROKEN_FEEDS] + [(RELAYS, *each) for each in BROKEN_RELAYS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "seeds"),  # those of every run have each number of relays, and something that takes all with it
    cases(
        [("sync", range(2)), ("async", range(2, 4))],
        [
            ("sync", range(2, 30)),
            ("async", [0, 1, *range(4, 30)]),
            *((mode, range(30)) for mode in ("ssp:2", "local:4", "sync quorum all-1")),
        ],
    ),
    ids=str,
)
def test_no_seed_breaks_a_promise_to_readers(mode: str, seeds: Sequence[int]) -> None:
    """Never two versions in one block of `reading`; no version falls unsaid; equal versions of a run have equal bytes;
    buffers are those of rank 0 at their version's step, and frozen tensors come once; in quiet times readers have the
    newest weights, and at the end the last."""
    read = 0
    for seed in seeds:
        relays = seed % (RELAYS + 1)
        cluster = Cluster(mode, seed, readers=READERS, wholesale=seed % 3 == 0, relays=relays)
        found = cluster.run()
        more = f"--readers {READERS} --relays {relays} --seed {seed} --mode {mode}"
        assert found == [], f"replay: python -m tests.simulation {more}"
        read += any(reader.read for reader in cluster.readers.all)
    assert read >= 0.9 * len(seeds), "a job may end before its readers have had a look"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("relays", "breaks", "mode", "known", "kinds"),
    cases([*BROKEN[::3], *BROKEN[-1:]], [each for number, each in enumerate(BROKEN[:-1]) if number % 3]),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_feed_is_found_out(
    relays: int,
    breaks: Callable[[pytest.MonkeyPatch], None],
    mode: str,
    known: int,
    kinds: frozenset[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the seed that is written down; by one of the next where a change has moved what happens in that one."""
    breaks(monkeypatch)
    found: set[str] = set()
    for seed in range(known, known + 30):
        found |= {each.kind for each in Cluster(mode, seed, readers=READERS, relays=relays).run()}
        if found & kinds:
            return
    pytest.fail(f"no seed shows it; found {found}")
