"""The cases of a claim: a few in every run of the tests, the others among the long ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cases(every_run: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`; a case of several values is a tuple of them."""
    return [*every_run, *(pytest.param(*_values(case), marks=pytest.mark.long) for case in long)]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
