"""Tensors as bytes: their memory without a copy, and the wire formats of buckets.

Bytes are little-endian and contiguous, as every host stores them.

A job knows few element types (DATA_TYPES), and torch has many more. A tensor of another type enters the job as the
parts of its elements, in one more dimension. With an optimizer, [6, 4] of complex64 becomes [6, 4, 2] of float32, which
is how torch's own optimizers see it. Without one, every type becomes bytes, which are only stored: [6, 4, 8] of uint8.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable

import torch

from ps_protocol.framing import Buffer
from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, BucketSpec
from ps_protocol.wire_formats import BLOCK_FORMATS, BlockFormat, CastFormat, gradient_format, weight_format

if sys.byteorder != "little":
    raise ImportError("tensors travel as little-endian bytes; this host is big-endian")

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DATA_TYPES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

with warnings.catch_warnings():
    # torch.frombuffer warns once a process that tensors over `bytes` are not writable. This package only reads them, so
    # the warning is provoked and hidden at import.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


_ALL = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_ELEMENT_TYPES: dict[str, torch.dtype] = {str(each).removeprefix("torch."): each for each in _ALL}
# The parts of complex elements. torch's optimizers, too, step them as pairs of reals (torch.view_as_real).
REAL_PARTS: dict[torch.dtype, torch.dtype] = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def element_name(dtype: torch.dtype) -> str:
    """Returns the job's name of an element type that it stores in parts; empty for one of DATA_TYPES."""
    return "" if dtype in DTYPE_NAMES else str(dtype).removeprefix("torch.")


def element_type(name: str) -> torch.dtype | None:
    """Returns the type with this name; None if this version of torch has no such type."""
    return _ELEMENT_TYPES.get(name)


