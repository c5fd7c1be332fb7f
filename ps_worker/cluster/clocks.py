"""Reads the clock of a shard, for a timeline: a few times, because the smallest of the round trips says most."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ps_protocol.identity import Identity
from ps_protocol.messages.data import PullCall, read_notice, write_pull
from ps_worker.cluster.calls import ShardCalls
from ps_worker.timeline.clocks import ClockReading

READINGS = 8
READING_SECONDS = 2.0


def read_clock(calls: ShardCalls, worker: Identity) -> Iterator[ClockReading]:
    """Yields readings of a shard's clock; none if its version does not tell it. Raises PSError."""
    request = write_pull(PullCall(worker, 0, (), times_wanted=True))
    for _ in range(READINGS):
        asked = time.perf_counter()
        message = calls.first_of("Pull", request, READING_SECONDS)
        answered = time.perf_counter()
        clock = read_notice(message).clock if message is not None else None
        if clock is None:
            return
        yield ClockReading(asked, answered, clock)
