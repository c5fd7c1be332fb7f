"""What a directory of checkpoints is kept in: a file system (disk.py) or an object store (objects.py).

`place` reads where it is, `files_of` returns what it is written with and read from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PosixPath
from typing import BinaryIO, Protocol

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer
from ps_server.storage.disk import MAX_READ_BYTES, Disk
from ps_server.storage.objects import Objects

_REMOTE = re.compile(r"(?P<scheme>[^/]*)://(?P<rest>.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(/[\w.=+@-]+)*/?", re.ASCII)
SCHEMES = ("s3", "gs")


class Files(Protocol):
    """Files below one directory. Methods raise OSError and may be called from any thread; no file is a link.

    A ConnectionError says nothing about the files: what they are kept in does not answer now.

    A file that is written is there whole, and stays if a machine loses its power, from the moment `write` or `replace`
    returns.
    """

    def make_directory(self, path: Path, is_new: bool = False) -> None:
        """Makes a directory, and those above it. is_new: raises FileExistsError if it is there."""

    def is_writable(self, path: Path) -> bool:
        """Whether files can be made in a directory, as far as can be said without making one."""

    def kind(self, path: Path) -> str | None:
        """Returns what is at a path: "a file", "a directory" or a word for another thing; None: nothing is."""

    def directories(self, path: Path) -> list[str]:
        """Returns the names of the directories in a directory, sorted; none where it is missing."""

    def is_empty(self, path: Path) -> bool:
        """Whether no file is in a directory."""

    def size(self, path: Path) -> int:
        """Returns the bytes of a file."""

    def modified(self, path: Path) -> float:
        """Returns when a file was written last, in seconds since 1970."""

    def lock(self, path: Path, holder: bytes) -> Callable[[], None]:
        """Locks a name until what it returns is called or this process ends. `holder`: for others to read.

        Raises BlockingIOError, with that text, if another process has locked it.
        """

    def term(self) -> int:
        """Returns the number of the lease that `lock` has taken, which rises with each holder; 0: a lock of the system
        needs none, since it ends with its process."""

    def taken_over(self) -> str:
        """Returns who has taken the lease over, in words; empty: nobody, as far as this process knows. Waits for no
        store."""

    def open(self, path: Path) -> BinaryIO:
        """Opens a file to read it from its beginning to its end. What it returns is closed by the caller."""

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        """Returns the content of a file. Raises OSError, and reads nothing, where that has more bytes than `most`."""

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        """Writes a file, in place of one that is there. Each chunk is written before the next one is asked for."""

    def replace(self, path: Path, data: bytes, failpoint: Callable[[str], object]) -> None:
        """Gives a file new content, so that it has the old or the new one whatever happens.

        failpoint: called with "half-written" and "unnamed" where these hold of the new content
        """

    def remove(self, path: Path) -> None:
        """Removes a file."""

    def remove_tree(self, path: Path) -> None:
        """Removes a directory with all that is in it, as far as it can."""


class RemotePath(PosixPath):
    """The place of a directory or a file in an object store, such as s3://bucket/checkpoints.

    Of the methods of Path only those are meant that take it apart and put it together.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def place(text: str) -> Path | None:
    """Returns where checkpoints are: a directory, or a place in an object store; no text is none.

    Raises InvalidRequest for a store that is not known here, and for one that is not named as it has to be.
    """
    remote = _REMOTE.fullmatch(text)
    if remote is None:
        return Path(text) if text else None
    if remote["scheme"] not in SCHEMES or not _KEY.fullmatch(remote["rest"]):
        known = " or ".join(f"{scheme}://BUCKET/PATH" for scheme in SCHEMES)
        raise InvalidRequest(f"expected a directory, or {known} of letters, digits and . _ - = + @, got {text[:200]!r}")
    return RemotePath(text)


def check_directory(directory: Path) -> None:
    """Raises InvalidRequest where a directory that checkpoints are read from is not there."""
    if not isinstance(directory, RemotePath) and not directory.is_dir():
        raise InvalidRequest(f"{directory} is no directory")


def files_of(directory: Path) -> Files:
    """Returns what a place is written with and read from. Raises InvalidRequest where a package for it is missing."""
    if isinstance(directory, RemotePath):
        return Objects(directory.parts[0].removesuffix(":"))
    return Disk()
