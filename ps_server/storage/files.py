"""The interface of a storage backend for checkpoints: a file system (disk.py) or an object store (objects.py).

`parse_path` parses the path of a directory, and `files_of` returns its backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PosixPath
from typing import BinaryIO, Protocol

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer
from ps_server.storage.disk import MAX_READ_BYTES, Disk
from ps_server.storage.objects import SCHEMES, Objects

_REMOTE = re.compile(r"(?P<scheme>[^/]*)://(?P<rest>.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(/[\w.=+@-]+)*/?", re.ASCII)


class Files(Protocol):
    """A storage backend. Methods raise OSError and are thread-safe; no file is a link.

    A ConnectionError says nothing about the files: the store does not answer now.

    From the moment `write` or `replace` returns, a file is complete and survives a power failure.
    """

    def make_directory(self, path: Path, is_new: bool = False) -> None:
        """Creates a directory and missing ones above it. is_new: raises FileExistsError if it exists"""

    def is_writable(self, path: Path) -> bool:
        """Whether files can be created in a directory, as far as this can be known without creating one."""

    def kind(self, path: Path) -> str | None:
        """Returns "a file", "a directory" or another word for the object at a path; None if there is none."""

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted; none if it is missing."""

    def is_empty(self, path: Path) -> bool:
        """Whether a directory has no file. One that was removed meanwhile has none."""

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""

    def modified(self, path: Path) -> float:
        """Returns the time of a file's last change, in seconds since 1970."""

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Locks a name until the returned function is called or this process ends. `holder`: a text for others

        Raises BlockingIOError, with that text, if another process has the lock.
        """

    def term(self) -> int:
        """Returns the number of the lease of `lock`, which rises with each holder; 0 for a lock of the kernel, which
        ends with its process."""

    def taken_over(self) -> str:
        """Returns the process that has taken over the lease, as text; empty: none is known. Does not wait for the
        store.
        """

    def open(self, path: Path) -> BinaryIO:
        """Opens a file to be read from its beginning to its end. The caller closes it."""

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        """Returns the content of a file. Raises OSError, and reads nothing, if the file has more than `most` bytes."""

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Writes a file, and replaces an existing one. Each chunk is written before the next one is requested."""

    def replace(self, path: Path, data: bytes, failpoint: Callable[[str], object]) -> None:
        """Replaces the content of a file atomically.

        failpoint: called with "half-written" and "unnamed" when the new content is in this state
        """

    def remove(self, path: Path) -> None:
        """Removes a file."""

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and its content, as far as possible."""


class RemotePath(PosixPath):
    """The path of a directory or a file in an object store, such as s3://bucket/checkpoints.

    Only the methods of Path that split and join paths are meaningful.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def parse_path(text: str) -> Path | None:
    """Returns the path of checkpoints in a file system or in an object store; None for an empty text.

    Raises InvalidRequest for an unknown kind of store, and for an invalid name in it.
    """
    remote = _REMOTE.fullmatch(text)
    if remote is None:
        return Path(text) if text else None
    if remote["scheme"] not in SCHEMES or not _KEY.fullmatch(remote["rest"]):
        known = " or ".join(f"{scheme}://BUCKET/PATH" for scheme in SCHEMES)
        raise InvalidRequest(f"expected a directory, or {known} of letters, digits and . _ - = + @, got {text[:200]!r}")
    return RemotePath(text)


def check_directory(directory: Path) -> None:
    """Raises InvalidRequest if the directory of checkpoints to read does not exist."""
    if not isinstance(directory, RemotePath) and not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory")


def files_of(directory: Path) -> Files:
    """Returns the storage backend of a path. Raises InvalidRequest if it needs a package that is missing."""
    if isinstance(directory, RemotePath):
        return Objects(directory.parts[0].removesuffix(":"))
    return Disk()
