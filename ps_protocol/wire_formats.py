"""How many bytes a bucket's elements take on the wire, and in which format a bucket travels: from the job alone.

What makes payloads of elements is in codecs.py, which needs torch. This does not, so that `ps-server plan` can say what
a job will send.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, BucketSpec


@dataclass(frozen=True)
class CastFormat:
    """Elements of one type on the wire; `dtype` is its name, torch's own."""

    dtype: str

    @property
    def name(self) -> str:
        """What the format is called."""
        return self.dtype

    def size(self, numel: int) -> int:
        """Returns how many bytes that many elements take."""
        return numel * DATA_TYPES[self.dtype].itemsize

    def keeps(self, bucket: BucketSpec) -> bool:
        """Returns whether a bucket's elements travel as the very bytes that they are in memory."""
        return self.dtype == bucket.dtype

    def wire_format(self, bucket: BucketSpec) -> str:
        """Returns what a message calls the format of a bucket's payload; empty where it keeps the bucket's type."""
        return "" if self.dtype == bucket.dtype else self.dtype

    def check_format(self, bucket: BucketSpec, wire_format: str) -> None:
        """Raises InvalidRequest if a message calls a payload something else; see `wire_format`."""
        _check_format(self.dtype, bucket, wire_format)


@dataclass(frozen=True)
class BlockFormat:
    """Codes of `bits` bits, 8 or 4, with one bfloat16 scale for each block of `block` elements."""

    name: str
    bits: int
    block: int

    def size(self, numel: int) -> int:
        """Returns how many bytes that many elements take."""
        return 2 * -(-numel // self.block) + -(-numel * self.bits // 8)

    def keeps(self, bucket: BucketSpec) -> bool:
        """Returns whether a bucket's elements travel as the very bytes that they are in memory."""
        return False

    def wire_format(self, bucket: BucketSpec) -> str:
        """Returns what a message calls the format of a bucket's payload."""
        return self.name

    def check_format(self, bucket: BucketSpec, wire_format: str) -> None:
        """Raises InvalidRequest if a message calls a payload something else."""
        _check_format(self.name, bucket, wire_format)


def _check_format(expected: str, bucket: BucketSpec, wire_format: str) -> None:
    if (wire_format or bucket.dtype) != expected:
        raise InvalidRequest(
            f"bucket {bucket.index}: expected elements as {expected}, got {wire_format or bucket.dtype}"
        )


BLOCK_FORMATS = {each.name: each for each in (BlockFormat("int8", 8, 128), BlockFormat("int4", 4, 64))}
# What float32 gradients and weights may travel as; a job names one for each.
FORMATS: dict[str, CastFormat | BlockFormat] = {
    **{name: CastFormat(name) for name in ("float32", "bfloat16", "float16")},
    **BLOCK_FORMATS,
}
NARROWED_TO_BLOCKS = frozenset({"float32", "bfloat16", "float16"})  # what gradients of these types become


def gradient_format(spec: JobSpec, bucket: BucketSpec) -> str:
    """Returns the name of the format in which the gradients of a bucket travel."""
    if spec.gradient_wire in BLOCK_FORMATS and bucket.dtype in NARROWED_TO_BLOCKS:
        return spec.gradient_wire
    return spec.gradient_wire if bucket.dtype == "float32" else bucket.dtype


def weight_format(spec: JobSpec, bucket: BucketSpec) -> str:
    """Returns that of its weights; what no optimizer steps travels as it is."""
    return spec.weight_wire if bucket.dtype == "float32" and not bucket.frozen else bucket.dtype
