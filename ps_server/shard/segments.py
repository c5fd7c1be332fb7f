"""Maps a worker's segment, without trusting the worker.

The worker waits at a unix socket in the shared directory, whose name and inode it sends in a call. The shard connects
there, proves by the nonce of that call that it is the one that was called, and receives a descriptor. So the shard
listens on no socket for this, connects only to sockets of its own user, and waits HANDOVER_SECONDS for a worker at
most.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import re
import socket
from pathlib import Path

from ps_protocol.errors import NotShared
from ps_protocol.handover import HANDED_OVER, HANDOVER_SECONDS, NONCE_BYTES, SOCKET_PREFIX
from ps_protocol.segment_layout import SegmentOffer
from ps_runtime.local_sockets import reach
from ps_runtime.memory_files import check_file

_NAME = re.compile(re.escape(SOCKET_PREFIX) + r"[0-9a-f]{32}")


def attach(offer: SegmentOffer, size: int, directory: Path) -> mmap.mmap:
    """Maps the segment that a worker offers: a memory file of `size` bytes, allocated and sealed against shrinking.

    directory: where workers create their sockets; a location must be a bare name in it

    Raises NotShared, with what was expected and what came, after HANDOVER_SECONDS at the latest.
    """
    if not _NAME.fullmatch(offer.location):
        raise NotShared(
            f"a segment's location is {SOCKET_PREFIX} and 32 hexadecimal digits, got {offer.location[:80]!r}"
        )
    if len(offer.nonce) != NONCE_BYTES:
        raise NotShared(f"a segment's nonce has {NONCE_BYTES} bytes, got {len(offer.nonce)}")
    descriptor = _receive(offer, directory)
    try:
        _refuse_other_files(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        raise NotShared(f"the segment cannot be mapped for reading and writing ({error.strerror})") from None
    finally:
        os.close(descriptor)
    if not hmac.compare_digest(memory[:NONCE_BYTES], offer.nonce):
        memory.close()
        raise NotShared(f"the segment is another one: its first {NONCE_BYTES} bytes are not the nonce")
    return memory


def _receive(offer: SegmentOffer, directory: Path) -> int:
    """Connects to the worker's socket, shows the nonce of the offer, and returns the descriptor of the segment that the
    worker sends. Raises NotShared if it sends none.
    """
    where = f"the socket {offer.location} in {directory}"
    try:
        with reach(directory, offer.location, offer.socket_inode, HANDOVER_SECONDS) as connection:
            connection.sendall(offer.nonce)
            return _one_descriptor(connection, where)
    except TimeoutError:
        raise NotShared(f"{where} gave nothing for {HANDOVER_SECONDS:g} s") from None
    except OSError as error:
        raise NotShared(f"{where} cannot be reached from here ({error.strerror})") from None


def _one_descriptor(connection: socket.socket, where: str) -> int:
    """Returns the one descriptor of the next message. Raises NotShared, and closes all, if it has another number of
    them.
    """
    room = len(HANDED_OVER) + 1, 2  # room for one byte and one descriptor too many, to detect them
    content, descriptors, flags, _ = socket.recv_fds(connection, *room, socket.MSG_CMSG_CLOEXEC)
    if content == HANDED_OVER and len(descriptors) == 1 and not flags & socket.MSG_CTRUNC:
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    if not content:
        raise NotShared(f"{where} was closed: it offers another segment")
    raise NotShared(f"{where} must send a zero byte with one descriptor, got {content!r} with {len(descriptors)}")


def _refuse_other_files(descriptor: int, size: int) -> None:
    """Raises NotShared unless the descriptor is a memory file of `size` bytes, fully allocated and sealed against
    shrinking.
    """
    check_file(descriptor, fcntl.F_SEAL_SHRINK, "the segment", size)
    status = os.fstat(descriptor)
    if status.st_blocks * 512 < size:
        raise NotShared(f"the segment has {status.st_blocks * 512} bytes of {size} in memory: allocate all (fallocate)")
