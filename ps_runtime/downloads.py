"""Serves bytes in memory over HTTP/1.1: whole, a range of them, or the answer that they have not changed (304).

Each connection has a thread, and may send many requests; it lasts as long as its client asks and reads. Nothing is
copied: views are sent, and what has to be made is made as it leaves. Only GET and HEAD are allowed, without a body; a
request has at most a few KiB.
"""

from __future__ import annotations

import re
import socketserver
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

from ps_runtime.arrivals import HostLimits
from ps_runtime.background import note_error
from ps_runtime.credentials import Tls, is_loopback
from ps_runtime.web import SERVER_SOFTWARE, ConnectionServer, names_loopback, run_server

MAX_CONNECTIONS = 256
MAX_HEAD_BYTES = 16 * 2**10
MAX_HEADERS = 64
MAX_FIELDS = 8
REQUEST_SECONDS = 10.0  # the time for a whole request to arrive, from its first byte
IDLE_SECONDS = 15.0  # the time that a connection may stay open without a request
CHUNK_BYTES = 256 * 2**10  # the bytes of a chunk, which a client must read within `stall_seconds`
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # all but a tab
# After these statuses the connection is closed. New connections are limited by host, so nobody can try many tokens.
_LAST = ("400", "401", "403")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class WebRequest(NamedTuple):
    """A request.

    path:    decoded
    query:   by name, the first value of each
    headers: by name in lower case
    host:    the address of the client
    names:   the names in its TLS certificate
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    host: str
    names: Sequence[str]


def nothing_to_do() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class MadeLater:
    """Bytes that are made when they are sent, and not kept.

    make:  makes all of them
    start: the first byte that is sent
    """

    nbytes: int
    make: Callable[[], memoryview]
    start: int = 0

    def __getitem__(self, which: slice) -> MadeLater:
        """Returns some of these bytes, as a memoryview does."""
        start, end, _ = which.indices(self.nbytes)
        return MadeLater(max(0, end - start), self.make, self.start + start)

    def bytes(self) -> memoryview:
        """Makes all of the bytes."""
        return self.make()[self.start : self.start + self.nbytes]


Part = memoryview | MadeLater


@dataclass
class Reply:
    """An answer.

    body:    its bytes, as views that follow each other
    etag:    identifies the body; with it, ranges and conditional requests are answered; empty: neither
    lost:    returns whether to stop sending the body
    sent:    is called with the number of bytes of the body that were sent
    close:   is called when the answer is over, for any reason
    size:    bytes of the body; -1: computed from it
    """

    status: str = "200 OK"
    headers: Sequence[tuple[str, str]] = ()
    body: Sequence[Part] = ()
    etag: str = ""
    lost: Callable[[], bool] = bool
    sent: Callable[[int], object] = int
    close: Callable[[], None] = nothing_to_do
    size: int = field(default=-1)

    def __post_init__(self) -> None:
        if self.size < 0:
            self.size = sum(part.nbytes for part in self.body)


def text_reply(status: str, text: str, *headers: tuple[str, str]) -> Reply:
    """Returns an answer of plain text."""
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return Reply(status, (kind, *headers), (memoryview(f"{text}\n".encode()),))


App = Callable[[WebRequest], Reply]


class _BadRequest(Exception):
    """A request is malformed. The text is the answer."""


class _Server(ConnectionServer):
    app_of_downloads: App
    stall_seconds: float
    is_of_loopback: bool
    most = MAX_CONNECTIONS


class _WebConnection(socketserver.BaseRequestHandler):
    """One connection."""

    server: _Server

    def handle(self) -> None:
        left = b""
        while True:
            self.server.give_time(IDLE_SECONDS)
            self.request.settimeout(IDLE_SECONDS)
            try:
                head, left = self._head(left)
                if not head:
                    return
                asked = self._parsed(head)
            except _BadRequest as error:
                self._send_all(text_reply("400 Bad Request", str(error)), "GET", is_last=True)
                return
            except TimeoutError:
                return
            is_last = asked.headers.get("connection", "").lower() == "close" or asked.headers[":version"] == "HTTP/1.0"
            if self._answer(asked, is_last):
                return

    def _head(self, left: bytes) -> tuple[bytes, bytes]:
        """Returns the head of the next request, and the bytes that followed it. An empty head: the client has closed
        the connection.
        """
        data = left
        while b"\r\n\r\n" not in data:
            if len(data) > MAX_HEAD_BYTES:
                raise _BadRequest(f"a request has up to {MAX_HEAD_BYTES} bytes")
            more = self.request.recv(MAX_HEAD_BYTES)
            if not more:
                return b"", b""
            if not data:
                self.server.give_time(REQUEST_SECONDS)
            data += more
        head, _, left = data.partition(b"\r\n\r\n")
        return head, left

    def _parsed(self, head: bytes) -> WebRequest:
        lines = head.decode("latin-1").split("\r\n")
        if any(map(_CONTROL.search, lines)) or "\t" in lines[0]:
            raise _BadRequest("a request has no control characters")
        words = lines[0].split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0") or not words[1].startswith("/"):
            raise _BadRequest("expected a request such as GET /jobs/NAME/latest.safetensors HTTP/1.1")
        if len(lines) > MAX_HEADERS:
            raise _BadRequest(f"a request has up to {MAX_HEADERS} headers")
        headers = {":version": words[2]}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            name = name.lower()
            if not colon or not _TOKEN.fullmatch(name) or name in headers:
                raise _BadRequest("a header is malformed, or came twice")
            headers[name] = value.strip(" \t")
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise _BadRequest("a request here has no body")
        path, _, query = words[1].partition("?")
        try:
            given = parse_qs(query, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise _BadRequest(f"a query has up to {MAX_FIELDS} values") from None
        first = {name: values[0] for name, values in given.items()}
        return WebRequest(words[0], unquote(path), first, headers, str(self.client_address[0]), self._names())

    def _names(self) -> Sequence[str]:
        """Returns the names in the client's certificate."""
        if not isinstance(self.request, ssl.SSLSocket):
            return ()
        subject = (self.request.getpeercert() or {}).get("subject", ())
        return [str(pair[1]) for group in subject for pair in group if pair[0] == "commonName"]

    def _answer(self, asked: WebRequest, is_last: bool) -> bool:
        """Answers a request; returns whether the connection ends."""
        try:
            reply = self._reply(asked)
        except Exception:
            note_error("downloads")
            reply = text_reply("500 Internal Server Error", "internal error; the log says more")
        is_last = is_last or reply.status.startswith(_LAST)
        try:
            self._send_all(_as_asked(asked, reply), asked.method, is_last)
        finally:
            reply.close()
        return is_last

    def _reply(self, asked: WebRequest) -> Reply:
        if self.server.is_of_loopback and not names_loopback(asked.headers.get("host", "")):
            return text_reply("403 Forbidden", "this is for this machine alone: ask for it at 127.0.0.1 or localhost")
        if asked.method not in ("GET", "HEAD"):
            return text_reply("405 Method Not Allowed", "this is only to be read", ("Allow", "GET, HEAD"))
        return self.server.app_of_downloads(asked)

    def _send_all(self, reply: Reply, method: str, is_last: bool) -> None:
        lines = [f"HTTP/1.1 {reply.status}", f"Server: {SERVER_SOFTWARE}", *(f"{n}: {v}" for n, v in reply.headers)]
        if not reply.status.startswith("304"):
            lines.append(f"Content-Length: {reply.size}")
        if is_last:
            lines.append("Connection: close")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        stall = self.server.stall_seconds
        self.request.settimeout(stall)
        self.server.give_time(2 * stall)
        if method == "HEAD" or not reply.body:
            self.request.sendall(head)
            return
        if reply.size <= CHUNK_BYTES // 16:  # in one packet
            self.request.sendall(head + b"".join(map(_bytes_of, reply.body)))
            return
        self.request.sendall(head)
        for later in reply.body:
            part = _bytes_of(later)
            for start in range(0, part.nbytes, CHUNK_BYTES):
                if reply.lost():
                    raise ConnectionAbortedError
                self.server.give_time(2 * stall)
                chunk = part[start : start + CHUNK_BYTES]
                self.request.sendall(chunk)
                reply.sent(chunk.nbytes)
            part = chunk = memoryview(b"")  # the next one is made only when nothing refers to this one


