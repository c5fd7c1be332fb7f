"""Admits the optimizer state of a script's later stages: the shard refuses a stage for which it has no memory.

Otherwise the kernel would kill the process.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_protocol.errors import LimitExceeded
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizer_state import tensors_kept
from ps_protocol.stage_spec import StageSpec
from ps_runtime.memory import free_bytes
from ps_server.core.checking import PushChecker


class OptimizerRoom:
    """The memory for the optimizer state of one job's later stages, beyond its first stage's. Not thread-safe.

    promised: returns the bytes of free memory that the job was promised and has not allocated yet
    more:     bytes that later stages have been promised
    """

    def __init__(self, name: str, checker: PushChecker, promised: Callable[[], int]) -> None:
        self._name, self._checker, self._promised = name, checker, promised
        self.more = 0
        # By bucket, the number of its last stage, and the bytes of the optimizer's state in it
        self._kept: dict[int, tuple[int, int]] = {}
        self._number, self._free = 0, 0.0  # the stage that begins, and the free bytes when it did

    def make(self, bucket: BucketSpec, stage: StageSpec) -> None:
        """Promises the memory for a bucket in a stage, once. Raises LimitExceeded if there is too little."""
        number, kept = self._kept.get(bucket.index) or (0, _bytes_kept(bucket, self._checker.stage(bucket, 0)))
        if stage.number <= number:
            return
        wanted = _bytes_kept(bucket, stage)
        if stage.number > self._number:  # once a stage: it goes through all buckets
            free = free_bytes()
            self._number, self._free = stage.number, float("inf") if free is None else free - self._promised()
        more = max(0, wanted - kept)
        if more and more > self._free:
            self._number = 0  # whoever tries once more may find more
            raise LimitExceeded(
                f"job {self._name!r}: what {stage.optimizer} keeps in stage {stage.number} does not fit into this "
                f"shard's memory: bucket {bucket.index} comes to {wanted} bytes, for {kept} before, and "
                f"{max(0, self._free):.0f} are free for more. Take an optimizer that keeps less, or more shards"
            )
        self._free -= more
        self.more += more
        self._kept[bucket.index] = stage.number, wanted


def _bytes_kept(bucket: BucketSpec, stage: StageSpec) -> int:
    """Returns the bytes of an optimizer's state for a bucket, once it has stepped."""
    itemsize = bucket.nbytes // bucket.numel if bucket.numel else 0
    return sum(
        part.length * itemsize * len(tensors_kept(stage.optimizer, stage.groups[group]))
        for part, group in zip(bucket.slices, stage.group_of_slice, strict=True)
        if group is not None
    )
