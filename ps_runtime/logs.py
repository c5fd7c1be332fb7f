"""Log lines: text for a person, or a JSON object a line for a program, with the identity of the process as fields.

A JSON line has the time (UTC), the level, the identity of the process (role, and index or job and rank), the message,
and the traceback of an exception. The job, the worker's rank and the shard that a message names are fields, too.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from ps_runtime.settings import Setting, one_of

LEVELS = ("debug", "info", "warning", "error")
TEXT, JSON = FORMATS = ("text", "json")
JSON_LINE = b'{"time": "'  # how a line begins that a JsonLines made

_LINE = "%(asctime)s %(levelname)s %(message)s"
# The text before a value in a message, and the field of that value.
_FIELDS = {"job": "job", "worker": "rank", "shard": "shard"}
_VALUE = re.compile(r"(?:\b(job|worker|shard) )?%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-z])")


def log_settings(level: str | None) -> tuple[Setting, Setting]:
    """Returns the settings of a process's log. level: the default level; None: that of Python's logging"""
    return (
        Setting("log_level", f"the least that is logged: {', '.join(LEVELS)}", one_of(*LEVELS), level, "LEVEL"),
        Setting("log_format", "log lines as text or json", one_of(*FORMATS), TEXT, "FORMAT"),
    )


@dataclass(frozen=True)
class Speaker:
    """The identity of a process in its log lines.

    role: coordinator, shard, worker, or the command that started these
    index: the number of a shard
    job, rank: of a worker; None before they are known
    member: the number of the process in its worker's group; None if the worker is one process
    """

    role: str
    index: int | None = None
    job: str | None = None
    rank: int | None = None
    member: int | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the known fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__()
        self._speaker = speaker

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            # Of a worker, its own job and rank: a message may be about another one.
            **_named(record),
            **self._speaker.fields(),
            "message": record.getMessage(),
        }
        exception = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if exception:
            line["exception"] = exception
        return json.dumps(line, default=str)


def formatter(speaker: Speaker, kind: str) -> logging.Formatter:
    """Returns the formatter of log lines. kind: one of FORMATS"""
    if kind == JSON:
        return JsonLines(speaker)
    if speaker.role != "worker":
        return logging.Formatter(_LINE)
    rank = "?" if speaker.rank is None else speaker.rank
    return logging.Formatter(_LINE.replace("%(message)s", f"worker {rank}: %(message)s"))


def start(speaker: Speaker, level: str, kind: str) -> None:
    """Starts logging to this process's stderr."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(formatter(speaker, kind))
    logging.basicConfig(level=level.upper(), handlers=[stream])


def line_of(speaker: Speaker, text: str, kind: str) -> str:
    """Formats a line of a command as the log formats its lines: as JSON if the log does."""
    if kind != JSON:
        return f"{speaker.role}: {text}"
    return JsonLines(speaker).format(logging.LogRecord(speaker.role, logging.INFO, "", 0, text, None, None))


def _named(record: logging.LogRecord) -> dict[str, Any]:
    """Returns the fields that a record's message names: in `job %s: worker %d is gone`, the job and the rank."""
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return {}
    places = [place for place in _VALUE.finditer(record.msg) if not place[0].endswith("%%")]
    return {_FIELDS[place[1]]: value for place, value in zip(places, record.args, strict=False) if place[1]}
