"""Loads a library by cffi's ABI mode, which needs neither a compiler nor Python's headers."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from ps_protocol.errors import Unsupported
from ps_tables.native.libraries import DECLARATIONS, FOLDER, features, runnable, sources
from ps_tables.native.loops import Loops, check_complete

CPUINFO = Path("/proc/cpuinfo")


def libraries(folder: Path = FOLDER) -> list[Path]:
    """Returns the libraries of this installation that this processor can run, the best first."""
    try:
        has = features(CPUINFO.read_text(errors="replace"))
    except OSError:
        return []
    return runnable(platform.machine(), has, folder)


def load(path: Path) -> Loops:
    """Returns the loops of a library. Raises Unsupported if it cannot be loaded, or was compiled from other sources."""
    declared = re.sub(r"/\*.*?\*/", "", DECLARATIONS.read_text(), flags=re.DOTALL)
    try:
        from cffi import FFI

        foreign = FFI()
        foreign.cdef(declared)
    except ImportError as error:  # cffi is missing, or the parser with which it reads declarations
        raise Unsupported(f"cffi cannot be used ({error}): pip install cffi") from None
    try:
        library = foreign.dlopen(os.fspath(path))
        if library.ps_sources() != sources():
            raise Unsupported(f"{path.name} was compiled from other sources: install ps-torch again")
        check_complete(library)
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{path.name} cannot be loaded: {error}") from None
    return Loops(foreign, library, path.stem.removeprefix("loops-"))
