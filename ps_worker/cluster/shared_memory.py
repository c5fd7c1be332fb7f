"""A segment that this worker shares with the shards on its host.

An anonymous memory file that shards open through /proc vanishes with the last process that holds it, however that ends.
Where processes cannot see each other (containers), it is a file in a shared directory, unlinked as soon as every shard
has mapped it; should its maker be killed in that moment, the next worker finds it unlocked and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ps_protocol.errors import NotShared
from ps_protocol.job import JobSpec
from ps_protocol.layout import Layout
from ps_protocol.segment_layout import NAME_PREFIX, NONCE_BYTES, SegmentMap, segment_plan
from ps_worker.cluster import convert
from ps_worker.cluster.transports import ShardCalls
from ps_worker.values import Identity

log = logging.getLogger("ps_worker")


class LocalSegment:
    """A new segment of `size` bytes, mapped here. `location` and `nonce` are what a shard needs to map it too.

    directory: where a file is to be made; None makes an anonymous memory file. Raises OSError if there is no room.
    """

    def __init__(self, size: int, directory: Path | None) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._path: Path | None = None
        if directory is None:
            self._descriptor = os.memfd_create("ps-torch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(self._descriptor, 0o600)
            self.location = f"{os.getpid()}/{self._descriptor}"
        else:
            remove_leftovers(directory)
            self.location = NAME_PREFIX + secrets.token_hex(16)
            self._path = directory / self.location
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            # Takes the pages now: a full directory would otherwise end the process with SIGBUS in the middle of a step.
            os.posix_fallocate(self._descriptor, 0, size)
            if directory is None:
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.memory = mmap.mmap(self._descriptor, size)
        except OSError:
            self.hide()
            raise
        self.memory[:NONCE_BYTES] = self.nonce

    def hide(self) -> None:
        """Removes the segment's name: from here on only those who have mapped it hold it."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_leftovers(directory: Path) -> None:
    """Removes segments whose makers are gone: a living one holds a lock on its file until its name is removed."""
    for path in directory.glob(NAME_PREFIX + "*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def share_memory(
    spec: JobSpec,
    layout: Layout,
    calls: Mapping[int, ShardCalls],
    who: Identity,
    transport: str,
    directory: Path,
) -> tuple[SegmentMap | None, set[int]]:
    """A segment shared with every shard that can see this worker's memory, and which shards those are.

    transport: "grpc" shares with none; "shm" raises NotShared unless all can; "auto" takes what it gets.
    """
    if transport == "grpc":
        return None, set()
    plan = segment_plan(spec, layout)
    reason = NotShared("no shard can see this worker's memory")
    for place in (None, directory):
        try:
            segment = LocalSegment(plan.size, place)
        except OSError as error:
            reason = NotShared(f"no room for a segment of {plan.size} bytes in {place or 'memory'} ({error.strerror})")
            continue
        try:
            sharing = set()
            for index, call in calls.items():
                try:
                    call.unary("AttachSegment", convert.attach_request(who, segment.location, segment.nonce))
                    sharing.add(index)
                except NotShared as error:
                    reason = error
        finally:
            segment.hide()
        if len(sharing) == len(calls) or (sharing and transport == "auto" and place is not None):
            return SegmentMap(segment.memory, plan), sharing
    if transport == "shm":
        raise reason
    log.info("buckets travel over the network: %s", reason)
    return None, set()
