"""Where workers open data connections: a TCP port, and a unix socket for those on this host.

Each connection has a thread. One that does not show its ticket in time is closed. Few may be there without a ticket:
the next one closes the oldest, so that silent clients keep no worker out.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import InvalidRequest, PSError
from ps_protocol.frames import HEADER_BYTES, TICKET_BYTES, Kind, read_header
from ps_protocol.segment_layout import SOCKET_PREFIX
from ps_runtime.background import guarded
from ps_runtime.credentials import Tls
from ps_runtime.frame_socket import FrameSocket, frames_over, receive_exactly
from ps_runtime.local_sockets import listen
from ps_runtime.reloading import ReloadingFiles
from ps_runtime.tls_contexts import server_context
from ps_server.core.limits import Limits
from ps_server.rpc.data_connections import DataConnection, Opener, Serving, Tickets

log = logging.getLogger("ps_server")

_BACKLOG = 128
_PAUSE_SECONDS = 0.05
_STRANGERS = 64  # connections that have shown no ticket yet; the oldest makes room for the next


@dataclass(frozen=True)
class DataPlaces:
    """Where data connections may be opened.

    port:     TCP; 0: there is none
    location: the name of a unix socket in the shared directory, and its inode; empty: there is none
    """

    port: int = 0
    location: str = ""
    inode: int = 0


@dataclass(frozen=True)
class Where:
    """Where to listen.

    host, port: TCP; port 0: any free one, None: not over TCP
    tls:        certificates to serve with; None: plaintext
    directory:  where workers of this host look for a socket
    """

    host: str
    port: int | None
    tls: Tls | None
    directory: Path


class DataListener:
    """Takes connections until it is stopped.

    admit: is called with the opener of a connection and what ends it; returns what is to be called when it has ended.
           Raises PSError where the worker's place is lost
    """

    def __init__(
        self,
        serving: Serving,
        tickets: Tickets,
        admit: Callable[[Opener, Callable[[], None]], Callable[[], None]],
        limits: Limits,
    ) -> None:
        self._serving, self._tickets, self._admit, self._limits = serving, tickets, admit, limits
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._strangers: dict[int, socket.socket] = {}  # by number, the oldest first
        self._connections: dict[int, DataConnection] = {}
        self._threads: set[threading.Thread] = set()
        self._next = 0
        self._stopping = threading.Event()
        self._path: Path | None = None
        self.places = DataPlaces()

    def listen(self, where: Where) -> None:
        """Begins to listen. Raises InvalidRequest if the port cannot be had; a directory may take no socket."""
        port = 0 if where.port is None else self._listen_tcp(where.host, where.port, where.tls)
        self.places = DataPlaces(port, *self._listen_here(where.directory))

    def _listen_tcp(self, host: str, port: int, tls: Tls | None) -> int:
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen for data connections on {host}:{port} ({error.strerror}); choose another --data-port"
            ) from None
        contexts = None if tls is None else ReloadingFiles(tls.paths(), lambda: server_context(tls, "data connections"))

        def secure(plain: socket.socket) -> socket.socket:
            return plain if contexts is None else contexts.get().wrap_socket(plain, server_side=True)

        self._accept(listener, secure)
        return int(listener.getsockname()[1])

    def _listen_here(self, directory: Path) -> tuple[str, int]:
        name = SOCKET_PREFIX + secrets.token_hex(16)
        try:
            listener, inode = listen(directory, name, _BACKLOG)
        except OSError as error:
            log.info("no socket for data connections in %s: %s", directory, error.strerror or error)
            return "", 0
        self._path = directory / name
        self._accept(listener, lambda plain: plain)
        return name, inode

    def _accept(self, listener: socket.socket, secure: Callable[[socket.socket], socket.socket]) -> None:
        self._listeners.append(listener)

        def accept() -> None:
            while not self._stopping.is_set():
                try:
                    plain, _ = listener.accept()
                except OSError:  # it was shut; or this process has too many files open, and some are closed meanwhile
                    self._stopping.wait(_PAUSE_SECONDS)
                    continue
                guarded("data-connections", lambda: self._take(plain, secure))  # noqa: B023 (called at once)

        self._start(accept, "data-listener")

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _take(self, plain: socket.socket, secure: Callable[[socket.socket], socket.socket]) -> None:
        """Has a new connection served, in a thread of its own."""
        with self._lock:
            self._next += 1
            number = self._next
            if self._stopping.is_set() or len(self._connections) >= self._limits.connections:
                plain.close()
                return
            self._strangers[number] = plain
            oldest = next(iter(self._strangers)) if len(self._strangers) > _STRANGERS else None
            turned_away = None if oldest is None else self._strangers.pop(oldest)
        if turned_away is not None:
            _shut(turned_away)
        self._start(lambda: guarded("data-connections", lambda: self._serve(plain, secure, number)), "data")

    def _serve(self, plain: socket.socket, secure: Callable[[socket.socket], socket.socket], number: int) -> None:
        connection = plain
        try:
            plain.settimeout(self._limits.handshake_seconds)
            connection = secure(plain)
            until = time.monotonic() + self._limits.handshake_seconds
            opener = self._tickets.redeem(_ticket(connection, until))
            if opener is None:
                return
            with self._lock:
                if self._strangers.pop(number, None) is None or self._stopping.is_set():
                    return
            frames = frames_over(connection)
            self._serve_opened(frames, opener, number)
        except (OSError, PSError):
            pass  # a stranger, or a worker whose place is lost
        finally:
            with self._lock:
                self._strangers.pop(number, None)
            connection.close()

    def _serve_opened(self, frames: FrameSocket, opener: Opener, number: int) -> None:
        made = DataConnection(frames, opener, self._serving, number)
        with self._lock:
            self._connections[number] = made
        try:
            ended = self._admit(opener, made.abort)
            try:
                if not self._stopping.is_set():
                    made.serve()
            finally:
                ended()
        finally:
            with self._lock:
                del self._connections[number]

    def stop(self) -> None:
        """Ends all connections and threads."""
        with self._lock:
            self._stopping.set()
            strangers, connections = list(self._strangers.values()), list(self._connections.values())
            threads = list(self._threads)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for listener in self._listeners:
            _shut(listener)
        for stranger in strangers:
            _shut(stranger)
        for connection in connections:
            connection.abort()
        for thread in threads:
            thread.join()
        for listener in self._listeners:
            listener.close()


def _ticket(connection: socket.socket, until: float) -> bytes:
    """Returns what a new connection shows as its ticket. Raises InvalidRequest, or OSError if it does not in time."""
    first = receive_exactly(connection, HEADER_BYTES, until)
    header = read_header(first, TICKET_BYTES)
    if header.kind is not Kind.OPEN or header.size != TICKET_BYTES:
        raise InvalidRequest("a data connection begins with its ticket")
    return receive_exactly(connection, TICKET_BYTES, until)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
