"""A worker's output for the person at the launcher: log lines with its rank, and errors in one line."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import ps_protocol
import ps_runtime
from ps_protocol.errors import PSError
from ps_runtime.launch_id import is_launched, launched_rank
from ps_runtime.settings import unknown_variables

log = logging.getLogger("ps_worker")

LINE = "%(asctime)s %(levelname)s worker %(rank)s: %(message)s"

_OURS = tuple(str(Path(file).parent) + os.sep for file in (__file__, ps_protocol.__file__, ps_runtime.__file__))
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


# -- log lines -------------------------------------------------------------------------------------------------------


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Log lines on stderr with time, level and rank, for as long as the script sets up no logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = "?"
        self.setFormatter(logging.Formatter(LINE))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        if not logging.getLogger().handlers:
            record.rank = self.rank
            self.stream = sys.stderr  # of now: a notebook changes it
            super().emit(record)


_lines = _Lines()
_warned = False


def speak_as(rank: int | None) -> None:
    """Gives this package's log lines time, level and rank; None: the rank is not known yet."""
    _lines.rank = "?" if rank is None else str(rank)
    for name in ("ps_worker", "ps_runtime"):
        logger = logging.getLogger(name)
        if _lines not in logger.handlers:
            logger.addHandler(_lines)


def warn_of_unknown_variables() -> None:
    """Warns once of PS_* variables that have no effect; under the launcher, which has done so, it does not."""
    global _warned
    unknown = unknown_variables()
    if unknown and not _warned and not is_launched():
        log.warning(unknown)
    _warned = True


# -- errors ----------------------------------------------------------------------------------------------------------


def report_errors_in_one_line() -> None:
    """Has this project's errors and Ctrl-C end a script, under the launcher, with its own line and one message."""
    if not is_launched() or getattr(sys.excepthook, "is_ours", False):
        return
    usual = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PSError):
            rank = launched_rank() or _lines.rank
            sys.stderr.write(f"{_place(trace)}worker {rank}: {error}\n")
        elif not isinstance(error, KeyboardInterrupt):
            usual(kind, error, trace)

    report.is_ours = True  # type: ignore[attr-defined]
    sys.excepthook = report


def _place(trace: TracebackType | None) -> str:
    """Returns the last frame of the user's own code as Python shows it, with a new line; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(("<frozen", *_OURS))]
    own = [frame for frame in frames if not _is_library(frame.filename)]
    last = (own or frames)[-1:]
    return "".join(traceback.format_list(last))


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)
