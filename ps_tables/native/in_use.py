"""The loops that this process uses; none: numpy and torch do the work. The bits are the same, so it may change at any
time."""

from __future__ import annotations

from ps_tables.native.loops import Loops

_loops: Loops | None = None


def loops() -> Loops | None:
    """Returns the loops of the library; None where numpy and torch are used."""
    return _loops


def use(found: Loops | None) -> None:
    """Selects the loops of this process from now on; None: numpy and torch."""
    global _loops
    _loops = found
