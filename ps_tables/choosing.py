"""Selects the loops of a process: those of the compiled library if it can be loaded, otherwise numpy and torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ps_protocol.errors import Unsupported
from ps_tables.native import in_use
from ps_tables.native.libraries import FOLDER
from ps_tables.native.loading import libraries, load
from ps_tables.native.loops import Loops

AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class Choice:
    """The selected loops.

    level: the processor level that the library was compiled for; empty: numpy and torch are used
    text:  one line for the log
    is_trouble: there is a library that cannot be used; the line has the reason
    """

    level: str
    text: str
    is_trouble: bool = False


@cache
def _loaded(path: Path) -> Loops:
    """Returns the loops of a library, which is loaded once in a process."""
    return load(path)


def library_in_use() -> str:
    """Returns the processor level of the library that this process uses, or "numpy"."""
    loops = in_use.loops()
    return "numpy" if loops is None else loops.level


def choose(how: str, folder: Path = FOLDER) -> Choice:
    """Selects the loops of this process, and returns the selection. A failure is no error: numpy gives the same bits.

    how: "auto": the best library that this processor can run; "off": numpy and torch
    """
    in_use.use(None)
    if how == OFF:
        return Choice("", "tables: numpy, because native is off")
    found = libraries(folder)
    if not found:
        return Choice("", "tables: numpy, because this installation has no library for this machine")
    try:
        loops = _loaded(found[0])
    except Unsupported as error:
        return Choice("", f"tables: numpy in place of the library: {error}", is_trouble=True)
    in_use.use(loops)
    return Choice(loops.level, f"tables: the library for {loops.level}")
