"""Memory of editions that a relay hands over to readers of its host: see MappingOffer in feed.proto.

The relay connects to a socket of the reader, sends a descriptor, and waits for nothing. The connection stays open as
long as the reader has the memory mapped. What a reader has mapped counts as memory of the relay, also where the relay
no longer keeps it. So slow readers could take all of it, and past MOST_HELD editions readers get payloads.
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

MOST_HELD = 3  # editions that readers have mapped, beside the one that is handed over
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

    directory: where readers wait; None: nothing is handed over
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._leases: dict[int, _Lease] = {}  # by the descriptor of the connection
        self._ends = select.poll()
        self._lock = threading.Lock()
        self._troubles = Troubles(log, None)

    def hand_over(self, offer: MappingOffer, edition: EditionArrays, spaces: Collection[str]) -> dict[str, int] | None:
        """Hands over the memory of an edition's spaces. Returns the number of each; None: payloads are to be sent."""
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
        """How many readers have anything mapped."""
        with self._lock:
            return len({each.reader for each in self._leases.values()})

    def look(self) -> None:
        """Forgets what readers have given back."""
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
        """Forgets all readers; what they have mapped stays theirs."""
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
    """Whether an error says that the reader is on another host, or gone."""
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
