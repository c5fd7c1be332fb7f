"""The manifest of a checkpoint, and its file.

The file has the version of its format, and a seal, a SHA-256. A file that was edited by hand is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ps_protocol.convert import job_spec_from_data
from ps_server.core.snapshot import CheckpointFile, StoredFile

FORMAT = 4
WITHOUT_BASES = 3  # the format of a manifest that names no files of other checkpoints, and of the state file
# Format 1 has the job's spec in another form, which job_spec_from_data reads, too. Format 2 names no disks of shards,
# format 3 no bases.
READABLE = (1, 2, WITHOUT_BASES, FORMAT)


@dataclass(frozen=True)
class WorkerFile:
    """A worker's own state: `clock` is how many steps it had finished."""

    part: CheckpointFile
    clock: int


@dataclass(frozen=True)
class Manifest:
    """The content and the origin of a checkpoint.

    job: the job's spec, as plain data
    run: the run of the job
    clock: in sync, the clock of every bucket and worker; otherwise the highest clock of any worker
    placement: for each bucket, the index of the shard whose file has it
    shards: by index
    workers: by rank, without those that sent no state
    versions: the lowest and highest version of a bucket that trains: equal in sync
    clocks: by rank, the lowest clock over the buckets that train
    last_incarnation, restore_count: the job's, when the checkpoint was made
    without: the ranks of workers that took part, or had left, and whose own state is missing
    bases: by shard, the files of earlier checkpoints that its own file builds on, oldest first. Its own file then has
    only the later changes of tables. A shard with a complete file is missing.
    """

    name: str
    job: dict[str, Any]
    run: str
    mode: str
    clock: int
    placement: tuple[int, ...]
    shards: Mapping[int, CheckpointFile]
    workers: Mapping[int, WorkerFile]
    versions: tuple[int, int]
    clocks: Mapping[int, int]
    last_incarnation: int
    restore_count: int
    format: int = WITHOUT_BASES
    written_by: Mapping[str, str] = field(default_factory=dict)
    without: tuple[int, ...] = ()
    bases: Mapping[int, tuple[StoredFile, ...]] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """The names of the checkpoints that it builds on."""
        return frozenset(stored.checkpoint for chain in self.bases.values() for stored in chain)

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(part.bytes for part in [*self.shards.values(), *(worker.part for worker in self.workers.values())])


# -- as JSON ---------------------------------------------------------------------------------------------------------


def sealed(manifest: Manifest) -> dict[str, Any]:
    """Returns a manifest as the plain data of its JSON file, with the seal."""
    data = json.loads(json.dumps(asdict(manifest)))  # as it will be read: with text for keys
    if manifest.bases:
        data["format"] = FORMAT
    else:  # readable by earlier releases too
        del data["bases"]
    return {**data, "seal": seal(data)}


def unsealed(data: dict[str, Any]) -> Manifest:
    """Returns the manifest in a file. Raises ValueError, KeyError, TypeError or AttributeError for other content."""
    if data.pop("seal") != seal(data):
        raise ValueError("it is not what was written")
    if data["format"] not in READABLE:
        raise ValueError(f"expected format {FORMAT}, found {data['format']}")
    spec = job_spec_from_data(data["job"])
    if not (spec.parameters or spec.tables):
        raise ValueError("it names no job")
    data["placement"] = tuple(data["placement"])
    data["versions"] = tuple(data["versions"])
    data["without"] = tuple(data.get("without", ()))  # files of earlier releases lack it
    data["shards"] = {int(index): CheckpointFile(**part) for index, part in data["shards"].items()}
    data["workers"] = {
        int(rank): WorkerFile(CheckpointFile(**worker["part"]), worker["clock"])
        for rank, worker in data["workers"].items()
    }
    data["clocks"] = {int(rank): clock for rank, clock in data["clocks"].items()}
    data["bases"] = {
        int(index): tuple(StoredFile(stored["checkpoint"], CheckpointFile(**stored["part"])) for stored in chain)
        for index, chain in data.get("bases", {}).items()
    }
    return Manifest(**data)


def written_by_newer(data: Any) -> str | None:
    """Returns a message if a newer version of this program has written a file's content; None otherwise."""
    version = data.get("format") if isinstance(data, dict) else None
    if type(version) is not int or version <= FORMAT:
        return None
    return f"written by a newer version of ps-torch (format {version}), this one reads up to {FORMAT}: upgrade"


def seal(data: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of JSON data, independent of its layout."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
