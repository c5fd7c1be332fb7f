"""The cases of a claim: a few in every run of the tests, the others where they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def cases(every_run: Iterable[Any], repeats: Iterable[Any]) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`; a case of several values is a tuple of them.

    every_run: each kind of case once
    repeats:   the same ways with other values, which only `make test-repeats` runs
    """
    first = [*every_run]
    assert first, "without a case in every run nothing holds the claim"
    return [*first, *(pytest.param(*_values(case), marks=pytest.mark.repeat) for case in repeats)]


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Returns every combination of values of some axes: in every run so many that each value occurs."""
    values = [list(axis) for axis in axes]
    lines = [tuple(axis[number % len(axis)] for axis in values) for number in range(max(map(len, values)))]
    return cases(lines, [each for each in product(*values) if each not in lines])


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
