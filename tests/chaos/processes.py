"""Processes of the cluster: started again when they die, found among another's children, and signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import ROOT

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 60.0
WELL_SECONDS = 10.0


@dataclass
class UnlessStopped:
    """The pauses of Docker's `restart: unless-stopped`: they double, and begin anew after ten seconds of running."""

    _next: float = FIRST_PAUSE

    def after(self, seconds: float) -> float:
        """Returns the pause before a process starts again that ran for so long."""
        pause = FIRST_PAUSE if seconds >= WELL_SECONDS else self._next
        self._next = min(2 * pause, LONGEST_PAUSE)
        return pause


class Kept:
    """A server process that is started again, by the same command, whenever it ends, until `end` is called."""

    def __init__(self, arguments: list[str], variables: Mapping[str, str], log: Path) -> None:
        self._arguments = arguments
        self._variables = variables
        self._log = log
        self._pauses = UnlessStopped()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        while True:
            begun = time.monotonic()
            with self._lock:
                if self._ending.is_set():
                    return
                self._process = start(self._arguments, self._variables, self._log)
            self._process.wait()
            self._ending.wait(self._pauses.after(time.monotonic() - begun))

    @property
    def pid(self) -> int | None:
        """The process now; None between two."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def end(self, seconds: float) -> None:
        """Asks it to stop, waits for it, and ends it by force if it has not stopped by then."""
        self._ending.set()
        with self._lock:
            send(self.pid, signal.SIGTERM)
        self._thread.join(seconds)
        send(self.pid, signal.SIGKILL)
        self._thread.join()


def start(arguments: list[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `python -m ARGUMENTS` without the settings of this process; what it writes is appended to the log."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **variables}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**kept, **own},
        )


def send(pid: int | None, number: int) -> bool:
    """Sends a process a signal; False if there is none."""
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)
            return True
    return False


def children(parent: int | None) -> list[int]:
    """Returns the processes that a process has started, and that run."""
    with contextlib.suppress(OSError):
        if parent is not None:
            return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def argument(pid: int, flag: str) -> str | None:
    """Returns what follows a flag in a process' command line."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = _words(pid, "cmdline")
        return words[words.index(flag) + 1]
    return None


def variable(pid: int, name: str) -> str | None:
    """Returns a variable of the environment that a process was started with."""
    with contextlib.suppress(OSError):
        found = (word.partition("=") for word in _words(pid, "environ"))
        return next((value for key, _, value in found if key == name), None)
    return None


def _words(pid: int, file: str) -> list[str]:
    return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
