"""Notes which files of the packages run while something is done, here and on the threads of servers in this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
# Threads that look around now and then, whatever else happens.
QUIET = {"view", "watch", "status", "leases", "metrics", "slow-peers", "notices", "state", "held-jobs", "health"}


class FilesThatRun:
    """Inside `with FilesThatRun() as files`, threads that are started from then on can be watched; see `during`."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}  # by file: the thread and the function that ran there first
        self._start = f"{ROOT}/ps_"
        self._is_on = False

    def __enter__(self) -> FilesThatRun:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed lacks None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Notes what runs meanwhile."""
        sys.setprofile(self._note)
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._is_on and event == "call" and code.co_filename.startswith(self._start):
            thread = threading.current_thread().name.rpartition("_")[0] or threading.current_thread().name
            if thread not in QUIET:
                self.found.setdefault(code.co_filename[len(str(ROOT)) + 1 :], (thread, code.co_name))
