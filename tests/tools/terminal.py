"""A terminal in place of standard error: what a script writes there for somebody who sits before it."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from collections.abc import Callable, Iterator

import pytest


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Has standard error be a terminal; yields what returns, afterwards, all that was written to it."""
    ours, theirs = pty.openpty()
    written = b""
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as screened:
        monkeypatch.setattr(sys, "stderr", screened)
        yield lambda: written.decode()
        print("end", file=screened, flush=True)
        while b"end" not in written:
            written += screen.read(4096)
