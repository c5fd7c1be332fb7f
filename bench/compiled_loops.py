"""Compiled loops for tables, as benchmarks have them beside numpy."""

from __future__ import annotations

import sys
from pathlib import Path

from ps_runtime.compiled_loops import c_compiler, loops_folder
from ps_tables.choosing import BUILD, choose
from ps_tables.native import in_use
from ps_tables.native.loops import Loops


def folder() -> Path:
    """Returns where they are: beside the user's own, which servers would use from then on."""
    return loops_folder(None).with_name("ps-torch-bench")


def compiled() -> Loops | None:
    """Returns compiled loops; None where they cannot be had, which is said. This process begins with numpy."""
    choice = choose(BUILD, folder(), c_compiler)
    if not choice.is_native:
        print(choice.text, file=sys.stderr)
    loops = in_use.loops()
    in_use.use(None)
    return loops
