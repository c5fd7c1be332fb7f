"""Checkpoints as files.

    DIRECTORY/JOB/NAME/shard-0.safetensors   a shard's buckets: weights, optimizer state, versions and clocks
                       worker-0.state        what a worker of that rank needs besides: its place in the data, ...
                       manifest.json         last: what belongs to it, with sizes and SHA-256; without it, there is none
    DIRECTORY/.coordinator.json              what the coordinator needs to come back; see coordinator.state_file

Every file is flushed to disk before the manifest is given its name, so a checkpoint is there whole or not at all. What
is read may have been written by any process that can write there: it is checked before it is used, and no name in it
leads out of its directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ps_protocol.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest
from ps_protocol.job import HyperParameters
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.data_commits import Committed
from ps_server.core.snapshot import BucketSnapshot, Part
from ps_server.failpoints import failpoint

FORMAT = 2
READABLE = (1, FORMAT)  # they differ in the job's spec, of which job_spec_from_data reads both
MANIFEST = "manifest.json"
_NAME = re.compile(r"\d{6,12}")
_PART = re.compile(r"(shard|worker)-\d{1,6}\.(safetensors|state)")
_STATE_NAME = re.compile(r"[a-z_]{1,64}")
_READ_BYTES = 2**20


@dataclass(frozen=True)
class WorkerPart:
    """A worker's own state: `clock` is how many steps it had finished."""

    part: Part
    clock: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    job:        the job's spec, as plain data
    run:        tells this job from earlier ones of its name
    clock:      in sync, the clock of every bucket and worker; otherwise the highest clock of any worker
    placement:  for each bucket, the index of the shard whose file holds it
    shards:     by index
    workers:    by rank; those of which nothing came are missing
    versions:   the lowest and highest version of a bucket that trains: equal in sync
    clocks:     by rank, the lowest clock over the buckets that train
    last_incarnation, restore_count: of the job when it was made
    """

    name: str
    job: dict[str, Any]
    run: str
    mode: str
    clock: int
    placement: tuple[int, ...]
    shards: Mapping[int, Part]
    workers: Mapping[int, WorkerPart]
    versions: tuple[int, int]
    clocks: Mapping[int, int]
    last_incarnation: int
    restore_count: int
    format: int = FORMAT
    written_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(part.bytes for part in [*self.shards.values(), *(worker.part for worker in self.workers.values())])


def snapshot_tensors(snapshots: Sequence[BucketSnapshot]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns what a safetensors file holds of snapshots: tensors by name, and the rest as one JSON text."""
    tensors: dict[str, torch.Tensor] = {}
    buckets: dict[str, Any] = {}
    for bucket in snapshots:
        tensors[f"{bucket.index}/weights"] = bucket.weights
        for position, state in bucket.state.items():
            tensors |= {f"{bucket.index}/{position}/{name}": tensor for name, tensor in state.items()}
        buckets[str(bucket.index)] = {
            "version": bucket.version,
            "clocks": {str(rank): clock for rank, clock in bucket.clocks.items()},
            "groups": {str(group): dict(values) for group, values in bucket.groups.items()},
            "data": {str(loader): [number, spans] for loader, (number, spans) in bucket.committed.items()},
        }
    return tensors, {"format": str(FORMAT), "buckets": json.dumps(buckets)}


