"""What a coordinator needs to come back after its death, in one small file beside the checkpoints.

It is written when a job begins, ends or is rolled back, when a worker joins or leaves, and when the workers have
exchanged values: never by a step. It holds the keys of the workers' leases, so only its owner may read it.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest, TryLater
from ps_server.coordinator.ended_jobs import FinishedJob
from ps_server.coordinator.saved_job import SavedJob
from ps_server.core.membership import Member
from ps_server.core.rounds import Round
from ps_server.failpoints import failpoint
from ps_server.storage.files import Files, files_of
from ps_server.storage.manifest import READABLE, WITHOUT_BASES, seal, written_by_newer

log = logging.getLogger("ps_server")

FILE = ".coordinator.json"
MAX_BYTES = 2**30  # that are read: it has the values of rounds, which are many where jobs are
# Of workers, what is not written: times by the clock of a process that is gone when they are read, and what is for the
# answer to a join alone.
_PASSING = ("expires", "heard", "heard_before", "on_shards")
_NAMES_OF_FORMAT_1 = {"held_by": "shard_processes", "awaited": "rejoining", "ghosts": "pending_removals"}


class StateFile:
    """The file of one coordinator. Methods may be called from any thread.

    disk: what it is written with and read from
    Raises InvalidRequest for a file that a newer version has written: it would be lost; TryLater where an object store
    does not say whether there is one.
    """

    def __init__(self, directory: Path, disk: Files | None = None) -> None:
        self.path, self._disk = directory / FILE, disk or files_of(directory)
        self.is_behind, self._taken_over = False, ""
        self._lock = threading.Lock()
        newer = written_by_newer(self._content())
        if newer is not None:
            raise InvalidRequest(f"{self.path} is {newer}, or give this one another directory")

    def _content(self) -> Any:
        """Returns what the file holds; None where it is missing or no JSON. Raises TryLater as `load` does."""
        try:
            return json.loads(self._read())
        except (OSError, ValueError, RecursionError):
            return None

    def save(
        self, jobs: Callable[[], Mapping[str, SavedJob]], finished: Callable[[], Mapping[str, FinishedJob]] = dict
    ) -> None:
        """Replaces the file by what these return: the jobs that run, and those that have finished.

        Raises TryLater if the disk does not take it.
        """
        with self._lock:  # while they are listed, too: what is written last is the newest
            running = {name: _data(job) for name, job in jobs().items()}
            done = {name: json.loads(json.dumps(asdict(job))) for name, job in finished().items()}
            data = {"format": WITHOUT_BASES, "jobs": running, "finished": done}
            content = json.dumps({**data, "seal": seal(data)}).encode()
            try:
                self._disk.replace(self.path, content, lambda place: failpoint(f"coordinator-file-{place}"))
            except OSError as error:
                self.is_behind = True
                self._taken_over = (error.strerror or "") if error.errno == errno.ESTALE else ""
                raise TryLater(f"{self.path} cannot be written: {error.strerror}") from None
            self.is_behind, self._taken_over = False, ""

    def term(self) -> int:
        """Returns the number of the lease under which this file is written; 0: there is none."""
        return self._disk.term()

    def taken_over(self) -> str:
        """Returns who writes it now, in words, as the lease or the last attempt to write has shown; empty: this
        process, as far as it knows."""
        return self._disk.taken_over() or self._taken_over

    def load(self) -> tuple[dict[str, SavedJob], dict[str, FinishedJob]]:
        """Returns the jobs that ran, and those that had finished; none where there is no file, or, with a warning, one
        that was not written so.

        Raises TryLater where it is in an object store that does not answer.
        """
        try:
            data = self._sealed()
            jobs = {name: _job(job, data["format"]) for name, job in data["jobs"].items()}
            finished = data.get("finished", {})  # earlier releases knew nothing of it
            return jobs, {name: _finished(job) for name, job in finished.items()}
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "%s cannot be used: %s; jobs resume from their checkpoints when their workers come", self.path, error
            )
            return {}, {}

    def _sealed(self) -> dict[str, Any]:
        """Returns the file's content. Raises ValueError and others if it is not what was written."""
        data: dict[str, Any] = json.loads(self._read())
        if data.pop("seal") != seal(data) or data["format"] not in READABLE:
            raise ValueError("it is not what was written")
        return data

    def _read(self) -> bytes:
        try:
            return self._disk.read(self.path, MAX_BYTES)
        except ConnectionError as error:
            raise TryLater(f"{self.path} cannot be read: {error.strerror}") from None


def _data(job: SavedJob) -> dict[str, Any]:
    """Returns a job as JSON has it."""
    data = {**asdict(replace(job, spec={}, workers=(), away=(), absent=())), "spec": job.spec}  # which is plain data
    for name, workers in (("workers", job.workers), ("away", job.away), ("absent", job.absent)):
        data[name] = [
            {each: value for each, value in vars(worker).items() if each not in _PASSING} for worker in workers
        ]
    # Earlier releases know nothing of these: they go on with the file where it says nothing of them.
    if job.left is None:
        del data["absent"], data["left"]
    if not job.done:
        del data["done"]
    return dict(json.loads(json.dumps(data, default=bytes.hex)))


def _job(data: dict[str, Any], version: int) -> SavedJob:
    if version == 1:
        data = {_NAMES_OF_FORMAT_1.get(name, name): value for name, value in data.items()}
    data["placement"] = tuple(data["placement"])
    data["shard_processes"] = {int(shard): process for shard, process in data["shard_processes"].items()}
    data["unaccounted"] = {int(rank): tuple(clocks) for rank, clocks in data["unaccounted"].items()}
    for clocks in ("began", "departed"):
        data[clocks] = {int(rank): clock for rank, clock in data.get(clocks, {}).items()}
    settled = data.pop("skipped", data.get("settled", {}))  # the name in format 2
    data["settled"] = {int(rank): tuple((start, end) for start, end in spans) for rank, spans in settled.items()}
    continues = data.get("continues")
    data["continues"] = (continues[0], continues[1]) if continues else None
    for names in ("launches", "done"):
        data[names] = tuple(data.get(names, ()))
    data["rejoining"] = tuple(data["rejoining"])
    data["pending_removals"] = tuple((shard, rank, number) for shard, rank, number in data["pending_removals"])
    data["left"] = tuple(data["left"]) if data.get("left") else None
    for workers in ("workers", "away", "absent"):
        data[workers] = tuple(_worker(worker) for worker in data.get(workers, ()))
    data["rounds"] = tuple(
        Round(**{**saved, "values": tuple((rank, bytes.fromhex(value)) for rank, value in saved["values"])})
        for saved in data.get("rounds", ())
    )
    return SavedJob(**data)


def _finished(data: dict[str, Any]) -> FinishedJob:
    return FinishedJob(**{**data, "launches": tuple(data["launches"])})


def _worker(data: dict[str, Any]) -> Member:
    replaced = tuple((launch, incarnation) for launch, incarnation in data.pop("replaced", ()))
    data.pop("heard_before", None)  # earlier releases wrote it
    return Member(**{**data, "key": bytes.fromhex(data["key"])}, expires=0.0, replaced=replaced)
