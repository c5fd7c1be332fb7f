"""The files of a directory of checkpoints, as the programs here use them: all goes through one object.

A simulation hands in a Disk of its own that is full, slow, or has the content of an hour ago.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ps_protocol.framing import Buffer

PIECE_BYTES = 2**20  # that are written in one go


class Disk:
    """The file system of this machine. Methods raise OSError and may be called from any thread; no file is a link."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory, and those above it, where they are missing."""
        path.mkdir(parents=True, exist_ok=True)

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted; none where it is missing."""
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""
        return _size_of_file(os.lstat(path), path)

    def modified(self, path: Path) -> float:
        """Returns when a file was written last, in seconds since 1970."""
        return os.lstat(path).st_mtime

    def is_file(self, path: Path) -> bool:
        """Whether there is a file."""
        try:
            self.size(path)
        except OSError:
            return False
        return True

    def open(self, path: Path) -> BinaryIO:
        """Opens a file to read it. What it returns is closed by the caller."""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # nothing here waits for a pipe's writer
        file = open(handle, "rb", buffering=0)  # noqa: SIM115 (the caller's)
        try:
            _size_of_file(os.fstat(handle), path)
        except OSError:
            file.close()
            raise
        return file

    def read(self, path: Path) -> bytes:
        """Returns the content of a file."""
        with self.open(path) as file:
            return file.read()

    def write(self, path: Path, chunks: Iterable[Buffer], mode: int = 0o600) -> None:
        """Writes a file, in place of one that is there, and flushes it and its name to disk.

        Each chunk is written before the next one is asked for. Where it raises, part of the file may be there.
        """
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        try:
            for piece in pieces(chunks):
                while piece:
                    piece = piece[os.write(handle, piece) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        self._flush_directory(path.parent)

    def rename(self, path: Path, new: Path) -> None:
        """Gives a file another name, in place of a file that has it, and flushes the name to disk."""
        path.replace(new)
        self._flush_directory(new.parent)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Removes a directory with all that is in it, as far as it can."""
        shutil.rmtree(path, ignore_errors=True)

    def _flush_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_file(disk: Disk, path: Path, data: bytes, failpoint: Callable[[str], object], mode: int = 0o600) -> None:
    """Gives a file new content, flushed to disk, so that it has the old or the new one whatever happens.

    failpoint: called with "half-written" and "unnamed" where these hold of the new content
    """
    partial, half = path.with_name(path.name + ".partial"), len(data) // 2

    def halves() -> Iterator[bytes]:
        yield data[:half]
        failpoint("half-written")
        yield data[half:]

    disk.write(partial, halves(), mode)
    failpoint("unnamed")
    disk.rename(partial, path)


def pieces(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yields what chunks hold in pieces of at most PIECE_BYTES."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _size_of_file(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"expected a file, found {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}", path)
    return status.st_size


_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}
