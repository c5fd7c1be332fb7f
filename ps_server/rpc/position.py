"""The position of a watcher of WatchStatus: the events and samples that it has already."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.v1 import cluster_pb2


@dataclass(frozen=True)
class Position:
    """The last event and sample that a caller has.

    process: the coordinator's process that numbered them; the numbers mean nothing to another one"""

    process: int = 0
    last_event: int = 0
    next_sample: int = 0


def position(request: cluster_pb2.WatchStatusRequest) -> Position:
    """Returns the position in the stream that the caller already has."""
    return Position(request.process, request.last_event, request.next_sample)
