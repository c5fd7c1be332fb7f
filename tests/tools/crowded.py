"""Many connections to one port, one after the other, of clients that say nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def silent(port: int, count: int, most: int | None = None, seconds: float = 20.0) -> Iterator[list[socket.socket]]:
    """So many connections from this host, in the order in which they were opened.

    most:    how many of them the server has at a time, or in its queue, if it hangs up on the oldest: the next one is
             opened then. Where the queue is full, the kernel has a client wait for seconds. None: all
    seconds: for which each waits, here and when it is read
    """
    with contextlib.ExitStack() as stack:
        opened: list[socket.socket] = []
        while len(opened) < count:
            if most is not None and len(opened) >= most:
                _await_end(opened[len(opened) - most])
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), seconds)))
        yield opened


def _await_end(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
