"""Processes that are there in a moment: forks of one that has imported everything, and has no thread yet.

A process of its own, started as a script: it reads one JSON line for each process to start, and says how each ended.
What a fork runs comes to its end as it would in a process of its own: threads that are no daemons are awaited, exit
handlers run, and it has the same code. Only the interpreter is not taken apart, unless `finalizes` says so: a fork
would have 170 MB of the nursery's memory copied for it, in a fourth of a second of CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ps_server.ops.glibc import streaming
from tests.tools.cluster import until

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 120.0  # the nursery imports torch first


class Forked:
    """A running fork, with what subprocess.Popen has. ended: called with its exit code."""

    def __init__(self, ended: Callable[[int], object]) -> None:
        self.pid = 0
        self._ended = ended
        self._code: int | None = None
        self._changed = threading.Condition()

    def note(self, pid: int | None = None, code: int | None = None) -> None:
        """Takes note of what the nursery says: that the process runs, or how it ended."""
        with self._changed:
            self.pid, self._code = pid or self.pid, code
            self._changed.notify_all()
        if code is not None:  # not in this thread: who hears it may want to start another
            threading.Thread(target=self._ended, args=(code,), daemon=True).start()

    def await_pid(self) -> None:
        """Waits until it runs."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.pid), ANSWER_SECONDS), "the nursery does not answer"

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        with self._changed:
            return self._code

    def ends_within(self, seconds: float) -> bool:
        """Waits for its end; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._code is not None, seconds)

    def wait(self, seconds: float) -> int:
        """Waits for its end; its exit code."""
        assert self.ends_within(seconds), "the process does not end"
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the nursery has not told yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, if it still runs."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Starts processes; ended with the `with`, and they with it."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), *sys.path])
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Else each shard would start the program anew, to set it: this one.
            env=streaming({**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}),
        )
        self._lock = threading.Lock()
        self._forks: list[Forked] = []
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def serve(
        self,
        words: Sequence[str],
        log: Path,
        ended: Callable[[int], object] = lambda code: None,
        network: str = "",
        **variables: str,
    ) -> Forked:
        """Starts `ps-server WORDS`, which writes to `log`. network: a network namespace to run in, by its name"""
        asked = {"words": ["ps-server", *words], "log": log, "network": network, "variables": variables}
        return self._fork(ended, script="", finalizes=False, **asked)

    def run(
        self,
        script: Path,
        words: Sequence[object],
        log: Path,
        network: str = "",
        finalizes: bool = False,
        **variables: str,
    ) -> Forked:
        """Starts `python SCRIPT WORDS`, which writes to `log`.

        network:   as for `serve`
        finalizes: the interpreter is taken apart at the end
        """
        asked = [str(script), *map(str, words)]
        more = {"network": network, "finalizes": finalizes, "variables": variables}
        return self._fork(lambda code: None, script=asked[0], words=asked, log=log, **more)

    def _fork(self, ended: Callable[[int], object], **asked: Any) -> Forked:
        fork = Forked(ended)
        with self._lock:
            self._forks.append(fork)
            line = json.dumps({"number": len(self._forks) - 1, **asked}, default=str)
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        fork.await_pid()
        return fork

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self._forks[said.pop("number")].note(**said)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._thread.join()
        self._process.stdout.close()


def address_in(log: Path) -> str:
    """Waits until a server says in its log that it is ready; its address."""

    def ready() -> re.Match[str] | None:
        return re.search(r"ready at (\S+)", log.read_text()) if log.exists() else None

    return until(ready, "a server that is ready")[1]  # type: ignore[index]


def main() -> None:
    """Forks what it is asked for until its input ends; in a fork, runs that."""
    _import_everything()
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
                    _run(asked)
                    return
                numbers[pid] = asked["number"]
                _say(number=asked["number"], pid=pid)


def _import_everything() -> None:
    import safetensors.torch  # noqa: F401
    import torch

    import ps_worker.connecting  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=0.0)  # torch imports more with the first optimizer
    # A fork that ends would walk through all this memory, and so have it copied: four fifths of a second each time.
    gc.collect()
    gc.freeze()
    # And it would take apart what torch has registered here, library by library, with 30 MB copied: 35 ms.
    for each in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        each.atexit = False


def _say(**what: int) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def _run(asked: dict[str, Any]) -> None:
    """In the fork: runs a server, or a script."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if asked["network"]:
        namespace = os.open(f"/run/netns/{asked['network']}", os.O_RDONLY)
        assert libc.setns(namespace, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A shell that starts the tests in the background has them ignore SIGINT; a user's process gets Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(asked["variables"])
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    sys.argv = asked["words"]
    if asked["finalizes"]:
        _call(asked["script"])
        return
    try:
        _call(asked["script"])
        code = 0
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _call(script: str) -> None:
    """Runs a script, or without one `ps-server`, with the words in `sys.argv`."""
    if script:
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
    else:
        from ps_server.cli import main as command

        command()


if __name__ == "__main__":
    main()
