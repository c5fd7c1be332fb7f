"""Clusters in virtual time keep their promises under every seed; a seed replays exactly; broken ones are found out."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import parser, replay
from tests.simulation.cluster import Cluster
from tests.simulation.faults import WHOLESALE as KINDS_OF_WHOLESALE
from tests.simulation.mutations import HALF_STEPS, REPAIRS, ROWS, RULES, SAVED, WHOLESALE, Mutation
from tests.tools.cases import cases

ROOT = Path(__file__).parents[2]
SEEDS = cases([range(4)], [range(4, 50)])
KNOWN = [mutation for mutation in (*HALF_STEPS, *REPAIRS, *ROWS, *SAVED, *WHOLESALE) if mutation.known is not None]
OFTEN = [HALF_STEPS[1], SAVED[0], *KNOWN[5::5]]  # some of each list


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("mode", ["sync", "ssp:0"])
def test_no_seed_breaks_a_promise(mode: str, seeds: range) -> None:
    for seed in seeds:
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE={mode}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", KINDS_OF_WHOLESALE)
@pytest.mark.parametrize("seeds", cases([range(2)], [range(2, 20)]), ids=str)
@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:2", "async"]))
def test_no_launch_comes_back_to_train_in_part_and_no_deposed_coordinator_changes_anything(
    mode: str, seeds: range, fault: str
) -> None:
    for seed in seeds:
        assert Cluster(mode, seed, faults=(fault,)).run() == [], seed


def digest(mode: str, seed: int) -> str:
    cluster = Cluster(mode, seed)
    cluster.run()
    return cluster.digest()


def test_a_seed_replays_exactly() -> None:
    once = digest("async", 3)
    assert digest("async", 3) == once
    assert digest("async", 4) != once


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["async"], ["sync"]))
def test_a_seed_replays_exactly_also_in_another_process(mode: str) -> None:
    """Where the hashes of words, and with them the order of a set, are others."""
    again = f"from tests.simulation.cluster import Cluster; c = Cluster({mode!r}, 3); c.run(); print(c.digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", again], env=environment, capture_output=True, text=True, check=True)
    assert digest(mode, 3) == done.stdout.strip()


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tables", "--sharing", "--native", "off"],
        ["--members", "2"],
        ["--readers", "3", "--relays", "2", "--in-turn", "--first", "7"],
    ],
)
def test_a_seed_that_failed_is_replayed_as_it_was(flags: list[str]) -> None:
    asked = parser().parse_args(flags)
    words = shlex.split(replay(asked, "sync quorum 2", 7))
    said = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [line] = [each for each in said.replace("\\\n", "").splitlines() if "-m tests.simulation" in each]
    again = parser().parse_args(shlex.split(line.partition("-m tests.simulation")[2]))
    assert (again.mode, again.seed) == ("sync quorum 2", 7)
    for name in ("tables", "sharing", "readers", "relays", "members", "native"):
        assert getattr(again, name) == getattr(asked, name), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", cases(RULES[:4], RULES[4:]), ids=lambda mutation: mutation.name)
def test_a_cluster_that_breaks_a_rule_is_found_out(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutation.find(monkeypatch, range(20)) is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutation",
    cases(OFTEN, [each for each in KNOWN if each not in OFTEN]),
    ids=lambda mutation: mutation.name,
)
def test_what_is_broken_is_found_out_by_a_seed_nearby(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed that is written down; by one of the next where a change has moved what happens in that one."""
    assert mutation.known is not None
    mode, first = mutation.known
    seeds = range(first, first + 20)
    assert any(mutation.finds(monkeypatch, mode, seed, mutation.faults) for seed in seeds)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mutation", [*REPAIRS, *ROWS], ids=lambda mutation: mutation.name)
def test_what_is_broken_is_found_out_among_all_faults(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutation.find(monkeypatch, range(1000)) is not None
