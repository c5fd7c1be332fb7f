"""Clusters in virtual time whose workers are groups: members die, hang, are cut off, and lose each other."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from ps_protocol.errors import PSError
from ps_server.coordinator.worker_states import WorkerStates
from tests.simulation.cluster import MODES, NARROW_MODES, QUORUM_MODES, Cluster
from tests.simulation.members import Works
from tests.simulation.worker import Place, Worker
from tests.simulation.world import Log
from tests.tools.cases import cases

GROUP_MODES = (*MODES, *QUORUM_MODES, *NARROW_MODES)
# The seeds of every run: sync, async, sync quorum all-1, local:4, sync int4 and local:4/2.
FEW = [0, 3, 4, 7, 8, 10]
MEMBERS = ("a member is killed", "a member hangs", "a member is cut off", "members lose each other")


def in_turn(seed: int) -> str:
    return GROUP_MODES[seed % len(GROUP_MODES)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds", cases([FEW], [[seed for seed in range(12) if seed not in FEW], range(12, 112), range(112, 212)]), ids=str
)
def test_groups_keep_all_promises_whatever_fails(seeds: Sequence[int]) -> None:
    for seed in seeds:
        assert Cluster(in_turn(seed), seed, members=2).run() == [], (in_turn(seed), seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", cases([range(4)], [range(4, 112)]), ids=str)
def test_members_that_fail_end_nothing_but_their_group(seeds: range) -> None:
    """Of three members each. Shards die besides, so that all go back to a checkpoint."""
    for seed in seeds:
        faults = MEMBERS if seed % 2 else (*MEMBERS, "a shard is killed")
        assert Cluster(in_turn(seed), seed, faults=faults, members=3).run() == [], (in_turn(seed), seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "is_lost"), [("a member hangs", True), ("members lose each other", False)])
def test_a_group_loses_its_place_where_a_member_hangs_and_not_where_members_wait_for_each_other(
    fault: str, is_lost: bool
) -> None:
    """Its first member sends heartbeats all the time."""
    cluster = Cluster("sync", 3, tracing=True, faults=(fault,), members=2)
    log, handler = logging.getLogger("ps_server"), Log(cluster.world)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        assert cluster.run() == []
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert any("is gone: no sign of life" in event for event in map(str, cluster.world.events)) == is_lost


def first_state(patch: pytest.MonkeyPatch) -> None:
    """A group's state counts once one member has sent its own."""
    usual = WorkerStates.__init__

    def made(self: WorkerStates, room: object, owner: object = None, group_size: int = 1, *more: float) -> None:
        usual(self, room, owner, 1, *(more or (math.inf,)))  # type: ignore[arg-type]

    patch.setattr(WorkerStates, "__init__", made)


@pytest.mark.timeout(600)
def test_servers_that_take_the_state_of_one_member_for_the_groups_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_state(monkeypatch)
    assert any(each.kind == "wrong state" for seed in range(4) for each in Cluster("sync", seed, members=2).run())


def first_member(patch: pytest.MonkeyPatch) -> None:
    """A group goes on where its first member is through, although the push or the pull of another one has failed."""
    usual = Worker.begun

    def begun(self: Worker, place: Place, works: Sequence[Callable[[], object]]) -> Callable[[], None]:
        return usual(self, place, [quiet(work) if isinstance(work, Works) and work.member else work for work in works])

    patch.setattr(Worker, "begun", begun)


def quiet(work: Works) -> Works:
    def do() -> None:
        with suppress(PSError):
            work()

    return Works(work.member, do)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "seed", "kind"), [("async", 2, "lost"), ("sync", 3, "wrong update")])
def test_a_group_that_goes_on_where_the_push_of_one_member_has_failed_is_found_out(
    monkeypatch: pytest.MonkeyPatch, mode: str, seed: int, kind: str
) -> None:
    """As one whose members do not compare once they have pushed. Without that the seed finds nothing."""
    assert Cluster(mode, seed, faults=MEMBERS, members=2).run() == []
    first_member(monkeypatch)
    assert kind in {each.kind for each in Cluster(mode, seed, faults=MEMBERS, members=2).run()}
