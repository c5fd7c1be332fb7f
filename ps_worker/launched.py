"""A worker's output for the person at the launcher: log lines with its rank, and errors in one line."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import ps_protocol
import ps_runtime
from ps_protocol.errors import FinishedWithout, JobFinished, PSError
from ps_runtime.launch_id import FINISHED_WITHOUT_CODE, is_launched, launched_member, launched_rank
from ps_runtime.logs import JSON, TEXT, Speaker, formatter
from ps_runtime.settings import unknown_variables

log = logging.getLogger("ps_worker")

_OURS = tuple(str(Path(file).parent) + os.sep for file in (__file__, ps_protocol.__file__, ps_runtime.__file__))
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


# -- log lines -------------------------------------------------------------------------------------------------------


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Log lines on stderr, for as long as the script sets up no logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.speaker = Speaker("worker")
        self.kind = TEXT

    def speak_as(self, speaker: Speaker, kind: str) -> None:
        """Adds this worker's name to each line from now on. kind: a key of ps_runtime.logs.FORMATS"""
        self.speaker, self.kind = speaker, kind
        self.setFormatter(formatter(speaker, kind))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record."""
        if not _is_heard(record.name):
            self.stream = sys.stderr  # read each time: a notebook replaces it
            super().emit(record)


LAST_WORDS_SECONDS = 5.0  # for the message of a process that ends at once

_lines = _Lines()
_warned = False


def _is_heard(name: str) -> bool:
    """Returns whether a logger's records reach a handler of the script's own."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(handler is not _lines for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def speak_as(job: str, rank: int | None, level: str | None, kind: str) -> None:
    """Adds the worker's job and rank to this package's log lines. rank: None: not known yet. level: None: Python's
    default
    """
    _lines.speak_as(Speaker("worker", job=job, rank=rank, member=launched_member()), kind)
    for name in ("ps_worker", "ps_runtime"):
        logger = logging.getLogger(name)
        if _lines not in logger.handlers:
            logger.addHandler(_lines)
        if level is not None:
            logger.setLevel(level.upper())


def warn_of_unknown_variables() -> None:
    """Warns once of PS_* variables that have no effect; under the launcher it does not, as the launcher has warned
    already.
    """
    global _warned
    unknown = unknown_variables()
    if unknown and not _warned and not is_launched():
        log.warning(unknown)
    _warned = True


# -- errors ----------------------------------------------------------------------------------------------------------


def report_errors_in_one_line() -> None:
    """Makes this project's errors and Ctrl-C end a script, under the launcher, with the script's own line and one
    message.

    A process that comes late, and finds its job finished in `prepare`, has nothing to do: it ends with code 0. One that
    has trained, in this job or in another one of its launch, ends with a code of its own.
    """
    if not is_launched() or getattr(sys.excepthook, "is_ours", False):
        return
    usual = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobFinished):
            _say_last(error, "", logging.INFO)
            raise SystemExit(0)
        if isinstance(error, PSError):
            _say_last(error, _source_line(traceback.extract_tb(trace)))
            if isinstance(error, FinishedWithout):
                raise SystemExit(FINISHED_WITHOUT_CODE)
        elif not isinstance(error, KeyboardInterrupt):
            usual(kind, error, trace)

    report.is_ours = True  # type: ignore[attr-defined]
    sys.excepthook = report


def end_at_once(text: str, code: int) -> NoReturn:
    """Ends this process with one message, which shows where the script is. For another thread than the script's, which
    may be in a call that never returns: nothing of the script is run.
    """

    def say() -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        with suppress(Exception):
            place = _source_line(traceback.extract_stack(frame)) if frame is not None else ""
            if is_launched():
                _say_last(PSError(text), place)
            else:
                log.critical("%s\n%s", text, place.rstrip())
            sys.stdout.flush()

    try:
        # In a thread of its own: the script's file may lie on a machine that is gone, and nobody may read a pipe.
        saying = threading.Thread(target=say, name="last-words", daemon=True)
        saying.start()
        saying.join(LAST_WORDS_SECONDS)
    finally:
        os._exit(code)


def _say_last(error: PSError, place: str, level: int = logging.CRITICAL) -> None:
    """Writes the error that ends the script as one message; as a line of JSON if log lines are JSON."""
    rank = _lines.speaker.rank if _lines.speaker.rank is not None else launched_rank()
    if _lines.kind == JSON:
        record = logging.LogRecord("ps_worker", level, "", 0, str(error), None, None)
        record.exc_text = place
        sys.stderr.write(_lines.format(record) + "\n")
    else:
        sys.stderr.write(f"{place}worker {'?' if rank is None else rank}: {error}\n")


def script_frame(frame: FrameType) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the user's own code, of a thread that is at `frame`. It reads no file."""
    # Not by StackSummary.extract, which looks whether files of the stack have changed on the disk.
    stack = [
        traceback.FrameSummary(each.f_code.co_filename, line, each.f_code.co_name, lookup_line=False)
        for each, line in traceback.walk_stack(frame)
    ]
    return next(iter(_of_script(stack[::-1])), None)


def _source_line(stack: traceback.StackSummary) -> str:
    """Returns the last frame of the user's own code as Python shows it, with a new line; empty if there is none."""
    return "".join(traceback.format_list(_of_script(stack)))


def _of_script(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the last frame of the user's own code, or of a library if there is none; nothing if the stack is ours."""
    frames = [frame for frame in stack if not frame.filename.startswith(("<frozen", *_OURS))]
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return (own or frames)[-1:]


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)
