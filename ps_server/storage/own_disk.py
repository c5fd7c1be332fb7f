"""A shard's own disk. If the servers share no directory, each shard keeps its files of checkpoints on its own disk.

    DIRECTORY/.shard-0/.disk                               the disk's name: random, written once
                       .lock                               held by the shard's process
                       JOB/NAME/shard-0.safetensors

The coordinator's manifest names the disk of each file. So a shard that starts on a machine without its disk can report
that, instead of damaged files. The directory's name has the shard's index: shards on one machine have separate
directories below one DIRECTORY.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from ps_protocol.errors import InvalidRequest, TryLater
from ps_server.core.snapshot import CheckpointFile
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.disk import MAX_HOLDER_BYTES
from ps_server.storage.files import Files, RemotePath, files_of

FILE = ".disk"
_NAME = re.compile(r"[0-9a-f]{16}")


def own_directory(directory: Path, shard: int) -> Path:
    """Returns the directory of a shard's files, below the directory of checkpoints."""
    return directory / f".shard-{shard}"


def own_path(directory: Path, path: Path, shard: int) -> Path:
    """Returns the path on a shard's own disk for a path below the directory of checkpoints."""
    return own_directory(directory, shard) / path.relative_to(directory)


def disk_name(path: Path, files: Files) -> str | None:
    """Returns the name of the disk that a shard's directory is on; None if it has no name, or does not exist.

    Raises InvalidRequest if the name cannot be read: under another name, the checkpoints on this disk would not be
    found.
    """
    try:
        name = json.loads(files.read(path / FILE, MAX_HOLDER_BYTES))["disk"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(f"{path / FILE} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{path / FILE} cannot be read: it does not hold the name of a disk")
    return name


def check_disk(directory: Path, shard: int, part: CheckpointFile, checkpoint: str, files: Files) -> None:
    """Raises TryLater, which names the missing disk, if a shard's directory is not on the disk of the file."""
    path = own_directory(directory, shard)
    try:
        present = disk_name(path, files)
        found = f"{path} is {f'on disk {present}' if present else 'not there'}"
    except InvalidRequest as error:
        present, found = None, str(error)
    if present != part.disk:
        raise TryLater(
            f"{part.file} of checkpoint {checkpoint} is on disk {part.disk[:80]}, and {found}: "
            f"start shard {shard} where that disk is, or bring its directory"
        )


def prune(path: Path, kept: Collection[str], files: Files) -> None:
    """Removes a shard's files of checkpoints before the one at a path, except for those in `kept`. kept empty: removes
    none
    """
    with contextlib.suppress(OSError):  # the next checkpoint tries it again
        for name in files.directories(path.parent):
            if kept and name < path.name and name not in kept:
                files.remove_tree(path.parent / name)


def take_own_disk(
    directory: Path, shard: int, address: str, since: float, files: Files | None = None
) -> tuple[str, Callable[[], None]]:
    """Locks a shard's directory for this process. Returns the disk's name, and a function that unlocks it.

    address, since: this shard's, for other processes to read; since in seconds since 1970
    Raises InvalidRequest if another process has the lock, if the directory cannot be written, if its name cannot be
    read, or if the directory is in an object store.
    """
    if isinstance(directory, RemotePath):
        raise InvalidRequest(
            f"--own-disk expects a directory, and {directory} is one place for all shards: leave it out"
        )
    path, files = own_directory(directory, shard), files or files_of(directory)
    try:
        files.make_directory(path)
    except OSError as error:
        raise InvalidRequest(f"the checkpoint directory {path} cannot be made: {error.strerror}") from None
    release = lock_directory(path, address, files, since, holder=f"shard {shard}")
    try:
        return disk_name(path, files) or _new_name(path, files), release
    except InvalidRequest:
        release()
        raise


def _new_name(path: Path, files: Files) -> str:
    name = secrets.token_hex(8)
    try:
        files.replace(path / FILE, json.dumps({"disk": name}).encode(), lambda place: None)
    except OSError as error:
        raise InvalidRequest(f"{path / FILE} cannot be written: {error.strerror}") from None
    return name
