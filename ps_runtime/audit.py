"""The audit log: who was refused, joined, left, ended a job, and when checkpoints, tokens and certificates changed.

One JSON object a line, by the logger `ps_server.audit`: to the file that --audit-log names, or nowhere. Only refusals
are in the ordinary log as well. A line has

    time        UTC
    what        refused, started, join, leave, lost, end, checkpoint begun, checkpoint, checkpoint failed, rollback or
                credentials
    principal   as docs/security.md names it; "the servers" for what they do by themselves
    host, job   empty: unknown, or it concerns no job
    detail      in words; no secret is ever in it
    count       how many equal events the line stands for, if there is more than one
    role, index those of the server that writes the line

Lines that differ in nothing but their detail are equal. The first is written at once. Those that follow are counted,
and written as one after a second, then after two, and so on up to a minute: a stranger in a loop fills no disk.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from typing import Any, NamedTuple

from ps_protocol.errors import InvalidRequest
from ps_runtime.logs import Speaker

log = logging.getLogger("ps_server")
audit_log = logging.getLogger("ps_server.audit")

REFUSED = "refused"
SERVERS = "the servers"
FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0  # equal lines are counted for this long, and written once
MOST_KINDS = 500  # the most different lines before they are written; further ones are counted in one line
MOST_CHARACTERS = 500  # longer details are cut off


class AuditEntry(NamedTuple):
    """The fields of a line, apart from its detail and its count. about: the refused method; otherwise empty"""

    what: str
    principal: str
    host: str
    job: str
    about: str = ""


_OTHERS = AuditEntry("others", "", "", "")  # stands for all lines past MOST_KINDS


@dataclass
class _Equal:
    """Equal lines that are not written yet: the last detail, their count, and when they are written."""

    until: float
    seconds: float
    detail: str = ""
    count: int = 0


class Audit:
    """Limits the number of lines, and writes them. Methods may be called from any thread.

    write: writes a line, given its entry, detail and count
    clock: returns the time in seconds
    """

    def __init__(
        self, write: Callable[[AuditEntry, str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._equal: dict[AuditEntry, _Equal] = {}

    def note(self, entry: AuditEntry, detail: str) -> None:
        """Writes a line, or counts it."""
        now, detail = self._clock(), detail[:MOST_CHARACTERS]
        with self._lock:
            if entry not in self._equal and len(self._equal) >= MOST_KINDS:
                entry, detail = _OTHERS, "too many different lines at once"
            equal = self._equal.get(entry)
            if equal is not None:
                equal.detail, equal.count = detail, equal.count + 1
                return
            self._equal[entry] = _Equal(now + FIRST_SECONDS, FIRST_SECONDS)
        self._write(entry, detail, 1)

    def flush(self, all_of_them: bool = False) -> None:
        """Writes the counted lines that are due. Call it regularly. all_of_them: write all counted lines"""
        if not self._equal:
            return
        now, due = self._clock(), list[tuple[AuditEntry, str, int]]()
        with self._lock:
            for entry, equal in list(self._equal.items()):
                if equal.until > now and not all_of_them:
                    continue
                if not equal.count:
                    del self._equal[entry]
                    continue
                due.append((entry, equal.detail, equal.count))
                equal.seconds = min(2 * equal.seconds, LONGEST_SECONDS)
                equal.until, equal.count = now + equal.seconds, 0
        for entry, detail, count in due:
            self._write(entry, detail, count)


class _File(WatchedFileHandler):
    """Appends to a file, and opens it again after it was moved. Logs once if the disk refuses a line."""

    _is_failing = _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        self._failed = False
        super().emit(record)
        self._is_failing = self._failed

    def handleError(self, record: logging.LogRecord) -> None:
        """Logs once that the audit log cannot be written."""
        self._failed = True
        if not self._is_failing:
            self._is_failing = True
            log.error("the audit log %s cannot be written: %s", self.baseFilename, sys.exc_info()[1])


_fields: dict[str, Any] = {}


def start(speaker: Speaker, place: str | None) -> None:
    """Begins to write lines. place: a file; `-`: stderr; None or empty: lines are dropped

    Raises InvalidRequest if the file cannot be written.
    """
    _fields.update(speaker.fields())
    if not place:
        return
    if place == "-":
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
    else:
        try:
            os.close(os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
            handler = _File(place)
        except OSError as error:
            raise InvalidRequest(f"--audit-log: cannot write {place} ({error.strerror})") from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    audit_log.addHandler(handler)
    audit_log.propagate = False  # its lines are not the ordinary log's
    audit_log.setLevel(logging.INFO)


def _written(entry: AuditEntry, detail: str, count: int) -> None:
    times = f" ({count} times)" if count > 1 else ""
    if entry.what == REFUSED:
        log.info("refused: %s, %s: %s%s", entry.principal, entry.host, detail, times)
    if audit_log.handlers:
        audit_log.info("%s", json.dumps(_line(entry, detail, count)))


def _line(entry: AuditEntry, detail: str, count: int) -> dict[str, Any]:
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        **entry._asdict(),
        "detail": detail,
        **({"count": count} if count > 1 else {}),
        **_fields,
    }
    return {name: value for name, value in line.items() if name != "about" or value}


_audit = Audit(_written)
flush = _audit.flush


def note(what: str, detail: str, principal: str = SERVERS, host: str = "", job: str = "", about: str = "") -> None:
    """Writes a line of this process' audit log, or counts it; see the head of this file."""
    _audit.note(AuditEntry(what, principal, host, job, about), detail)
