"""The cases of a claim: a few in every run of the tests, the others where they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(every_run: Iterable[Any], repeats: Iterable[Any]) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`; a case of several values is a tuple of them.

    every_run: each kind of case once
    repeats:   the same ways with other values, which only `make test-repeats` runs
    """
    return [*every_run, *(pytest.param(*_values(case), marks=pytest.mark.repeat) for case in repeats)]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
