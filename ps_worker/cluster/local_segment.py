"""A segment: memory that this worker allocates, and shares with shards on its host.

memory    An anonymous memory file. It vanishes with the last process that holds it, however that process ends. All its
          pages are allocated at once, and then it is sealed against shrinking: a shard that reads it never reads beyond
          its end.
handover  While shards are asked to attach it, the worker listens at a unix socket in the shared directory. It sends the
          file's descriptor to each process that knows the nonce, which shards learn in a call. So this works between
          containers too, and other processes with access to the directory get nothing. If the worker is killed
          meanwhile, its socket is left, and the next worker removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from ps_protocol.errors import NotShared, TryLater
from ps_protocol.handover import HANDED_OVER, HANDOVER_SECONDS, NONCE_BYTES, SOCKET_PREFIX
from ps_protocol.segment_layout import SegmentOffer
from ps_runtime.background import start
from ps_runtime.local_sockets import listen, remove_leftovers
from ps_runtime.memory import free_bytes

_HANDING_THREADS = 4  # a process that connects and sends nothing occupies one of them
_BACKLOG = 64


class LocalSegment:
    """A new segment of `size` bytes, mapped into this process as `memory`. Shards can attach it with `offer`, until
    `hide`.

    directory: the directory of the socket
    row_bytes: see SegmentOffer

    Raises NotShared if there is too little memory, or no socket can be made.
    """

    def __init__(self, size: int, directory: Path, row_bytes: int = 0) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        name = SOCKET_PREFIX + secrets.token_hex(16)
        self._descriptor, self.memory = _memory_file(size)
        self.memory[:NONCE_BYTES] = nonce
        try:
            remove_leftovers(directory, SOCKET_PREFIX)
            self._listener, inode = listen(directory, name, _BACKLOG)
        except OSError as error:
            os.close(self._descriptor)
            reason = error.strerror or error
            raise NotShared(f"no socket can be made in the shared directory {directory} ({reason})") from None
        self.offer = SegmentOffer(name, inode, nonce, row_bytes)
        self._path = directory / name
        self._lock = threading.Lock()
        for _ in range(_HANDING_THREADS):
            # Each thread has its own descriptor: the number of a descriptor that `hide` closes may soon be another
            # file's.
            listener = self._listener.dup()
            try:
                start(threading.Thread(target=self._serve, args=(listener,), name="segment", daemon=True))
            except TryLater as error:
                listener.close()
                self.hide()
                raise NotShared(f"no memory can be handed over: {error}") from None

    def __enter__(self) -> LocalSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def hide(self) -> None:
        """Removes the socket. No further process can map the segment."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the threads that accept
        self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        with listener, contextlib.suppress(OSError):  # raised once the segment is hidden
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):  # raised for this peer alone
                    self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        """Sends the descriptor to a process that knows the nonce; nothing to any other."""
        deadline = time.monotonic() + HANDOVER_SECONDS
        shown = b""
        while len(shown) < NONCE_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            received = connection.recv(NONCE_BYTES - len(shown))
            if not received:
                return
            shown += received
        with self._lock:
            if self._descriptor >= 0 and hmac.compare_digest(shown, self.offer.nonce):
                socket.send_fds(connection, [HANDED_OVER], [self._descriptor])


def _memory_file(size: int) -> tuple[int, mmap.mmap]:
    """Returns a sealed memory file of `size` bytes: its descriptor, and it mapped. Raises NotShared."""
    free = free_bytes()
    if free is not None and size > free:  # the kernel would not refuse it, but kill processes until there is room
        raise NotShared(f"no room for a memory file of {size} bytes: {free} are free")
    descriptor = -1
    try:
        descriptor = os.memfd_create("ps-torch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
        # Allocates the pages now, accounted to this process. Otherwise the process that first touches a page would pay
        # for it, and be killed in the middle of a step if memory is short.
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor, mmap.mmap(descriptor, size)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise NotShared(f"no memory file of {size} bytes can be made ({error.strerror})") from None
