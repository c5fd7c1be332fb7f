"""Shares the memory of editions with readers on the relay's host: see MappingOffer in feed.proto.

The relay connects to a socket of the reader, sends a descriptor, and waits for nothing. The connection stays open as
long as the reader has the memory mapped. Mapped memory counts as the relay's own, even for an edition that the relay no
longer keeps. So slow readers could use up all memory. Therefore past MOST_HELD mapped editions, readers get payloads
instead.
"""

from __future__ import annotations

import logging
import re
import select
import socket
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ps_feed.edition import EditionArrays
from ps_protocol.errors import NotShared
from ps_protocol.handover import HANDOVER_SECONDS, MOST_FILES, NONCE_BYTES, SOCKET_PREFIX, MappingOffer
from ps_runtime.local_sockets import reach
from ps_runtime.memory_files import MemoryFile
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_server")

MOST_HELD = 3  # mapped editions, beside the one that is being shared
MOST_READERS = 1024  # files that are mapped, counted for each reader
_NAME = re.compile(re.escape(SOCKET_PREFIX) + r"[0-9a-f]{32}")


class _Lease(NamedTuple):
    """A file that a reader has mapped, until the connection ends."""

    connection: socket.socket
    file: int
    size: int
    reader: int


class MappedFiles:
    """The files of one job, in one wire format, that readers have mapped. Thread-safe.

    directory: the directory of the readers' sockets; None: no memory is shared
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._leases: dict[int, _Lease] = {}  # by the descriptor of the connection
        self._ends = select.poll()
        self._lock = threading.Lock()
        self._troubles = Troubles(log, None)

    def hand_over(self, offer: MappingOffer, edition: EditionArrays, spaces: Collection[str]) -> dict[str, int] | None:
        """Shares the memory of an edition's spaces with a reader. Returns the number of each; None: send payloads
        instead.
        """
        files = [(space, edition.files[space]) for space in sorted(spaces) if space in edition.files]
        directory = self._directory
        is_possible = 0 < len(files) == len(spaces) <= MOST_FILES
        if directory is None or not is_possible or not self._has_room(edition, len(files)):
            return None
        made: list[_Lease] = []
        try:
            for number, (_, file) in enumerate(files):
                made.append(_handed_over(directory, offer, file, number))
        except (NotShared, OSError) as error:
            for lease in made:
                lease.connection.close()
            if isinstance(error, NotShared) or not _is_away(directory, error):
                self._troubles.met(None, "readers of this host get editions in messages, and not as memory: %s", error)
            return None
        self._troubles.over(None)
        with self._lock:
            for lease in made:
                self._leases[lease.connection.fileno()] = lease
                self._ends.register(lease.connection, select.POLLIN)
        return {space: number for number, (space, _) in enumerate(files)}

    @property
    def readers(self) -> int:
        """The number of readers with mapped memory."""
        with self._lock:
            return len({each.reader for each in self._leases.values()})

    def look(self) -> None:
        """Forgets the files that readers have unmapped."""
        with self._lock:
            for descriptor, _ in self._ends.poll(0) if self._leases else ():
                self._forget(descriptor)

    def held_bytes(self, others_than: Collection[MemoryFile] = ()) -> int:
        """Returns the bytes that readers have mapped. others_than: files that are not counted"""
        own = {each.number for each in others_than}
        with self._lock:
            mapped = {each.file: each.size for each in self._leases.values()}
        return sum(size for number, size in mapped.items() if number not in own)

    def close(self) -> None:
        """Forgets all readers. Their mappings stay valid."""
        with self._lock:
            for descriptor in list(self._leases):
                self._forget(descriptor)

    def _has_room(self, edition: EditionArrays, files: int) -> bool:
        self.look()
        own = edition.files.values()
        most = MOST_HELD * sum(file.size for file in own)
        return len(self._leases) + files <= MOST_READERS and self.held_bytes(own) <= most

    def _forget(self, descriptor: int) -> None:
        self._ends.unregister(descriptor)
        self._leases.pop(descriptor).connection.close()


def _is_away(directory: Path, error: OSError) -> bool:
    """Whether an error means that the reader is on another host, or has gone."""
    is_unseen = isinstance(error, FileNotFoundError) and directory.is_dir()
    return is_unseen or isinstance(error, ConnectionError)


def _handed_over(directory: Path, offer: MappingOffer, file: MemoryFile, number: int) -> _Lease:
    """Sends a reader one file. Raises NotShared, or OSError; waits for nothing, as the message fits into any buffer."""
    if not _NAME.fullmatch(offer.location) or len(offer.nonce) != NONCE_BYTES:
        raise NotShared(
            f"a socket's name is {SOCKET_PREFIX} and 32 hexadecimal digits, a nonce has {NONCE_BYTES} bytes"
        )
    connection = reach(directory, offer.location, offer.socket_inode, HANDOVER_SECONDS)
    try:
        socket.send_fds(connection, [offer.nonce + bytes([number])], [file.descriptor])
    except OSError:
        connection.close()
        raise
    return _Lease(connection, file.number, file.size, offer.reader or int.from_bytes(offer.nonce))
