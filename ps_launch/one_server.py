"""Runs one server process for a parent of any kind: it needs no main thread, no signal handler and no fork of Python
code.

`ps-server up` and `ps-worker run` are commands, and wait for their children in their main thread (children.py). This
module is for a process whose main thread belongs to another program, such as an actor of Ray.

The server is supervised: it prints its addresses as one line of JSON, and stops when its standard input closes, which
happens when this process ends for any reason.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from ps_launch.lifeline import STOP
from ps_launch.ready import addresses_in
from ps_protocol.errors import TryLater
from ps_runtime.background import start
from ps_runtime.own_program import own_program

KILL_SECONDS = 5.0  # the longest wait for a killed server to end
LAST_LINES = 20  # lines of the server's log that the error quotes if it cannot start


class OneServer:
    """A `ps-server coordinator` or `ps-server shard`. The constructor starts it. Methods may be called from any thread.

    arguments:   the command and its flags
    environment: the complete environment of the process
    Raises OSError if the process cannot be started.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._addresses: dict[str, str] | None = None
        self._settled = threading.Event()  # it is ready, or has ended
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, *own_program("ps_server", *arguments, "--supervised")],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C on a terminal reaches the parent alone, which stops it in order
        )
        self._readers = [
            threading.Thread(target=read, args=(source,), name="server's output", daemon=True)
            for read, source in ((self._read_out, self._process.stdout), (self._read_err, self._process.stderr))
        ]
        try:
            for reader in self._readers:
                start(reader)
        except TryLater:  # without a reader of its output the server would block for ever
            with self._process:
                self._process.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def await_ready(self, seconds: float) -> dict[str, str] | None:
        """Waits up to `seconds` for the server to be ready. Returns its `address`, `metrics` and `process`; None if it
        is not ready.
        """
        self._settled.wait(seconds)
        return self._addresses

    def has_ended(self) -> bool:
        """Returns whether the process has ended."""
        return self._process.poll() is not None

    def await_end(self) -> int:
        """Waits for the process to end; returns its exit code."""
        return self._process.wait()

    def last_words(self) -> str:
        """Returns the last lines of its log. Call it after the process has ended."""
        for reader in self._readers:
            reader.join(KILL_SECONDS)
        return "\n".join(self._lines)

    def stop(self, seconds: float) -> bool:
        """Asks the server to end, and kills it after `seconds`. Returns whether it has ended by itself."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(STOP + "\n")
                self._process.stdin.close()  # by this it knows that the signal is that of its parent
        self._process.terminate()
        in_time = True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            in_time = False
            self._process.kill()
        for reader in self._readers:  # they end with the process
            reader.join(KILL_SECONDS)
        return in_time

    def _read_out(self, source: IO[str]) -> None:
        with source:
            for line in source:
                addresses = addresses_in(line) if self._addresses is None else None
                if addresses is not None:
                    self._addresses = addresses
                    self._settled.set()
                else:
                    self._pass_on([line])
        self._settled.set()  # it has ended
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _read_err(self, source: IO[str]) -> None:
        with source:
            self._pass_on(source)

    def _pass_on(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._lines.append(line.rstrip())
            with contextlib.suppress(OSError, ValueError):  # a parent that ends has closed it
                sys.stderr.write(line)
                sys.stderr.flush()
