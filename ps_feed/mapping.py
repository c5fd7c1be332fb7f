"""A reader's end of the memory that a shard or a relay on its host shares: see MappingOffer in feed.proto.

The reader listens at a unix socket in the shared directory while its call is under way. A server on another host, or
one that runs as another user, does not see that socket, or may not connect to it. Then payloads come, as without the
offer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import NotShared
from ps_protocol.handover import (
    HANDOVER_SECONDS,
    MOST_FILES,
    NONCE_BYTES,
    RETRY_SECONDS,
    SOCKET_PREFIX,
    MappingOffer,
)
from ps_runtime.local_sockets import listen, peer_of, remove_leftovers
from ps_runtime.memory_files import check_file, mapped
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_feed")


_BACKLOG = 2 * MOST_FILES


class Handover:
    """Whether servers may hand over memory to this process. Thread-safe.

    directory: the shared directory; None if they may not
    job:       the job that is read, for the log
    """

    def __init__(self, directory: Path | None, job: str) -> None:
        self._directory = directory if sys.platform == "linux" else None
        self._job = job
        self._is_clean = False
        self._reader = 0 if directory is None else secrets.randbits(64)
        self._again = 0.0  # when it is tried again
        self._troubles = Troubles(log, None)

    def offered(self, may: bool) -> contextlib.AbstractContextManager[HandedOver | None]:
        """Returns a block in which one server may hand over memory; in it None: it may not. may: False: it may not"""
        if self._directory is not None and may and time.monotonic() >= self._again:
            try:
                if not self._is_clean:  # once: it connects to each old socket there, also to those of live processes
                    self._is_clean = True
                    remove_leftovers(self._directory, SOCKET_PREFIX)
                return HandedOver(self._directory, self._worked, self._reader)
            except NotShared as error:
                self.failed(error)
        return contextlib.nullcontext()

    def failed(self, error: NotShared) -> None:
        """Records that memory could not be mapped: for RETRY_SECONDS all buckets come in messages."""
        text = "job %s: its weights come in messages, also from servers on this host: %s"
        self._troubles.met(self._job, text, self._job, error)
        self._again = time.monotonic() + RETRY_SECONDS

    def _worked(self) -> None:
        self._troubles.over(self._job)


class HandedOver:
    """The files of one edition that one server hands over. For one thread.

    directory: the shared directory
    worked:    is called at the end where a file was taken over
    reader:    see MappingOffer

    Raises NotShared if no socket can be made there.
    """

    def __init__(self, directory: Path, worked: Callable[[], None] = lambda: None, reader: int = 0) -> None:
        nonce, name = secrets.token_bytes(NONCE_BYTES), SOCKET_PREFIX + secrets.token_hex(16)
        try:
            self._listener, inode = listen(directory, name, _BACKLOG)
        except OSError as error:
            reason = error.strerror or error
            raise NotShared(f"no socket can be made in the shared directory {directory} ({reason})") from None
        self.offer = MappingOffer(name, inode, nonce, reader)
        self._path, self._worked = directory / name, worked
        self._came: dict[int, tuple[int, int]] = {}  # what is not mapped yet: the file, and the connection
        self._files: dict[int, npt.NDArray[np.uint8]] = {}

    def __enter__(self) -> HandedOver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for each in (each for pair in self._came.values() for each in pair):
            os.close(each)
        self._came.clear()
        if self._files and kind is None:
            self._worked()
        self._files.clear()  # an error that is kept may refer to this object

    def file(self, number: int, most: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a file.

        Raises NotShared if the server has not handed it over, or if it is not sealed or has more than `most` bytes.
        """
        if number >= MOST_FILES:
            raise NotShared(f"a server hands over {MOST_FILES} files at most, and names number {number}")
        if number not in self._files:
            self._wait_for(number)
            descriptor, reference = self._came.pop(number)
            try:
                size = check_file(descriptor, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, "the edition")
                if size > most:
                    raise NotShared(f"file {number} has {size} bytes where {most} are the most")
                # What has the elements of a whole space is kept as it is; what has some of them is read once.
                self._files[number] = mapped(descriptor, size, reference, populate=size == most)
            except NotShared:
                os.close(reference)
                raise
            except OSError as error:
                os.close(reference)
                raise NotShared(f"file {number} of the server cannot be mapped ({error.strerror})") from None
            finally:
                os.close(descriptor)
        return self._files[number]

    def _wait_for(self, number: int) -> None:
        """Raises NotShared if the server does not hand over a file."""
        deadline = time.monotonic() + HANDOVER_SECONDS
        while number not in self._came:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    self._receive(connection)
            except OSError as error:
                raise NotShared(f"the server did not hand over file {number} ({error.strerror or error})") from None

    def _receive(self, connection: socket.socket) -> None:
        """Takes the file that a connection brings; nothing from a process that does not know the nonce."""
        content, descriptors, flags, _ = socket.recv_fds(connection, NONCE_BYTES + 2, 2, socket.MSG_CMSG_CLOEXEC)
        with contextlib.ExitStack() as closing:
            for each in descriptors:
                closing.callback(os.close, each)
            is_server = hmac.compare_digest(content[:NONCE_BYTES], self.offer.nonce)
            if peer_of(connection).uid != os.geteuid() or not is_server:
                return
            if len(content) != NONCE_BYTES + 1 or len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
                raise NotShared(f"expected a byte and a descriptor, got {len(content)} bytes, {len(descriptors)}")
            number = content[-1]
            if number >= MOST_FILES or number in self._came or number in self._files:
                raise NotShared(f"file {number} was handed over twice, or is none of {MOST_FILES}")
            reference = os.dup(connection.fileno())
            self._came[number] = descriptors[0], reference
            closing.pop_all()  # the descriptor stays open
