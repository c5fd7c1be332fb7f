"""What a shard holds while it runs: the state of `core`, with the locks, segments and waiting pulls beside it.

Locks: a job's `lock` guards its protocol state and is held for microseconds. A bucket's `tensors` lock guards its
weights while they are stepped or copied out. Where both are needed, `tensors` is taken first.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ps_protocol.codecs import Cast
from ps_protocol.errors import NotShared, PSError
from ps_protocol.job import JobSpec
from ps_protocol.segment_layout import SegmentMap, segment_plan
from ps_server.core.consistency import Admission
from ps_server.core.partition import BucketPartition, JobPartition
from ps_server.rpc.streams import Outbox

if TYPE_CHECKING:
    from ps_server.shard.snapshots import SnapshotTask


NARROWED_BUCKETS = 4  # that a job keeps


@dataclass(frozen=True)
class Attached:
    """The segment of one incarnation of a worker."""

    incarnation: int
    segment: SegmentMap


@dataclass
class Pull:
    """One Pull call: who asks, how many of its buckets are still to be sent, and where to if not over the network."""

    rank: int
    incarnation: int
    clock: int
    outbox: Outbox
    left: int
    since: float
    segment: SegmentMap | None = None
    notified: float = 0.0
    words: list[bytes] = field(default_factory=list)  # of buckets in the segment, not sent yet
    unsaid: int = 0  # the bytes of those buckets
    word_bytes: int = 0  # see PullCall
    with_pushes: bool = False  # came with pushes, and was not told yet that they are staged

    def said(self, word: bytes, size: int) -> bytes:
        """Keeps the word of a bucket of `size` bytes; returns all that are kept once they are enough, or the last."""
        self.words.append(word)
        self.unsaid += size
        if self.left and not 0 < self.word_bytes <= self.unsaid:
            return b""
        words = b"".join(self.words)
        self.words, self.unsaid = [], 0
        return words


@dataclass
class Waiter:
    """One bucket of a pull that is not admitted: why, since when for that reason, and how long for others so far."""

    pull: Pull
    verdict: Admission
    since: float
    waited: float = 0.0


@dataclass
class HostedBucket:
    """A bucket with its lock, its waiting pulls, and whether an apply thread is at it."""

    state: BucketPartition
    tensors: threading.Lock = field(default_factory=threading.Lock)
    waiters: list[Waiter] = field(default_factory=list)
    busy: bool = False


class Narrowed:
    """The buckets last narrowed to the wire format: what several workers wait for is narrowed once, not once for each.

    A few stay for as long as the job does; workers who read slowly pin no more.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, index: int, version: int, weights: torch.Tensor, codec: Cast) -> torch.Tensor:
        """A bucket's weights in the wire format. The caller holds the bucket's `tensors` lock."""
        with self._lock:
            found = self._kept.pop(index, None)
        if found is None or found[0] != version:
            found = version, codec.encode(weights)
        with self._lock:
            self._kept[index] = found
            while len(self._kept) > NARROWED_BUCKETS:
                self._kept.popitem(last=False)
        return found[1]


class HostedJob:
    """A job on this shard."""

    def __init__(
        self, spec: JobSpec, buckets: Iterable[int], staged_limit: int | None = None, norm_limit: float = math.inf
    ) -> None:
        self.state = JobPartition(spec, buckets, staged_limit, norm_limit)
        self.mode = str(spec.consistency)
        self.lock = threading.Lock()
        self.buckets = {index: HostedBucket(state) for index, state in self.state.buckets.items()}
        self.segments: dict[int, Attached] = {}
        self.plan = segment_plan(spec, self.state.layout)
        self.narrowed = Narrowed()
        self.failure: PSError | None = None
        self.capture: SnapshotTask | None = None  # the checkpoint that is being taken, or was taken last

    def segment(self, rank: int, incarnation: int, key: bytes = b"") -> SegmentMap:
        """The segment of a live worker. Raises NotShared if it has attached none, UnknownWorker if it is not live."""
        with self.lock:
            self.state.check_worker(rank, incarnation, key)
            attached = self.segments.get(rank)
        if attached is None or attached.incarnation != incarnation:
            raise NotShared(f"worker {rank} has attached no segment here")
        return attached.segment
