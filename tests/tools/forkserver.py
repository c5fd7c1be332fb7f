"""Server processes that are there in a moment: forks of one that has imported everything, and has no thread yet.

A process of its own, started as a script: it reads one JSON line for each server to start, and says how each ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ps_server.ops.glibc import streaming

_PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]


class Nursery:
    """Starts servers; ended with the `with`, and they with it."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), *sys.path])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Else each fork would start the program anew, to set it: this one.
            env=streaming({**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}),
        )
        self._lock = threading.Lock()
        self._count = 0
        self._pids: dict[int, int] = {}
        self._ended: dict[int, Callable[[int], object]] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def start(self, words: Sequence[str], log: Path, ended: Callable[[int], object], **variables: str) -> int:
        """Starts `ps-server WORDS`, which writes to `log`; its process id. `ended`: called with its exit code."""
        with self._lock:
            self._count += 1
            number = self._count
            self._ended[number] = ended
            assert self._process.stdin is not None
            asked = {"number": number, "words": list(words), "log": str(log), "variables": variables}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._pids, 60), "the nursery does not answer"
        return self._pids[number]

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "pid" in said:
                with self._changed:
                    self._pids[said["number"]] = said["pid"]
                    self._changed.notify_all()
            else:  # not in this thread: who hears it may want to start another
                threading.Thread(target=self._ended.pop(said["number"]), args=(said["code"],), daemon=True).start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._thread.join()
        self._process.stdout.close()


def main() -> None:
    """Forks what it is asked for until its input ends."""
    import torch

    import ps_server.server  # noqa: F401
    from ps_protocol.optimizers import ELEMENTWISE

    ELEMENTWISE["SGD"]([torch.zeros(1)], lr=0.0)  # type: ignore[call-arg]  # torch imports more with the first one
    numbers: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    rest = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while numbers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                _say(number=numbers.pop(pid), code=os.waitstatus_to_exitcode(status))
        if 0 in ready:
            found = os.read(0, 65536)
            if not found:
                return
            *lines, rest = (rest + found).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                pid = os.fork()
                if not pid:
                    _serve(asked["words"], asked["variables"], asked["log"])
                numbers[pid] = asked["number"]
                _say(number=asked["number"], pid=pid)


def _say(**what: int) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def _serve(words: list[str], variables: dict[str, str], log: str) -> None:
    """In the fork: becomes a server."""
    code: Any = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(variables)
        sys.argv = ["ps-server", *words]
        from ps_server.cli import main as command

        command()
    except SystemExit as ended:
        code = ended.code or 0
        if isinstance(code, str):
            os.write(2, f"{code}\n".encode())
            code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
