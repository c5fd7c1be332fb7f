"""Opens the data connection that a shard offers: by a unix socket of this host, or else by TCP."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from ps_frames.client import ClientConnection
from ps_frames.frames import (
    HEADER_BYTES,
    ConnectionOffer,
    Kind,
    frames_over,
    read_header,
    receive_exactly,
    write_header,
)
from ps_frames.reading import ReadingThreads
from ps_protocol.errors import InvalidRequest, TryLater, Unreachable
from ps_runtime.credentials import Access
from ps_runtime.local_sockets import connect, is_private_socket, opened, peer_of
from ps_runtime.tls_contexts import client_context, tls_socket

CONNECT_SECONDS = 2.0  # a port that a firewall closes gives no answer, and gRPC is there meanwhile


def open_data_connection(
    offer: ConnectionOffer, address: str, access: Access, directory: Path | None, peer: str, reading: ReadingThreads
) -> ClientConnection:
    """Opens the connection that a shard offers.

    address:   that of the shard's gRPC port
    directory: the directory of unix sockets on this host; None: use TCP only
    reading:   the threads that receive

    Raises Unreachable if no connection is possible, TryLater if it cannot be opened now.
    """
    connection: socket.socket | None = None
    if not offer.port and directory is None:
        raise Unreachable(f"{peer} takes no data connection: it has no port for them (--no-data-port)")
    try:
        if directory is not None:
            connection = _connect_here(directory, offer.location, offer.inode)
        if connection is None:
            connection = _connect_tcp(address, offer.port, access)
        connection.sendall(write_header(0, Kind.OPEN, len(offer.ticket)) + offer.ticket)
        first = receive_exactly(connection, HEADER_BYTES, time.monotonic() + CONNECT_SECONDS)
        kind = read_header(first, 0).kind
        if kind is not Kind.OPENED:
            raise InvalidRequest(f"expected a frame OPENED, got {kind.name}")
        return ClientConnection(frames_over(connection), reading)
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
        return tls_socket(client_context(access.tls), plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
