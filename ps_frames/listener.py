"""Accepts data connections of workers: on a TCP port, and on a unix socket for workers on this host.

One thread serves all connections that have not shown a valid ticket yet. It reads their TLS handshakes and tickets as
bytes come, so such a connection costs a descriptor and no thread: 1,000 silent connections over TLS once took 1,000
threads, each in a handshake. One that is silent for a few seconds is closed. If there are too many, the host with most
of them loses its oldest, so that no host keeps another out. With a valid ticket, a connection moves to the shared
threads of reading.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ps_frames.frames import HEADER_BYTES, TICKET_BYTES, ConnectionOffer, Kind, frames_over, read_header
from ps_frames.reading import ReadingThreads
from ps_frames.server import Opener, ServerConnection, Serving
from ps_protocol.errors import InvalidRequest, PSError, TryLater
from ps_protocol.handover import SOCKET_PREFIX
from ps_runtime.arrivals import Arrivals, HostLimits
from ps_runtime.background import guarded, start
from ps_runtime.credentials import Tls
from ps_runtime.local_sockets import listen, remove_leftovers
from ps_runtime.reloading import ReloadingFiles
from ps_runtime.tls_contexts import server_context, tls_socket
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_server")

_BACKLOG = 128
MOST_STRANGERS = 64
SILENT_SECONDS = 3.0  # a connection that shows no ticket for this long is closed; NATS waits 2 to 3 s
ACCEPTED_AT_ONCE = 64  # at most so many connections in a row: a flood of them must not keep handshakes waiting
_PAUSE_SECONDS = 0.05  # where no connection can be accepted: this process has too many files open
_OPENING_BYTES = HEADER_BYTES + TICKET_BYTES
TICKET_SECONDS = 30.0
_TICKETS_OF_A_WORKER = 4
_MOST_TICKETS = 4_096  # as many as a job may have workers; beyond it the oldest tickets become invalid

# What serves TLS: returns its present context, which changes when its files do. None: plaintext.
Context = Callable[[], ssl.SSLContext] | None


@dataclass
class _Stranger:
    """A connection that has not shown its ticket.

    host:     the host that it comes from; empty on this machine's unix socket
    until:    when it is closed, whatever it has sent
    heard:    when it last sent bytes
    received: the bytes of its first frame, which holds the ticket
    """

    connection: socket.socket
    host: str
    until: float
    heard: float
    received: bytes = b""
    is_shaking_hands: bool = field(default=False)

    def deadline(self) -> float:
        return min(self.until, self.heard + SILENT_SECONDS)


class Handshakes:
    """Accepts connections, and hands over those that have shown a ticket. Methods may be called from any thread.

    opened:  is called with a connection, the ticket that it has shown and its host, in the thread of all of them: it is
             not to wait. From then on the connection is the callee's, which tells `arrivals` when it has ended
    seconds: that a connection may take until then
    arrivals: counts connections by host
    thread:  in which all of that is done
    """

    def __init__(self, opened: Callable[[socket.socket, bytes, str], None], seconds: float, arrivals: Arrivals) -> None:
        self._opened, self._seconds, self._arrivals = opened, seconds, arrivals
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._contexts: dict[socket.socket, Context] = {}  # by listener
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first; of this thread alone
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="data-listener", daemon=True)

    def listen(self, listener: socket.socket, context: Context) -> None:
        """Accepts connections of a listener from `start` on."""
        listener.setblocking(False)
        self._contexts[listener] = context
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def start(self) -> None:
        """Begins. Raises TryLater if no thread can be had."""
        start(self.thread)

    def stop(self) -> None:
        """Closes all that is here, the listeners too; returns when that is done."""
        self._stopping.set()
        with contextlib.suppress(OSError):  # it is full of what wakes already
            self._wake.send(b"\0")
        if self.thread.ident is not None:
            self.thread.join()
        for connection in [*self._strangers, *self._contexts, self._wake, self._woken]:
            connection.close()
        self._selector.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            guarded("data-listener", self._turn)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.fileobj in self._contexts:
                self._accept(key.data)
            elif key.data is not None and key.data.connection in self._strangers:
                self._go_on(key.data)
        now = time.monotonic()
        for stranger in [each for each in self._strangers.values() if each.deadline() <= now]:
            self._close(stranger)

    def _patience(self) -> float | None:
        until = min((stranger.deadline() for stranger in self._strangers.values()), default=None)
        return None if until is None else max(0.0, until - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                plain, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many files are open in this process: some are closed meanwhile
                self._stopping.wait(_PAUSE_SECONDS)
                return
            host = str(address[0]) if listener.family != socket.AF_UNIX else ""
            if self._arrivals.comes(host):
                self._greet(plain, host, self._contexts[listener])
            else:
                plain.close()

    def _greet(self, plain: socket.socket, host: str, context: Context) -> None:
        connection, now = plain, time.monotonic()
        try:
            plain.setblocking(False)
            if context is not None:
                connection = tls_socket(context(), plain, server_side=True, do_handshake_on_connect=False)
        except (OSError, InvalidRequest):  # it has gone; or the new files of TLS cannot be used, as the log says
            plain.close()
            self._arrivals.goes(host)
            return
        stranger = _Stranger(connection, host, now + self._seconds, now, is_shaking_hands=context is not None)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        if len(self._strangers) > MOST_STRANGERS:
            self._make_room()
        if connection in self._strangers:
            self._go_on(stranger)

    def _make_room(self) -> None:
        hosts = Counter(stranger.host for stranger in self._strangers.values())
        (most, _), *_ = hosts.most_common(1)
        self._close(next(stranger for stranger in self._strangers.values() if stranger.host == most))

    def _go_on(self, stranger: _Stranger) -> None:
        """Reads the bytes that have come on a connection; passes it to `opened` when its ticket is complete."""
        wanted = selectors.EVENT_READ
        try:
            if stranger.is_shaking_hands:
                assert isinstance(stranger.connection, ssl.SSLSocket)
                stranger.heard = time.monotonic()
                stranger.connection.do_handshake()
                stranger.is_shaking_hands = False
            if not self._receive(stranger):
                self._close(stranger)
                return
        except (ssl.SSLWantReadError, BlockingIOError):
            pass
        except ssl.SSLWantWriteError:
            wanted = selectors.EVENT_WRITE
        except OSError:  # it has gone, or shows no certificate of the CA
            self._close(stranger)
            return
        if len(stranger.received) == _OPENING_BYTES:
            self._hand_over(stranger)
        else:
            self._selector.modify(stranger.connection, wanted, stranger)

    def _receive(self, stranger: _Stranger) -> bool:
        """Receives until the ticket is whole, or nothing more is here; returns whether it may still be one."""
        while len(stranger.received) < _OPENING_BYTES:
            piece = stranger.connection.recv(_OPENING_BYTES - len(stranger.received))
            if not piece:
                return False
            stranger.received += piece
            stranger.heard = time.monotonic()
            if len(stranger.received) >= HEADER_BYTES and not _may_open(stranger.received[:HEADER_BYTES]):
                return False
        return True

    def _hand_over(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.setblocking(True)
        self._opened(stranger.connection, stranger.received[HEADER_BYTES:], stranger.host)

    def _close(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()
        self._arrivals.goes(stranger.host)

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)


def _may_open(header: bytes) -> bool:
    """Whether a frame may open a connection: its header has the kind and the size of a ticket."""
    try:
        read = read_header(header, TICKET_BYTES)
    except InvalidRequest:
        return False
    return read.kind is Kind.OPEN and read.size == TICKET_BYTES


# -- from the good ticket on -----------------------------------------------------------------------------------------


class Tickets:
    """The valid tickets. Thread-safe.

    clock: returns the time in seconds
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._good: dict[tuple[str, str, int, int], list[tuple[bytes, float, Opener]]] = {}  # the oldest first

    def issue(self, opener: Opener) -> bytes:
        """Returns a ticket for a worker. The worker's last few tickets stay valid: it may have made the call twice in
        parallel.
        """
        ticket, worker = secrets.token_bytes(TICKET_BYTES), opener.worker
        name = worker.job, worker.run, worker.rank, worker.member
        with self._lock:
            before = self._good.pop(name, [])[1 - _TICKETS_OF_A_WORKER :]
            self._good[name] = [*before, (_digest(ticket), self._clock() + TICKET_SECONDS, opener)]
            while len(self._good) > _MOST_TICKETS:
                del self._good[next(iter(self._good))]
        return ticket

    def redeem(self, ticket: bytes, is_of: Callable[[Opener], bool] = lambda _: True) -> Opener | None:
        """Uses up a ticket. Returns the call that got it; None if the ticket is not valid.

        is_of: returns whether the caller that shows the ticket is the one that got it; if not, the ticket stays valid
        """
        digest, now = _digest(ticket), self._clock()
        with self._lock:
            for name, given in list(self._good.items()):
                found = next((opener for known, until, opener in given if known == digest and now < until), None)
                if found is not None and not is_of(found):
                    return None
                if found is not None or given[-1][1] <= now:
                    del self._good[name]  # a worker needs only one connection, so its tickets are void once one is used
                if found is not None:
                    return found
        return None