class CheckpointStore:
    """The checkpoints below one directory. Raises InvalidRequest if it cannot be written to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"the checkpoint directory {directory} cannot be made: {error.strerror}") from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise InvalidRequest(f"the checkpoint directory {directory} cannot be written to")

    def path(self, job: str, name: str | None = None) -> Path:
        """Returns where a job's checkpoints are, or one is. Raises InvalidRequest for names that lead elsewhere."""
        if job.startswith(".") or "/" in job or not job:
            raise InvalidRequest(
                f"a job with checkpoints needs a name that does not start with a dot, got {job[:200]!r}"
            )
        if name is not None and not _NAME.fullmatch(name):
            raise InvalidRequest(f"a checkpoint's name is 6 to 12 digits, got {name[:200]!r}")
        return self.directory / job if name is None else self.directory / job / name

    # -- writing -----------------------------------------------------------------------------------------------------

    def next_name(self, job: str) -> str:
        """Returns a name that no checkpoint of the job has had, complete or not."""
        numbers = [int(entry.name) for entry in _entries(self.path(job)) if _NAME.fullmatch(entry.name)]
        return f"{max(numbers, default=0) + 1:06d}"

    def write_shard(self, job: str, name: str, index: int, snapshots: Sequence[BucketSnapshot]) -> Part:
        """Writes a shard's part and flushes it to disk. Raises CheckpointFailed; nothing of it is left then."""
        tensors, metadata = snapshot_tensors(snapshots)
        path = self.path(job, name) / f"shard-{index}.safetensors"
        with _writing(path):
            safetensors.torch.save_file(tensors, path, metadata)
            failpoint("shard-file-half-written", lambda: os.truncate(path, path.stat().st_size // 2))
            return _part(path)

    def write_worker(self, job: str, name: str, rank: int, state: bytes) -> Part:
        """Writes a worker's part and flushes it to disk."""
        path = self.path(job, name) / f"worker-{rank}.state"
        with _writing(path):
            path.write_bytes(state)
            return _part(path)

    def commit(self, job: str, manifest: Manifest) -> None:
        """Makes a checkpoint whose parts are all written a checkpoint."""
        directory = self.path(job, manifest.name)
        with _writing(directory / MANIFEST):
            replace_file(directory / MANIFEST, json.dumps(_sealed(manifest), indent=1).encode(), "manifest")
            _flush(directory.parent)

    def discard(self, job: str, name: str) -> None:
        """Removes a checkpoint, complete or not."""
        path = self.path(job, name)
        with contextlib.suppress(OSError):
            (path / MANIFEST).unlink()  # first: half removed, it must not look whole
        failpoint("checkpoint-half-removed")
        shutil.rmtree(path, ignore_errors=True)

    def prune(self, job: str, keep: int) -> None:
        """Removes all but the last `keep` complete ones, and what was begun before them and never completed."""
        complete = self.names(job)
        kept = complete[-keep:]
        for entry in _entries(self.path(job)):
            if _NAME.fullmatch(entry.name) and kept and entry.name < kept[-1] and entry.name not in kept:
                self.discard(job, entry.name)

    # -- reading -----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[str]:
        """Returns the jobs that have a complete checkpoint."""
        return [entry.name for entry in _entries(self.directory) if entry.name[0] != "." and self.names(entry.name)]

    def names(self, job: str) -> list[str]:
        """Returns the complete checkpoints of a job, oldest first."""
        return [
            entry.name
            for entry in _entries(self.path(job))
            if _NAME.fullmatch(entry.name) and (entry / MANIFEST).is_file()
        ]

    def unfinished(self, job: str, after: str) -> list[str]:
        """Returns the checkpoints of a job that were begun after this one, and have no manifest."""
        begun = [entry.name for entry in _entries(self.path(job)) if _NAME.fullmatch(entry.name) and entry.name > after]
        return [name for name in begun if not (self.path(job, name) / MANIFEST).exists()]

    def manifest(self, job: str, name: str) -> Manifest:
        """Returns what a checkpoint is. Raises CheckpointDamaged if its manifest is not what was written."""
        path = self.path(job, name) / MANIFEST
        try:
            return _unsealed(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{path}: {_reason(error)}") from None

    def read_worker(self, job: str, name: str, part: Part) -> bytes:
        """Returns a worker's state, checked against its checksum."""
        path = self._verified(job, name, part)
        return path.read_bytes()

    def read_buckets(self, job: str, manifest: Manifest, buckets: Sequence[BucketSpec]) -> dict[int, BucketSnapshot]:
        """Returns snapshots of buckets, by index, from files that match their checksums. Raises CheckpointDamaged."""
        wanted: dict[int, list[BucketSpec]] = {}
        for bucket in buckets:
            if bucket.index >= len(manifest.placement):
                raise CheckpointDamaged(f"{self.path(job, manifest.name)} has no bucket {bucket.index}")
            wanted.setdefault(manifest.placement[bucket.index], []).append(bucket)
        snapshots: dict[int, BucketSnapshot] = {}
        for shard, held in wanted.items():
            if shard not in manifest.shards:
                raise CheckpointDamaged(f"{self.path(job, manifest.name)} has no part of shard {shard}")
            path = self._verified(job, manifest.name, manifest.shards[shard])
            try:
                with safetensors.safe_open(path, "pt") as file:
                    snapshots |= {bucket.index: _snapshot(file, bucket) for bucket in held}
            except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointDamaged(f"{path}: {_reason(error)}") from None
        return snapshots

    def _verified(self, job: str, name: str, part: Part) -> Path:
        """Returns a part's path, once its content is known to be what was written."""
        if not _PART.fullmatch(part.file):
            raise CheckpointDamaged(f"{self.path(job, name)}: {part.file[:200]!r} is no name of a part")
        path = self.path(job, name) / part.file
        try:
            if path.is_symlink():
                raise CheckpointDamaged(f"{path}: expected a file, found a link")
            size = path.stat().st_size
            if size != part.bytes:
                raise CheckpointDamaged(f"{path}: expected {part.bytes} bytes, found {size}")
            if _sha256(path) != part.sha256:
                raise CheckpointDamaged(f"{path}: its SHA-256 is not the one in the manifest")
        except OSError as error:
            raise CheckpointDamaged(f"{path}: {_reason(error)}") from None
        return path


def replace_file(path: Path, data: bytes, point: str, mode: int = 0o644) -> None:
    """Gives a file new content, flushed to disk, so that it has the old or the new one whatever happens.

    point: what its failpoints are called after
    """
    partial, half = path.with_name(path.name + ".partial"), len(data) // 2
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data[:half])
        failpoint(f"{point}-half-written", file.flush)
        file.write(data[half:])
        file.flush()
        os.fsync(file.fileno())
    failpoint(f"{point}-unnamed")
    partial.replace(path)
    _flush(path.parent)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises CheckpointFailed, and leaves nothing behind, where a file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, safetensors.SafetensorError) as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise CheckpointFailed(f"{path} cannot be written: {_reason(error)}") from None


def _part(path: Path) -> Part:
    """Flushes a file to disk and describes it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    _flush(path.parent)
    return Part(path.name, path.stat().st_size, _sha256(path))


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink())
    except FileNotFoundError:
        return []


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


# -- the manifest as JSON --------------------------------------------------------------------------------------------


def _sealed(manifest: Manifest) -> dict[str, Any]:
    data = json.loads(json.dumps(asdict(manifest)))  # as it will be read: with text for keys
    return {**data, "seal": seal(data)}


def _unsealed(data: dict[str, Any]) -> Manifest:
    if data.pop("seal") != seal(data):
        raise ValueError("it is not what was written")
    if data["format"] not in READABLE:
        raise ValueError(f"expected format {FORMAT}, found {data['format']}")
    data["placement"] = tuple(data["placement"])
    data["versions"] = tuple(data["versions"])
    data["shards"] = {int(index): Part(**part) for index, part in data["shards"].items()}
    data["workers"] = {
        int(rank): WorkerPart(Part(**worker["part"]), worker["clock"]) for rank, worker in data["workers"].items()
    }
    data["clocks"] = {int(rank): clock for rank, clock in data["clocks"].items()}
    return Manifest(**data)


def seal(data: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of what JSON holds, however it is laid out."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# -- a bucket out of a file ------------------------------------------------------------------------------------------


def _snapshot(file: Any, bucket: BucketSpec) -> BucketSnapshot:
    """Returns one bucket's snapshot. Raises ValueError saying what was expected where the file holds something else."""
    described = json.loads(file.metadata()["buckets"])[str(bucket.index)]
    version, clocks = described["version"], {int(rank): clock for rank, clock in described["clocks"].items()}
    if any(type(number) is not int or number < 0 for number in (version, *clocks, *clocks.values())):
        raise ValueError(f"bucket {bucket.index}: versions and clocks are numbers from 0")
    weights = file.get_tensor(f"{bucket.index}/weights")
    dtype = TORCH_DTYPES[bucket.dtype]
    if weights.dtype != dtype or weights.shape != (bucket.numel,):
        present = f"{tuple(weights.shape)} {weights.dtype}"
        raise ValueError(f"bucket {bucket.index}: expected {bucket.numel} x {bucket.dtype}, found {present}")
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key in file.keys():  # noqa: SIM118 (not a mapping)
        index, *rest = key.split("/")
        if index != str(bucket.index) or rest == ["weights"]:
            continue
        position, name = int(rest[0]), rest[1]
        if not _STATE_NAME.fullmatch(name) or not 0 <= position < len(bucket.slices):
            raise ValueError(f"bucket {bucket.index} has no optimizer state {'/'.join(rest)[:80]!r}")
        tensor = file.get_tensor(key)
        if not tensor.is_floating_point() or tensor.shape not in ((), (1,), (bucket.slices[position].length,)):
            raise ValueError(f"{key}: shape {tuple(tensor.shape)} and type {tensor.dtype} fit no optimizer state")
        state.setdefault(position, {})[name] = tensor
    groups = {int(group): _hyper_parameters(values) for group, values in described["groups"].items()}
    return BucketSnapshot(bucket.index, version, clocks, weights, state, groups, _committed(described.get("data", {})))


def _committed(described: Mapping[str, Any]) -> Committed:
    """Returns the data that a bucket has had. Raises ValueError for what is none."""
    committed = {
        int(loader): (number, [(start, stop) for start, stop in spans]) for loader, (number, spans) in described.items()
    }
    for number, spans in committed.values():
        numbers = [number, *(end for span in spans for end in span)]
        if any(type(end) is not int or end < 0 for end in numbers) or any(start >= stop for start, stop in spans):
            raise ValueError("passes and positions are numbers from 0, and a range ends after it starts")
    return committed


def _hyper_parameters(values: Mapping[str, Any]) -> HyperParameters:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
