"""The library for tables, as benchmarks have it beside numpy."""

from __future__ import annotations

import sys

from ps_tables.choosing import AUTO, choose
from ps_tables.native import in_use
from ps_tables.native.loops import Loops


def compiled() -> Loops | None:
    """Returns the library's loops; None where it cannot be had, which is said. This process begins with numpy."""
    choice = choose(AUTO)
    if not choice.level:
        print(choice.text, file=sys.stderr)
    loops = in_use.loops()
    in_use.use(None)
    return loops
