"""How much memory a job comes to take on a shard, beside what its weights take at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.job import JobSpec
from ps_protocol.layout import bucket_layout
from ps_protocol.optimizer_state import tensors_kept
from ps_protocol.wire_formats import BLOCK_FORMATS, weight_format
from ps_server.core.budget import derived_limit

# What a job costs beside its tensors, whatever they hold (measured).
BUCKET_BYTES, SLICE_BYTES, GROUP_BYTES = 5 * 1024, 1536, 1024


@dataclass(frozen=True)
class Room:
    """The bytes that a job comes to take on a shard: all of them, long after it was admitted.

    weights:   of its buckets there, and what workers have of them where they travel in blocks
    optimizer: what its optimizer keeps of them once it has stepped
    staged:    what may wait there for others
    objects:   what its buckets, parameters and groups cost besides
    """

    weights: int
    optimizer: int
    staged: int
    objects: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.optimizer + self.staged + self.objects


def room_for(spec: JobSpec, indices: Sequence[int], staged_limit: int | None = None) -> Room:
    """Returns what the buckets of a job with these indices come to take. staged_limit: as a shard was started with."""
    layout = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    buckets = [layout[index] for index in indices if 0 <= index < len(layout)]
    kept = [len(tensors_kept(spec.optimizer_of(index), group)) for index, group in enumerate(spec.groups)]
    weights = sum(bucket.nbytes for bucket in buckets)
    optimizer = 0
    for bucket in buckets:
        itemsize = bucket.nbytes // bucket.numel if bucket.numel else 0
        for part in bucket.slices:
            group = spec.parameters[part.parameter].group
            optimizer += part.length * itemsize * kept[group] if group is not None else 0
    staged = staged_limit or derived_limit(weights, spec.bucket_bytes, max(1, spec.world_size))
    if spec.world_size:  # one of them waits for no other
        trained = sum(bucket.nbytes for bucket in buckets if not bucket.frozen)
        staged = min(staged, trained * (spec.world_size - 1))
    if not staged_limit:
        staged += derived_limit(0, 0, max(0, spec.world_size - 1), len(spec.tables))
    slices = sum(len(bucket.slices) for bucket in buckets)
    objects = len(buckets) * BUCKET_BYTES + slices * SLICE_BYTES + len(spec.groups) * GROUP_BYTES
    weights += sum(bucket.nbytes for bucket in buckets if weight_format(spec, bucket) in BLOCK_FORMATS)
    return Room(weights, optimizer, staged, objects)
