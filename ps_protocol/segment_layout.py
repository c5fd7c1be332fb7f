"""The layout of the memory that a worker shares with the shards on its host.

    0      nonce, 32 bytes, then padding up to one page
    4096   gradients of the first space, then of the next, each from a new page on
    ...    weights of the first space, then of the next, each from a new page on

Each member of a group shares a segment of its own, with the spaces of its own pieces. All these segments are as large
as the member with the most elements needs.

All tensors have the data type of their space: wire formats are for the network.

Worker and shard compute the same offsets from the job, so no message can name a wrong one. The worker writes gradients
and reads weights. A shard reads the gradients and writes the weights of its own buckets, and touches nothing else.

The worker hands the memory file over at a unix socket: see AttachSegmentRequest in proto/ps_protocol/v1/data.proto.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES
from ps_protocol.tensors import Cast, plain_codec

PAGE_BYTES = 4096


@dataclass(frozen=True)
class SegmentOffer:
    """A worker's offer of its segment: where a shard on its host can receive it.

    location: the name of the socket in the shared directory
    socket_inode: the inode number of that file
    nonce: the secret that a shard shows there, and with which the segment begins
    row_bytes: 0, or the size of a segment for rows of tables
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
    """The regions of a segment by space, and its `size` in bytes. For a group, the regions of each member: those of
    different members begin at the same offset, in segments of their own.
    """

    gradients: dict[str, Region]
    weights: dict[str, Region]
    size: int


def segment_plan(layout: Layout) -> SegmentPlan:
    """Returns the layout of a job's gradients and weights in a segment."""
    spaces = {bucket.space: bucket for bucket in layout.buckets if not bucket.frozen}
    ends = {bucket.member: PAGE_BYTES for bucket in spaces.values()}
    gradients: dict[str, Region] = {}
    weights: dict[str, Region] = {}
    for regions in (gradients, weights):
        for space, bucket in spaces.items():
            region = Region(ends[bucket.member], plain_codec(bucket), layout.space_sizes[space])
            regions[space] = region
            ends[bucket.member] += -(-region.codec.size(region.numel) // PAGE_BYTES) * PAGE_BYTES
    return SegmentPlan(gradients, weights, max(ends.values(), default=PAGE_BYTES))


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


# -- rows --------------------------------------------------------------------------------------------------------------

# The memory for rows that a worker shares with the shards on its host: ids, gradients and rows of the current step.
#
# It is a second segment, which the worker hands over like that of the buckets. The worker chooses its layout, and its
# messages name offsets. A shard reads and writes there only while it answers such a message.


MAX_ROW_BYTES = 2**32
ELEMENT_BYTES = 4
_ALIGNMENT = 8


def pushed_bytes(rows: int, dim: int) -> int:
    """Returns the size of the ids, counts and gradients of `rows` rows."""
    return rows * (ID_BYTES + COUNT_BYTES + ELEMENT_BYTES * dim)


def pulled_bytes(rows: int, dim: int) -> int:
    """Returns the size of `rows` rows and of the ids before them."""
    return rows * (ID_BYTES + ELEMENT_BYTES * dim)


def aligned(size: int) -> int:
    """Returns a size rounded up to the alignment, so that another array can follow directly."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RowMemory:
    """A mapped segment for rows. `size`: the bytes behind its first page"""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.size = len(memory) - PAGE_BYTES

    def array(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns the numbers at an offset: [count]. Raises InvalidRequest for an offset outside of the segment."""
        end = offset + count * np.dtype(dtype).itemsize
        if offset % ELEMENT_BYTES or offset < PAGE_BYTES or end > PAGE_BYTES + self.size:
            raise InvalidRequest(
                f"expected a place in a segment for rows of {self.size} bytes, got bytes {offset} to {end}"
            )
        return np.frombuffer(self._memory, dtype, count, offset)

    def rows(self, offset: int, count: int, dim: int) -> torch.Tensor:
        """Returns the rows at an offset: [count, dim] float32. Raises InvalidRequest for an offset outside of the
        segment."""
        return torch.from_numpy(self.array(offset, count * dim, np.float32)).view(count, dim)
