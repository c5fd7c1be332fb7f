"""What a coordinator needs to come back after its death, in one small file beside the checkpoints.

It is written when a job begins, ends, is set back, when somebody joins or leaves, and when the workers have exchanged
values: never by a step. It holds the keys of the workers' leases, so only its owner may read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ps_server.storage.checkpoints import replace_file

log = logging.getLogger("ps_server")

FILE = ".coordinator.json"
FORMAT = 1


@dataclass(frozen=True)
class DurableWorker:
    """A live worker; see core.membership.Member. The key as hexadecimal digits.

    With the attempt: who never got its answer asks again, and is to find the place that it was given. Files of earlier
    versions have no launch.
    """

    rank: int
    incarnation: int
    clock: int
    pid: int
    host: str
    metrics_address: str
    key: str
    attempt: int = 0
    launch: str = ""
    since: float = 0.0
    replaced: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class DurableRound:
    """What the workers exchanged in a round; see core.rounds.Round. Values as hexadecimal digits."""

    number: int
    clock: int
    values: tuple[tuple[int, str], ...]
    refused: str = ""


@dataclass(frozen=True)
class SavedJob:
    """A job that runs.

    spec:    as plain data
    run:     tells this job from earlier ones of its name
    held_by: by shard, the process that holds the job's part
    lost_steps, redone_steps, unaccounted, began, skipped: what set-backs have cost; see jobs.CoordinatedJob
    awaited: ranks that the others wait for, after the job was set back
    ghosts:  (shard, rank, incarnation) that shards may still count; with them who was just joining
    rounds_completed, rounds: how many rounds the workers have exchanged values in, and the last of them
    """

    spec: dict[str, Any]
    run: str
    placement: tuple[int, ...]
    held_by: Mapping[int, int]
    last_incarnation: int
    restore_count: int
    started: bool
    workers: tuple[DurableWorker, ...]
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    began: Mapping[int, int] = field(default_factory=dict)
    skipped: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    awaited: tuple[int, ...] = ()
    ghosts: tuple[tuple[int, int, int], ...] = ()
    rounds_completed: int = 0
    rounds: tuple[DurableRound, ...] = ()


def save(directory: Path, jobs: Mapping[str, SavedJob]) -> None:
    """Replaces the file. Raises OSError."""
    data = json.loads(json.dumps({"format": FORMAT, "jobs": {name: asdict(job) for name, job in jobs.items()}}))
    replace_file(directory / FILE, json.dumps({**data, "seal": _seal(data)}).encode(), "coordinator-file", 0o600)


def load(directory: Path) -> dict[str, SavedJob]:
    """The jobs that ran; none where there is no file, or one that is not what was written: that is said in the log."""
    path = directory / FILE
    try:
        data = json.loads(path.read_bytes())
        if data.pop("seal") != _seal(data) or data["format"] != FORMAT:
            raise ValueError("it is not what was written")
        return {name: _job(job) for name, job in data["jobs"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be used: %s; jobs go on from their checkpoints when their workers come", path, error)
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
        DurableRound(**{**one, "values": tuple((rank, value) for rank, value in one["values"])})
        for one in data.get("rounds", ())
    )
    data["workers"] = tuple(_worker(worker) for worker in data["workers"])
    return SavedJob(**data)


def _worker(data: dict[str, Any]) -> DurableWorker:
    replaced = tuple((launch, incarnation) for launch, incarnation in data.pop("replaced", ()))
    return DurableWorker(**data, replaced=replaced)


def _seal(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
