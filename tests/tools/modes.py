"""Modes as tests name them: a mode's name, and behind sync a quorum and its grace: "sync quorum all-1 grace 0.5"."""

from __future__ import annotations

from ps_protocol.modes import Consistency, parse_mode, parse_quorum, with_quorum


def rule_of(mode: str) -> Consistency | None:
    """Returns the rule that such a text stands for; None for a mode without servers."""
    name, *rest = mode.split()
    more = dict(zip(rest[::2], rest[1::2], strict=True))
    quorum = parse_quorum(more["quorum"]) if "quorum" in more else None
    return with_quorum(name, parse_mode(name), quorum, float(more.get("grace", 0.0)))


def consistency(mode: str) -> Consistency:
    """Returns the rule of a mode with servers."""
    rule = rule_of(mode)
    assert rule is not None
    return rule
