"""A recording as a Chrome trace, which Perfetto and chrome://tracing open.

A process of the trace is a worker or a shard. A worker has a track for its steps, and one for each bucket; a shard has
one for each bucket and worker. Times are microseconds since 1970 by this host's clock, so that files of several workers
of one host, put together, are on one clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]

SIX = ("ready", "sent", "staged", "applied", "admitted", "landed")
FIRST_WORKER = 100_000  # the process of rank 0 in the trace; shard s is process s + 1
MOST_RANKS = 10_000  # tracks of one bucket of a shard


class BucketMoments(NamedTuple):
    """One bucket of one step, in seconds on the clock of time.perf_counter.

    on_shard: staged, applied and admitted; empty: unknown
    error:    seconds by which these three may be off
    """

    bucket: int
    shard: int
    ready: float
    sent: float
    landed: float
    on_shard: tuple[float, ...] = ()
    error: float = 0.0

    @property
    def all(self) -> tuple[float, ...]:
        """The moments that are known, in the order in which they come."""
        return self.ready, self.sent, *self.on_shard, self.landed


class StepMoments(NamedTuple):
    """One step: its clock, when it began, when `optimizer.step()` began to push, when it ended, and its buckets."""

    clock: int
    began: float
    pushing: float
    ended: float
    buckets: tuple[BucketMoments, ...]


def write(path: Path, rank: int, steps: Sequence[StepMoments], member: int | None = None) -> None:
    """Writes the trace of one worker, or of a member of its group. Replaces an existing file. Raises OSError."""
    since_1970 = time.time() - time.perf_counter()
    trace = {"displayTimeUnit": "ms", "traceEvents": list(events(rank, steps, since_1970, member))}
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        half.write_text(json.dumps(trace, separators=(",", ":")))
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def events(rank: int, steps: Sequence[StepMoments], since_1970: float, member: int | None = None) -> Iterator[Event]:
    """Yields the events of one worker's trace.

    since_1970: seconds from then to zero on the clock of the moments
    member: the member's number, if the worker is a group; None if it is one process
    """
    worker = FIRST_WORKER + rank + MOST_RANKS * (member or 0)
    name = f"worker {rank}" if member is None else f"member {member} of group {rank}"
    yield from _names(worker, name, rank, {0: "steps"} | _bucket_tracks(steps))
    for shard in sorted({bucket.shard for step in steps for bucket in step.buckets}):
        yield from _names(shard + 1, f"shard {shard}", FIRST_WORKER + shard, _shard_tracks(steps, shard, rank))
    for step in steps:
        whole = [_micros(moment + since_1970) for moment in (step.began, step.pushing, step.ended)]
        yield _slice(worker, 0, f"step {step.clock}", whole[0], whole[2], {"clock": step.clock})
        yield _slice(worker, 0, "optimizer.step()", whole[1], whole[2], {})
        for bucket in step.buckets:
            yield from _bucket_events(worker, rank, step.clock, bucket, since_1970)


def _bucket_events(worker: int, rank: int, clock: int, bucket: BucketMoments, since_1970: float) -> Iterator[Event]:
    names = SIX if bucket.on_shard else ("ready", "sent", "landed")
    moments = [_micros(moment + since_1970) for moment in bucket.all]
    measured: dict[str, Any] = dict(zip(names, moments, strict=True))
    about = {"clock": clock, "bucket": bucket.bucket, "shard": bucket.shard, "rank": rank}
    error = {"error_us": _micros(bucket.error)} if bucket.on_shard else {}
    # Drawn in order: a shard's moment may be off by its error, and no slice is shorter than nothing.
    drawn = [min(moment, moments[-1]) for moment in accumulate(moments, max)]
    yield _slice(worker, bucket.bucket + 1, f"step {clock}", drawn[0], drawn[-1], about | measured | error)
    spans = list(zip(names, names[1:], drawn, drawn[1:], strict=False))
    for before, after, start, end in spans:
        yield _slice(worker, bucket.bucket + 1, f"{before} → {after}", start, end, {})
    for before, after, start, end in spans[2:4]:
        track = bucket.bucket * MOST_RANKS + rank
        yield _slice(bucket.shard + 1, track, f"{before} → {after}", start, end, {"clock": clock})


def _bucket_tracks(steps: Sequence[StepMoments]) -> dict[int, str]:
    buckets = sorted({(bucket.bucket, bucket.shard) for step in steps for bucket in step.buckets})
    return {bucket + 1: f"bucket {bucket} (shard {shard})" for bucket, shard in buckets}


def _shard_tracks(steps: Sequence[StepMoments], shard: int, rank: int) -> dict[int, str]:
    buckets = sorted({bucket.bucket for step in steps for bucket in step.buckets if bucket.shard == shard})
    return {bucket * MOST_RANKS + rank: f"bucket {bucket} of worker {rank}" for bucket in buckets}


def _names(process: int, name: str, place: int, tracks: dict[int, str]) -> Iterator[Event]:
    yield _meta(process, 0, "process_name", {"name": name})
    yield _meta(process, 0, "process_sort_index", {"sort_index": place})
    for track, text in tracks.items():
        yield _meta(process, track, "thread_name", {"name": text})
        yield _meta(process, track, "thread_sort_index", {"sort_index": track})


def _meta(process: int, track: int, name: str, args: dict[str, Any]) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": name, "args": args}


def _slice(process: int, track: int, name: str, start: int, end: int, args: dict[str, Any]) -> Event:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": "ps", "pid": process, "tid": track, "name": name, **times, "args": args}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