def _as_asked(asked: WebRequest, reply: Reply) -> Reply:
    """Returns the answer to the conditions and the range of a request (RFC 9110, sections 13 and 14)."""
    if not reply.etag or reply.status != "200 OK":
        return reply
    headers = (*reply.headers, ("ETag", reply.etag), ("Accept-Ranges", "bytes"))
    known = asked.headers.get("if-none-match")
    if known is not None and (known == reply.etag or reply.etag in _etags(known) or known == "*"):
        return Reply("304 Not Modified", headers)
    whole = Reply(reply.status, headers, reply.body, lost=reply.lost, sent=reply.sent, size=reply.size)
    wanted = _RANGE.fullmatch(asked.headers.get("range", ""))
    if asked.method != "GET" or wanted is None or asked.headers.get("if-range", reply.etag) != reply.etag:
        return whole
    first, last = wanted.groups()
    if not first and not last:
        return whole
    start = int(first) if first else max(0, reply.size - int(last))
    end = min(reply.size, int(last) + 1) if first and last else reply.size
    if first and last and int(last) < int(first):
        return whole  # it is no valid range
    if start >= end:
        text = f"this has {reply.size} bytes"
        return text_reply("416 Range Not Satisfiable", text, ("Content-Range", f"bytes */{reply.size}"))
    headers = (*headers, ("Content-Range", f"bytes {start}-{end - 1}/{reply.size}"))
    return Reply("206 Partial Content", headers, _piece(reply.body, start, end), lost=reply.lost, sent=reply.sent)


def _etags(text: str) -> set[str]:
    return {each.strip().removeprefix("W/") for each in text.split(",")}


def _bytes_of(part: Part) -> memoryview:
    return part.bytes() if isinstance(part, MadeLater) else part


def _piece(parts: Sequence[Part], start: int, end: int) -> list[Part]:
    """Returns the views of bytes start to end of a body that consists of parts."""
    found, at = list[Part](), 0
    for part in parts:
        low, high = max(start - at, 0), min(end - at, part.nbytes)
        if low < high:
            found.append(part[low:high])
        at += part.nbytes
    return found


def serve_downloads(
    host: str, port: int, app: App, flag: str, tls: Tls | None, limits: HostLimits, stall_seconds: float
) -> tuple[int, Callable[[], None]]:
    """Serves the answers of an application. Returns the port and a function that stops serving.

    host, port, tls, limits: as for ps_runtime.web.serve, but with up to MAX_CONNECTIONS, half of them from one host. If
    the host is loopback, only requests for a loopback name are answered
    stall_seconds: the time in which a client must read a chunk
    """

    def make() -> _Server:
        server = _Server((host, port), _WebConnection)
        server.app_of_downloads, server.stall_seconds = app, stall_seconds
        server.is_of_loopback = is_loopback(host)
        return server

    most = min(limits.most, MAX_CONNECTIONS // 2)
    return run_server(make, (host, port), "downloads", flag, tls, HostLimits(most, limits.new))
