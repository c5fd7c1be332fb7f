"""Describes how a worker failed: its exit code or signal, and the last line of its traceback."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass

from ps_runtime.logs import JSON_LINE

LONGEST_CAUSE = 200  # characters of an error that a line about a worker repeats

_TRACEBACK = b"Traceback (most recent call last):"
_OWN_ERROR = re.compile(rb"worker (?:\d+|\?): (?P<error>.+)")  # how a worker ends with an error of this package
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Python 3.13 and later paint a traceback on a terminal


class Cause:
    """Reads what a worker writes to its stderr, and keeps the last error in it as `text`; empty if there was none.

    It knows three forms: Python's traceback, whose last line names the exception; an error of this package, whose text
    follows the line of the script that raised it; and a critical log line in JSON.
    """

    def __init__(self) -> None:
        self.text = ""
        self._within = False  # a traceback that has not come to its last line
        self._before = b""

    def read(self, line: bytes) -> None:
        """Reads a whole line, without its end."""
        own = _OWN_ERROR.fullmatch(line)
        if line.startswith(_TRACEBACK):
            self._within = True
        elif self._within and line.strip() and not line.startswith(b" "):
            self._within = False
            self._keep(line.decode(errors="replace"))
        elif own and self._before.startswith(b"  "):
            self._keep(own["error"].decode(errors="replace"))
        elif line.startswith(JSON_LINE):
            self._read_json(line)
        self._before = line

    def _read_json(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if said.get("level") == "critical":
            self._keep(str(said.get("message", "")))

    def _keep(self, text: str) -> None:
        text = _COLOURS.sub("", text).strip()
        self.text = text if len(text) <= LONGEST_CAUSE else text[: LONGEST_CAUSE - 3] + "..."


@dataclass(frozen=True)
class Failure:
    """The end of a worker that failed.

    code:   the exit code of its process; negative: the signal that ended it
    cause:  the last error that it wrote; empty: unknown
    member: the number of the failed process in its group; None if the worker is one process
    """

    rank: int
    code: int
    cause: str = ""
    member: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code as a shell would show it."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        """Returns the failure as in "worker 1 failed with code 1 (RuntimeError: no)"."""
        how = f"failed with code {self.code}" if self.code >= 0 else f"was ended by {_signal_name(-self.code)}"
        who = f"worker {self.rank}" if self.member is None else f"member {self.member} of group {self.rank}"
        return f"{who} {how}" + (f" ({self.cause})" if self.cause else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
