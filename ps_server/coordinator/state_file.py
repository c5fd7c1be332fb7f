"""The state that a restarted coordinator needs, in one small file beside the checkpoints.

It is written when a job begins, ends or is rolled back, when a worker joins or leaves, and when the workers have
exchanged values: never by a step. It holds the keys of the workers' leases, so only its owner may read it.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest, TryLater
from ps_protocol.job import JobSpec
from ps_server.coordinator.cluster import Cluster, Registry, new_membership
from ps_server.coordinator.coordinated_job import CoordinatedJob
from ps_server.coordinator.ended_jobs import FinishedJob
from ps_server.core.accounting import StepAccounting
from ps_server.core.data_commits import Span
from ps_server.core.membership import LiveWorker
from ps_server.core.placement import place_job
from ps_server.core.rounds_of_values import ValueRound, newest
from ps_server.failpoints import failpoint
from ps_server.storage.files import Files, files_of
from ps_server.storage.manifest import READABLE, WITHOUT_BASES, seal, written_by_newer

log = logging.getLogger("ps_server")

FILE = ".coordinator.json"
MAX_BYTES = 2**30  # most bytes that are read: with many jobs, the values of their rounds make the file large
# Fields of workers that are not written: times on the clock of a process that has ended when they are read, what each
# heartbeat tells anew, and fields for the answer to a join.
_PASSING = ("expires", "heard", "heard_before", "signs", "processes", "on_shards")
_NAMES_OF_FORMAT_1 = {"held_by": "shard_processes", "awaited": "rejoining", "ghosts": "pending_removals"}


class StateFile:
    """The file of one coordinator. Methods may be called from any thread.

    disk: reads and writes the file; None: that of `directory`, a file system or an object store

    Raises InvalidRequest if a newer version has written the file: this one would overwrite it. Raises TryLater if the
    object store does not say whether there is a file.
    """

    def __init__(self, directory: Path, disk: Files | None = None) -> None:
        self.path, self._disk = directory / FILE, disk or files_of(directory)
        self.is_behind, self._taken_over = False, ""
        self._lock = threading.Lock()
        newer = written_by_newer(self._content())
        if newer is not None:
            raise InvalidRequest(f"{self.path} is {newer}, or give this one another directory")

    def _content(self) -> Any:
        """Returns the file's content; None if it is missing or no JSON. Raises TryLater as `load` does."""
        try:
            return json.loads(self._read())
        except (OSError, ValueError, RecursionError):
            return None

    def save(
        self, jobs: Callable[[], Mapping[str, SavedJob]], finished: Callable[[], Mapping[str, FinishedJob]] = dict
    ) -> None:
        """Replaces the file. Raises TryLater if the write fails.

        jobs:     returns the jobs that run, by name; is called under the lock, so that the last write has the newest
                  state
        finished: returns the jobs that have finished, by name
        """
        with self._lock:  # held while the jobs are listed too, so that the last write has the newest state
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
        """Returns the number of the lock lease under which this file is written; 0: there is none."""
        return self._disk.term()

    def taken_over(self) -> str:
        """Returns a description of the process that writes the file now, if the lock lease or the last write has shown
        another one; empty if, as far as is known, this one does.
        """
        return self._disk.taken_over() or self._taken_over

    def load(self) -> tuple[dict[str, SavedJob], dict[str, FinishedJob]]:
        """Returns the jobs that ran and those that had finished. Both are empty if there is no file, or, with a
        warning, if it is damaged.

        Raises TryLater if an object store does not answer.
        """
        try:
            data = self._sealed()
            jobs = {name: _job(job, data["format"]) for name, job in data["jobs"].items()}
            finished = data.get("finished", {})  # files of earlier releases lack it
            return jobs, {name: _finished(job) for name, job in finished.items()}
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning(
                "%s cannot be used: %s; jobs resume from their checkpoints when their workers come", self.path, error
            )
            return {}, {}

    def _sealed(self) -> dict[str, Any]:
        """Returns the file's content. Raises ValueError and others if the content was changed."""
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
    """Returns a job as plain data that JSON can hold."""
    data = {**asdict(replace(job, spec={}, workers=(), away=(), absent=())), "spec": job.spec}  # which is plain data
    for name, workers in (("workers", job.workers), ("away", job.away), ("absent", job.absent)):
        data[name] = [
            {each: value for each, value in vars(worker).items() if each not in _PASSING} for worker in workers
        ]
    # Earlier releases do not know these fields. They can resume from a file without them.
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
        ValueRound(**{**saved, "values": tuple((rank, bytes.fromhex(value)) for rank, value in saved["values"])})
        for saved in data.get("rounds", ())
    )
    return SavedJob(**data)


def _finished(data: dict[str, Any]) -> FinishedJob:
    return FinishedJob(**{**data, "launches": tuple(data["launches"])})


def _worker(data: dict[str, Any]) -> LiveWorker:
    replaced = tuple((launch, incarnation) for launch, incarnation in data.pop("replaced", ()))
    data.pop("heard_before", None)  # earlier releases wrote it
    return LiveWorker(**{**data, "key": bytes.fromhex(data["key"])}, expires=0.0, replaced=replaced)


# -- one job in the file -----------------------------------------------------------------------------------------------


ROUND_BYTES_ON_DISK = 2**20  # most bytes of a job's past rounds in the file: each new round writes them once more


