"""docs/failures.md has a row for every pair of failures that the simulator makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path

from tests.simulation.faults import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
TITLE = "# Two failures at once"

Pair = tuple[str, ...]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the table of pairs."""
    _, _, section = text.partition(f"\n{TITLE}\n")
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "one" and set(cells[0]) != {"-"}:
            yield cells


def pairs(text: str) -> Counter[Pair]:
    """How many rows are about each pair, which has its kinds in the order of the alphabet."""
    found: Counter[Pair] = Counter()
    for one, other, *_ in rows(text):
        found.update({tuple(sorted(pair)) for pair in product(one.split("; "), other.split("; "))})
    return found


def test_every_pair_of_failures_has_one_row() -> None:
    wanted = {tuple(sorted(pair)) for pair in combinations_with_replacement(KINDS, 2)}
    present = pairs(PAGE.read_text())
    assert present.keys() == wanted
    assert {pair for pair, count in present.items() if count > 1} == set()


def test_a_pair_that_is_missing_or_told_twice_is_seen() -> None:
    text = f"{TITLE}\n| one | the other |\n|---|---|\n| a | b; c |\n| c | a |\n"
    assert pairs(f"\n{text}") == {("a", "b"): 1, ("a", "c"): 2}


def test_every_row_says_what_is_seen_and_what_holds() -> None:
    assert all(len(cells) == 4 and all(cells) for cells in rows(PAGE.read_text()))
