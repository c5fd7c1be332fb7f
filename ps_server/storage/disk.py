"""The files of a directory of checkpoints, as the programs here use them: all goes through one object.

What is written is flushed here, and so is each new name: what is in a file that is there survives a power failure. A
simulation hands in a Disk of its own, which has files in memory, and forgets what was not flushed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ps_protocol.framing import Buffer

PIECE_BYTES = 2**20  # that are written in one go
MAX_HOLDER_BYTES = 4096
# That a file has which is read in one go, such as a manifest: one of 10 GiB in a directory that others can write to
# would end the process that reads it. A manifest of 100,000 parameters and 4,096 workers has about 30 MiB.
MAX_READ_BYTES = 64 * 2**20


class Disk:
    """The file system of this machine. Methods raise OSError and may be called from any thread; no file is a link."""

    def make_directory(self, path: Path, is_new: bool = False) -> None:
        """Makes a directory, and those above it, where they are missing: open to this user alone. Flushes their names.

        is_new: raises FileExistsError if it is there
        """
        for directory in (*reversed(path.parents), path):
            before = self.kind(directory)
            if before is None or directory is path:
                self._make_directory(directory, exist_ok=directory is not path or not is_new)
            if before is None:
                with contextlib.suppress(PermissionError):  # one above may be written to, and not be read
                    self._flush_directory(directory.parent)

    def is_writable(self, path: Path) -> bool:
        """Whether files can be made in a directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def kind(self, path: Path) -> str | None:
        """Returns what is at a path: "a file", "a directory", "a link" or "something else"; None: nothing is."""
        try:
            return _kind(os.lstat(path))
        except FileNotFoundError:
            return None

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted; none where it is missing."""
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def is_empty(self, path: Path) -> bool:
        """Whether nothing is in a directory."""
        return not os.listdir(path)

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""
        return _size_of_file(os.lstat(path), path)

    def modified(self, path: Path) -> float:
        """Returns when a file was written last, in seconds since 1970."""
        return os.lstat(path).st_mtime

    def term(self) -> int:
        """Returns 0: a lock of the system ends with its process, and needs no number."""
        return 0

    def taken_over(self) -> str:
        """Returns nothing: while this process lives, nobody takes its lock over."""
        return ""

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Locks a file until what it returns is called or this process ends, however it ends. `holder`: its content.

        Raises BlockingIOError, with the content as its text, if another process has locked it, and other OSErrors where
        the file system knows no locks.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        file = open(handle, "r+b", buffering=0)  # noqa: SIM115 (open as long as it is locked)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = os.pread(handle, MAX_HOLDER_BYTES, 0).decode("utf-8", "replace")
            file.close()
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(error.errno, text) from None
            raise
        with contextlib.suppress(OSError):  # a full disk: it is locked all the same
            file.truncate(0)
            file.write(holder)
        return file.close

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

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        """Returns the content of a file. Raises OSError, and reads nothing, where that has more bytes than `most`."""
        check_readable(path, self.size(path), most)
        with self.open(path) as file:
            return file.read()

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Writes a file, in place of one that is there, and flushes it and its name to disk.

        Each chunk is written before the next one is asked for. Where it raises, part of the file may be there.
        """
        file = self._create(path)
        try:
            for piece in pieces(chunks):
                while piece:
                    piece = piece[file.write(piece) :]
            self._flush(file)
        finally:
            file.close()
        self._flush_directory(path.parent)

    def replace(self, path: Path, data: bytes, failpoint: Callable[[str], object]) -> None:
        """Gives a file new content, flushed to disk, so that it has the old or the new one whatever happens.

        failpoint: called with "half-written" and "unnamed" where these hold of the new content
        """
        partial, half = path.with_name(path.name + ".partial"), len(data) // 2

        def halves() -> Iterator[bytes]:
            yield data[:half]
            failpoint("half-written")
            yield data[half:]

        self.write(partial, halves())
        failpoint("unnamed")
        self.rename(partial, path)

    def rename(self, path: Path, new: Path) -> None:
        """Gives a file another name, in place of a file that has it, and flushes the name to disk."""
        self._rename(path, new)
        self._flush_directory(new.parent)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Removes a directory with all that is in it, as far as it can."""
        shutil.rmtree(path, ignore_errors=True)

    # -- of what the rest is made: each is one call of the system, and a simulation has its own ------------------------

    def _make_directory(self, path: Path, exist_ok: bool) -> None:
        path.mkdir(mode=0o700, exist_ok=exist_ok)

    def _create(self, path: Path) -> BinaryIO:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        return open(handle, "wb", buffering=0)

    def _flush(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def _rename(self, path: Path, new: Path) -> None:
        path.replace(new)

    def _flush_directory(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def pieces(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yields what chunks hold in pieces of at most PIECE_BYTES."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def check_readable(path: Path, size: int, most: int) -> None:
    """Raises OSError where a file is too large to be read in one go."""
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", path)


def _size_of_file(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"expected a file, found {_kind(status)}", path)
    return status.st_size


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


_KINDS = {stat.S_IFREG: "a file", stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}
