"""The layout of the memory that a worker shares with the shards on its host.

    0      nonce, 32 bytes, then padding up to one page
    4096   gradients of the first space, then of the next, each from a new page on
    ...    weights of the first space, then of the next, each from a new page on

All tensors have the data type of their space: wire formats are for the network.

Worker and shard compute the same offsets from the job, so no message can name a wrong one. The worker writes gradients
and reads weights. A shard reads the gradients and writes the weights of its own buckets, and touches nothing else.

The worker hands the memory file over at a unix socket: see AttachSegmentRequest in proto/ps_protocol/v1/data.proto.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch

from ps_protocol.codecs import Cast, plain_codec
from ps_protocol.layout import BucketSpec, Layout

NONCE_BYTES = 32
PAGE_BYTES = 4096
SOCKET_PREFIX = "ps-torch-"  # of a socket's name, before 32 hexadecimal digits
HANDED_OVER = b"\0"  # the data byte that carries the descriptor: SCM_RIGHTS needs at least one
HANDOVER_SECONDS = 10.0  # how long worker and shard wait for each other at the socket


@dataclass(frozen=True)
class SegmentOffer:
    """A worker's offer of its segment: where a shard on its host can receive it.

    location: the name of the socket in the shared directory
    socket_inode: the inode number of that file
    nonce: the secret that a shard shows there, and with which the segment begins
    row_bytes: 0, or the size of a segment for rows of tables (row_memory.py)
    """

    location: str
    socket_inode: int
    nonce: bytes = field(repr=False)
    row_bytes: int = 0


@dataclass(frozen=True)
class Region:
    """The gradients or the weights of one space: `numel` elements of a codec, from byte `offset` on."""

    offset: int
    codec: Cast
    numel: int


@dataclass(frozen=True)
class SegmentPlan:
    """The regions of a segment by space; `size` in bytes."""

    gradients: dict[str, Region]
    weights: dict[str, Region]
    size: int


def segment_plan(layout: Layout) -> SegmentPlan:
    """Returns the layout of a job's gradients and weights in a segment."""
    spaces = {bucket.space: bucket for bucket in layout.buckets if not bucket.frozen}
    end = PAGE_BYTES
    gradients: dict[str, Region] = {}
    weights: dict[str, Region] = {}
    for regions in (gradients, weights):
        for space, bucket in spaces.items():
            region = regions[space] = Region(end, plain_codec(bucket), layout.space_sizes[space])
            end += -(-region.codec.size(region.numel) // PAGE_BYTES) * PAGE_BYTES
    return SegmentPlan(gradients, weights, end)


class SegmentMap:
    """A mapped segment as tensors by space: `gradients` and `weights`, each [size of the space] in its data type."""

    def __init__(self, memory: mmap.mmap, plan: SegmentPlan) -> None:
        self._memory = memory  # the tensors below keep it mapped
        self.gradients = {space: _tensor(memory, region) for space, region in plan.gradients.items()}
        self.weights = {space: _tensor(memory, region) for space, region in plan.weights.items()}

    def gradient(self, bucket: BucketSpec) -> torch.Tensor:
        """Returns a bucket's gradient: [numel]."""
        return self.gradients[bucket.space][bucket.start : bucket.start + bucket.numel]

    def weight(self, bucket: BucketSpec) -> torch.Tensor:
        """Returns a bucket's weights: [numel]."""
        return self.weights[bucket.space][bucket.start : bucket.start + bucket.numel]


def _tensor(memory: mmap.mmap, region: Region) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=region.codec.torch_dtype, count=region.numel, offset=region.offset)
