"""Where a reader of views is: what it has been told already."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.v1 import cluster_pb2


@dataclass(frozen=True)
class Position:
    """What a caller has been told. process: by which coordinator; numbers of another one mean nothing"""

    process: int = 0
    last_event: int = 0
    next_sample: int = 0


def position(request: cluster_pb2.WatchStatusRequest) -> Position:
    """Returns the position in the stream that the caller already has."""
    return Position(request.process, request.last_event, request.next_sample)
