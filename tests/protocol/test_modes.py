"""A mode's name stands for one setting of the one rule."""

from __future__ import annotations

from typing import Any

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.local import MAX_STEPS, Local
from ps_protocol.modes import (
    MAX_GRACE,
    MAX_QUORUM,
    MAX_STALENESS,
    Consistency,
    local_rounds,
    local_steps,
    parse_mode,
    parse_quorum,
    with_quorum,
)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("single", None),  # without servers, there is none
        ("ddp", None),
        ("sync", Consistency(max_staleness=0, aggregate=True)),
        ("ssp:0", Consistency(max_staleness=0)),
        ("ssp:4", Consistency(max_staleness=4)),
        (f"ssp:{MAX_STALENESS}", Consistency(max_staleness=MAX_STALENESS)),
        ("async", Consistency(max_staleness=None)),
    ],
)
def test_a_mode_is_a_setting_of_the_one_rule_and_says_its_name(name: str, rule: Consistency | None) -> None:
    assert parse_mode(name) == rule
    assert rule is None or str(rule) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "Sync", "ssp", "ssp:", "ssp:-1", "ssp:1.5", "ssp: 4", "ssp:4:4", "ssp:²", "sync:0", "async:1", "bsp"),
        *("ssp:x", "local", "local:", "local:-1", "local:1.5", "local:8/4/2", "local:8:1"),
    ],
)
def test_any_other_name_is_refused_with_what_was_expected_and_what_came(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_mode(name)
    assert (
        "single, ddp, sync, local:H (such as local:8, local:8/4, or local:30s), ssp:K (such as ssp:4) or async"
        in str(refused.value)
    )
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("steps", [1, 8, MAX_STEPS])
def test_local_steps_are_sync_to_the_servers(steps: int) -> None:
    assert parse_mode(f"local:{steps}") == Consistency(max_staleness=0, aggregate=True)
    assert local_steps(f"local:{steps}") == steps
    assert all(local_steps(mode) is None for mode in ("single", "ddp", "sync", "ssp:4", "async"))


@pytest.mark.parametrize(("name", "seconds"), [("local:30s", 30.0), ("local:0.25s", 0.25), ("local:86400s", 86400.0)])
def test_rounds_of_a_time_are_sync_to_the_servers(name: str, seconds: float) -> None:
    assert parse_mode(name) == Consistency(max_staleness=0, aggregate=True)
    rounds = local_rounds(name)
    assert rounds is not None
    assert (rounds.seconds, rounds.mode, local_steps(name)) == (seconds, name, None)
    assert [rounds.ends_by_time(number) for number in (64, 65)] == [False, True]


@pytest.mark.parametrize("seconds", ["0", "86401"])
def test_a_time_of_rounds_that_no_job_can_use_is_refused(seconds: str) -> None:
    with pytest.raises(InvalidRequest, match=f"a T above 0, up to 86400 seconds, got {seconds}"):
        parse_mode(f"local:{seconds}s")


def test_rounds_end_after_steps_or_after_a_time() -> None:
    with pytest.raises(InvalidRequest, match="after so many steps, or after so long, got 8 steps and a time"):
        Local(8, seconds=30.0)


@pytest.mark.parametrize("steps", ["0", str(MAX_STEPS + 1)])
def test_a_number_of_local_steps_that_no_job_can_use_is_refused(steps: str) -> None:
    with pytest.raises(InvalidRequest, match=f"an H from 1 to {MAX_STEPS}, got {steps}"):
        parse_mode(f"local:{steps}")


def test_a_round_of_the_warm_up_has_one_step_and_averages() -> None:
    local = Local(8, warm_up=3)
    assert [local.steps_of(number) for number in range(1, 6)] == [1, 1, 1, 8, 8]
    assert [local.clock(rounds) for rounds in range(6)] == [0, 1, 2, 3, 11, 19]
    assert [local.averages(number) for number in (3, 4)] == [True, False]
    assert [local.outer(3)[name] for name in ("lr", "momentum", "nesterov")] == [1.0, 0.0, False]
    assert [local.outer(4)[name] for name in ("lr", "momentum", "nesterov")] == [0.8, 0.7, True]


@pytest.mark.parametrize("bound", [str(MAX_STALENESS + 1), "9" * 5000])
def test_a_bound_that_no_job_can_use_is_refused(bound: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_mode(f"ssp:{bound}")


@pytest.mark.parametrize(
    ("bound", "aggregate", "said"),
    [
        (-1, False, "staleness must be from 0"),
        (None, True, "averaging needs max_staleness 0"),  # workers that run ahead would wait for each other
        (1, True, "averaging needs max_staleness 0"),
    ],
)
def test_a_negative_bound_or_one_that_would_deadlock_is_refused(bound: int | None, aggregate: bool, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Consistency(max_staleness=bound, aggregate=aggregate)


# -- quorums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "of_four", "of_one"),
    [("1", 1, 1), ("3", 3, 1), ("7", 4, 1), ("all-1", 3, 1), ("all-3", 1, 1), ("all-9", 1, 1)],
)
def test_a_quorum_says_how_many_of_the_live_workers_an_update_waits_for(text: str, of_four: int, of_one: int) -> None:
    rule = Consistency(0, True, quorum=parse_quorum(text))
    assert (rule.needed(4), rule.needed(1), rule.needed(0)) == (of_four, of_one, 0)
    assert rule.quorum_text == text
    assert str(rule) == f"sync, quorum {text}"
    assert str(Consistency(0, True, rule.quorum, 1.5)) == f"sync, quorum {text}, grace 1.5 s"
    assert not rule.one_clock
    assert Consistency(0, True).one_clock


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "all", "all-", "all-0", "all--1", "all-1.5", "1.5", "3 ", "²", "Q", "9" * 40, str(MAX_QUORUM + 1)],
)
def test_any_other_quorum_is_refused_with_what_was_expected_and_what_came(text: str) -> None:
    with pytest.raises(InvalidRequest, match="quorum must be a number of workers from 1 on, or all-N") as refused:
        parse_quorum(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"max_staleness": 4, "quorum": 2}, "a quorum is for sync, where an update has .*; not ssp:4"),
        ({"max_staleness": None, "quorum": -1}, "a quorum is for sync"),
        ({"quorum": 0}, "a quorum is from 1 to"),
        ({"quorum": MAX_QUORUM + 1}, "a quorum is from 1 to"),
        ({"quorum": 2, "quorum_grace": -0.5}, "the grace of a quorum is from 0 to 3600 seconds, got -0.5"),
        ({"quorum": 2, "quorum_grace": float("nan")}, "the grace of a quorum is from 0 to"),
        ({"quorum": 2, "quorum_grace": MAX_GRACE + 1}, "the grace of a quorum is from 0 to"),
        ({"quorum_grace": 1.0}, "a grace of 1 seconds needs a quorum"),
    ],
)
def test_a_quorum_that_no_rule_can_have_is_refused(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Consistency(**{"max_staleness": 0, "aggregate": rule.get("max_staleness", 0) == 0, **rule})


@pytest.mark.parametrize("mode", ["single", "ddp", "ssp:2", "async"])
def test_a_mode_other_than_sync_has_no_quorum(mode: str) -> None:
    with pytest.raises(InvalidRequest, match=f"--quorum is for sync, .* mode is {mode}"):
        with_quorum(mode, parse_mode(mode), 2, 0.0)
    with pytest.raises(InvalidRequest, match=f"--quorum-grace is for sync, .* mode is {mode}"):
        with_quorum(mode, parse_mode(mode), None, 1.0)
    assert with_quorum(mode, parse_mode(mode), None, 0.0) == parse_mode(mode)
