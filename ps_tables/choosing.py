"""Selects the loops of a process: compiled ones if they exist and give the same bits, otherwise numpy and torch."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ps_protocol.errors import Unsupported
from ps_tables.equal_bits import with_equal_bits
from ps_tables.native import building, in_use
from ps_tables.native.loading import load
from ps_tables.native.loops import ADD, ADD_SCALED, SGD, SGD_FUSED, Loops

AUTO, BUILD, OFF = "auto", "build", "off"

# Display names of the loops whose rounding may differ from torch's.
_CALLED = {"SGD": {SGD, SGD_FUSED}, "row-wise Adagrad": {ADD_SCALED}, "sums": {ADD}}


@dataclass(frozen=True)
class Choice:
    """The selected loops.

    is_native: whether compiled loops are used
    text: one line for the log; may be empty
    is_trouble: whether numpy and torch are used although compiled loops were requested; the line has the reason
    """

    is_native: bool
    text: str = ""
    is_trouble: bool = False


@cache
def _loaded(path: Path) -> Loops:
    """Returns the loops of a file, tested once in a process."""
    return with_equal_bits(load(path))


def _has_any(folder: Path) -> bool:
    """Whether a folder has compiled loops of any version. A folder that this user cannot read has none."""
    try:
        return bool(fnmatch.filter(os.listdir(folder), building.FILES))
    except OSError:
        return False


def choose(how: str, folder: Path, compiler: Callable[[], Sequence[str]]) -> Choice:
    """Selects the loops of this process, and returns the selection. A failure is no error: the results are the same
    without.

    how: "off": none; "auto": compiled loops if they are in the folder; "build": compiles them if they are missing
    compiler: returns the command of a C compiler
    """
    in_use.use(None)
    if how == OFF:
        return Choice(False)
    try:
        path = folder / building.file_name()
        if not os.path.exists(path):  # False where this user may not look
            if how == AUTO and not _has_any(folder):
                return Choice(False)
            if how == AUTO:
                raise Unsupported(f"those in {folder} are of another version or processor: run `ps-server native`")
            path = building.build(folder, compiler())
        loops = _loaded(path)
    except (Unsupported, OSError) as error:
        return Choice(False, f"tables: numpy in place of compiled loops: {error}", is_trouble=True)
    in_use.use(loops)
    without = [name for name, loops_of in _CALLED.items() if not loops_of & loops.used]
    but = f", but not for {' and '.join(without)}, which torch rounds in another way here" if without else ""
    return Choice(True, f"tables: compiled loops, {path}{but}")
