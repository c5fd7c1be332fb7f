"""The lock of a directory in an object store, which has no locks: a lease that its holder renews.

    NAME-000007   the lock: JSON with its holder's name, and a count that the holder raises at each renewal

The lock is the object with the highest number. A process takes it by creating the next number; a conditional put lets
only one process succeed. It may do so once the content has not changed for the duration of a lease: the holder has then
ended, or is cut off. A holder that was stopped for so long looks for a higher number before it writes again, and then
writes nothing more. Only requests that were in transit to the store at that moment may still take effect.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from ps_server.storage.disk import MAX_HOLDER_BYTES

log = logging.getLogger("ps_server")

LOCK_LEASE_SECONDS = 20.0
RENEWALS_PER_LEASE = 4
LOOKS_PER_LEASE = 20  # how often a process that wants the lease looks whether the holder has renewed it


class Store(Protocol):
    """The operations of an object store that a lease uses. Methods raise OSError."""

    def files(self, path: Path) -> list[str]:
        """Returns the names of the files in a directory."""

    def read(self, path: Path, most: int) -> bytes:
        """Returns the content of a file of at most `most` bytes."""

    def create(self, path: Path, data: bytes) -> None:
        """Creates a file. Raises FileExistsError if it exists."""

    def put(self, path: Path, data: bytes) -> None:
        """Replaces the content of a file."""

    def remove(self, path: Path) -> None:
        """Removes a file."""


class LockLease:
    """A process's lease of a name. Methods are thread-safe.

    seconds: how long other processes wait before they take the lease from a holder that does not renew it
    """

    def __init__(self, store: Store, path: Path, holder: bytes, seconds: float) -> None:
        self._store, self._path, self._seconds = store, path, seconds
        self._content: dict[str, Any] = {
            "holder": holder.decode(),
            "token": secrets.token_hex(16),
            "count": 0,
            "machine": _machine(),
            "pid": os.getpid(),
            "released": False,
        }
        self._number = 0
        self._renewed = 0.0
        self._lost = ""  # why this process may no longer write
        self._lock = threading.Lock()  # held while it is renewed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)

    def take(self) -> None:
        """Takes the lease, and renews it from now on. Raises BlockingIOError with the text of a live holder."""
        while not self._number:
            number, content = self._newest()
            if content is not None and self._is_live(number, content):
                raise BlockingIOError(errno.EWOULDBLOCK, str(content.get("holder", "")))
            began = _now()
            with contextlib.suppress(FileExistsError):  # another process was faster
                self._store.create(self._at(number + 1), self._text())
                self._number, self._renewed = number + 1, began
        with contextlib.suppress(FileExistsError):
            self._store.create(self._at(self._number), self._text())
            raise OSError(errno.EIO, "this store overwrites what a conditional put must not: there is no lock on it")
        for number in self._numbers():
            if number < self._number:
                self._store.remove(self._at(number))
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be started to renew the lease
            self.release()
            raise OSError(errno.EAGAIN, str(error)) from None

    def check(self) -> None:
        """Raises OSError if another process may have the lease now."""
        if _now() - self._renewed > self._seconds and not self._stop.is_set():
            self._renew()
        if self._lost:
            raise OSError(errno.ESTALE, self._lost)

    @property
    def number(self) -> int:
        """The number of the lease, higher than that of every earlier holder."""
        return self._number

    @property
    def lost(self) -> str:
        """The process that has taken over the lease, if this process knows of one; otherwise empty. Unlike `check`,
        this does not wait.
        """
        return self._lost

    def release(self) -> None:
        """Releases the lease: another process can take it at once."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            self._renew(released=True)

    def _renew_regularly(self) -> None:
        while not self._stop.wait(self._seconds / RENEWALS_PER_LEASE) and not self._lost:
            self._try_to_renew()

    def _try_to_renew(self) -> None:
        try:
            self._renew()
        except OSError:
            # The store does not answer. The next attempt follows soon; once a lease's time is over, `check` makes one
            # before anything is written.
            pass
        except Exception:
            log.exception("the lease of %s is not renewed", self._path)

    def _renew(self, released: bool = False) -> None:
        with self._lock:
            began, (number, content) = _now(), self._newest()
            if self._lost:
                return
            if number != self._number or content is None or content.get("token") != self._content["token"]:
                other = "" if content is None else f": {content.get('holder')}"
                self._lost = f"another process has taken {self._path} over{other}"
                log.error("%s; this one writes nothing there any more", self._lost)
                return
            self._content |= {"count": self._content["count"] + 1, "released": released}
            self._store.put(self._at(number), self._text())
            self._renewed = began

    def _is_live(self, number: int, content: dict[str, Any]) -> bool:
        """Whether the holder of a lease renews it. Waits for one lease at most."""
        if content.get("released") or _is_dead(content):
            return False
        log.info("%s is held: looking for %g s whether its holder renews it", self._path, self._seconds)
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            self._stop.wait(self._seconds / LOOKS_PER_LEASE)
            now, seen = self._newest()
            if now != number or seen != content:
                return seen is not None and not seen.get("released")
        return False

    def _newest(self) -> tuple[int, dict[str, Any] | None]:
        """Returns the number and the content of the lock; 0 and None if there is none."""
        number = max(self._numbers(), default=0)
        if not number:
            return 0, None
        try:
            content = json.loads(self._store.read(self._at(number), MAX_HOLDER_BYTES))
        except (ValueError, RecursionError):
            content = None
        return number, content if isinstance(content, dict) else {"holder": ""}

    def _numbers(self) -> list[int]:
        prefix = f"{self._path.name}-"
        names = [name for name in self._store.files(self._path.parent) if name.startswith(prefix)]
        texts = [name.removeprefix(prefix) for name in names]
        return [int(text) for text in texts if text.isascii() and text.isdigit()]

    def _at(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}-{number:06d}")

    def _text(self) -> bytes:
        return json.dumps(self._content).encode()


def _now() -> float:
    """Returns the time of a clock that also runs while this process is stopped or its machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """Returns the id of the pid namespace and the boot that processes share; empty if the system does not tell it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_dead(content: dict[str, Any]) -> bool:
    """Whether a holder has ended for certain: a process of this machine that did not release its lease."""
    pid = content.get("pid")
    if type(pid) is not int or pid <= 0 or not content.get("machine") or content["machine"] != _machine():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
