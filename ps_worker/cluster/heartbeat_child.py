"""A small process that sends a worker's heartbeats while the worker's own thread cannot: see heartbeat_process.py.

It is run as a script by `python -I -S`, and imports only modules of the standard library: no package of this project,
no torch, no gRPC. So it takes 5 MB of memory of its own and 40 ms. Its calls are gRPC's (HTTP/2 with one request; see
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md); the messages in them were made by the worker.

The worker writes lines of JSON to its stdin: first the fields of a `Plan`, then at each turn of its heartbeat thread
the heartbeat that the thread is about to send. If a line is late, this process sends the last heartbeat itself, as long
as the worker's process runs. While the worker's process is stopped (SIGSTOP, a debugger), this one sends nothing: the
worker is then silent. It ends with the worker's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time

TYPE_CHECKING = False  # instead of typing.TYPE_CHECKING: importing typing takes long
if TYPE_CHECKING:
    from typing import Any

_LATE = 1.5  # pauses between two turns, from which on the thread has missed one
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7  # kinds of frames
_END_STREAM = _ACK = 1  # flags of frames
_END_HEADERS = 4
_MAX_LINE = 2**20


class Plan:
    """The settings for calling the coordinator. The worker sends them once, as JSON.

    parent:  the pid of the worker
    address: HOST:PORT of the coordinator
    path:    the gRPC method's path
    pause:   seconds between two turns of the worker's thread
    busy:    seconds without a turn after which the thread counts as hung
    token:   bearer token; None if there is none, or it is in `token_file`
    token_file: the file with the token; None if there is none
    tls:     None: plaintext; otherwise `cert`, `key` and `ca`, each a file or None
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.parent: int = settings["parent"]
        self.address: str = settings["address"]
        self.path: str = settings["path"]
        self.pause: float = settings["pause"]
        self.busy: float = settings["busy"]
        self.token: str | None = settings["token"]
        self.token_file: str | None = settings["token_file"]
        self.tls: dict[str, str | None] | None = settings["tls"]

    def current_token(self) -> str | None:
        """Returns the token. One in a file is read each time; None if there is none."""
        if self.token_file is None:
            return self.token
        with open(self.token_file, encoding="utf-8") as file:
            return file.read().strip()


# -- one call --------------------------------------------------------------------------------------------------------


def call(plan: Plan, message: bytes) -> None:
    """Makes one call, on a new connection with the current certificates and token. Raises OSError."""
    host, _, port = plan.address.rpartition(":")
    host = host.strip("[]")
    until = time.monotonic() + plan.pause
    with socket.create_connection((host, int(port)), plan.pause) as plain:
        connection = plain if plan.tls is None else _encrypted(plain, host, plan.tls)
        with connection:
            connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0, b"") + request(plan, message))
            _await_end(connection, until)


def request(plan: Plan, message: bytes) -> bytes:
    """Returns the frames of a request."""
    headers = [
        (":method", "POST"),
        (":scheme", "http" if plan.tls is None else "https"),
        (":path", plan.path),
        (":authority", plan.address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("grpc-timeout", f"{max(1, int(plan.pause * 1000))}m"),
    ]
    token = plan.current_token()
    if token is not None:
        headers.append(("authorization", f"Bearer {token}"))
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)  # literal, never indexed
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(_HEADERS, _END_HEADERS, 1, block) + frame(_DATA, _END_STREAM, 1, body)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns one frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """Encodes a string for HPACK, without Huffman coding: its length (7-bit prefix integer), then its bytes."""
    data = text.encode("ascii")
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    size, prefix = size - 127, b"\x7f"
    while size >= 128:
        prefix, size = prefix + bytes([size % 128 + 128]), size // 128
    return prefix + bytes([size]) + data


def _encrypted(plain: socket.socket, host: str, files: dict[str, str | None]) -> socket.socket:
    """Returns a TLS connection by the rules of ps_runtime.tls_contexts.client_context."""
    import ssl

    context = ssl.create_default_context(cafile=files["ca"] or files["cert"])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
    context.set_alpn_protocols(["h2"])
    if files["cert"] is not None:
        context.load_cert_chain(files["cert"], files["key"])
    return context.wrap_socket(plain, server_hostname=host)


def _await_end(connection: socket.socket, until: float) -> None:
    """Reads until the call is over: closing the connection earlier might cancel the call before it is carried out.

    The answer is not used: the worker's own thread calls as soon as it can.
    """
    held = b""
    while True:
        while len(held) < 9 or len(held) < 9 + int.from_bytes(held[:3], "big"):
            connection.settimeout(max(0.001, until - time.monotonic()))
            found = connection.recv(65536)
            if not found:
                return
            held += found
        size, kind, flags = int.from_bytes(held[:3], "big"), held[3], held[4]
        payload, held = held[9 : 9 + size], held[9 + size :]
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            connection.sendall(frame(_PING, _ACK, 0, payload))
        elif kind in (_GOAWAY, _RST_STREAM) or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            return  # the connection carries this call alone


# -- the worker's process --------------------------------------------------------------------------------------------


def is_running(pid: int) -> bool:
    """Whether a process exists and is not stopped by a signal or a debugger; see proc_pid_stat(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X")
    except OSError:
        return False


class Lines:
    """The lines that come on stdin. is_over: stdin was closed, because the worker has ended"""

    def __init__(self) -> None:
        self.is_over = False
        self._rest = b""

    def wait(self, seconds: float) -> list[bytes]:
        """Waits up to `seconds` for input. Returns the complete lines that have come, perhaps none."""
        ready, _, _ = select.select([0], [], [], max(0.0, seconds))
        if not ready:
            return []
        found = os.read(0, 65536)
        self.is_over = not found
        *lines, self._rest = (self._rest + found).split(b"\n")
        self.is_over |= len(self._rest) > _MAX_LINE
        return lines


def main() -> None:
    """Sends heartbeats in place of the worker's thread, until the worker ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C
    lines, message = Lines(), b""
    first: list[bytes] = []
    while not first and not lines.is_over:
        first = lines.wait(60.0)
    if not first:
        return
    plan = Plan(json.loads(first[0]))
    came = first[1:]
    turn = time.monotonic()  # the last one of the worker's thread
    while not lines.is_over and os.getppid() == plan.parent:
        if came:
            message, turn = bytes.fromhex(came[-1].decode()), time.monotonic()
        silent, late = time.monotonic() - turn, _LATE * plan.pause
        if message and late <= silent <= plan.busy and is_running(plan.parent):
            with contextlib.suppress(OSError, ValueError):  # the next one may come through
                call(plan, message)
        came = lines.wait(late - silent if silent < late else plan.pause)


if __name__ == "__main__":
    main()
