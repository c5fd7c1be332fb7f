"""New data connections, until they have shown their ticket: one thread takes all of them.

A stranger costs a descriptor, and no thread: 1,000 silent connections over TLS once took 1,000 threads, each in a
handshake. Here the handshake and the ticket are read as bytes come. A connection that is silent for a few seconds is
closed. When too many are here, the host that has most of them loses its oldest, so that no host keeps another out.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ps_protocol.errors import InvalidRequest
from ps_protocol.frames import HEADER_BYTES, TICKET_BYTES, Kind, read_header
from ps_runtime.arrivals import Arrivals
from ps_runtime.background import guarded, start

log = logging.getLogger("ps_server")

MOST_STRANGERS = 64
SILENT_SECONDS = 3.0  # after which a connection that has not shown its ticket is closed; NATS cuts off after 2 to 3
ACCEPTED_AT_ONCE = 64  # of the connections that wait to be accepted, so that a flood of them keeps no handshake waiting
_PAUSE_SECONDS = 0.05  # where no connection can be accepted: this process has too many files open
_OPENING_BYTES = HEADER_BYTES + TICKET_BYTES

# What serves TLS: returns its present context, which changes when its files do. None: plaintext.
Context = Callable[[], ssl.SSLContext] | None


@dataclass
class _Stranger:
    """A connection that has not shown its ticket.

    host:     it comes from; empty on this machine's unix socket
    until:    it is closed then, whatever it has sent
    heard:    when it sent something last
    received: of its first frame, which holds the ticket
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
                connection = context().wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
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
        """Takes what has come on a connection; hands it over when its ticket is whole."""
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
    """Whether a frame's header is that of a ticket."""
    try:
        read = read_header(header, TICKET_BYTES)
    except InvalidRequest:
        return False
    return read.kind is Kind.OPEN and read.size == TICKET_BYTES
