"""Clusters in virtual time keep their promises under every seed; broken ones are found out; a seed replays exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.errors import TryLater
from ps_server.core.consistency import ADMITTED, UpdateRule
from ps_server.core.membership import Membership, Rivals
from ps_server.core.partition import JobPartition
from tests.simulation.virtual_cluster import MODES, Cluster
from tests.simulation.virtual_time import Host, Weather, World

SEEDS = 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_no_seed_breaks_a_promise(mode: str) -> None:
    for seed in range(SEEDS):
        found = Cluster(mode, seed).run()
        assert found == [], f"replay: make simulate SEED={seed} MODE={mode}"


def takes_repeats_for_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UpdateRule, "is_repeat", lambda self, rank, clock: False)


def acknowledges_and_forgets(patch: pytest.MonkeyPatch) -> None:
    stage = UpdateRule.stage

    def forgetful(self: UpdateRule[object], rank: int, clock: int, *rest: object) -> None:
        stage(self, rank, clock, *rest)  # type: ignore[arg-type]
        if clock % 7 == 0:
            del self.waiting[rank]

    patch.setattr(UpdateRule, "stage", forgetful)


def admits_everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UpdateRule, "admits", lambda self, rank, clock: ADMITTED)


def fences_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobPartition, "check_worker", lambda self, rank, incarnation, key=None: None)


def never_retires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobPartition, "_remove_worker", lambda self, command: None)


def refuses_whoever_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    rivals = Membership.rivals

    def at_once(self: Membership, *arguments: Any) -> Rivals | None:
        found = rivals(self, *arguments)
        return found and replace(found, live=True)

    patch.setattr(Membership, "rivals", at_once)


@pytest.mark.parametrize(
    ("breaks", "mode", "kinds"),
    [
        (takes_repeats_for_new, "async", {"doubled"}),
        (acknowledges_and_forgets, "async", {"lost", "own update missing", "stuck"}),
        (admits_everybody, "ssp:0", {"too stale"}),
        (admits_everybody, "sync", {"wrong update", "own update missing"}),
        (fences_nobody, "sync", {"wrong update", "gave up", "stuck", "lost", "doubled"}),
        (never_retires, "ssp:0", {"stuck"}),
        (refuses_whoever_does_not_wait, "async", {"gave up"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_cluster_that_breaks_a_rule_is_found_out(
    breaks: Callable[[pytest.MonkeyPatch], None], mode: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    found: set[str] = set()
    for seed in range(20):
        try:
            found |= {violation.kind for violation in Cluster(mode, seed).run()}
        except (AssertionError, KeyError):  # the rules themselves notice
            found |= kinds
        if found & kinds:
            return
    pytest.fail(f"nothing of {kinds} was found in 20 seeds, but {found}")


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_replays_exactly(mode: str) -> None:
    once, again, other = Cluster(mode, 3), Cluster(mode, 3), Cluster(mode, 4)
    for cluster in (once, again, other):
        cluster.run()
    assert once.digest() == again.digest()
    assert once.digest() != other.digest()


# -- the world itself ------------------------------------------------------------------------------------------------


class Echo(Host):
    """Answers with what it is sent, and counts."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "echo")
        self.heard: list[int] = []

    def serve(self, method: str, arguments: tuple[int, ...], answer: Callable[..., None]) -> None:
        self.heard.append(arguments[0])
        answer(arguments[0], None)


def exchange(world: World, count: int) -> tuple[Echo, list[object]]:
    """So many calls at once; what they were answered with."""
    echo, caller = Echo(world), Host(world, "caller")
    answers: list[object] = []
    for number in range(count):
        caller.call(echo, "say", number).wait(lambda value, error: answers.append(error or value))
    world.run(lambda: False, world.now + 5.0)
    return echo, answers


def test_links_lose_repeat_delay_and_reorder_as_the_weather_says() -> None:
    world = World("links")
    assert exchange(world, 50)[0].heard != sorted(range(50)), "messages overtake each other"
    world.weather = Weather(loss=1.0)
    echo, answers = exchange(world, 3)
    assert echo.heard == []
    assert all(isinstance(answer, TryLater) for answer in answers)
    world.weather = Weather(repeat=1.0)
    echo, answers = exchange(world, 3)
    assert sorted(echo.heard) == [0, 0, 1, 1, 2, 2]
    assert sorted(answers) == [0, 1, 2]  # type: ignore[type-var]


def test_what_is_sent_over_a_cut_link_arrives_when_it_heals_and_to_a_stopped_host_when_it_goes_on() -> None:
    world = World("cut")
    echo, caller = Echo(world), Host(world, "caller")
    world.cut(echo, caller, 2.0)
    caller.call(echo, "say", 1)
    world.run(lambda: bool(echo.heard), 10.0)
    assert 2.0 <= world.now <= 2.1
    echo.stopped_until = world.now + 3.0
    caller.call(echo, "say", 2)
    world.run(lambda: len(echo.heard) == 2, 10.0)
    assert 5.0 <= world.now <= 5.2
    echo.die()
    caller.call(echo, "say", 3)
    assert not world.run(lambda: len(echo.heard) == 3, 20.0)
