"""Starts worker processes on this machine and stays until all have ended.

In the parameter-server modes a worker that dies takes no other with it once all declared workers have joined: it is
started again as often as was asked for, alone, and the others go on; the exit code tells at the end. Before that the
others only wait for it, so they are stopped, as they are in ddp, where the rest cannot go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ps_launch.output import Console, Stream, log_file
from ps_launch.restarts import Restarts
from ps_protocol.errors import InvalidRequest
from ps_runtime.launch_id import LAUNCH_ID, LAUNCH_RANKS, new_launch_id
from ps_runtime.rank import TORCHRUN
from ps_worker.launched import LAUNCHED, STARTED_FILE, is_launched

STOP_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1
# What torchrun tells its workers. Libraries take any of it for "torch.distributed was launched", so it is there as a
# whole, in ddp, or not at all.
TORCHRUN_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
)
_OF_ONE_WORKER = frozenset({"PS_RANK", "PS_WORLD_SIZE", "PS_LOCAL_RANK"})


@dataclass(frozen=True)
class Launch:
    """What to start; see `ps-worker run --help`.

    command:  what follows the interpreter: a script, or -m and a module, and its arguments
    settings: PS_* variables that all workers are told
    log_dir:  gets a file for each worker with what it writes
    """

    command: tuple[str, ...]
    workers: int
    first_rank: int
    world_size: int
    elastic: bool
    mode: str
    settings: Mapping[str, str]
    max_restarts: int = 0
    log_dir: Path | None = None


class _Stopped(Exception):
    """A signal asked to stop."""

    def __init__(self, number: int) -> None:
        self.number = number


def launch(what: Launch) -> int:
    """Runs the workers to their end. Returns 0, or the first code other than 0, or 128 + the signal that stopped us.

    Raises InvalidRequest if the log directory cannot be written, or ddp's processes could not meet.
    """
    with contextlib.ExitStack() as stack:
        crew = _Crew(what, stack)

        def stop(number: int, frame: object) -> None:
            raise _Stopped(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            crew.run()
        except _Stopped as stopped:
            crew.code = 128 + stopped.number
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            crew.stop()
    return crew.code


class _Crew:
    """The workers of one launch, by their number here: those that run, and those that wait to be started again."""

    def __init__(self, what: Launch, stack: contextlib.ExitStack) -> None:
        self.code = 0
        self._what = what
        self._extra = rendezvous(what)
        # The one that a launcher has given to this process, if it is a worker itself, is not that of our workers.
        self._launch_id = (not is_launched() and os.environ.get(LAUNCH_ID)) or new_launch_id()
        self._guard = _die_with_parent()
        self._console = Console()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, list[Stream]] = {local: [] for local in range(what.workers)}
        self._restarts = {local: Restarts(what.max_restarts) for local in range(what.workers)}
        self._begun: dict[int, float] = {}  # when it was started last
        self._due: dict[int, float] = {}  # when a worker that ended is started again
        self._logs = _open_logs(what, stack)
        self._started = Path(stack.enter_context(_directory())) / "started"
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(stack.enter_context(_child_signal()), selectors.EVENT_READ)

    def run(self) -> None:
        """Starts all, and stays until all have ended, or one has whose end is that of all."""
        for local in range(self._what.workers):
            self._start(local)
        while self._running or self._due:
            for local in [local for local, when in self._due.items() if when <= time.monotonic()]:
                del self._due[local]
                self._start(local)
            self._wait(min(self._due.values(), default=None))
            for local, code in self._ended():
                if code and self._failed(local, code):
                    return

    def stop(self) -> None:
        """Ends all that still run: asks first, and hands on what they write about it."""
        deadline = self._console.until = time.monotonic() + STOP_SECONDS
        for process in self._running.values():
            process.terminate()
        while self._running and time.monotonic() < deadline:
            self._wait(deadline)
            self._ended()
        for process in self._running.values():
            process.kill()
            process.wait()
        self._ended()

    def _start(self, local: int) -> None:
        what = self._what
        environment = worker_environment(what, local, self._extra)
        environment |= {"PS_RESTART_COUNT": str(self._restarts[local].count), STARTED_FILE: str(self._started)}
        # One that is started again asks for its own place alone: the others are under way.
        ranks = f"{what.first_rank}-{what.first_rank + what.workers - 1}" if not self._restarts[local].count else ""
        environment |= {LAUNCH_ID: self._launch_id, LAUNCH_RANKS: ranks}
        # A single worker keeps the terminal, if there is one.
        piped = subprocess.PIPE if what.workers > 1 or self._logs else None
        self._begun[local] = time.monotonic()
        # A session of its own: Ctrl-C on a terminal reaches this process alone, which stops the workers once.
        process = subprocess.Popen(
            [sys.executable, *what.command],
            env=environment,
            stdout=piped,
            stderr=piped,
            start_new_session=True,
            preexec_fn=self._guard,
        )
        self._running[local] = process
        prefix = f"[{what.first_rank + local}] ".encode() if what.workers > 1 else None
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                stream = Stream(source, self._console, target.fileno(), prefix, self._logs.get(local))
                self._streams[local].append(stream)
                self._selector.register(source, selectors.EVENT_READ, stream)

    def _wait(self, until: float | None) -> None:
        """Hands on what workers write, until one has ended or `until`: for a moment, then the caller looks."""
        left = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(left):
            if isinstance(key.data, Stream):
                if not key.data.pump():
                    self._selector.unregister(key.fileobj)
            else:
                os.read(key.fd, 4096)

    def _ended(self) -> list[tuple[int, int]]:
        """Takes those that have ended off the running ones, all they wrote handed on; their numbers and codes."""
        found = []
        for local, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[local]
            for stream in self._streams[local]:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(stream.source)
                stream.finish()
            self._streams[local] = []
            found.append((local, code))
        return found

    def _failed(self, local: int, code: int) -> bool:
        """Starts a worker that failed again, if it may be. True: the launch is over, because the others need it."""
        what, rank = self._what, self._what.first_rank + local
        self._console.say(f"worker {rank} ended with code {code}")
        pause = self._restarts[local].after(time.monotonic() - self._begun[local])
        if pause is not None:
            self._due[local] = time.monotonic() + pause
            count = f"{self._restarts[local].count} of {what.max_restarts}"
            self._console.say(f"worker {rank} is started again in {pause:g} s (restart {count})")
            return False
        self.code = self.code or (128 - code if code < 0 else code)
        if what.mode == "ddp":
            return True
        if what.elastic or self._started.exists():
            return False
        if self._running or self._due:
            self._console.say("not all workers of the job had joined, so the others are stopped")
        return True


def worker_environment(what: Launch, local: int, extra: Mapping[str, str]) -> dict[str, str]:
    """What a worker is told; `extra` is where ddp's processes meet."""
    rank, world_size = str(what.first_rank + local), str(what.world_size)
    hidden = TORCHRUN_VARIABLES | _OF_ONE_WORKER
    found = {name: value for name, value in os.environ.items() if name not in hidden and "TORCHELASTIC" not in name}
    found |= {**what.settings, LAUNCHED: "1", "PS_LOCAL_RANK": str(local), "PYTHONUNBUFFERED": "1"}
    # Workers that share a machine share its cores; without this each would start a thread a core.
    found.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // what.workers)))
    if not what.elastic:
        found |= {"PS_RANK": rank, "PS_WORLD_SIZE": world_size}
    if what.mode == "ddp":
        assert TORCHRUN.world_size is not None
        assert TORCHRUN.local_rank is not None
        found |= {TORCHRUN.rank: rank, TORCHRUN.world_size: world_size, TORCHRUN.local_rank: str(local)}
        found |= {"LOCAL_WORLD_SIZE": str(what.workers), **extra}
    return found


