"""A value that is read from files, and read again when they change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ps_protocol.errors import InvalidRequest
from ps_runtime import audit

T = TypeVar("T")

log = logging.getLogger("ps_runtime")

# The shortest time between two checks of the files: a call in between costs nothing.
CHECK_SECONDS = 1.0


class ReloadingFiles(Generic[T]):
    """A value that `load` makes from files, and makes again when they change. Thread-safe.

    If `load` raises InvalidRequest, for instance because only some of the files are replaced yet, this is logged once
    and the earlier value stays.

    generation: how many times a changed value was loaded
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Loads the value. Raises the errors of `load`: at the start an invalid file is an error."""
        self.generation = 0
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._checked = time.monotonic()
        self._value = load()

    def get(self) -> T:
        """Returns the current value."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked >= CHECK_SECONDS:
                self._checked = now
                stamp = self._look()
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._reload()
            return self._value

    def _reload(self) -> None:
        names = ", ".join(str(path) for path in self._paths)
        try:
            self._value = self._load()
        except InvalidRequest as error:
            log.warning("%s changed and cannot be used, so what was read before stays: %s", names, error)
            audit.note("credentials", f"{names} changed and cannot be used: {error}", about=names)
        else:
            self.generation += 1
            log.info("%s changed and is used from now on", names)
            audit.note("credentials", f"{names} changed and is used from now on", about=names)

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
