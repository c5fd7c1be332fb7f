"""docs/failures.md has a whole section for every failure, and a row for every pair that the simulator makes."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path

from tests.simulation.faults import KINDS

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "failures.md"
TITLE = "# Two failures at once"
SCREEN_WIDTH = 120
MOST_LINES_OF_PAIRS = 25  # of a table

Pair = tuple[str, ...]


def meant(cell: str, text: str) -> Iterator[str]:
    """The kinds of failure that a cell names. Some words stand for several, as a list of the page says."""
    stand_for = dict(re.findall(r"^\* \*\*([^*]+)\*\*: (.+)$", text.partition(f"\n{TITLE}\n")[2], re.MULTILINE))
    for word in cell.split("; "):
        yield from meant(stand_for[word], text) if word in stand_for else [word]


def lines(text: str) -> int:
    """How many lines of a screen a text takes; a bullet or a row is one line of the source, of any length."""
    return sum(max(1, len(textwrap.wrap(line, SCREEN_WIDTH))) for line in text.strip().splitlines())


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables of pairs."""
    _, _, section = text.partition(f"\n{TITLE}\n")
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "one" and set(cells[0]) != {"-"}:
            yield cells


def pairs(text: str) -> Counter[Pair]:
    """How many rows are about each pair, which has its kinds in the order of the alphabet."""
    found: Counter[Pair] = Counter()
    for one, other, *_ in rows(text):
        found.update({tuple(sorted(pair)) for pair in product(meant(one, text), meant(other, text))})
    return found


def test_every_pair_of_failures_has_one_row() -> None:
    wanted = {tuple(sorted(pair)) for pair in combinations_with_replacement(KINDS, 2)}
    present = pairs(PAGE.read_text())
    assert present.keys() == wanted
    assert {pair for pair, count in present.items() if count > 1} == set()


def test_a_pair_that_is_missing_or_told_twice_is_seen() -> None:
    text = f"\n{TITLE}\n* **both**: b; c\n\n| one | the other |\n|---|---|\n| a | both |\n| c | a |\n"
    assert pairs(text) == {("a", "b"): 1, ("a", "c"): 2}


def test_each_table_of_pairs_fits_a_screen() -> None:
    _, *tables = re.split(r"^## ", PAGE.read_text().partition(f"\n{TITLE}\n")[2], flags=re.MULTILINE)
    assert len(tables) >= 3
    assert {table.partition("\n")[0]: lines(table) for table in tables if lines(table) > MOST_LINES_OF_PAIRS} == {}


def test_every_row_says_what_is_seen_and_what_holds() -> None:
    assert all(len(cells) == 4 and all(cells) for cells in rows(PAGE.read_text()))


# -- one failure -----------------------------------------------------------------------------------------------------

PARTS = ["You see", "Who waits", "What is lost", "How it ends", "Do"]
MOST_LINES = 15  # of a section: it fits half a screen


def sections(text: str) -> dict[str, str]:
    """The text of each failure by itself, by its title."""
    single, _, _ = text.partition(f"\n{TITLE}\n")
    _, *found = re.split(r"^### ", single, flags=re.MULTILINE)
    return {
        title: body for title, _, body in (re.split(r"^## ", each, flags=re.M)[0].partition("\n") for each in found)
    }


def faults_of(body: str) -> list[str]:
    """What a section lacks."""
    faults = []
    if re.findall(r"^\* \*\*(.+?)\*\*: \S", body, re.MULTILINE) != PARTS:
        faults.append("the parts")
    last = body.strip().splitlines()[-1]
    if not last.startswith("Tests: "):
        faults.append("its tests at the end")
    missing = [name for name in re.findall(r"test_\w+\.py", last) if not list(TESTS.rglob(name))]
    faults += [f"{name} is not there" for name in missing]
    if lines(body) > MOST_LINES:
        faults.append("it is too long")
    return faults


def test_every_failure_says_what_is_seen_who_waits_what_is_lost_how_it_ends_and_what_to_do() -> None:
    found = sections(PAGE.read_text())
    assert len(found) >= 47
    assert {title: faults_of(body) for title, body in found.items() if faults_of(body)} == {}


def test_a_section_that_lacks_a_part_is_seen() -> None:
    whole = "".join(f"* **{part}**: x.\n" for part in PARTS) + "\nTests: test_failures.py.\n"
    assert faults_of(whole) == []
    assert faults_of(whole.replace("* **Do**: x.\n", "")) == ["the parts"]
    assert faults_of(whole.replace("**Who waits**: x.", "**Who waits**:")) == ["the parts"]
    assert faults_of(whole.replace("Tests: ", "")) == ["its tests at the end"]
    assert faults_of(whole.replace("test_failures", "test_gone")) == ["test_gone.py is not there"]
    assert faults_of("long\n" * MOST_LINES + whole) == ["it is too long"]
    assert faults_of(whole.replace("**Do**: x.", f"**Do**: {'some words ' * 120}.")) == ["it is too long"]
