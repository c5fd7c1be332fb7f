"""Memory that a worker shares with the shards on its host: what lies where in it.

    0      nonce, 32 bytes, then padding up to one page
    4096   gradients of the first space, then of the next, each on a page of its own
    ...    weights of the first space, then of the next, likewise

All are in the data type of their space: wire formats are for what travels.

Both ends compute the same places from the job, so no message can name a wrong one. The worker writes gradients and
reads weights; a shard reads the gradients and writes the weights of its own buckets, and touches nothing else.

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
HANDED_OVER = b"\0"  # what travels with the descriptor
HANDOVER_SECONDS = 10.0  # that either end waits for the other at the socket


@dataclass(frozen=True)
class SegmentOffer:
    """Where a worker hands its segment over.

    location:     the socket's name in the shared directory
    socket_inode: the number of that file
    nonce:        what a shard proves itself with there, and what the segment begins with
    row_bytes:    not 0: the segment is for rows of tables, so many bytes of them (row_memory.py)
    """

    location: str
    socket_inode: int
    nonce: bytes = field(repr=False)
    row_bytes: int = 0


@dataclass(frozen=True)
class Region:
    """One space in one direction: `numel` elements as their codec writes them, from byte `offset` on."""

    offset: int
    codec: Cast
    numel: int


@dataclass(frozen=True)
class SegmentPlan:
    """Where everything lies, by space; `size` in bytes."""

    gradients: dict[str, Region]
    weights: dict[str, Region]
    size: int


def segment_plan(layout: Layout) -> SegmentPlan:
    """Returns the places of a job's gradients and weights in a segment."""
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
    """A mapped segment as tensors, by space: `gradients` and `weights`, each [size of the space] in its data type."""

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