@dataclass(frozen=True)
class SavedJob:
    """A job that runs. The names of the fields are those in the file.

    spec:              as plain data
    run:               tells this job from earlier ones of its name
    shard_processes:   by shard, the process that holds the job's part
    workers:           the live workers. Each has its attempt, so that a repeated join request gets the same membership
    lost_steps, redone_steps, unaccounted, began, departed, settled: the cost of rollbacks; see core.accounting
    rejoining:         the ranks that are expected to join again, after a rollback
    away:              the workers that had these ranks
    pending_removals:  (shard, rank, incarnation) of workers that shards may still count; also of workers that are
                       joining
    continues:         the run and the checkpoint with which this run began; None if it began anew
    launches:          the launches that have taken part
    absent:            the silent workers that the job waits for before it ends, because all others have left
    left:              how the last worker left, and when: `is_done` and `left_at` of Attendance
    done:              the ranks whose scripts have ended
    rounds_completed:  the number of the last round in which the workers have exchanged values
    rounds:            the last complete rounds
    """

    spec: dict[str, Any]
    run: str
    placement: tuple[int, ...]
    shard_processes: Mapping[int, int]
    last_incarnation: int
    restore_count: int
    started: bool
    workers: tuple[LiveWorker, ...]
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    began: Mapping[int, int] = field(default_factory=dict)
    departed: Mapping[int, int] = field(default_factory=dict)
    settled: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    rejoining: tuple[int, ...] = ()
    away: tuple[LiveWorker, ...] = ()
    pending_removals: tuple[tuple[int, int, int], ...] = ()
    continues: tuple[str, str] | None = None
    rounds_completed: int = 0
    rounds: tuple[ValueRound, ...] = ()
    launches: tuple[str, ...] = ()
    absent: tuple[LiveWorker, ...] = ()
    left: tuple[bool, float] | None = None
    done: tuple[int, ...] = ()


def saved(job: CoordinatedJob) -> SavedJob:
    """Returns the state that another coordinator needs to resume a job. Does not wait for joins under way."""
    completed, rounds = job.rounds.done()
    accounting, live = job.accounting, job.workers.all()
    attendance, ranks = job.workers.attendance, {worker.rank for worker in live}
    return SavedJob(
        spec=job.spec_data,
        run=job.placed.run,
        placement=job.placed.placement,
        shard_processes=dict(job.shard_processes),
        last_incarnation=job.workers.last_incarnation(),
        restore_count=job.workers.restore_count,
        started=job.workers.roster()[2],
        workers=tuple(live),
        lost_steps=accounting.lost_steps,
        redone_steps=accounting.redone_steps,
        unaccounted=dict(accounting.unaccounted),
        began=dict(accounting.began),
        departed=dict(accounting.departed),
        settled=dict(accounting.settled),
        rejoining=job.workers.rejoining(),
        away=tuple(worker for worker in job.workers.all(and_away=True) if worker.rank not in ranks),
        pending_removals=tuple(sorted(job.workers.pending_removals())),
        continues=job.placed.continues,
        rounds_completed=completed,
        rounds=newest(rounds, ROUND_BYTES_ON_DISK),
        launches=attendance.launches,
        absent=job.absent_awaited(),
        left=(attendance.is_done, attendance.left_at) if attendance.waits else None,
        done=job.workers.done(),
    )


def resumed(saved: SavedJob, spec: JobSpec, cluster: Cluster, registry: Registry) -> CoordinatedJob:
    """Makes a job from its saved state. Its workers may be training: they have two leases to send a heartbeat."""
    until, count = cluster.clock.now() + 2 * cluster.lease, cluster.shards.count
    # No incarnation twice: the file may be an earlier copy, and workers that joined after it was made may be alive.
    last_incarnation = max(saved.last_incarnation, int(cluster.clock.since_1970() * 1e3))
    membership = new_membership(spec, cluster, last_incarnation)
    for worker in saved.workers:
        membership.join(replace(worker, expires=until))
    membership.started = saved.started
    # Also if all its workers had left: their training belongs into a last checkpoint before the job ends.
    membership.ever_joined = membership.ever_joined or saved.last_incarnation > 0
    membership.rejoining = dict.fromkeys(saved.rejoining, until)
    membership.away = {worker.rank: replace(worker, expires=cluster.clock.now()) for worker in saved.away}
    back_by = cluster.clock.now() + membership.absence
    membership.absent = {worker.rank: replace(worker, expires=back_by) for worker in saved.absent}
    membership.resume(set(saved.done), cluster.clock.now())
    placed = replace(place_job(spec, count, saved.run), continues=saved.continues)
    processes: dict[int, int] = {}
    # If the number of shards has changed since, no shard has its part of the job: every part counts as lost.
    if len(saved.shard_processes) == count and all(shard < count for shard in saved.placement):
        placed, processes = replace(placed, placement=saved.placement), dict(saved.shard_processes)
    accounting = StepAccounting(
        goes_back_together=spec.consistency.goes_back_together,
        lost_steps=saved.lost_steps,
        redone_steps=saved.redone_steps,
        unaccounted=dict(saved.unaccounted),
        began=dict(saved.began),
        departed=dict(saved.departed),
        settled=dict(saved.settled),
    )
    job = CoordinatedJob(
        placed,
        processes,
        cluster,
        registry,
        membership,
        pending_removals=frozenset(saved.pending_removals),
        restore_count=saved.restore_count,
        accounting=accounting,
    )
    job.workers.attendance.launches = saved.launches
    if saved.left is not None:
        job.workers.attendance.left(*saved.left)
        job.workers.attendance.wait()
    job.rounds.resume(saved.rounds_completed, saved.rounds)
    if job.checkpoints is not None:
        job.checkpoints.resume()
    return job
