"""The offer by which a reader gets memory from a relay on the same host: the relay sends the memory's descriptor at a
unix socket in the shared directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NONCE_BYTES = 32
SOCKET_PREFIX = "ps-torch-"  # a socket's name is this and 32 hexadecimal digits
HANDED_OVER = b"\0"  # the data byte that carries the descriptor: SCM_RIGHTS needs at least one
MOST_FILES = 64  # the most files of one edition that a shard or relay hands over
HANDOVER_SECONDS = 10.0  # how long the two ends wait for each other at the socket
RETRY_SECONDS = 60.0  # the pause before memory is handed over again, after a failure


@dataclass(frozen=True)
class MappingOffer:
    """A reader's offer to map an edition: where a shard or a relay on its host can hand the memory over.

    location: the name of the socket in the shared directory
    socket_inode: the inode number of that file
    nonce: the secret that the other end shows there
    reader: a number that all offers of this reader share; 0: a reader of an earlier version
    """

    location: str
    socket_inode: int
    nonce: bytes = field(repr=False)
    reader: int = 0
