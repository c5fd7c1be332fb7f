"""Where workers open data connections: a TCP port, and a unix socket for those on this host.

A connection has a thread of its own from its good ticket on. Until then one thread has all of them (handshakes.py).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest, PSError, TryLater
from ps_protocol.segment_layout import SOCKET_PREFIX
from ps_runtime.arrivals import Arrivals, HostLimits
from ps_runtime.background import guarded, start
from ps_runtime.credentials import Tls
from ps_runtime.frame_socket import frames_over
from ps_runtime.local_sockets import listen
from ps_runtime.reloading import ReloadingFiles
from ps_runtime.tls_contexts import server_context
from ps_runtime.troubles import Troubles
from ps_server.core.limits import Limits
from ps_server.rpc.data_connections import DataConnection, Opener, Serving, Tickets
from ps_server.rpc.handshakes import Handshakes

log = logging.getLogger("ps_server")

_BACKLOG = 128


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
    most:  connections at a time, each with a thread. Past that the caller with the most of them loses one to a caller
           that would still have fewer with it; another caller's connection is refused
    """

    def __init__(
        self,
        serving: Serving,
        tickets: Tickets,
        admit: Callable[[Opener, Callable[[], None]], Callable[[], None]],
        limits: Limits,
        most: int,
    ) -> None:
        self._serving, self._tickets, self._admit, self._most = serving, tickets, admit, most
        self._lock = threading.Lock()
        self._arrivals = Arrivals(HostLimits(limits.connections_of_a_host, limits.new_connections))
        self._handshakes = Handshakes(self._open, limits.handshake_seconds, self._arrivals)
        self._connections: dict[int, DataConnection] = {}
        # By number, the oldest first: with the caller of the connection, None once it has had to make room.
        self._threads: dict[int, tuple[threading.Thread, str | None]] = {}
        self._next = 0
        self._is_stopping = False
        self._troubles = Troubles(log, None)
        self._path: Path | None = None
        self.places = DataPlaces()

    @property
    def thread(self) -> threading.Thread:
        """The one that takes connections."""
        return self._handshakes.thread

    def listen(self, where: Where) -> None:
        """Begins to listen. Raises InvalidRequest if the port cannot be had; a directory may take no socket."""
        port = 0 if where.port is None else self._listen_tcp(where.host, where.port, where.tls)
        self.places = DataPlaces(port, *self._listen_here(where.directory))
        self._handshakes.start()

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
        self._handshakes.listen(listener, None if contexts is None else contexts.get)
        return int(listener.getsockname()[1])

    def _listen_here(self, directory: Path) -> tuple[str, int]:
        name = SOCKET_PREFIX + secrets.token_hex(16)
        try:
            listener, inode = listen(directory, name, _BACKLOG)
        except OSError as error:
            log.info("no socket for data connections in %s: %s", directory, error.strerror or error)
            return "", 0
        self._path = directory / name
        self._handshakes.listen(listener, None)
        return name, inode

    def _open(self, connection: socket.socket, ticket: bytes, host: str) -> None:
        """Has a connection served in a thread of its own, if its ticket is good."""
        opener = self._tickets.redeem(ticket, lambda opener: _is_of(connection, opener))
        if opener is None or not self._start(connection, opener, host):
            connection.close()
            self._arrivals.goes(host)

    def _start(self, connection: socket.socket, opener: Opener, host: str) -> bool:
        """Starts a connection's thread; returns whether there is room for it, and a thread can be had."""
        with self._lock:
            if self._is_stopping or (len(self._threads) >= self._most and not self._make_room(opener.caller)):
                return False
            self._next += 1
            number = self._next
            arguments = connection, opener, number, host
            thread = threading.Thread(target=self._run, args=arguments, name="data", daemon=True)
            self._threads[number] = thread, opener.caller
        try:
            start(thread)
        except TryLater as error:  # no thread can be had: the worker goes on over gRPC, and asks again later
            with self._lock:
                del self._threads[number]
            self._troubles.met("", "a data connection is refused: %s", error)
            return False
        self._troubles.over("")
        return True

    def _make_room(self, caller: str) -> bool:
        """Ends a connection of the caller that has most, if this one has two fewer; returns whether it did."""
        counts = Counter(other for _, other in self._threads.values() if other is not None)
        most = max(counts, key=counts.__getitem__, default=caller)
        if counts[caller] + 1 >= counts[most]:
            return False
        number = next((number for number in self._connections if self._threads[number][1] == most), None)
        if number is not None:
            self._threads[number] = self._threads[number][0], None
            self._connections[number].abort()
        return number is not None

    def _run(self, connection: socket.socket, opener: Opener, number: int, host: str) -> None:
        try:
            guarded("data-connections", lambda: self._serve(connection, opener, number))
        finally:
            connection.close()
            self._arrivals.goes(host)
            with self._lock:
                del self._threads[number]

    def _serve(self, connection: socket.socket, opener: Opener, number: int) -> None:
        made = DataConnection(frames_over(connection), opener, self._serving, number)
        with self._lock:
            if self._is_stopping:
                return
            self._connections[number] = made
        try:
            with contextlib.suppress(OSError, PSError):  # it has gone, or its worker's place is lost
                ended = self._admit(opener, made.abort)
                try:
                    made.serve()
                finally:
                    ended()
        finally:
            with self._lock:
                del self._connections[number]

    def stop(self) -> None:
        """Ends all connections and threads."""
        with self._lock:
            self._is_stopping = True
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._handshakes.stop()
        with self._lock:
            connections, threads = list(self._connections.values()), [thread for thread, _ in self._threads.values()]
        for connection in connections:
            connection.abort()
        for thread in threads:
            if thread.ident is not None:  # one that is about to start ends at once
                thread.join()


def _is_of(connection: socket.socket, opener: Opener) -> bool:
    """Whether a connection is its opener's, as far as certificates tell: a ticket alone is not enough then.

    Not by its host: one worker may reach the two ports of a shard from two addresses.
    """
    if not isinstance(connection, ssl.SSLSocket):
        return True
    known = {name.decode("utf-8", "replace") for name in opener.auth_context.get("x509_common_name", ())}
    subject: Any = (connection.getpeercert() or {}).get("subject", ())
    shown = {value for part in subject for name, value in part if name == "commonName"}
    return not known or known == shown
