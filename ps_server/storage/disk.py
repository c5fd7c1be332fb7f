"""The storage backend for a file system.

It flushes file content and each new name to disk (fsync of the file, then of its directory), so that both survive a
power failure. The simulation has a Disk with files in memory, which forgets whatever was not flushed.
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

PIECE_BYTES = 2**20  # the most that one call of write gets
MAX_HOLDER_BYTES = 4096
# The largest file that is read into memory at once, such as a manifest. Others may be able to write to the directory,
# and a manifest of 10 GiB would kill the reading process. One of 100,000 parameters and 4,096 workers has about 30 MiB.
MAX_READ_BYTES = 64 * 2**20


class Disk:
    """The file system of this machine. Methods raise OSError and may be called from any thread; no file is a link."""

    def make_directory(self, path: Path, is_new: bool = False) -> None:
        """Creates a directory and missing ones above it, for this user alone. Flushes their names.

        is_new: raises FileExistsError if it exists
        """
        for directory in (*reversed(path.parents), path):
            before = self.kind(directory)
            if before is None or directory is path:
                self._make_directory(directory, exist_ok=directory is not path or not is_new)
            if before is None:
                with contextlib.suppress(PermissionError):  # a directory that is writable and not readable
                    self._flush_directory(directory.parent)

    def is_writable(self, path: Path) -> bool:
        """Whether files can be created in a directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def kind(self, path: Path) -> str | None:
        """Returns "a file", "a directory", "a link" or "something else" for a path; None if nothing has this path."""
        try:
            return _kind(os.lstat(path))
        except FileNotFoundError:
            return None

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted; none if it is missing."""
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def is_empty(self, path: Path) -> bool:
        """Whether a directory is empty, or was removed meanwhile."""
        try:
            return not os.listdir(path)
        except FileNotFoundError:
            return True

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""
        return _size_of_file(os.lstat(path), path)

    def modified(self, path: Path) -> float:
        """Returns the time of a file's last change, in seconds since 1970."""
        return os.lstat(path).st_mtime

    def term(self) -> int:
        """Returns 0: a kernel's lock ends with its process, so it needs no number."""
        return 0

    def taken_over(self) -> str:
        """Returns "": no process can take over the kernel's lock of a live process."""
        return ""

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Locks a file until the returned function is called or this process ends. `holder`: its content

        Raises BlockingIOError, with the content as its text, if another process has the lock, and other OSErrors if the
        file system has no locks.
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
        """Opens a file for reading. The caller closes it."""
        handle = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )  # O_NONBLOCK: opening a named pipe would wait for its writer
        file = open(handle, "rb", buffering=0)  # noqa: SIM115 (the caller's)
        try:
            _size_of_file(os.fstat(handle), path)
        except OSError:
            file.close()
            raise
        return file

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        """Returns the content of a file. Raises OSError, and reads nothing, if the file has more than `most` bytes."""
        check_readable(path, self.size(path), most)
        with self.open(path) as file:
            return file.read()

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Writes a file, replaces an existing one, and flushes it and its name to disk.

        Each chunk is written before the next one is requested. After an error a part of the file may exist.
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
        """Replaces the content of a file atomically, and flushes it to disk.

        failpoint: called with "half-written" and "unnamed" when the new content is in this state
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
        """Renames a file, replaces an existing one, and flushes the name to disk."""
        self._rename(path, new)
        self._flush_directory(new.parent)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and its content, as far as possible."""
        shutil.rmtree(path, ignore_errors=True)

    # -- system calls: the other methods use these alone, and the simulation replaces them -----------------------------

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
    """Yields the bytes of chunks in pieces of at most PIECE_BYTES."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def check_readable(path: Path, size: int, most: int) -> None:
    """Raises OSError if a file is too large to be read into memory at once."""
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", path)


def _size_of_file(status: os.stat_result, path: Path) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"expected a file, found {_kind(status)}", path)
    return status.st_size


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


_KINDS = {stat.S_IFREG: "a file", stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}
