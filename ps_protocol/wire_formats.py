"""The wire formats of buckets: their names, and the size of a bucket in each, in bytes.

Both follow from the job alone. tensors.py, which needs torch, encodes and decodes the formats. This file does not need
torch, so `ps-server plan` computes the traffic of a job without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import DATA_TYPES, BucketSpec


@dataclass(frozen=True)
class CastFormat:
    """The format of elements of one type. `dtype` is torch's name of the type."""

    dtype: str

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.dtype

    def size(self, numel: int) -> int:
        """Returns the size of `numel` elements in bytes."""
        return numel * DATA_TYPES[self.dtype].itemsize

    def keeps(self, bucket: BucketSpec) -> bool:
        """Whether the wire carries a bucket's elements with the same bytes as memory."""
        return self.dtype == bucket.dtype

    def wire_format(self, bucket: BucketSpec) -> str:
        """Returns the name of the format in a message about a bucket; empty if it is the bucket's own type."""
        return "" if self.dtype == bucket.dtype else self.dtype

    def check_format(self, bucket: BucketSpec, wire_format: str) -> None:
        """Raises InvalidRequest if a message names another format; see `wire_format`."""
        _check_format(self.dtype, bucket, wire_format)


@dataclass(frozen=True)
class BlockFormat:
    """The format of blocks of elements: codes of `bits` bits, 8 or 4, and one bfloat16 scale for each block."""

    name: str
    bits: int
    block: int

    def size(self, numel: int) -> int:
        """Returns the size of `numel` elements in bytes."""
        return 2 * -(-numel // self.block) + -(-numel * self.bits // 8)

    def keeps(self, bucket: BucketSpec) -> bool:
        """Whether the wire carries a bucket's elements with the same bytes as memory."""
        return False

    def wire_format(self, bucket: BucketSpec) -> str:
        """Returns the name of the format in a message about a bucket."""
        return self.name

    def check_format(self, bucket: BucketSpec, wire_format: str) -> None:
        """Raises InvalidRequest if a message names another format."""
        _check_format(self.name, bucket, wire_format)


def _check_format(expected: str, bucket: BucketSpec, wire_format: str) -> None:
    if (wire_format or bucket.dtype) != expected:
        raise InvalidRequest(
            f"bucket {bucket.index}: expected elements as {expected}, got {wire_format or bucket.dtype}"
        )


BLOCK_FORMATS = {each.name: each for each in (BlockFormat("int8", 8, 128), BlockFormat("int4", 4, 64))}
# The wire formats of float32 tensors. A job names one for gradients and one for weights.
FORMATS: dict[str, CastFormat | BlockFormat] = {
    **{name: CastFormat(name) for name in ("float32", "bfloat16", "float16")},
    **BLOCK_FORMATS,
}
# Those of the weights that readers, relays and shards accept for an edition.
EDITION_WIRES = ("float32", "bfloat16", "float16")
NARROWED_TO_BLOCKS = frozenset({"float32", "bfloat16", "float16"})  # types of gradients that a block format encodes


def gradient_format(wire: str, bucket: BucketSpec) -> str:
    """Returns the name of the wire format of a bucket's gradients. wire: the job's format of gradients"""
    if wire in BLOCK_FORMATS and bucket.dtype in NARROWED_TO_BLOCKS:
        return wire
    return wire if bucket.dtype == "float32" else bucket.dtype


def weight_format(wire: str, bucket: BucketSpec) -> str:
    """Returns the name of the wire format of a bucket's weights. Frozen buckets keep their type.

    wire: the job's format of weights
    """
    return wire if bucket.dtype == "float32" and not bucket.frozen else bucket.dtype