def _digest(ticket: bytes) -> bytes:
    return hashlib.sha256(ticket).digest()  # compared in its place, so that how long that takes tells nothing


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


@dataclass
class _Admitted:
    """A connection with a good ticket.

    caller: the principal; None if the connection has had to make room for another caller's
    left:   called when it has ended; None if the shard has not been asked yet
    """

    made: ServerConnection
    caller: str | None
    host: str
    left: Callable[[], None] | None = None


class DataListener:
    """Takes connections until it is stopped.

    admit: is called with the opener of a connection and what ends it; returns what is to be called when it has ended.
           Raises PSError if the worker's place is lost
    most:  connections at a time. Each may need a thread: while its request arrives slowly. Past that the caller with
           the most of them loses one to a caller that would still have fewer with it; another caller's connection is
           refused
    """

    def __init__(
        self,
        serving: Serving,
        tickets: Tickets,
        admit: Callable[[Opener, Callable[[], None]], Callable[[], None]],
        hosts: HostLimits,
        handshake_seconds: float,
        most: int,
    ) -> None:
        self._serving, self._tickets, self._admit, self._most = serving, tickets, admit, most
        self._lock = threading.Lock()
        self._arrivals = Arrivals(hosts)
        self._handshakes = Handshakes(self._open, handshake_seconds, self._arrivals)
        self._connections: dict[int, _Admitted] = {}  # by number, the oldest first
        self._next = 0
        self._is_stopping = False
        self._troubles = Troubles(log, None)
        self._threads = ReadingThreads("data", self._troubles)
        self._path: Path | None = None
        self.offer = ConnectionOffer()

    @property
    def thread(self) -> threading.Thread:
        """The thread that accepts connections."""
        return self._handshakes.thread

    def listen(self, where: Where) -> None:
        """Begins to listen. Raises InvalidRequest if the port is taken.

        If no socket can be made in the directory, it logs this, and listens on the port alone.
        """
        port = 0 if where.port is None else self._listen_tcp(where.host, where.port, where.tls)
        self.offer = ConnectionOffer(port, *self._listen_here(where.directory))
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
        if tls is not None:
            log.info("data connections are encrypted by this Python's %s", ssl.OPENSSL_VERSION)
        contexts = None if tls is None else ReloadingFiles(tls.paths(), lambda: server_context(tls, "data connections"))
        self._handshakes.listen(listener, None if contexts is None else contexts.get)
        return int(listener.getsockname()[1])

    def _listen_here(self, directory: Path) -> tuple[str, int]:
        name = SOCKET_PREFIX + secrets.token_hex(16)
        remove_leftovers(directory, SOCKET_PREFIX)
        try:
            listener, inode = listen(directory, name, _BACKLOG)
        except OSError as error:
            log.info("no socket for data connections in %s: %s", directory, error.strerror or error)
            return "", 0
        self._path = directory / name
        self._handshakes.listen(listener, None)
        return name, inode

    def _open(self, connection: socket.socket, ticket: bytes, host: str) -> None:
        """Serves a connection if its ticket is valid."""
        opener = self._tickets.redeem(ticket, lambda opener: _is_of(connection, opener))
        if opener is None or not self._begin(connection, opener, host):
            connection.close()
            self._arrivals.goes(host)

    def _begin(self, connection: socket.socket, opener: Opener, host: str) -> bool:
        """Begins to read from a connection; returns whether there is room for it, and a thread."""
        try:
            frames = frames_over(connection)
        except OSError:  # it has gone
            return False
        with self._lock:
            if self._is_stopping or (len(self._connections) >= self._most and not self._make_room(opener.caller)):
                return False
            self._next += 1
            number = self._next
            each = _Admitted(ServerConnection(frames, opener, self._serving, number), opener.caller, host)
            each.made.admit = partial(self._is_in_place, each)
            self._connections[number] = each
        try:
            self._threads.add(frames.fileno(), each.made.read, partial(self._end, number))
        except TryLater as error:  # no thread can be had: the worker goes on over gRPC, and asks again later
            with self._lock:
                del self._connections[number]
            self._troubles.met("", "a data connection is refused: %s", error)
            return False
        self._troubles.over("")
        return True

    def _make_room(self, caller: str) -> bool:
        """Ends a connection of the caller that has most, if this one has two fewer; returns whether it did."""
        counts = Counter(each.caller for each in self._connections.values() if each.caller is not None)
        most = max(counts, key=counts.__getitem__, default=caller)
        if counts[caller] + 1 >= counts[most]:
            return False
        oldest = next(each for each in self._connections.values() if each.caller == most)
        oldest.caller = None
        oldest.made.cancel()
        return True

    def _is_in_place(self, each: _Admitted) -> bool:
        """Asks the shard whether a connection's worker has its place."""
        try:
            each.left = self._admit(each.made.opener, each.made.cancel)
        except PSError:  # its worker's place is lost
            return False
        return True

    def _end(self, number: int) -> None:
        each = self._connections[number]
        try:
            each.made.end()
        finally:
            try:
                if each.left is not None:
                    each.left()
            finally:
                self._arrivals.goes(each.host)
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
            connections = list(self._connections.values())
        for each in connections:
            each.made.cancel()
        self._threads.stop()


def _is_of(connection: socket.socket, opener: Opener) -> bool:
    """Whether a connection is its opener's, as far as certificates tell: a ticket alone is not enough then.

    Not by its host: one worker may reach the two ports of a shard from two addresses.
    """
    if not isinstance(connection, ssl.SSLSocket):
        return True
    known = {name.decode("utf-8", "replace") for name in opener.auth_context.get("x509_common_name", ())}
    subject: Iterable[Iterable[tuple[str, str]]] = (connection.getpeercert() or {}).get("subject", ())  # type: ignore[assignment]
    shown = {value for part in subject for name, value in part if name == "commonName"}
    return not known or known == shown
