"""Plain sockets that send back what they receive: what the kernel and Python's `socket` can move, without any protocol.

A connection for each worker and server, and one thread for each at either end, as data connections have them.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.cluster import HERE, START_SECONDS
from bench.results import MIB
from bench.talk import answer, end, own_output

MESSAGE = 4 * MIB


@dataclass(frozen=True)
class Echoes:
    """Processes that send back: their addresses, and their process ids."""

    addresses: Sequence[str]
    pids: Sequence[int]


@contextlib.contextmanager
def socket_servers(count: int) -> Iterator[Echoes]:
    """Processes that do nothing but send back."""
    running = [HERE.start("bench.socket_echo") for _ in range(count)]
    try:
        addresses = [f"{HERE.address}:{answer(process, START_SECONDS)}" for process in running]
        yield Echoes(addresses, [process.pid for process in running])
    finally:
        end(running)


def socket_echo(addresses: Sequence[str], size: int) -> Callable[[], None]:
    """A function that has `size` bytes sent back, spread over the servers, and returns when all are here."""
    sockets = [_connected(address) for address in addresses]
    parts = [size // len(sockets) + (index < size % len(sockets)) for index in range(len(sockets))]
    sent = [memoryview(bytes(min(MESSAGE, part))) for part in parts]
    landing = [memoryview(bytearray(part)) for part in parts]

    def step() -> None:
        threads = [
            threading.Thread(target=work)
            for connection, part, out, into in zip(sockets, parts, sent, landing, strict=True)
            for work in (_sending(connection, out, part), _receiving(connection, into))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return step


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _sending(connection: socket.socket, message: memoryview, size: int) -> Callable[[], None]:
    def send() -> None:
        for begin in range(0, size, len(message)):
            connection.sendall(message[: min(len(message), size - begin)])

    return send


def _receiving(connection: socket.socket, into: memoryview) -> Callable[[], None]:
    def receive() -> None:
        begin = 0
        while begin < len(into):
            begin += connection.recv_into(into[begin : begin + MESSAGE])

    return receive


def _serve(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(MESSAGE))
    with connection:
        while count := connection.recv_into(buffer):
            connection.sendall(buffer[:count])


def main() -> None:
    """Serves until there is no more input."""
    say = own_output()
    listener = socket.create_server((HERE.address, 0))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    say(listener.getsockname()[1])
    sys.stdin.read()


if __name__ == "__main__":
    main()
