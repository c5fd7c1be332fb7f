"""Memory for the rows of the step at hand, shared with shards on this host: only the messages that name it travel."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_protocol.errors import NotShared, PSError
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.row_memory import MAX_ROW_BYTES, RowMemory, aligned
from ps_protocol.segment_layout import PAGE_BYTES
from ps_runtime.quantities import ranges
from ps_runtime.troubles import Troubles
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.segments import LocalSegment
from ps_worker.cluster.shared_memory import attach_to

log = logging.getLogger("ps_worker")

FIRST_BYTES = 2**20


def share_rows(
    spec: JobSpec, calls: Mapping[int, ShardCalls], worker: Identity, transport: str, directory: Path
) -> SharedRows | None:
    """Returns memory for a job's rows, shared with every shard that can see this worker's; None: with none.

    transport: as in share_memory
    """
    if transport in ("grpc", "tcp") or not spec.tables:
        return None
    try:
        shared = SharedRows(calls, worker, directory)
        if transport == "shm" and shared.refusal is not None:
            raise shared.refusal
    except NotShared as error:
        if transport == "shm":
            raise
        log.info("rows travel over the network: %s", error)
        return None
    log.info("rows travel in shared memory to shards %s", ranges(sorted(shared.shards)))
    return shared


@dataclass
class Room:
    """A part of the segment, until the calls that use it are over.

    calls: that use it
    """

    memory: RowMemory
    calls: list[Future[Any]]
    _end: int = PAGE_BYTES

    def take(self, size: int) -> int:
        """Returns the place of so many bytes of it."""
        place, self._end = self._end, self._end + aligned(size)
        return place


class SharedRows:
    """A segment for rows, and a larger one whenever a step needs that. For the training thread.

    Raises NotShared if there is no memory, or no shard can see it.

    shards:  that see it
    refusal: why others do not; None: all do
    """

    def __init__(self, calls: Mapping[int, ShardCalls], worker: Identity, directory: Path) -> None:
        self._calls, self._worker, self._directory = calls, worker, directory
        self.shards: Collection[int] = set(calls)
        self.refusal: NotShared | None = None
        self._troubles = Troubles(log, None)
        self._calls_of_room: list[Future[Any]] = []
        self._memory = self._attached(FIRST_BYTES)

    def room(self, size: int) -> Room | None:
        """Returns room for so many bytes of a step; None: there is none, or calls still use the last."""
        if any(not call.done() for call in self._calls_of_room) or size > MAX_ROW_BYTES:
            return None
        if size > self._memory.size:
            try:
                self._memory = self._attached(min(MAX_ROW_BYTES, max(size + size // 4, 2 * self._memory.size)))
            except NotShared as error:
                self._troubles.met("room", "rows of %d bytes travel in messages: %s", size, error)
                return None
            except (PSError, ValueError) as error:  # ValueError: grpc's, where the channel was closed meanwhile
                # The worker has lost its place, or a shard is gone: the calls that follow meet that, too.
                log.debug("no larger segment for rows now: %s", error)
                return None
        self._calls_of_room = []
        return Room(self._memory, self._calls_of_room)

    def _attached(self, size: int) -> RowMemory:
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        calls = {index: self._calls[index] for index in self.shards}
        with LocalSegment(PAGE_BYTES + size, self._directory, size) as segment:
            refusals = attach_to(segment.offer, calls, self._worker)
        if refusals:
            self.refusal = next(iter(refusals.values()))
            if len(refusals) == len(calls):
                raise self.refusal
            self.shards = set(self.shards) - refusals.keys()
        return RowMemory(segment.memory)
