"""A disk of a shard's own: where the servers share no directory, each shard keeps its files of checkpoints here.

    DIRECTORY/.shard-0/.disk                               the disk's name: random, written once
                       .lock                               held by the shard's process
                       JOB/NAME/shard-0.safetensors

The coordinator's manifest says of each file which disk has it. So a shard that comes up where its disk is not can say
that, and is not taken for one whose files are damaged. The directory has the shard's index in its name: shards on one
machine have disks of their own, too, below one DIRECTORY.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from ps_protocol.errors import InvalidRequest, TryLater
from ps_server.core.snapshot import Part
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.disk import MAX_HOLDER_BYTES
from ps_server.storage.files import Files, RemotePath, files_of

FILE = ".disk"
_NAME = re.compile(r"[0-9a-f]{16}")


def own_directory(directory: Path, shard: int) -> Path:
    """Returns where a shard keeps its files below a directory."""
    return directory / f".shard-{shard}"


def own_path(directory: Path, path: Path, shard: int) -> Path:
    """Returns where a shard has what would be at a path below the directory, if that were shared."""
    return own_directory(directory, shard) / path.relative_to(directory)


def disk_name(path: Path, files: Files) -> str | None:
    """Returns the name of the disk that a shard's directory is on; None if there is none, or no such directory.

    Raises InvalidRequest where it cannot be read: under another name, no checkpoint's part here would be found again.
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


def check_disk(directory: Path, shard: int, part: Part, checkpoint: str, files: Files) -> None:
    """Raises TryLater, saying which disk is missing where, if a shard's directory is not on the disk of a part."""
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
    """Removes a shard's parts of checkpoints before the one at a path, but those that stay. kept: none: all stay"""
    with contextlib.suppress(OSError):  # the next checkpoint tries it again
        for name in files.directories(path.parent):
            if kept and name < path.name and name not in kept:
                files.remove_tree(path.parent / name)


def take_own_disk(
    directory: Path, shard: int, address: str, since: float, files: Files | None = None
) -> tuple[str, Callable[[], None]]:
    """Takes a shard's directory for this process; returns the disk's name, and what gives the directory back.

    address, since: of this shard, for others to read; since in seconds since 1970
    Raises InvalidRequest if another process has it, if it cannot be written, if its name cannot be read, and where an
    object store is no disk.
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
