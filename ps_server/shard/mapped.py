"""Shares the memory of editions with readers on the host of a shard or a relay: see MappingOffer in feed.proto.

The server connects to a socket of the reader, sends a descriptor, and waits for nothing. The connection stays open as
long as the reader has the memory mapped. Mapped memory counts as the server's own, even for an edition that the server
no longer keeps. So slow readers could use up all memory. Therefore past MOST_HELD mapped editions, readers get payloads
instead. This module needs no torch: relays use it, too.
"""

from __future__ import annotations

import logging
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from ps_protocol.errors import NotShared
from ps_protocol.handover import (
    HANDOVER_SECONDS,
    MOST_FILES,
    NONCE_BYTES,
    RETRY_SECONDS,
    SOCKET_PREFIX,
    MappingOffer,
)
from ps_runtime.local_sockets import reach
from ps_runtime.memory_files import SharedFile
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_server")

MOST_HELD = 3  # mapped editions, beside the one that is being shared
MOST_READERS = 1024  # mapped files; one that several readers have mapped counts once for each reader
_NAME = re.compile(re.escape(SOCKET_PREFIX) + r"[0-9a-f]{32}")
_IN_MESSAGES = "readers of this host get editions in messages, and not as memory: %s"

F = TypeVar("F", bound=SharedFile)


class InFiles(Protocol):
    """An edition that lies in memory files, or some of it."""

    @property
    def files(self) -> Mapping[str, SharedFile]:
        """By space of the job, the sealed file in which it lies."""


class NewFiles(Generic[F]):
    """Makes memory files for editions. Where that fails it says so once, and tries again after RETRY_SECONDS.

    kind: makes one of so many bytes; raises NotShared
    """

    def __init__(self, kind: Callable[[int], F]) -> None:
        self._kind, self._again = kind, 0.0
        self._troubles = Troubles(log, None)

    def make(self, size: int) -> F | None:
        """Returns a file; None: none can be made."""
        if time.monotonic() < self._again:
            return None
        try:
            file = self._kind(size)
        except NotShared as error:
            self.failed(error)
            return None
        self._troubles.over(None)
        return file

    def failed(self, error: NotShared) -> None:
        """Notes that a file could not be made, or gets no memory: none is made for RETRY_SECONDS."""
        self._troubles.met(None, _IN_MESSAGES, error)
        self._again = time.monotonic() + RETRY_SECONDS


class _Mapping(NamedTuple):
    """A file that a reader has mapped, until the connection ends."""

    connection: socket.socket
    file: int
    size: int
    reader: int


class MappedFiles:
    """The files of one job, in one wire format, that readers have mapped. Thread-safe.

    directory: the directory of the readers' sockets; None if no memory is shared
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._mappings: dict[int, _Mapping] = {}  # by the descriptor of the connection
        # The bytes of the most that a reader was handed of an edition: one that has what never changes gets less later.
        self._largest = 0
        self._ends = select.poll()
        self._closed = False
        self._lock = threading.Lock()
        self._troubles = Troubles(log, None)

    def sees(self, offer: MappingOffer) -> bool:
        """Whether the reader seems to be on this host: its socket is there."""
        try:
            return self._directory is not None and _is_name(offer) and (self._directory / offer.location).is_socket()
        except OSError:  # it is not allowed to look there, say
            return False

    def hand_over(self, offer: MappingOffer, edition: InFiles, spaces: Collection[str]) -> dict[str, int] | None:
        """Shares the memory of an edition's spaces with a reader. Returns the number of each; None: send payloads
        instead.
        """
        files = [(space, edition.files[space]) for space in sorted(spaces) if space in edition.files]
        directory = self._directory
        size = sum(file.size for _, file in files)
        is_possible = 0 < len(files) == len(spaces) <= MOST_FILES
        if directory is None or not is_possible or not self._has_room(edition, len(files), size):
            return None
        made: list[_Mapping] = []
        try:
            for number, (_, file) in enumerate(files):
                made.append(_handed_over(directory, offer, file, number))
        except (NotShared, OSError) as error:
            _give_up(made)
            if isinstance(error, NotShared) or not _is_away(directory, error):
                self._troubles.met(None, _IN_MESSAGES, error)
            return None
        self._troubles.over(None)
        with self._lock:
            if self._closed:  # since the reader's call began: nobody looks at these connections again
                _give_up(made)
                return None
            for mapping in made:
                self._mappings[mapping.connection.fileno()] = mapping
                self._ends.register(mapping.connection, select.POLLIN)
            self._largest = max(self._largest, size)
        return {space: number for number, (space, _) in enumerate(files)}

    @property
    def readers(self) -> int:
        """The number of readers with mapped memory."""
        with self._lock:
            return len({each.reader for each in self._mappings.values()})

    def look(self) -> None:
        """Forgets the files that readers have unmapped."""
        with self._lock:
            for descriptor, _ in self._ends.poll(0) if self._mappings else ():
                self._forget(descriptor)

    def held_bytes(self, others_than: Collection[SharedFile] = ()) -> int:
        """Returns the bytes that readers have mapped. others_than: files that are not counted"""
        own = {each.number for each in others_than}
        with self._lock:
            mapped = {each.file: each.size for each in self._mappings.values()}
        return sum(size for number, size in mapped.items() if number not in own)

    def close(self) -> None:
        """Forgets all readers, and shares nothing more. The readers' mappings stay valid."""
        with self._lock:
            self._closed = True
            for descriptor in list(self._mappings):
                self._forget(descriptor)

    def _has_room(self, edition: InFiles, files: int, size: int) -> bool:
        """Whether readers may have so many more files mapped, of so many bytes."""
        self.look()
        most = MOST_HELD * max(self._largest, size)
        return len(self._mappings) + files <= MOST_READERS and self.held_bytes(edition.files.values()) <= most

    def _forget(self, descriptor: int) -> None:
        self._ends.unregister(descriptor)
        self._mappings.pop(descriptor).connection.close()


def _give_up(mappings: Iterable[_Mapping]) -> None:
    for mapping in mappings:
        mapping.connection.close()


def _is_name(offer: MappingOffer) -> bool:
    return _NAME.fullmatch(offer.location) is not None


def _is_away(directory: Path, error: OSError) -> bool:
    """Whether an error means that the reader is on another host, or has gone."""
    is_unseen = isinstance(error, FileNotFoundError) and directory.is_dir()
    return is_unseen or isinstance(error, ConnectionError)


def _handed_over(directory: Path, offer: MappingOffer, file: SharedFile, number: int) -> _Mapping:
    """Sends a reader one file. Raises NotShared, or OSError; waits for nothing, as the message fits into any buffer."""
    if not _is_name(offer) or len(offer.nonce) != NONCE_BYTES:
        raise NotShared(
            f"a socket's name is {SOCKET_PREFIX} and 32 hexadecimal digits, a nonce has {NONCE_BYTES} bytes"
        )
    connection = reach(directory, offer.location, offer.socket_inode, HANDOVER_SECONDS)
    try:
        socket.send_fds(connection, [offer.nonce + bytes([number])], [file.descriptor])
    except OSError:
        connection.close()
        raise
    return _Mapping(connection, file.number, file.size, offer.reader or int.from_bytes(offer.nonce))
