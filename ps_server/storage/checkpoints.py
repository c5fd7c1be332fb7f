"""Checkpoints as files.

    DIRECTORY/JOB/NAME/shard-0.safetensors   a shard's buckets: weights, optimizer state, versions and clocks
                       worker-0.state        the own state of the worker of rank 0: its position in the data, ...
                       manifest.json         written last: all files with sizes and SHA-256; a checkpoint begins to
                                             exist with it
    DIRECTORY/.lock                          the lock of the coordinator; see directory_lock and lock_lease
    DIRECTORY/.coordinator.json              the coordinator's own state, for a restart; see coordinator.state_file
    DIRECTORY/.shard-0/JOB/NAME/             the part of a shard with a disk of its own; see own_disk

DIRECTORY is on a file system, or in an object store (files.py). Every file is durable before the manifest gets its
name, so a checkpoint exists completely or not at all. Any process with access to the directory may have written its
files: their content is checked before use, and no name in it leads out of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ps_protocol.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    InvalidRequest,
    PSError,
    TryLater,
    VersionMismatch,
)
from ps_protocol.framing import Buffer
from ps_protocol.layout import BucketSpec
from ps_server.core.other_cut import OtherCut
from ps_server.core.snapshot import BucketSnapshot, CheckpointFile, Snapshot, StoredFile, TableSnapshot, chained
from ps_server.failpoints import failpoint
from ps_server.storage.bucket_file import read_into, read_snapshots, snapshot_tensors
from ps_server.storage.disk import MAX_READ_BYTES, check_readable, pieces
from ps_server.storage.files import Files, files_of
from ps_server.storage.manifest import Manifest, sealed, unsealed, written_by_newer
from ps_server.storage.own_disk import check_disk, own_path, prune
from ps_server.storage.retention import KnownNeeds, staying
from ps_server.storage.tensor_file import TensorReader, file_chunks

MANIFEST = "manifest.json"
MAX_WORKER_BYTES = 2**30  # the largest state of a worker that is read, whatever the manifest says
_NAME = re.compile(r"\d{6,12}")
_PART = re.compile(r"(shard|worker)-(?P<index>\d{1,6})\.(safetensors|state)")


# Errors of a process or of its file system that say nothing about a file: they pass.
_PASSING = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR),
    *(errno.ETIMEDOUT, errno.ESTALE),
}
PASSED_OVER = "job %s: checkpoint %s cannot be used, trying the one before: %s"

T = TypeVar("T")

Rows = Mapping[int, list[TableSnapshot]]  # by table, its rows on each shard that were read


@dataclass(frozen=True)
class Wanted:
    """A file to read, with the buckets to read from it.

    is_base: whether the next file of the list, of the same shard, builds on it
    """

    stored: StoredFile
    buckets: Sequence[BucketSpec] = ()
    is_base: bool = False


def last_whole(
    names: Sequence[str],
    take: Callable[[str], T | None],
    pass_over: Callable[[str, CheckpointDamaged], object],
) -> T | None:
    """Returns the result of `take` for the last intact checkpoint. Restores and exports use that one.

    names: oldest first
    take: raises CheckpointDamaged for a damaged checkpoint; returns None to skip one
    pass_over: called with each damaged checkpoint, and the reason
    """
    for name in reversed(names):
        try:
            taken = take(name)
        except CheckpointDamaged as error:
            pass_over(name, error)
            continue
        if taken is not None:
            return taken
    return None


def wanted(chain: Sequence[StoredFile], buckets: Sequence[BucketSpec]) -> list[Wanted]:
    """Returns the files to read of one shard: buckets from its last file, rows from all."""
    return [*(Wanted(base, is_base=True) for base in chain[:-1]), Wanted(chain[-1], buckets)]


class CheckpointStore:
    """The checkpoints below one directory. Raises InvalidRequest if it is not writable.

    Methods that read raise TryLater if the object store of the directory does not answer.

    disk: the backend that writes and reads all files
    own_disk: the name of the shard's own disk, to which write_shard writes; empty: the shared directory
    """

    def __init__(self, directory: Path, disk: Files | None = None, own_disk: str = "") -> None:
        self.directory, self._disk, self._own_disk = directory, disk or files_of(directory), own_disk
        self._needs = KnownNeeds(self.manifest)
        try:
            self._disk.make_directory(directory)
        except OSError as error:
            raise InvalidRequest(f"the checkpoint directory {directory} cannot be made: {_reason(error)}") from None
        if not self._disk.is_writable(directory):
            raise InvalidRequest(f"the checkpoint directory {directory} cannot be written to")

    def path(self, job: str, name: str | None = None) -> Path:
        """Returns the directory of a job's checkpoints, or of one. Raises InvalidRequest for names that lead out
        of it."""
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
        """Creates the directory of a checkpoint. Returns False, and changes nothing, if a checkpoint has that name.

        Only the process that names a checkpoint creates its directory. Others can therefore neither overwrite an
        existing checkpoint, nor write into one that was removed. Raises CheckpointFailed.
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

    def write_shard(
        self, job: str, name: str, index: int, snapshots: Sequence[Snapshot], kept: Collection[str] = ()
    ) -> CheckpointFile:
        """Writes a shard's part and flushes it to disk. Raises CheckpointFailed, and then removes the part.

        kept: the checkpoints that stay: a shard with a disk of its own first removes its other parts; none: all stay
        """
        directory, file = self.path(job, name), f"shard-{index}.safetensors"
        path = (own_path(self.directory, directory, index) if self._own_disk else directory) / file
        with self._writing(path):
            if self._own_disk:
                prune(path.parent, kept, self._disk)
                self._disk.make_directory(path.parent)
            chunks = file_chunks(*snapshot_tensors(snapshots))
            half = sum(snapshot.nbytes for snapshot in snapshots) // 2
            part = self._write_part(path, _with_failpoint(pieces(chunks), half, "shard-file-half-written"))
            return replace(part, disk=self._own_disk)

    def write_worker(self, job: str, name: str, rank: int, state: bytes) -> CheckpointFile:
        """Writes a worker's part and flushes it to disk."""
        path = self.path(job, name) / f"worker-{rank}.state"
        with self._writing(path):
            return self._write_part(path, [state])

    def commit(self, job: str, manifest: Manifest) -> None:
        """Completes a checkpoint by its manifest. All its parts must be written."""
        path = self.path(job, manifest.name) / MANIFEST
        with self._writing(path):
            data = json.dumps(sealed(manifest), indent=1).encode()
            check_readable(path, len(data), MAX_READ_BYTES)  # a larger one could be written, and not be read again
            self._disk.replace(path, data, lambda place: failpoint(f"manifest-{place}"))

    def is_given_up(self, job: str, name: str) -> bool:
        """Whether the coordinator has removed the directory of an incomplete checkpoint."""
        try:
            return not self._own_disk and self._disk.kind(self.path(job, name)) is None
        except OSError:
            return False

    def discard(self, job: str, name: str) -> None:
        """Removes a checkpoint, complete or not. If its manifest cannot be removed, the files stay: it would seem
        complete."""
        path = self.path(job, name)
        try:
            self._disk.remove(path / MANIFEST)
        except FileNotFoundError:
            pass
        except OSError:
            return  # the next `prune` tries again
        else:
            failpoint("checkpoint-half-removed")
        self._disk.remove_tree(path)

    def prune(self, job: str, keep: int, also: Collection[str | None] = ()) -> None:
        """Removes all checkpoints but the last `keep` complete ones, their bases, and later incomplete ones.

        also: further checkpoints that stay; see `staying`
        """
        complete = self.names(job)
        try:
            stays = staying(complete, keep, also, partial(self._needs.of, job))
        except VersionMismatch:  # a newer release has written it; it may need any other checkpoint
            return
        for name in reversed(self._all_names(job)):  # newest first: an older one may be its base
            if complete and name < complete[-1] and name not in stays:
                self.discard(job, name)
                self._needs.forget(job, name)

    def made_at(self, job: str, name: str) -> float:
        """Returns the time at which a checkpoint was completed, in seconds since 1970. Raises CheckpointDamaged if it
        is not."""
        path = self.path(job, name) / MANIFEST
        try:
            return self._disk.modified(path)
        except OSError as error:
            raise _unreadable(path, error) from None

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Raises CheckpointFailed if a file cannot be written, and removes what was written of it."""
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                self._disk.remove(path)
            raise CheckpointFailed(f"{path} cannot be written: {_reason(error)}") from None

    def _write_part(self, path: Path, chunks: Iterable[Buffer]) -> CheckpointFile:
        """Writes a file, flushes it to disk and describes it."""
        digest, size = hashlib.sha256(), 0

        def counted() -> Iterator[Buffer]:
            nonlocal size
            for piece in pieces(chunks):
                digest.update(piece)
                size += len(piece)
                yield piece

        self._disk.write(path, counted())
        return CheckpointFile(path.name, size, digest.hexdigest())

    # -- reading -----------------------------------------------------------------------------------------------------

    def jobs(self) -> list[str]:
        """Returns the jobs that have a complete checkpoint."""
        with _answering(self.directory):
            return [job for job in self._disk.directories(self.directory) if job[0] != "." and self.names(job)]

    def names(self, job: str) -> list[str]:
        """Returns the complete checkpoints of a job, oldest first."""
        return [name for name in self._all_names(job) if self.is_complete(job, name)]

    def unfinished(self, job: str, after: str) -> list[str]:
        """Returns the later checkpoints of a job that have files and no manifest."""
        begun = [name for name in self._all_names(job) if name > after and not self.is_complete(job, name)]
        with _answering(self.path(job)):
            return [name for name in begun if not self._disk.is_empty(self.path(job, name))]

    def _all_names(self, job: str) -> list[str]:
        path = self.path(job)
        with _answering(path):
            kind = self._disk.kind(path)
            if kind not in (None, "a directory"):
                raise InvalidRequest(f"checkpoints of job {job!r} belong into the directory {path}, and that is {kind}")
            return [name for name in self._disk.directories(path) if _NAME.fullmatch(name)]

    def is_complete(self, job: str, name: str) -> bool:
        """Returns whether a checkpoint has its manifest."""
        path = self.path(job, name) / MANIFEST
        with _answering(path):
            return self._disk.kind(path) == "a file"

    def manifest(self, job: str, name: str) -> Manifest:
        """Returns the manifest of a checkpoint. Raises CheckpointDamaged if it was changed, and VersionMismatch if a
        newer version of this program has written it."""
        path = self.path(job, name) / MANIFEST
        try:
            data = json.loads(self._disk.read(path))
            newer = written_by_newer(data)
            if newer is not None:
                raise VersionMismatch(f"{path} is {newer}")
            manifest = unsealed(data)
            if manifest.name != name:
                raise ValueError(f"is the manifest of checkpoint {manifest.name}")
            return manifest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(path, error) from None

    def read_worker(self, job: str, name: str, part: CheckpointFile) -> bytes:
        """Returns a worker's state, checked against its checksum."""
        path = self._path_of_part(job, StoredFile(name, part))
        try:
            state = self._disk.read(path, MAX_WORKER_BYTES)
        except OSError as error:
            raise _unreadable(path, error) from None
        _check_sum(path, hashlib.sha256(state).hexdigest(), part)
        return state

    def check_workers(self, job: str, manifest: Manifest) -> None:
        """Raises CheckpointDamaged if a worker's state does not match its checksum."""
        for worker in manifest.workers.values():
            self.read_worker(job, manifest.name, worker.part)

    def read_files(
        self,
        job: str,
        files: Sequence[Wanted],
        on_progress: Callable[[int], object] = lambda count: None,
        weights: Mapping[int, torch.Tensor] | None = None,
        rows: Rows | None = None,
        cut: OtherCut | None = None,
    ) -> dict[int, BucketSnapshot]:
        """Returns snapshots of buckets, by index, from files that match their checksums. Raises CheckpointDamaged.

        Every file is read once, and each tensor gets its own memory, which belongs to the caller.

        on_progress: called now and then with the number of bytes read; see `bytes_to_read`
        weights: by bucket, the memory for its weights; its content is undefined after an error
        rows: by table, receives its rows on each shard
        cut: assembles buckets of another cut from those of the files; the assembled ones are returned. Raises the
             errors of OtherCut.snapshots, too, if no file is damaged
        """
        rows = rows or {}
        snapshots: dict[int, BucketSnapshot] = {}
        # by table: of one shard, its last snapshot with all rows and those of changes since
        chains: dict[int, list[TableSnapshot]] = {table: [] for table in rows}
        for file in files:
            path = self._path_of_part(job, file.stored)
            with _undamaged(path), self._disk.open(path) as opened:
                reader = TensorReader(opened, file.stored.part.bytes, on_progress)
                if cut is not None:
                    read_into(reader, file.buckets, cut)
                read, tables = read_snapshots(reader, file.buckets, weights or {}, rows) if cut is None else ({}, {})
            _check_sum(path, reader.sha256(), file.stored.part)
            snapshots |= read
            for table, snapshot in tables.items():
                if not snapshot.changes_only:
                    chains[table].clear()
                chains[table].append(snapshot)
            del tables
            if not file.is_base:
                with _undamaged(path):
                    for table in [table for table, chain in chains.items() if chain]:
                        rows[table].append(chained(chains[table]))
        if cut is None:
            return snapshots
        with _undamaged(self.path(job)):
            return cut.snapshots()

    def bytes_to_read(self, job: str, files: Sequence[Wanted]) -> int:
        """Returns the size of files in bytes. Raises CheckpointDamaged if one is missing, or has another length."""
        for file in files:
            self._path_of_part(job, file.stored)
        return sum(file.stored.part.bytes for file in files)

    def files(
        self, job: str, manifest: Manifest, buckets: Sequence[BucketSpec], tables: Collection[int] = ()
    ) -> list[Wanted]:
        """Returns the files of these buckets. Raises CheckpointDamaged if a bucket is in no file.

        tables: shards whose rows are read, too
        """
        held: dict[int, list[BucketSpec]] = {shard: [] for shard in tables}
        for bucket in buckets:
            if bucket.index >= len(manifest.placement):
                raise CheckpointDamaged(f"{self.path(job, manifest.name)} has no bucket {bucket.index}")
            held.setdefault(manifest.placement[bucket.index], []).append(bucket)
        found: list[Wanted] = []
        for shard, wanted_here in held.items():
            if shard not in manifest.shards:
                raise CheckpointDamaged(f"{self.path(job, manifest.name)} has no part of shard {shard}")
            bases = manifest.bases.get(shard, ()) if shard in tables else ()
            found += wanted((*bases, StoredFile(manifest.name, manifest.shards[shard])), wanted_here)
        return found

    def _path_of_part(self, job: str, stored: StoredFile) -> Path:
        """Returns the path of a part, after a check of its kind and length.

        Raises CheckpointDamaged if they are wrong, and TryLater if the part is on a disk of another shard.
        """
        name, part = stored.checkpoint, stored.part
        if not _NAME.fullmatch(name):
            raise CheckpointDamaged(f"{self.path(job)}: {name[:200]!r} is no name of a checkpoint")
        path, match = self.path(job, name) / part.file, _PART.fullmatch(part.file)
        if not match:
            raise CheckpointDamaged(f"{self.path(job, name)}: {part.file[:200]!r} is no name of a part")
        if part.disk:
            check_disk(self.directory, int(match["index"]), part, name, self._disk)
            path = own_path(self.directory, path, int(match["index"]))
        try:
            size = self._disk.size(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        if size != part.bytes:
            raise CheckpointDamaged(f"{path}: expected {part.bytes} bytes, found {size}")
        return path


def _with_failpoint(chunks: Iterable[memoryview], half: int, name: str) -> Iterator[memoryview]:
    """Yields chunks, and calls the failpoint of this name once `half` bytes were yielded."""
    written = 0
    for piece in chunks:
        if written < half <= written + len(piece):
            yield piece[: half - written]
            failpoint(name)
            yield piece[half - written :]
        else:
            yield piece
        written += len(piece)


def _check_sum(path: Path, present: str, part: CheckpointFile) -> None:
    if present != part.sha256:
        raise CheckpointDamaged(f"{path}: its SHA-256 is not the one in the manifest")


def _unreadable(path: Path, error: Exception) -> PSError:
    """Returns the error for a file that cannot be read: it is damaged, or its store does not answer now."""
    return (TryLater if _passes(error) else CheckpointDamaged)(f"{path}: {_reason(error)}")


def _passes(error: Exception) -> bool:
    return isinstance(error, ConnectionError) or (isinstance(error, OSError) and error.errno in _PASSING)


@contextlib.contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Raises CheckpointDamaged if a file cannot be read, or has invalid content."""
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointDamaged(f"{path} is damaged: {_reason(error)}") from None


@contextlib.contextmanager
def _answering(path: Path) -> Iterator[None]:
    """Raises TryLater if the store of the checkpoints does not answer now."""
    try:
        yield
    except OSError as error:
        if not _passes(error):
            raise
        raise _unreadable(path, error) from None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
