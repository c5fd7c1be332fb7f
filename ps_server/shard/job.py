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

import torch

from ps_protocol.errors import NotShared, PSError
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.segment_layout import SegmentMap, segment_plan
from ps_protocol.tensors import TORCH_DTYPES
from ps_server.core.partition import BucketPartition, JobPartition
from ps_server.core.snapshot import BucketSnapshot
from ps_server.shard.snapshots import SnapshotTask
from ps_server.shard.waiting import Waiter

NARROWED_BUCKETS = 4  # that a job keeps


@dataclass(frozen=True)
class Attached:
    """The segment of one incarnation of a worker."""

    incarnation: int
    segment: SegmentMap


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

    def get(self, index: int, version: int, weights: torch.Tensor, wire: str) -> torch.Tensor:
        """A bucket's weights in the wire format. The caller holds the bucket's `tensors` lock."""
        with self._lock:
            found = self._kept.pop(index, None)
        if found is None or found[0] != version:
            found = version, weights.to(TORCH_DTYPES[wire])
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

    def specs(self) -> list[BucketSpec]:
        """The buckets here as the layout has them."""
        return [bucket.state.layout for bucket in self.buckets.values()]

    def snapshot(self, index: int) -> BucketSnapshot:
        """A copy of a bucket, with the leased data in it. The caller holds the bucket's `tensors` lock."""
        with self.lock:
            committed = self.state.committed(index)
        return self.state.buckets[index].image(committed)
