"""Modes as tests name them: a mode's name, and behind it a quorum and its grace, or how gradients and weights travel:
"sync quorum all-1 grace 0.5", "local:4 int4".
"""

from __future__ import annotations

from ps_protocol.job import BLOCK_WIRES
from ps_protocol.modes import Consistency, parse_mode, parse_quorum, with_quorum


def rule_of(mode: str) -> Consistency | None:
    """Returns the rule that such a text stands for; None for a mode without servers."""
    name, *rest = (word for word in mode.split() if word not in BLOCK_WIRES)
    more = dict(zip(rest[::2], rest[1::2], strict=True))
    quorum = parse_quorum(more["quorum"]) if "quorum" in more else None
    return with_quorum(name, parse_mode(name), quorum, float(more.get("grace", 0.0)))


def consistency(mode: str) -> Consistency:
    """Returns the rule of a mode with servers."""
    rule = rule_of(mode)
    assert rule is not None
    return rule


def wire_of(mode: str) -> str:
    """Returns how gradients and weights travel in it."""
    return next((word for word in mode.split() if word in BLOCK_WIRES), "float32")
