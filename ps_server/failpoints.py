"""Failpoints: named points in the code at which a server kills itself or waits on request, for tests.

    PS_FAILPOINTS=NAME[@SHARD][=N],...              SIGKILL the N-th time (first) that the place NAME is passed; with
                                                    @SHARD, only in the process that is this shard
    PS_FAILPOINTS=NAME[@SHARD]=delay:SECONDS,...    waits so long each time that it is passed, as if that took longer

Only the commands `ps-server shard`, `coordinator` and `relay` read the variable, once, when they start. A process that
`ps-server up` starts again after a death keeps only the delays. Without the variable, a failpoint costs one test of an
empty set, or of two empty dictionaries.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest

log = logging.getLogger("ps_server")

VARIABLE = "PS_FAILPOINTS"

POINTS: Mapping[str, str] = {
    "push-checked": "shard: a push was checked, and is not staged",
    "push-staged": "shard: a push is staged, and not acknowledged",
    "contribution-added": "shard: a gradient is in the sum of an update, and nothing says so yet",
    "update-stepped": "shard: the optimizer has stepped, and the update is not counted",
    "pull-half-sent": "shard: a bucket of a pull is read, and not sent; with =2, another one was",
    "shard-file-half-written": "shard: half of its file of a checkpoint is on disk",
    "shard-file-written": "shard: its file of a checkpoint is on disk, and the coordinator does not know",
    "restore-half-read": "shard: it has read a piece of a checkpoint, of 1 MiB at most",
    "restore-read": "shard: it has read a checkpoint, and holds nothing of the job yet",
    "manifest-missing": "coordinator: all files of a checkpoint are on disk, but the manifest",
    "manifest-half-written": "coordinator: half of the manifest is written, under its temporary name",
    "manifest-unnamed": "coordinator: the manifest is on disk, under its temporary name",
    "checkpoint-half-removed": "coordinator: an old checkpoint has lost its manifest, and not its files",
    "restore-half-done": "coordinator: the shards hold what a checkpoint has, and nothing else says so",
    "worker-half-added": "coordinator: a shard counts a worker that joins; others may not yet",
    "coordinator-file-half-written": "coordinator: half of its own file is written, under its temporary name",
    "coordinator-file-unnamed": "coordinator: its own file is on disk, under its temporary name",
    "edition-half-sent": "shard: a bucket of an edition is about to be sent to a reader; with =2, another one was",
    "edition-half-relayed": "relay: a bucket of an edition is about to be sent to a reader; with =2, another one was",
    "drain-begun": "coordinator: told to stop, before it makes last checkpoints",
}

_ENTRY = re.compile(r"([a-z-]+)(?:@(\d{1,6}))?(?:=(?:([1-9]\d{0,8})|delay:(\d{1,3}(?:\.\d{1,6})?)))?")


@dataclass(frozen=True)
class Entry:
    """One entry of the variable.

    shard: None for every process
    times: at which passage the process kills itself
    delay: seconds that each passage waits instead; None if it kills
    """

    name: str
    shard: int | None
    times: int = 1
    delay: float | None = None


# The names of all armed failpoints: code that every step passes calls `failpoint` only if there are any
armed: set[str] = set()
_left: dict[str, int] = {}  # by name, how often it is still to be passed; empty unless the variable is set
_delays: dict[str, float] = {}  # by name, seconds that each passage waits
_lock = threading.Lock()


def parse(text: str) -> list[Entry]:
    """Returns the entries of the variable. Raises InvalidRequest, naming the failpoints, for other texts."""
    entries = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None or match[1] not in POINTS:
            raise InvalidRequest(
                f"{VARIABLE}: expected NAME[@SHARD][=N] or NAME[@SHARD]=delay:SECONDS, "
                f"with a name out of {', '.join(POINTS)}; got {entry[:200]!r}"
            )
        shard, delay = int(match[2]) if match[2] else None, float(match[4]) if match[4] else None
        entries.append(Entry(match[1], shard, int(match[3] or 1), delay))
    return entries


def check() -> None:
    """Raises InvalidRequest for a PS_FAILPOINTS that `arm` would refuse."""
    parse(os.environ.get(VARIABLE, ""))


def arm(shard: int | None) -> None:
    """Arms the failpoints in PS_FAILPOINTS. shard: this process's shard; None if it is no shard"""
    for entry in parse(os.environ.get(VARIABLE, "")):
        if entry.shard not in (None, shard):
            continue
        armed.add(entry.name)
        if entry.delay is not None:
            _delays[entry.name] = entry.delay
            log.warning(
                "%s is set: this process waits %g s each time at %r: %s",
                *(VARIABLE, entry.delay, entry.name, POINTS[entry.name]),
            )
        else:
            _left[entry.name] = entry.times
            log.warning(
                "%s is set: this process kills itself at %r, time %d: %s",
                *(VARIABLE, entry.name, entry.times, POINTS[entry.name]),
            )


def failpoint(name: str) -> None:
    """Kills this process, or waits, if the failpoint `name` is armed."""
    if name in _delays:
        time.sleep(_delays[name])
    if _left:
        _pass(name)


def _pass(name: str) -> None:
    with _lock:
        if name not in _left:
            return
        _left[name] -= 1
        if _left[name]:
            return
        os.write(2, f"failpoint {name}: this process kills itself\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # it is dead before another thread gets on, and so is this one
