"""Passes on the output of children, as whole lines: to the console with the worker's rank in front, and to a log file.

The console may show only some workers. For the others it keeps the last lines of stderr, and shows them if the worker
fails, so that no error is hidden.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, BinaryIO, Protocol

from ps_runtime.logs import JSON_LINE, TEXT, Speaker, line_of

READ_BYTES = 65_536
LONGEST_LINE_BYTES = 65_536  # a longer line is written in parts
PROGRESS_SECONDS = 1.0
LINES_OF_AN_ERROR = 50  # last lines that are shown of a failed worker whose output was hidden
MOST_READS_AT_END = 64  # more than a pipe holds: a process that the worker left behind may write on without end
# A pipe that is ready accepts this many bytes without blocking
_WRITE_BYTES = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512

_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)  # a return at the very end may have its new line to come
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfsu]")  # sequences that move the cursor or clear text; colours are kept
# Readable on black and on white; without red, the colour of errors
_RANK_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class OutputLines:
    """Splits a stream of bytes into whole lines.

    A progress bar returns to the beginning of its line and overwrites it. Each such state counts as a line, at most one
    a second, and the last one before the line ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""
        self._state = b""  # the latest state of a progress bar, not passed on yet
        self._passed_on = float("-inf")

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are complete with `data`, without their ends."""
        lines: list[bytes] = []
        self._rest += data
        begin = 0
        for end in _END.finditer(self._rest):
            text = _MOVES.sub(b"", self._rest[begin : end.start()])
            begin = end.end()
            if end[0] == b"\r":
                lines += self._progress(text)
            else:
                self._state = b""
                lines.append(text)
        self._rest = self._rest[begin:]
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def end(self) -> list[bytes]:
        """Returns the last, unfinished line when the stream ends."""
        rest = _MOVES.sub(b"", self._rest.removesuffix(b"\r"))
        last = rest or self._state
        self._rest = self._state = b""
        return [last] if last else []

    def _progress(self, text: bytes) -> list[bytes]:
        if not text.strip():  # the bar is wiped out
            self._state = b""
            return []
        now = self._clock()
        if now - self._passed_on < PROGRESS_SECONDS:
            self._state = text
            return []
        self._state, self._passed_on = b"", now
        return [text]


class Console:
    """This process's stdout and stderr. It never depends on a reader: what cannot be written is dropped.

    program:    the name in front of the command's own lines
    log_format: the format of its own lines on stderr: text or json
    until:      the time, in seconds of time.monotonic, after which writing gives up; None: never
    """

    def __init__(self, program: str, log_format: str = TEXT) -> None:
        self._program = program
        self._log_format = log_format
        self._closed: set[int] = set()
        # From then on nothing is waited for: a reader that stands still keeps no end off.
        self.until: float | None = None

    def write(self, descriptor: int, data: bytes) -> None:
        """Writes all of `data`, however slow the reader is; gives up at the time `until`, if it is set."""
        view = memoryview(data)
        while len(view) and descriptor not in self._closed:
            left = None if self.until is None else max(0.0, self.until - time.monotonic())
            if not select.select([], [descriptor], [], left)[1]:
                return
            try:
                view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError:
                self._closed.add(descriptor)

    def say(self, text: str) -> None:
        """Writes a line to stderr."""
        line = line_of(Speaker(self._program), text, self._log_format)
        self.write(sys.stderr.fileno(), f"{line}\n".encode(errors="replace"))

    def tell(self, text: str) -> None:
        """Writes a line to stdout."""
        self.write(sys.stdout.fileno(), f"{self._program}: {text}\n".encode(errors="replace"))


class Output(Protocol):
    """Receives one of the two outputs of a child."""

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Processes output. data: the bytes as they came; lines: the lines that are complete with them, without their
        ends
        """


class Dropped:
    """Discards a child's output."""

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Drops the bytes."""


def rank_prefix(rank: int, target: int, member: int | None = None) -> bytes:
    """Returns the text before a worker's lines: in a colour of the worker's own if a terminal shows them.

    target: the descriptor that the lines are written to
    member: the process of a group that writes: [1.0] is the first member of group 1; None if the worker is one process

    NO_COLOR (https://no-color.org) and TERM=dumb turn colours off.
    """
    text = f"[{rank}]" if member is None else f"[{rank}.{member}]"
    if os.isatty(target) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = f"\x1b[{_RANK_COLOURS[rank % len(_RANK_COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


class WorkerOutput:
    """Passes one output of a worker on to the console, and its lines to the worker's log file.

    prefix: is put before each line on the console, but not before log lines in JSON, which have the rank as a field.
            None: the console gets the bytes unchanged
    log:    the worker's log file; None if there is none
    shown:  the console shows the output; False: only `reveal` shows its last lines
    read:   is called with each line; None if no function is
    """

    def __init__(
        self,
        console: Console,
        target: int,
        prefix: bytes | None,
        log: BinaryIO | None,
        shown: bool = True,
        read: Callable[[bytes], object] | None = None,
    ) -> None:
        self._console = console
        self._target = target
        self._prefix = prefix
        self._log = log
        self._shown = shown
        self._read = read
        self._last: deque[bytes] = deque(maxlen=LINES_OF_AN_ERROR)

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Processes output. data: the bytes as they came; lines: the lines that are complete with them"""
        if not self._shown:
            self._last.extend(lines)
        elif self._prefix is None:
            self._console.write(self._target, data)
        else:
            self._write(lines)
        if self._read is not None:
            for line in lines:
                self._read(line)
        if self._log is not None and lines:
            try:
                self._log.write(b"".join(line + b"\n" for line in lines))
                self._log.flush()
            except OSError as error:  # a full disk ends the log, not the training
                self._console.say(f"cannot write {self._log.name} ({error.strerror}): the log ends here")
                self._log = None

    def reveal(self) -> None:
        """Writes the last lines of a worker that is not shown to the console."""
        self._write(self._last)
        self._last.clear()

    def _write(self, lines: Iterable[bytes]) -> None:
        prefix = self._prefix or b""
        said = ((b"" if line.startswith(JSON_LINE) else prefix) + line + b"\n" for line in lines)
        self._console.write(self._target, b"".join(said))


class Stream:
    """One output of one child, read without waiting."""

    def __init__(self, source: IO[bytes], output: Output) -> None:
        self.source = source
        self._output = output
        self._lines = OutputLines()
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Reads the available bytes once, and passes them on. Returns False at the end of the stream."""
        data = self._read()
        if data:
            self._output.take(data, self._lines.feed(data))
        return data != b""

    def finish(self) -> None:
        """Passes on the rest of the output of a child that has ended, even if other processes hold its stream open."""
        for _ in range(MOST_READS_AT_END):
            data = self._read()
            if not data:
                break
            self._output.take(data, self._lines.feed(data))
        self._output.take(b"", self._lines.end())
        self.source.close()

    def _read(self) -> bytes | None:
        """Returns the available bytes; None if there are none now, and no bytes at the end of the stream."""
        try:
            return os.read(self.source.fileno(), READ_BYTES)
        except BlockingIOError:
            return None