def rendezvous(what: Launch) -> dict[str, str]:
    """Where DDP's processes meet: what the environment says, or a free port of this machine.

    Raises InvalidRequest if there are processes on other machines, which cannot know that port.
    """
    if what.mode != "ddp":
        return {}
    given = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    if all(given.values()):
        return given
    if what.world_size > what.workers:
        raise InvalidRequest(
            "ddp on several machines needs MASTER_ADDR and MASTER_PORT: "
            "an address on the machine of rank 0, the same for all"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_logs(what: Launch, stack: contextlib.ExitStack) -> dict[int, BinaryIO]:
    """A file for each worker, opened to append: an earlier run's lines stay."""
    if what.log_dir is None:
        return {}
    try:
        what.log_dir.mkdir(parents=True, exist_ok=True)
        return {
            local: stack.enter_context(log_file(what.log_dir, what.first_rank + local).open("ab"))
            for local in range(what.workers)
        }
    except OSError as error:
        raise InvalidRequest(f"--log-dir {what.log_dir} cannot be written ({error.strerror})") from None


def _directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="ps-worker-")
    except OSError as error:
        raise InvalidRequest(f"there is no directory for temporary files ({error.strerror}); set TMPDIR") from None


@contextlib.contextmanager
def _child_signal() -> Iterator[int]:
    """A descriptor that can be read from when a child has ended."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    usual = signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that nothing handles wakes nothing
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGCHLD, usual)
        os.close(reader)
        os.close(writer)


def _die_with_parent() -> Callable[[], None] | None:
    """What a worker does before it runs: have the kernel end it if this process is killed. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
