"""What a coordinator needs to come back after its death, in one small file beside the checkpoints.

It is written when a job begins, ends or is rolled back, when a worker joins or leaves, and when the workers have
exchanged values: never by a step. It holds the keys of the workers' leases, so only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ps_server.coordinator.saved_job import SavedJob, SavedRound, SavedWorker
from ps_server.storage.checkpoints import FORMAT, READABLE, replace_file

log = logging.getLogger("ps_server")

FILE = ".coordinator.json"


class StateFile:
    """The file of one coordinator. Methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = threading.Lock()

    def save(self, jobs: Callable[[], Mapping[str, SavedJob]]) -> None:
        """Replaces the file by what `jobs` returns. Logs an error if the disk does not take it."""
        with self._lock:  # while they are listed, too: what is written last is the newest
            data = json.loads(json.dumps({"format": FORMAT, "jobs": {n: asdict(job) for n, job in jobs().items()}}))
            content = json.dumps({**data, "seal": _seal(data)}).encode()
            try:
                replace_file(self.path, content, "coordinator-file", 0o600)
            except OSError as error:
                log.error("%s cannot be written: %s", self.path, error.strerror)

    def load(self) -> dict[str, SavedJob]:
        """Returns the jobs that ran; none where there is no file, or, with a warning, one that was not written so."""
        try:
            data = json.loads(self.path.read_bytes())
            if data.pop("seal") != _seal(data) or data["format"] not in READABLE:
                raise ValueError("it is not what was written")
            return {name: _job(job) for name, job in data["jobs"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning(
                "%s cannot be used: %s; jobs resume from their checkpoints when their workers come", self.path, error
            )
            return {}


def _job(data: dict[str, Any]) -> SavedJob:
    data["placement"] = tuple(data["placement"])
    data["held_by"] = {int(shard): process for shard, process in data["held_by"].items()}
    data["unaccounted"] = {int(rank): tuple(clocks) for rank, clocks in data["unaccounted"].items()}
    data["began"] = {int(rank): clock for rank, clock in data.get("began", {}).items()}
    skipped = data.get("skipped", {}).items()
    data["skipped"] = {int(rank): tuple((start, end) for start, end in spans) for rank, spans in skipped}
    data["awaited"] = tuple(data["awaited"])
    data["ghosts"] = tuple((shard, rank, incarnation) for shard, rank, incarnation in data["ghosts"])
    data["rounds"] = tuple(
        SavedRound(**{**saved, "values": tuple((rank, value) for rank, value in saved["values"])})
        for saved in data.get("rounds", ())
    )
    data["workers"] = tuple(_worker(worker) for worker in data["workers"])
    return SavedJob(**data)


def _worker(data: dict[str, Any]) -> SavedWorker:
    replaced = tuple((launch, incarnation) for launch, incarnation in data.pop("replaced", ()))
    return SavedWorker(**data, replaced=replaced)


def _seal(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
