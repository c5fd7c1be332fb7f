"""Compiled loops for tables, as benchmarks have them beside numpy."""

from __future__ import annotations

import sys

from ps_runtime.compiled_loops import c_compiler, loops_folder
from ps_tables.choosing import BUILD, choose
from ps_tables.native import in_use
from ps_tables.native.loops import Loops


def compiled() -> Loops | None:
    """Returns compiled loops; None where they cannot be had, which is said. This process begins with numpy."""
    choice = choose(BUILD, loops_folder(None), c_compiler)
    if not choice.is_native:
        print(choice.text, file=sys.stderr)
    loops = in_use.loops()
    in_use.use(None)
    return loops
