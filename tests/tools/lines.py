"""Interrupts at a chosen line of a file: for what must hold wherever a signal comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any


@contextmanager
def before_line(
    module: ModuleType, wanted: int, interrupt: Callable[[], object], functions: Collection[str] = ()
) -> Iterator[Callable[[], bool]]:
    """Calls `interrupt` before the `wanted`th line that runs in a module's file, from 1. Yields what tells whether it
    has.

    functions: the names of those whose lines count; empty: all
    """
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        code = frame.f_code
        if code.co_filename != module.__file__ or (functions and code.co_name not in functions):
            return None
        if event == "line" and lines < wanted:
            lines += 1
            if lines == wanted:
                interrupt()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines == wanted
    finally:
        sys.settrace(before)
