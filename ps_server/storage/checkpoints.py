"""Checkpoints as files.

    DIRECTORY/JOB/NAME/shard-0.safetensors   a shard's buckets: weights, optimizer state, versions and clocks
                       worker-0.state        what a worker of that rank needs besides: its place in the data, ...
                       manifest.json         last: what belongs to it, with sizes and SHA-256; without it, there is none
    DIRECTORY/.lock                          held by the one coordinator that works here; see directory_lock and lease
    DIRECTORY/.coordinator.json              what the coordinator needs to come back; see coordinator.state_file

DIRECTORY is on a file system, or in an object store (files.py). Every file is durable before the manifest has its
name, so a checkpoint is there whole or not at all. What is read may have been written by any process that can write
there: it is checked before it is used, and no name in it leads out of its directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ps_protocol.convert import job_spec_from_data
from ps_protocol.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    InvalidRequest,
    PSError,
    TryLater,
    VersionMismatch,
)
from ps_protocol.framing import Buffer
from ps_protocol.job import HyperParameters
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.data_commits import Committed
from ps_server.core.snapshot import BucketSnapshot, Part
from ps_server.failpoints import failpoint
from ps_server.storage.disk import pieces
from ps_server.storage.files import Files, files_of
from ps_server.storage.tensor_file import TensorEntry, TensorReader, file_chunks

FORMAT = 2
READABLE = (1, FORMAT)  # they differ in the job's spec, of which job_spec_from_data reads both
MANIFEST = "manifest.json"
_NAME = re.compile(r"\d{6,12}")
_PART = re.compile(r"(shard|worker)-\d{1,6}\.(safetensors|state)")
_STATE_NAME = re.compile(r"[a-z_]{1,64}")


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
    without:    ranks of workers that took part, or had left, and whose own state is not in it
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
    without: tuple[int, ...] = ()

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
    """The checkpoints below one directory. Raises InvalidRequest if it cannot be written to.

    What reads raises TryLater where the directory is in an object store that does not answer.

    disk: what all files here are written with and read from
    """

    def __init__(self, directory: Path, disk: Files | None = None) -> None:
        self.directory, self._disk = directory, disk or files_of(directory)
        try:
            self._disk.make_directory(directory)
        except OSError as error:
            raise InvalidRequest(f"the checkpoint directory {directory} cannot be made: {_reason(error)}") from None
        if not self._disk.is_writable(directory):
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
        return f"{max(map(int, self._all_names(job)), default=0) + 1:06d}"

    def begin(self, job: str, name: str) -> bool:
        """Makes the directory of a checkpoint. Returns False, and changes nothing, if there is one of that name.

        Only who names a checkpoint makes its directory, so nothing can be written over one that is there, nor into one
        that was removed. Raises CheckpointFailed.
        """
        path = self.path(job, name)
        try:
            self._disk.make_directory(self.path(job))  # raises FileExistsError, too, where a file has its name
            if self._disk.kind(path) is not None:
                return False
            self._disk.make_directory(path, is_new=True)
        except OSError as error:
            raise CheckpointFailed(f"{path} cannot be written: {_reason(error)}") from None
        return True

    def write_shard(self, job: str, name: str, index: int, snapshots: Sequence[BucketSnapshot]) -> Part:
        """Writes a shard's part and flushes it to disk. Raises CheckpointFailed; nothing of it is left then."""
        path = self.path(job, name) / f"shard-{index}.safetensors"
        with self._writing(path):
            chunks = file_chunks(*snapshot_tensors(snapshots))
            half = sum(snapshot.nbytes for snapshot in snapshots) // 2
            return self._write_part(path, _with_failpoint(pieces(chunks), half, "shard-file-half-written"))

    def write_worker(self, job: str, name: str, rank: int, state: bytes) -> Part:
        """Writes a worker's part and flushes it to disk."""
        path = self.path(job, name) / f"worker-{rank}.state"
        with self._writing(path):
            return self._write_part(path, [state])

    def commit(self, job: str, manifest: Manifest) -> None:
        """Makes a checkpoint whose parts are all written a checkpoint."""
        path = self.path(job, manifest.name) / MANIFEST
        with self._writing(path):
            data = json.dumps(_sealed(manifest), indent=1).encode()
            self._disk.replace(path, data, lambda place: failpoint(f"manifest-{place}"))

    def discard(self, job: str, name: str) -> None:
        """Removes a checkpoint, complete or not."""
        path = self.path(job, name)
        with contextlib.suppress(OSError):
            self._disk.remove(path / MANIFEST)  # first: half removed, it must not look whole
            failpoint("checkpoint-half-removed")
        self._disk.remove_tree(path)

    def prune(self, job: str, keep: int, also: str | None = None) -> None:
        """Removes all but the last `keep` complete ones, and what was begun before them and never completed.

        also: one that stays besides
        """
        complete = self.names(job)
        kept = complete[-keep:]
        for name in self._all_names(job):
            if kept and name < kept[-1] and name not in kept and name != also:
                self.discard(job, name)

    def made_at(self, job: str, name: str) -> float:
        """Returns when a checkpoint was complete, in seconds since 1970. Raises CheckpointDamaged if it is not."""
        path = self.path(job, name) / MANIFEST
        try:
            return self._disk.modified(path)
        except OSError as error:
            raise _unreadable(path, error) from None

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Raises CheckpointFailed, and leaves nothing behind, where a file cannot be written."""
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                self._disk.remove(path)
            raise CheckpointFailed(f"{path} cannot be written: {_reason(error)}") from None

    def _write_part(self, path: Path, chunks: Iterable[Buffer]) -> Part:
        """Writes a file, flushes it to disk and describes it."""
        digest, size = hashlib.sha256(), 0

        def counted() -> Iterator[Buffer]:
            nonlocal size
            for piece in pieces(chunks):
                digest.update(piece)
                size += len(piece)
                yield piece

        self._disk.write(path, counted())
        return Part(path.name, size, digest.hexdigest())

    # -- reading -----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[str]:
        """Returns the jobs that have a complete checkpoint."""
        with _answering(self.directory):
            return [job for job in self._disk.directories(self.directory) if job[0] != "." and self.names(job)]

    def names(self, job: str) -> list[str]:
        """Returns the complete checkpoints of a job, oldest first."""
        return [name for name in self._all_names(job) if self._is_complete(job, name)]

    def unfinished(self, job: str, after: str) -> list[str]:
        """Returns the checkpoints of a job that were begun after this one, and have files but no manifest."""
        begun = [name for name in self._all_names(job) if name > after and not self._is_complete(job, name)]
        with _answering(self.path(job)):
            return [name for name in begun if not self._disk.is_empty(self.path(job, name))]

    def _all_names(self, job: str) -> list[str]:
        path = self.path(job)
        with _answering(path):
            kind = self._disk.kind(path)
            if kind not in (None, "a directory"):
                raise InvalidRequest(f"checkpoints of job {job!r} belong into the directory {path}, and that is {kind}")
            return [name for name in self._disk.directories(path) if _NAME.fullmatch(name)]

    def _is_complete(self, job: str, name: str) -> bool:
        path = self.path(job, name) / MANIFEST
        with _answering(path):
            return self._disk.kind(path) == "a file"

    def manifest(self, job: str, name: str) -> Manifest:
        """Returns what a checkpoint is. Raises CheckpointDamaged if its manifest is not what was written, and
        VersionMismatch if that was a newer version of this program."""
        path = self.path(job, name) / MANIFEST
        try:
            data = json.loads(self._disk.read(path))
            newer = written_by_newer(data)
            if newer is not None:
                raise VersionMismatch(f"{path} is {newer}")
            return _unsealed(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(path, error) from None

    def read_worker(self, job: str, name: str, part: Part) -> bytes:
        """Returns a worker's state, checked against its checksum."""
        path = self._path_of_part(job, name, part)
        try:
            state = self._disk.read(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        _check_sum(path, hashlib.sha256(state).hexdigest(), part)
        return state

    def read_buckets(
        self,
        job: str,
        manifest: Manifest,
        buckets: Sequence[BucketSpec],
        told: Callable[[int], object] = lambda count: None,
        weights: Mapping[int, torch.Tensor] | None = None,
    ) -> dict[int, BucketSnapshot]:
        """Returns snapshots of buckets, by index, from files that match their checksums. Raises CheckpointDamaged.

        Every file is read once, each tensor into memory of its own: the snapshots are the caller's to keep.
        told: called with the bytes that were read, now and then; see `bytes_to_read`
        weights: by bucket, where the weights are read to; anything is in them if it raises
        """
        snapshots: dict[int, BucketSnapshot] = {}
        for part, held in self._parts_of(job, manifest, buckets):
            path = self._path_of_part(job, manifest.name, part)
            try:
                with self._disk.open(path) as file:
                    reader = TensorReader(file, part.bytes, told)
                    read = _read_snapshots(reader, held, weights or {})
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise _unreadable(path, error) from None
            _check_sum(path, reader.sha256(), part)
            snapshots |= read
        return snapshots

    def bytes_to_read(self, job: str, manifest: Manifest, buckets: Sequence[BucketSpec]) -> int:
        """Returns the bytes of the files that have some of these buckets. Raises CheckpointDamaged if one is missing,
        or not as long as it was."""
        total = 0
        for part, _ in self._parts_of(job, manifest, buckets):
            self._path_of_part(job, manifest.name, part)
            total += part.bytes
        return total

    def _parts_of(
        self, job: str, manifest: Manifest, buckets: Sequence[BucketSpec]
    ) -> list[tuple[Part, list[BucketSpec]]]:
        """Returns the files that have these buckets, with those of each."""
        wanted: dict[int, list[BucketSpec]] = {}
        for bucket in buckets:
            if bucket.index >= len(manifest.placement):
                raise CheckpointDamaged(f"{self.path(job, manifest.name)} has no bucket {bucket.index}")
            wanted.setdefault(manifest.placement[bucket.index], []).append(bucket)
        for shard in wanted:
            if shard not in manifest.shards:
                raise CheckpointDamaged(f"{self.path(job, manifest.name)} has no part of shard {shard}")
        return [(manifest.shards[shard], held) for shard, held in wanted.items()]

    def _path_of_part(self, job: str, name: str, part: Part) -> Path:
        """Returns the path of a part that is a file as long as it was when it was written."""
        if not _PART.fullmatch(part.file):
            raise CheckpointDamaged(f"{self.path(job, name)}: {part.file[:200]!r} is no name of a part")
        path = self.path(job, name) / part.file
        try:
            size = self._disk.size(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        if size != part.bytes:
            raise CheckpointDamaged(f"{path}: expected {part.bytes} bytes, found {size}")
        return path


def _with_failpoint(chunks: Iterable[memoryview], half: int, name: str) -> Iterator[memoryview]:
    written = 0
    for piece in chunks:
        if written < half <= written + len(piece):
            yield piece[: half - written]
            failpoint(name)
            yield piece[half - written :]
        else:
            yield piece
        written += len(piece)


def _check_sum(path: Path, present: str, part: Part) -> None:
    if present != part.sha256:
        raise CheckpointDamaged(f"{path}: its SHA-256 is not the one in the manifest")


def _unreadable(path: Path, error: Exception) -> PSError:
    """Returns what is raised where a file cannot be read: it is damaged, or what it is kept in does not answer now."""
    return (TryLater if isinstance(error, ConnectionError) else CheckpointDamaged)(f"{path}: {_reason(error)}")


@contextlib.contextmanager
def _answering(path: Path) -> Iterator[None]:
    """Raises TryLater where what the checkpoints are kept in does not answer now."""
    try:
        yield
    except ConnectionError as error:
        raise _unreadable(path, error) from None


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
    if not job_spec_from_data(data["job"]).parameters:
        raise ValueError("it names no job")
    data["placement"] = tuple(data["placement"])
    data["versions"] = tuple(data["versions"])
    data["without"] = tuple(data.get("without", ()))  # what earlier releases have written says nothing of it
    data["shards"] = {int(index): Part(**part) for index, part in data["shards"].items()}
    data["workers"] = {
        int(rank): WorkerPart(Part(**worker["part"]), worker["clock"]) for rank, worker in data["workers"].items()
    }
    data["clocks"] = {int(rank): clock for rank, clock in data["clocks"].items()}
    return Manifest(**data)


def written_by_newer(data: Any) -> str | None:
    """Returns in words that a file's content is a newer version's, if it is."""
    version = data.get("format") if isinstance(data, dict) else None
    if type(version) is not int or version <= FORMAT:
        return None
    return f"written by a newer version of ps-torch (format {version}), this one reads up to {FORMAT}: upgrade"


def seal(data: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of what JSON holds, however it is laid out."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# -- buckets out of a file -------------------------------------------------------------------------------------------


def _read_snapshots(
    reader: TensorReader, buckets: Sequence[BucketSpec], to: Mapping[int, torch.Tensor]
) -> dict[int, BucketSnapshot]:
    """Returns the snapshots of buckets in a file. Raises ValueError saying what was expected where it holds others.

    to: by bucket, where the weights are read to
    """
    described, wanted = json.loads(reader.metadata["buckets"]), {bucket.index: bucket for bucket in buckets}
    weights: dict[int, torch.Tensor] = {}
    states: dict[int, dict[int, dict[str, torch.Tensor]]] = {index: {} for index in wanted}

    def place(entry: TensorEntry) -> torch.Tensor | None:
        index, *rest = entry.name.split("/")
        bucket = wanted.get(int(index))
        if bucket is None:
            return None
        _check_entry(entry, bucket)
        return to[bucket.index] if rest == ["weights"] and bucket.index in to else entry.empty()

    for entry, tensor in reader.tensors(place):
        index, *rest = entry.name.split("/")
        if rest == ["weights"]:
            weights[int(index)] = tensor
        else:
            states[int(index)].setdefault(int(rest[0]), {})[rest[1]] = tensor
    return {index: _snapshot(index, described[str(index)], weights[index], state) for index, state in states.items()}


def _check_entry(entry: TensorEntry, bucket: BucketSpec) -> None:
    """Raises ValueError for a tensor that a bucket cannot have, before memory is taken for it."""
    _, *rest = entry.name.split("/")
    if rest == ["weights"]:
        if entry.dtype != TORCH_DTYPES[bucket.dtype] or entry.shape != (bucket.numel,):
            present = f"{entry.shape} {entry.dtype}"
            raise ValueError(f"bucket {bucket.index}: expected {bucket.numel} x {bucket.dtype}, found {present}")
        return
    position, name = int(rest[0]), rest[1]
    if not _STATE_NAME.fullmatch(name) or not 0 <= position < len(bucket.slices):
        raise ValueError(f"bucket {bucket.index} has no optimizer state {'/'.join(rest)[:80]!r}")
    if not entry.dtype.is_floating_point or entry.shape not in ((), (1,), (bucket.slices[position].length,)):
        raise ValueError(f"{entry.name}: shape {entry.shape} and type {entry.dtype} fit no optimizer state")


def _snapshot(
    index: int, described: Mapping[str, Any], weights: torch.Tensor, state: Mapping[int, Mapping[str, torch.Tensor]]
) -> BucketSnapshot:
    version, clocks = described["version"], {int(rank): clock for rank, clock in described["clocks"].items()}
    if any(type(number) is not int or number < 0 for number in (version, *clocks, *clocks.values())):
        raise ValueError(f"bucket {index}: versions and clocks are numbers from 0")
    groups = {int(group): _hyper_parameters(values) for group, values in described["groups"].items()}
    return BucketSnapshot(index, version, clocks, weights, state, groups, _committed(described.get("data", {})))


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
