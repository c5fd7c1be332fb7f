"""Every limit of a server by name, with its default. Each has a flag, --max-NAME.

Past a limit, a call ends with RESOURCE_EXHAUSTED or INVALID_ARGUMENT, which names it; or a connection is closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.errors import LimitExceeded
from ps_protocol.job import MAX_MESSAGE_BYTES, MAX_NAME_LENGTH, MAX_PARAMETERS

LEAST_THREADS = 512  # the least --max-threads
SHORTEST_WATCH, LONGEST_WATCH = 0.5, 60.0  # seconds between two views of a caller that watches
_LARGEST = 2**31 - 1  # gRPC's options are 32-bit integers
_LARGEST_SIZE = 2**62


def _limit(default: float | None, text: str, largest: int = _LARGEST, least: int = 1) -> Any:
    """Declares a limit.

    default: None: derived from other settings
    text:    the help text of --help-limits
    largest, least: the values that may be set
    """
    return field(default=default, metadata={"text": text, "largest": largest, "least": least})


def share(limit: float) -> float:
    """Returns how much of `limit` one principal may use: half, so that other principals find room."""
    return limit if math.isinf(limit) else max(1, limit // 2)


def check_feeds(job: str, callers: Sequence[str], caller: str, limit: float) -> None:
    """Raises LimitExceeded if a caller may not begin another feed of a job.

    callers: the principal of each feed there is; empty: unknown
    limit:   the most feeds of the job; one principal may have half of it
    """
    if len(callers) >= limit:
        raise LimitExceeded(f"job {job!r} has {len(callers)} feeds here: that is the limit max-feeds")
    own = callers.count(caller)
    if caller and own >= share(limit):
        raise LimitExceeded(f"{caller} has {own} feeds of job {job!r} here: its share is half of max-feeds")


@dataclass(frozen=True)
class Limits:
    """The limits of one server process."""

    # limits of jobs
    jobs: int = _limit(128, "jobs at the same time; begun by one caller half as many")
    workers: int = _limit(4_096, "live workers of a job")
    parameters: int = _limit(MAX_PARAMETERS, "tensors of a job")
    buckets: int = _limit(65_536, "buckets of a job")
    groups: int = _limit(4_096, "parameter groups of a job")  # a group a tensor is common; each costs 33 us at a server
    job_bytes: int = _limit(2**40, "bytes of a job's parameters", _LARGEST_SIZE)
    name_length: int = _limit(MAX_NAME_LENGTH, "characters of a parameter's name")
    samples: int = _limit(2**40, "samples of a loader whose data is leased", _LARGEST_SIZE)
    leases: int = _limit(1_024, "batches of one loader that one worker may have leased")
    # limits of memory, disk and feeds
    staged_bytes: int | None = _limit(
        None, "bytes of a job that a shard holds back for others (by default as many as its weights)", _LARGEST_SIZE
    )
    table_bytes: int | None = _limit(
        None, "bytes of memory of a job's tables on one shard (by default half of what is free)", _LARGEST_SIZE
    )
    cold_row_bytes: int | None = _limit(
        None, "bytes of rows in files of one shard (by default half of what that disk has free)", _LARGEST_SIZE
    )
    caller_bytes: int = _limit(
        64 * 2**30, "bytes that one caller has pushed, as any workers, and that are not applied", _LARGEST_SIZE
    )
    pulled_buckets: int = _limit(
        2**19,
        "buckets that one caller has asked for, as any workers, and that wait; as many that are not read yet; "
        "640 bytes of ids count as one, and there may be as many copies of 640 bytes of whole tables",
    )
    state_bytes: int = _limit(16 * 2**20, "bytes of a worker's own part of a checkpoint", _LARGEST_SIZE)
    all_state_bytes: int | None = _limit(
        None,
        "bytes of all workers' own states that the coordinator keeps in memory (by default half of what is free at its "
        "start, an eighth if it is a shard too); the jobs of one caller get half of it",
        _LARGEST_SIZE,
    )
    round_bytes: int = _limit(
        16 * 2**20,
        "bytes of all workers' values in one session.gather or the like, and of past ones that are kept",
        _LARGEST_SIZE,
    )
    all_round_bytes: int | None = _limit(
        None,
        "bytes of all such values of all jobs (by default a fourth of max-all-state-bytes); of one caller's jobs half",
        _LARGEST_SIZE,
    )
    push_norm: float = _limit(math.inf, "L2 norm of the gradient in one push, which is one bucket's")
    views: int = _limit(64, "calls that watch the cluster (WatchStatus) at the same time; of one caller half as many")
    feeds: int = _limit(64, "feeds (WatchRows, PullEdition) of one job on one shard; of one caller half as many")
    feed_bytes: int | None = _limit(
        None,
        "bytes of memory that messages of one caller's feeds may take on one shard, over all jobs (by default a "
        "quarter of the memory that is free when the shard starts)",
        _LARGEST_SIZE,
    )
    # limits of calls
    calls: int = _limit(
        512, "calls in flight of one caller (a token or certificate) from one host; and four times as many that wait"
    )
    all_calls: int = _limit(
        16_384, "calls in flight of all callers together, without health checks; one caller may have half as many"
    )
    message_bytes: int = _limit(MAX_MESSAGE_BYTES, "bytes of one message, either way")
    metadata_bytes: int = _limit(16 * 2**10, "bytes of a call's metadata")
    receiving_bytes: int = _limit(232 * 2**20, "bytes of all requests that are not whole yet", _LARGEST_SIZE)
    request_seconds: float = _limit(2.0, "seconds that a request of a few bytes may take to arrive")
    upload_seconds: float = _limit(30.0, "seconds that any other request may take to arrive")
    stall_seconds: float = _limit(30.0, "seconds that an answer may lie unread")
    # limits of connections and threads
    threads: int | None = _limit(
        None,
        "threads of one process (by default as many as its container, its user and the kernel allow)",
        least=LEAST_THREADS,
    )
    connections: int = _limit(8_192, "connections to one process")
    connections_of_a_host: int = _limit(4_096, "data connections from one host; and to metrics, where they are 16")
    new_connections: float = _limit(
        100.0, "connections that one host may open in a second, to data or metrics; ten times as many at once"
    )
    handshake_seconds: float = _limit(10.0, "seconds that a connection may take to be made, TLS included")
    idle_seconds: float = _limit(600.0, "seconds that a connection may lie without a call")


DEFAULTS = Limits()
