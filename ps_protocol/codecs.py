"""How a bucket's elements become a payload, and back: the one home of wire formats.

A payload is bytes, and its codec alone knows what is in them: both ends ask it for their number, and have it encode and
decode. `gradient_codec` and `weight_codec` choose one for a bucket that travels, from the job and from nothing else.
What lies in shared memory does not travel: it keeps its type (`plain_codec`), since to narrow it would only cost time.

Today every format is a cast: one element on the wire for each of the bucket's. Encoding makes one pass over memory, or
none where the type stays as it is. Decoding makes none: the receiver widens while it adds or copies. A format with
blocks, scales or other side data is another class with the same `size`, `encode` and `decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer
from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, BucketSpec
from ps_protocol.tensors import TORCH_DTYPES, tensor_from


@dataclass(frozen=True)
class Cast:
    """Elements of one type on the wire; `dtype` is its name, torch's own."""

    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch has it."""
        return TORCH_DTYPES[self.dtype]

    def size(self, numel: int) -> int:
        """Returns how many bytes that many elements take."""
        return numel * DATA_TYPES[self.dtype].itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elements as they travel: [numel]; the tensor itself where it has that type."""
        return values.to(self.torch_dtype)

    def decode(self, payload: Buffer) -> torch.Tensor:
        """Returns the elements of a payload: [numel], over its memory. Read from it, never write."""
        return tensor_from(payload, self.dtype)

    def keeps(self, bucket: BucketSpec) -> bool:
        """Returns whether a bucket's elements travel as the very bytes that they are in memory."""
        return self.dtype == bucket.dtype

    def wire_format(self, bucket: BucketSpec) -> str:
        """Returns what a message calls the format of a bucket's payload; empty where it keeps the bucket's type."""
        return "" if self.dtype == bucket.dtype else self.dtype

    def check_format(self, bucket: BucketSpec, wire_format: str) -> None:
        """Raises InvalidRequest if a message calls a payload something else; see `wire_format`."""
        if (wire_format or bucket.dtype) != self.dtype:
            raise InvalidRequest(
                f"bucket {bucket.index}: expected elements as {self.dtype}, got {wire_format or bucket.dtype}"
            )


# Tensors as they are: initial values, what a script assigns, optimizer state, and all that is not float32.
PLAIN: dict[str, Cast] = {name: Cast(name) for name in DATA_TYPES}
# What float32 gradients and weights may travel as; a job names one for each.
WIRE_FORMATS: dict[str, Cast] = {name: PLAIN[name] for name in ("float32", "bfloat16", "float16")}


def plain_codec(bucket: BucketSpec) -> Cast:
    """Returns how a bucket lies in memory, a shared segment too."""
    return PLAIN[bucket.dtype]


def gradient_codec(spec: JobSpec, bucket: BucketSpec) -> Cast:
    """Returns how the gradients of a bucket travel."""
    return WIRE_FORMATS[spec.gradient_wire] if bucket.dtype == "float32" else plain_codec(bucket)


def weight_codec(spec: JobSpec, bucket: BucketSpec) -> Cast:
    """Returns how the weights of a bucket travel; what no optimizer steps travels as it is."""
    if bucket.dtype == "float32" and not bucket.frozen:
        return WIRE_FORMATS[spec.weight_wire]
    return plain_codec(bucket)
