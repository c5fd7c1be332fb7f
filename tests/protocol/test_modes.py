"""A mode's name stands for one setting of the one rule."""

from __future__ import annotations

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.modes import MAX_STALENESS, Consistency, parse_mode


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
    ["", "Sync", "ssp", "ssp:", "ssp:-1", "ssp:1.5", "ssp: 4", "ssp:4:4", "ssp:²", "sync:0", "async:1", "bsp", "ssp:x"],
)
def test_any_other_name_is_refused_with_what_was_expected_and_what_came(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_mode(name)
    assert "single, ddp, sync, ssp:K (such as ssp:4) or async" in refused.value.message
    assert repr(name) in refused.value.message


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
