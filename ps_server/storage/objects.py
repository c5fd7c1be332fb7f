"""The storage backend for an object store, by fsspec.

An object exists completely or not at all, and is durable once the store acknowledges it, so nothing is renamed or
flushed. An object store has no directories: a name with a slash implies one. A new directory is claimed by an object in
it, which a conditional put lets only one caller create. A lock is a lease: see lock_lease.py.

The store has to be strongly consistent and to support conditional puts, as S3 (since 2024,
https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html) and GCS do.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote, unquote

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer
from ps_server.storage.disk import MAX_READ_BYTES, check_readable, pieces
from ps_server.storage.lock_lease import LOCK_LEASE_SECONDS, LockLease

CLAIM = ".begun"  # the object that makes a directory
PART_BYTES = 2**25  # size of a part of an upload, which may have 10,000 parts: so a file may have 320 GB
READ_AHEAD_BYTES = 2**23
_OPTIONS: dict[str, Any] = {}  # further options of fsspec's file system; `Objects` adds those that disable its caches
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # by protocol, the package that fsspec needs for it
SCHEMES = tuple(_PACKAGES)  # the protocols before :// in a path


class Objects:
    """A storage backend for one protocol of fsspec; see storage.files.Files. Paths are RemotePaths.

    lock_lease_seconds: the time after which the lock of a process that has ended can be taken over
    """

    def __init__(self, protocol: str, lock_lease_seconds: float = LOCK_LEASE_SECONDS) -> None:
        self._fs = _file_system(protocol)
        self._lock_lease_seconds = lock_lease_seconds
        self._lock_lease: LockLease | None = None

    def make_directory(self, path: Path, is_new: bool = False) -> None:
        """Claims a new directory. Otherwise only checks that the bucket exists: directories come with their files.

        Raises FileExistsError for a new directory that exists.
        """
        if is_new:
            self.create(path / CLAIM, b"begun")
        elif self.kind(path) is None and self.kind(bucket := (path, *path.parents)[-3]) is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no {bucket}")

    def is_writable(self, path: Path) -> bool:
        """Returns True: only a write shows whether it is permitted."""
        return True

    def kind(self, path: Path) -> str | None:
        """Returns "a file" or "a directory" for a path; None if neither is there."""
        with _os_errors(path):
            try:
                return f"a {self._fs.info(_key(path))['type']}"
            except FileNotFoundError:
                return None

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted; none if it is missing."""
        return sorted(name for name, kind in self._list(path) if kind == "directory")

    def files(self, path: Path) -> list[str]:
        """Returns the names of the files in a directory, sorted; none if it is missing."""
        return sorted(name for name, kind in self._list(path) if kind == "file")

    def is_empty(self, path: Path) -> bool:
        """Whether no file is in a directory."""
        return not any(name != CLAIM for name, _ in self._list(path))

    def _list(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yields the name and the type of each entry of a directory."""
        with _os_errors(path):
            try:
                entries = self._fs.ls(_key(path), detail=True)
            except FileNotFoundError:
                return
        for entry in entries:
            yield unquote(entry["name"].rstrip("/").rpartition("/")[2]), entry["type"]

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""
        return int(self._info(path)["size"])

    def modified(self, path: Path) -> float:
        """Returns when a file was written last, in seconds since 1970."""
        self._info(path)
        with _os_errors(path):
            return float(self._fs.modified(_key(path)).timestamp())

    def _info(self, path: Path) -> dict[str, Any]:
        with _os_errors(path):
            info = self._fs.info(_key(path))
        if info["type"] != "file":
            raise OSError(0, f"expected a file, found a {info['type']}", path)
        return dict(info)

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Takes the lock lease of a name. From then on this backend writes only while it has it.

        holder: a text for other processes
        Raises BlockingIOError, with that text, if a live process has the lock lease. It takes as long as such a lease.
        """
        lock_lease = LockLease(self, path, holder, self._lock_lease_seconds)
        lock_lease.take()
        self._lock_lease = lock_lease
        return lock_lease.release

    def term(self) -> int:
        """Returns the number of the lock lease, which rises with each holder; 0: this process has taken none."""
        return self._lock_lease.number if self._lock_lease is not None else 0

    def taken_over(self) -> str:
        """Returns the process that has taken over the lock lease, as text; empty: none is known."""
        return self._lock_lease.lost if self._lock_lease is not None else ""

    def open(self, path: Path) -> BinaryIO:
        """Opens a file for reading. The caller closes it."""
        with _os_errors(path):
            opened = self._fs.open(_key(path), "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead")
        return cast(BinaryIO, _ObjectReader(opened, path))

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        """Returns the content of a file. Raises OSError, and reads nothing, if the file has more than `most` bytes."""
        check_readable(path, self.size(path), most)
        with _os_errors(path):
            return bytes(self._fs.cat_file(_key(path)))

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Writes a file, and replaces an existing one. It exists when all of it has arrived, or not at all.

        Raises FileNotFoundError if nothing has claimed its directory, or if that was removed since.
        """
        self._check_lease()
        self._info(path.parent / CLAIM)
        with _os_errors(path):
            file = self._fs.open(_key(path), "wb", block_size=PART_BYTES)
        try:
            for piece in pieces(chunks):
                with _os_errors(path):
                    file.write(piece)
            with _os_errors(path):
                file.close()
        except BaseException:
            file.closed = True  # otherwise the upload would be completed when the file object is garbage-collected
            with contextlib.suppress(Exception):
                file.discard()
            raise

    def replace(self, path: Path, data: bytes, failpoint: Callable[[str], object]) -> None:
        """Replaces the content of a file; see storage.files.Files.replace."""
        self._check_lease()
        failpoint("half-written")
        failpoint("unnamed")
        self.put(path, data)

    def put(self, path: Path, data: bytes) -> None:
        """Replaces the content of a file, whether or not this process has the lock lease."""
        with _os_errors(path):
            self._fs.pipe_file(_key(path), data)

    def create(self, path: Path, data: bytes) -> None:
        """Creates a file. Raises FileExistsError if it exists: of several callers one succeeds."""
        with _os_errors(path):
            self._fs.pipe_file(_key(path), data, mode="create")

    def remove(self, path: Path) -> None:
        """Removes a file."""
        self._check_lease()
        with _os_errors(path):
            self._fs.rm_file(_key(path))

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and its content, as far as possible."""
        inside = _key(path) + "/"
        with contextlib.suppress(Exception):
            self._check_lease()
            for key in self._fs.find(_key(path)):
                if key.startswith(inside):
                    self._fs.rm_file(key)

    def _check_lease(self) -> None:
        if self._lock_lease is not None:
            self._lock_lease.check()


class _ObjectReader(io.RawIOBase):
    """An object that is read from its beginning to its end."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__()
        self._file, self._path = file, path

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads the next bytes of the object into a buffer; returns how many, at most its size, and 0 at the end."""
        with _os_errors(self._path):
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        """Closes the object's stream."""
        self._file.close()
        super().close()


@contextlib.contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Turns the errors of fsspec, and of the packages below it, into OSErrors with a text.

    An error that is not about one object becomes a ConnectionError: whatever keeps the store from answering may pass.
    """
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    except Exception as error:
        raise ConnectionError(errno.EIO, str(error) or type(error).__name__, path) from error


def _key(path: Path) -> str:
    """Returns the name of an object in fsspec's form. Every character in it stands for itself."""
    _, bucket, *names = path.parts
    return "/".join((bucket, *(quote(name, safe="=+@") for name in names)))


def _file_system(protocol: str) -> Any:
    package = _PACKAGES[protocol]
    try:
        import fsspec  # type: ignore[import-untyped,import-not-found,unused-ignore]

        return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **_OPTIONS)
    except ImportError:
        needs = f"{protocol}:// needs the packages fsspec and {package}"
        raise InvalidRequest(f"{needs}: pip install fsspec {package}") from None
