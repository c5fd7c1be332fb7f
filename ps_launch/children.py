"""Runs child processes: starts and restarts them, passes on their output, detects their end, and stops them.

A parent has one `Children` and one thread, which spends its time in `wait`: it passes on the children's output, starts
children whose pause is over, and returns those that have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from ps_launch.lifeline import STOP
from ps_launch.output import Output, Stream
from ps_runtime.signals import on_signals

_PR_SET_PDEATHSIG = 1
_KILL_SECONDS = 5.0  # the wait for a killed child: the kernel may take time to release its resources
CANNOT_START = 126  # the exit code of a child that the system could not start again: no memory, no process left


class Stopped(Exception):
    """A signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        self.number = number


def stop_on_signals(then: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Makes the first SIGTERM or SIGINT raise Stopped in the main thread. then: the handler of all later ones"""

    def stop(number: int, frame: FrameType | None) -> None:
        on_signals(then)  # at once: two may come together
        raise Stopped(number)

    on_signals(stop)


@dataclass(frozen=True)
class Program:
    """What a child process runs.

    arguments: the arguments of the Python interpreter
    out, err:  receive the child's output; None: the child writes to this process's own
    has_stdin: the child gets a pipe as standard input, for `tell`; it closes when this process ends
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    out: Output | None = None
    err: Output | None = None
    has_stdin: bool = False


class Children:
    """Child processes by number: those that run, and those that wait for a restart.

    program: returns what a child runs, given its number; is called at each start
    """

    def __init__(self, program: Callable[[int], Program], stack: contextlib.ExitStack) -> None:
        self._program = program
        self._guard = _die_with_parent()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._pids: dict[int, int] = {}  # of each, of its last process
        self._codes: dict[int, int] = {}  # of each that has ended
        self._begun: dict[int, float] = {}  # when each was started last
        self._due: dict[int, float] = {}  # by number, when a child that ended is started again
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(stack.enter_context(_child_signal()), selectors.EVENT_READ)

    def start(self, number: int, after: float | None = None) -> None:
        """Starts a child. after: seconds until `wait` starts it; None: now, which raises OSError if it fails"""
        if after is not None:
            self._due[number] = time.monotonic() + after
            return
        program = self._program(number)
        self._begun[number] = time.monotonic()
        # A session of its own: Ctrl-C on a terminal reaches this process alone, which stops its children in order.
        process = subprocess.Popen(
            [sys.executable, *program.arguments],
            env=dict(program.environment),
            stdin=subprocess.PIPE if program.has_stdin else None,
            stdout=subprocess.PIPE if program.out is not None else None,
            stderr=subprocess.PIPE if program.err is not None else None,
            start_new_session=True,
            # A child with a pipe as standard input learns from its end that this process is gone.
            preexec_fn=None if program.has_stdin else self._guard,
        )
        self._running[number], self._pids[number] = process, process.pid
        self._streams[number] = []
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
        for source, output in ((process.stdout, program.out), (process.stderr, program.err)):
            if source is not None and output is not None:
                stream = Stream(source, output)
                self._streams[number].append(stream)
                self._selector.register(source, selectors.EVENT_READ, stream)

    def pid(self, number: int) -> int:
        """Returns the process id of a child; after its end, its last one."""
        return self._pids[number]

    def is_running(self, number: int) -> bool:
        """Whether a child runs; one that waits to be started again does not."""
        return number in self._running

    def code(self, number: int) -> int | None:
        """Returns the exit code of a child that has ended; None if it runs, or was never started."""
        return None if number in self._running else self._codes.get(number)

    def seconds_run(self, number: int) -> float:
        """Returns how long ago a child was started."""
        return time.monotonic() - self._begun[number]

    def tell(self, number: int, line: str) -> None:
        """Writes a short line to a child's standard input, without waiting.

        Does nothing if the child has ended, or if it does not read and its pipe is full.
        """
        process = self._running.get(number)
        if process is not None and process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                # A write of up to PIPE_BUF bytes to a pipe is atomic
                os.write(process.stdin.fileno(), line.encode() + b"\n")

    def wait(self, until: float | None = None) -> list[tuple[int, int]]:
        """Waits for a moment, but not beyond `until`. Returns the numbers and exit codes of the children that have
        ended.

        A child that was due and could not be started is returned with the code CANNOT_START.
        """
        ended = []
        for number in [number for number, when in self._due.items() if when <= time.monotonic()]:
            del self._due[number]
            try:
                self.start(number)
            except OSError:
                ended.append((number, CANNOT_START))
        if ended:
            return ended
        deadline = min((when for when in (until, *self._due.values()) if when is not None), default=None)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(left):
            if isinstance(key.data, Stream):
                if not key.data.pump():
                    self._selector.unregister(key.fileobj)
            else:
                os.read(key.fd, 4096)
        return self._take_ended()

    def stop(self, seconds: float, numbers: Collection[int] | None = None) -> set[int]:
        """Asks children to end, by SIGTERM and by the end of their standard input, passes on their output meanwhile,
        and kills those that take longer than `seconds`. Returns those that it has killed.

        numbers: the children; None: all

        From now on no child is started again.
        """
        self._due.clear()
        wanted = set(self._running if numbers is None else numbers)
        for number in wanted & self._running.keys():
            process = self._running[number]
            if process.stdin is not None:
                self.tell(number, STOP)
                process.stdin.close()  # by this it knows that the signal is that of its parent
            process.terminate()
        self._await_end(wanted, seconds)
        late = wanted & self._running.keys()
        if late:
            self.kill(*late)
            self._await_end(late, _KILL_SECONDS)
        return late

    def terminate(self, *numbers: int) -> None:
        """Asks children to end, without waiting for that. Children that wait for a restart are not started again."""
        for number in numbers:
            self._due.pop(number, None)
            if number in self._running:
                self._running[number].terminate()

    def kill(self, *numbers: int) -> None:
        """Kills children, all by default."""
        for number in numbers or tuple(self._running):
            if number in self._running:
                self._running[number].kill()

    def _await_end(self, numbers: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while numbers & self._running.keys() and time.monotonic() < deadline:
            self.wait(deadline)

    def _take_ended(self) -> list[tuple[int, int]]:
        """Removes the children that have ended from the running ones, after all their output is passed on. Returns
        their numbers and exit codes.
        """
        ended = []
        for number, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[number]
            for stream in self._streams.pop(number):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(stream.source)
                stream.finish()
            if process.stdin is not None:
                process.stdin.close()
            self._codes[number] = code
            ended.append((number, code))
        return ended


@contextlib.contextmanager
def _child_signal() -> Iterator[int]:
    """Yields a descriptor that can be read from when a child has ended."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    usual = signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler wakes nothing
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGCHLD, usual)
        os.close(reader)
        os.close(writer)


def _die_with_parent() -> Callable[[], None] | None:
    """Returns a function that a child calls before its program starts: then the kernel ends the child if this process
    is killed. Linux only; None elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
