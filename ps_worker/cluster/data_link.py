"""The data connection to one shard, as long as a worker has its place: opened, and opened again where it has ended.

A call to the shard gives a ticket, which the new connection shows (data.proto). While there is no connection, calls go
by gRPC. A thread of its own tries again: no call waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from ps_protocol.errors import InvalidRequest, PSError, TryLater, Unreachable
from ps_protocol.frames import HEADER_BYTES, Kind, read_header, write_header
from ps_protocol.v1 import data_pb2
from ps_runtime.background import start
from ps_runtime.credentials import Access
from ps_runtime.frame_socket import frames_over, receive_exactly
from ps_runtime.local_sockets import connect, is_private_socket, opened, peer_of
from ps_runtime.tls_contexts import client_context
from ps_worker.cluster.data_connection import DataConnection

log = logging.getLogger("ps_worker")

CONNECT_SECONDS = 2.0  # a port that a firewall closes gives no answer, and gRPC is there meanwhile
AGAIN_SECONDS = 5.0  # from one try to the next; twice as long after each that fails
AGAIN_AT_MOST_SECONDS = 80.0


class DataLink:
    """Keeps a data connection to a shard. Methods may be called from any thread.

    make:    makes a connection, in one attempt. Raises PSError or grpc.RpcError where it cannot
    closing: is set before `close`
    """

    def __init__(self, make: Callable[[], DataConnection], peer: str, closing: threading.Event) -> None:
        self._make, self._peer, self._closing = make, peer, closing
        self._lock = threading.Lock()
        self._data: DataConnection | None = None
        self._is_opening = False
        self._opener: threading.Thread | None = None
        self._pause = AGAIN_SECONDS
        self._next = time.monotonic() + self._pause

    @property
    def current(self) -> DataConnection | None:
        """The connection; None: there is none now. Where it has ended another is opened in time."""
        data = self._data
        if data is not None and data.is_open:
            return data
        with self._lock:
            if not self._is_opening and not self._closing.is_set() and time.monotonic() >= self._next:
                self._is_opening = True
                opener = threading.Thread(target=self._open_again, name="data-open", daemon=True)
                try:
                    start(opener)
                except TryLater:
                    self._is_opening, self._next = False, time.monotonic() + self._pause
                else:
                    self._opener = opener
        return None

    def open(self) -> None:
        """Opens it, in one attempt. Raises Unreachable if there can be none, other PSErrors if there is none now."""
        self._opened(self._make())

    def _open_again(self) -> None:
        try:
            self._opened(self._make())
        except (PSError, grpc.RpcError, ValueError):  # ValueError: grpc's, where the channel was closed meanwhile
            self._pause = min(2 * self._pause, AGAIN_AT_MOST_SECONDS)
        else:
            self._pause = AGAIN_SECONDS
            log.info("%s: a data connection is open again", self._peer)
        finally:
            with self._lock:
                self._is_opening, self._next = False, time.monotonic() + self._pause

    def _opened(self, data: DataConnection) -> None:
        self._data = data
        if self._closing.is_set():
            data.close()

    @property
    def threads(self) -> list[threading.Thread]:
        """Its threads, which end soon after `close`."""
        receives = None if self._data is None else self._data.thread
        return [thread for thread in (receives, self._opener) if thread is not None]

    def close(self) -> None:
        """Ends the connection. When its calls have failed, nothing lands any more."""
        if self._data is not None:
            self._data.close()


# -- opening ---------------------------------------------------------------------------------------------------------


def open_data_connection(
    response: bytes, address: str, access: Access, directory: Path | None, peer: str
) -> DataConnection:
    """Returns a connection to the shard that answered a call of OpenDataConnection.

    address:   of the shard's gRPC port
    directory: where sockets of this host are; None: over TCP only

    Raises Unreachable if there can be none, TryLater if it cannot be made now.
    """
    answer = data_pb2.OpenDataConnectionResponse.FromString(response)
    connection: socket.socket | None = None
    if not answer.port and directory is None:
        raise Unreachable(f"{peer} takes no data connection: it has no port for them (--no-data-port)")
    try:
        if directory is not None:
            connection = _connect_here(directory, answer.location, answer.socket_inode)
        if connection is None:
            connection = _connect_tcp(address, answer.port, access)
        connection.sendall(write_header(0, Kind.OPEN, len(answer.ticket)) + answer.ticket)
        first = receive_exactly(connection, HEADER_BYTES, time.monotonic() + CONNECT_SECONDS)
        kind = read_header(first, 0).kind
        if kind is not Kind.OPENED:
            raise InvalidRequest(f"expected a frame OPENED, got {kind.name}")
        return DataConnection(frames_over(connection))
    except (OSError, InvalidRequest) as error:
        if connection is not None:
            connection.close()
        raise TryLater(f"{peer} takes no data connection: {error}") from None


def _connect_here(directory: Path, location: str, inode: int) -> socket.socket | None:
    """Returns a connection to the socket that a shard of this host says is its own; None if it is not there."""
    if not location or Path(location).name != location:
        return None
    with contextlib.suppress(OSError), opened(directory, location) as file:
        status = os.fstat(file)
        if not is_private_socket(status) or status.st_ino != inode:
            return None
        connection = connect(file, CONNECT_SECONDS)
        if peer_of(connection).uid == os.geteuid():
            return connection
        connection.close()
    return None


def _connect_tcp(address: str, port: int, access: Access) -> socket.socket:
    host = address.rpartition(":")[0].strip("[]")
    if not port:
        raise InvalidRequest("it has no port for them (--no-data-port)")
    plain = socket.create_connection((host, port), CONNECT_SECONDS)
    if access.tls is None:
        return plain
    try:
        return client_context(access.tls).wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