def flat_parts(tensor: torch.Tensor, trained: bool = False) -> torch.Tensor:
    """Returns the parts of a tensor's elements: [numel * parts]. It is a view if the tensor is contiguous.

    trained: whether an optimizer steps the tensor
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.dtype in DTYPE_NAMES:
        return flat
    return flat.view(REAL_PARTS[flat.dtype] if trained else torch.uint8)


def parts_of(tensor: torch.Tensor, trained: bool = False) -> torch.Tensor:
    """Returns the parts of a tensor's elements as [*shape, parts]; as [*shape] for a type of DATA_TYPES."""
    parts = flat_parts(tensor, trained)
    each = () if tensor.dtype in DTYPE_NAMES else (tensor.dtype.itemsize // parts.dtype.itemsize,)
    return parts.view((*tensor.shape, *each))


def whole_of(parts: torch.Tensor, element: str) -> torch.Tensor:
    """Returns the tensor of an element type that consists of these parts. It is a view if the memory is aligned.

    parts: contiguous. They are returned as they are if this torch does not know the type, or if it has other parts.
    """
    dtype = element_type(element)
    if dtype is None or not parts.shape or parts.shape[-1] * parts.dtype.itemsize != dtype.itemsize:
        return parts
    if parts.data_ptr() % dtype.itemsize:
        parts = parts.clone()  # unaligned, such as bytes in the middle of a file: torch crashes on such complex numbers
    return parts.reshape(-1).view(dtype).view(parts.shape[:-1])


def tensor_from(payload: Buffer, dtype: str) -> torch.Tensor:
    """Returns a flat tensor over the payload's memory. Never write to it: the memory may be immutable."""
    if len(payload) == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype], device="cpu")
    return torch.frombuffer(payload, dtype=TORCH_DTYPES[dtype])


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor of one dimension, as bytes."""
    return flat.view(torch.uint8).numpy().data


def is_finite(values: torch.Tensor) -> bool:
    """Returns True if no element is an infinity or a NaN.

    In the ordinary case one pass is enough: a sum is finite only if every term is. Finite terms may overflow, so an
    infinite sum is checked element by element. torch sums bfloat16 in float32 already; asking for float32 explicitly
    takes more than twice as long (measured on a CPU). float16 has to ask, as its range is small.
    """
    if values.is_complex():
        return is_finite(torch.view_as_real(values))
    if not values.dtype.is_floating_point or values.numel() == 0:
        return True
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(values).all())


# -- codecs ------------------------------------------------------------------------------------------------------------

# A codec encodes a bucket's elements as a payload, and decodes them. wire_formats.py has the sizes of the same formats.
# A payload is bytes that only its codec can interpret: servers and workers ask the codec for their size, and to encode
# and decode them. `gradient_codec` and `weight_codec` choose the codec of a bucket from the job alone. Shared memory
# keeps the bucket's own type (`plain_codec`): narrowing would save no transfer and cost a pass over memory.
#
# Cast     One element on the wire for each element of the bucket, possibly of a narrower type. Encoding makes one pass
# over memory, or none if the type is the same. Decoding makes none: the receiver widens while it adds or copies. Blocks
# int8 and int4: codes of 8 or 4 bits, with a scale for each block of elements. The same elements give the same
# bits on every machine: all operations are those that IEEE 754 defines, no value is subnormal, and nothing is
# random. types.proto specifies the format byte by byte. The sender adds the rounding error to the next payload
# (ps_worker/model/residual.py): without this error feedback, compressed SGD may not converge (Karimireddy et
# al., 2019, https://arxiv.org/abs/1901.09847).


Memory = Callable[[int, torch.dtype], torch.Tensor]  # (elements, type) -> memory for them, on the CPU

LEAST_SCALE = 2.0**-126  # the smallest normal float32: a processor that flushes subnormals to 0 would differ below it
GREATEST_BFLOAT16: float = torch.finfo(torch.bfloat16).max


class Cast(CastFormat):
    """A codec for elements of one type. `dtype` is torch's name of the type."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as a torch.dtype."""
        return TORCH_DTYPES[self.dtype]

    @property
    def decode_copies(self) -> bool:
        """Whether `decode` returns a copy, and no view of the payload."""
        return False

    @property
    def is_checked_by_scales(self) -> bool:
        """Whether `is_finite` checks the elements, so that they need no check of their own."""
        return False

    def encode(self, values: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
        """Returns the elements in the wire's type: [numel]. It is the tensor itself if the type is the same.

        memory: allocates the result, given its number of elements and its type; None: torch does
        """
        if memory is None or values.dtype == self.torch_dtype:
            return values.to(self.torch_dtype)
        return memory(values.numel(), self.torch_dtype).copy_(values)

    def decode(self, payload: Buffer, numel: int) -> torch.Tensor:
        """Returns the elements of a payload: [numel], a view of the payload. Never write to it."""
        return tensor_from(payload, self.dtype)

    def is_finite(self, payload: Buffer) -> bool:
        """Returns True: a cast has no scales, so a caller has to check the elements themselves."""
        return True


class Blocks(BlockFormat):
    """A codec for blocks of elements: codes of `bits` bits, 8 or 4, and one bfloat16 scale for each block."""

    @property
    def _largest(self) -> int:
        return (1 << self.bits - 1) - 1

    @property
    def _greatest_scale(self) -> float:
        return GREATEST_BFLOAT16 / (1 << self.bits - 1)  # its product with any code is finite

    @property
    def decode_copies(self) -> bool:
        """Whether `decode` returns a copy, and no view of the payload."""
        return True

    @property
    def is_checked_by_scales(self) -> bool:
        """Whether `is_finite` checks the elements, so that they need no check of their own."""
        return True

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the payload of elements [numel], on their device: bytes [size].

        A block with an infinity or a NaN decodes to NaNs.
        """
        numel = values.numel()
        blocks = _padded(values.float(), -numel % self.block).view(-1, self.block)
        scales = (blocks.abs().amax(-1) / self._largest).bfloat16().float()
        scales = scales.where(scales >= LEAST_SCALE, scales * 0)  # NaN * 0 stays NaN; the next line makes infinity NaN
        scales = scales.clamp(max=self._greatest_scale).where(scales.isfinite(), scales * torch.nan)
        codes = blocks / scales.where(scales != 0, 1).unsqueeze(-1)  # with scale 0, |x| < 2**-126: rounds to code 0
        codes = codes.round_().clamp_(-self._largest, self._largest).to(torch.int8).view(-1)[:numel]
        if self.bits == 4:
            half = (numel + 1) // 2
            codes = (codes[:half] & 15) | (_padded(codes[half:], numel % 2) << 4)
        return torch.cat((scales.bfloat16().view(torch.uint8), codes.view(torch.uint8)))

    def decode(self, payload: Buffer, numel: int) -> torch.Tensor:
        """Returns the elements of a payload: float32 [numel], a copy."""
        return self.values(tensor_from(payload, "uint8"), numel)

    def values(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns the elements of an encoded tensor, on its device: float32 [numel]."""
        count = -(-numel // self.block)
        scales = payload[: 2 * count].view(torch.bfloat16).float()
        codes = payload[2 * count :].view(torch.int8)
        padded = torch.empty(count * self.block, dtype=torch.float32, device=payload.device)
        if self.bits == 4:
            half = (numel + 1) // 2
            padded[:half] = (codes << 4) >> 4
            padded[half:numel] = (codes >> 4)[: numel - half]
        else:
            padded[:numel] = codes
        padded[numel:] = 0
        padded.view(count, self.block).mul_(scales.unsqueeze(-1))
        return padded[:numel]

    def is_finite(self, payload: Buffer) -> bool:
        """Whether all elements of a payload are finite. Only the scales have to be checked."""
        # A block is 2 bytes of scale and block * bits / 8 bytes of codes; the last block may have fewer codes.
        count = -(-len(payload) // (2 + self.block * self.bits // 8))
        scales = tensor_from(memoryview(payload)[: 2 * count], "bfloat16").float()
        return bool(((scales >= 0) & (scales <= self._greatest_scale)).all())


Codec = Cast | Blocks


def _padded(values: torch.Tensor, zeros: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, zeros)) if zeros else values


# Tensors in their own type: initial values, values that a script assigns, optimizer state, all types but float32.
PLAIN: dict[str, Cast] = {name: Cast(name) for name in DATA_TYPES}
BLOCKS: dict[str, Blocks] = {each.name: Blocks(each.name, each.bits, each.block) for each in BLOCK_FORMATS.values()}


def plain_codec(bucket: BucketSpec) -> Cast:
    """Returns the codec of a bucket in memory, also in a shared segment."""
    return PLAIN[bucket.dtype]


def gradient_codec(spec: JobSpec, bucket: BucketSpec) -> Codec:
    """Returns the codec of a bucket's gradients."""
    name = gradient_format(spec.gradient_wire, bucket)
    return BLOCKS.get(name) or PLAIN[name]


def weight_codec(spec: JobSpec, bucket: BucketSpec) -> Codec:
    """Returns the codec of a bucket's weights. Frozen buckets keep their type."""
    name = weight_format(spec.weight_wire, bucket)
    return BLOCKS.get(name) or PLAIN[name]


def row_codec(name: str) -> Cast:
    """Returns the codec for rows of tables in a job with this wire format; a format of blocks becomes float32.

    Each step trains other rows, so error feedback would reach a row late or never.
    """
    return PLAIN["float32" if name in BLOCKS else name]
