"""The compiled loops that this process uses, or None for numpy and torch. The results are equal to the bit, so the
choice may change at any time.
"""

from __future__ import annotations

from ps_tables.native.loops import Loops

_loops: Loops | None = None


def loops() -> Loops | None:
    """Returns the loops of the library; None: numpy and torch are used."""
    return _loops


def use(found: Loops | None) -> None:
    """Selects the loops of this process from now on; None: numpy and torch."""
    global _loops
    _loops = found
