"""Looks at update rules, as tests need them."""

from __future__ import annotations

from typing import Any

from ps_server.core.consistency import Admission, UpdateRule


def admits(rule: UpdateRule[Any], rank: int, clock: int) -> Admission:
    """Returns whether one pull may be answered."""
    [admission] = rule.admit_all([(rank, clock)])
    return admission
