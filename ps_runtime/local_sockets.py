"""Unix sockets in a directory that other users can write to.

Between a check of a path and its use, another user could replace the file (a race known as TOCTOU). Therefore a name is
opened once, and both the check and the connection use the descriptor, through /proc/self/fd. Such a path also fits
into the 107 bytes of a socket's address, however long the directory's own path is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import NotShared

LEFT_SECONDS = 60.0  # a socket begins to listen microseconds after it gets its name
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Credentials:
    """The process at the other end of a connection. pid: 0 if this process cannot see it, as from a container"""

    pid: int
    uid: int


def listen(directory: Path, name: str, backlog: int) -> tuple[socket.socket, int]:
    """Returns a new socket that listens at a name in a directory, for this user only (mode 0600), and its inode number.

    Raises OSError if the name exists, or the socket cannot be made; no file is left then.
    """
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file takes over the socket's mode as it is made
        listener.bind(f"/proc/self/fd/{folder}/{name}")
        try:
            listener.listen(backlog)
            return listener, _own_inode(directory, name)
        except OSError:
            os.unlink(name, dir_fd=folder)
            raise
    except OSError:
        listener.close()
        raise
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened(directory: Path, name: str) -> Iterator[int]:
    """A `with` block with a descriptor of the file at a name, for a check and for `connect`. Links are not followed.

    Raises OSError if there is no file.
    """
    descriptor = os.open(directory / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_private_socket(status: os.stat_result) -> bool:
    """Returns whether a file is a socket of this user that no other user can connect to."""
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def connect(descriptor: int, seconds: float) -> socket.socket:
    """Connects to a socket by its descriptor from `opened`. seconds: the timeout of the connect and of each later
    operation

    Raises OSError, at once, if no process listens there or its backlog is full.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(f"/proc/self/fd/{descriptor}")
    except OSError:
        connection.close()
        raise
    return connection


def reach(directory: Path, name: str, inode: int, seconds: float) -> socket.socket:
    """Connects to a socket of this user, given the name and inode number that another process has sent. seconds: as
    `connect`

    Raises NotShared if the name has another file, or another user's, and OSError as `opened` and `connect` do.
    """
    where = f"the socket {name} in {directory}"
    with opened(directory, name) as file:
        status = os.fstat(file)
        if not is_private_socket(status):
            raise NotShared(f"{where} must be a unix socket of this process' user alone (mode 0600)")
        if status.st_ino != inode:
            raise NotShared(f"{where} is another one: it has inode {status.st_ino}, not {inode}")
        connection = connect(file, seconds)
    if peer_of(connection).uid != os.geteuid():
        connection.close()
        raise NotShared(f"{where} is served by another user")
    return connection


def peer_of(connection: socket.socket) -> Credentials:
    """Returns the process at the other end, as it was when it began to listen, or connected."""
    noted = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(noted)
    return Credentials(pid, uid)


def remove_leftovers(directory: Path, prefix: str) -> None:
    """Removes sockets at which no process listens any more: those of this user's processes that were killed. prefix:
    the beginning of their names
    """
    for path in directory.glob(prefix + "*"):
        with contextlib.suppress(OSError), opened(directory, path.name) as file:
            status = os.fstat(file)
            if not is_private_socket(status) or time.time() - status.st_mtime < LEFT_SECONDS:
                continue
            try:
                connect(file, 1.0).close()
            except ConnectionRefusedError:
                path.unlink()


def _own_inode(directory: Path, name: str) -> int:
    """Returns the inode of the socket that this process has made under a name. Raises OSError if another took it."""
    with opened(directory, name) as file, connect(file, 1.0) as probe:
        if peer_of(probe).pid != os.getpid():
            raise FileExistsError(f"another process has taken the name {name}")
        return os.fstat(file).st_ino
