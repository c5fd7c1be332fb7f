"""How a bucket's elements become a payload, and back: the one home of wire formats, with wire_formats.py.

A payload is bytes, and its codec alone knows what is in them: both ends ask it for their number, and have it encode and
decode. `gradient_codec` and `weight_codec` choose one for a bucket that travels, from the job and from nothing else.
What lies in shared memory does not travel: it keeps its type (`plain_codec`), since to narrow it would only cost time.

Cast     One element on the wire for each of the bucket's, maybe of a narrower type. Encoding makes one pass over
         memory, or none where the type stays as it is. Decoding makes none: the receiver widens while it adds or
         copies.
Blocks   int8 and int4: codes of 8 or 4 bits, with a scale for each block of elements. Both ends get the same bits from
         the same elements, whatever the machine: every operation is one that IEEE 754 defines, no value is subnormal,
         and nothing is random. types.proto says the format byte by byte. What is lost is fed back by who encodes: see
         ps_worker/model/residual.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ps_protocol.framing import Buffer
from ps_protocol.job import JobSpec
from ps_protocol.layout import DATA_TYPES, BucketSpec
from ps_protocol.tensors import TORCH_DTYPES, tensor_from
from ps_protocol.wire_formats import BLOCK_FORMATS, BlockFormat, CastFormat, gradient_format, weight_format

Memory = Callable[[int, torch.dtype], torch.Tensor]  # returns memory for so many elements of a type, on the CPU

LEAST_SCALE = 2.0**-126  # the least that is not subnormal: some processors take those for 0
GREATEST_BFLOAT16: float = torch.finfo(torch.bfloat16).max


class Cast(CastFormat):
    """Elements of one type on the wire; `dtype` is its name, torch's own."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as torch has it."""
        return TORCH_DTYPES[self.dtype]

    @property
    def copies(self) -> bool:
        """Whether `decode` returns memory of its own."""
        return False

    def encode(self, values: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
        """Returns the elements as they travel: [numel]; the tensor itself where it has that type.

        memory: what they are put into, given their number and type; None: fresh memory
        """
        if memory is None or values.dtype == self.torch_dtype:
            return values.to(self.torch_dtype)
        return memory(values.numel(), self.torch_dtype).copy_(values)

    def decode(self, payload: Buffer, numel: int) -> torch.Tensor:
        """Returns the elements of a payload of that many: [numel], over its memory. Read from it, never write."""
        return tensor_from(payload, self.dtype)

    def is_finite(self, payload: Buffer) -> bool:
        """Whether what makes all of a payload's elements finite is in order: here, each has to be looked at."""
        return True


class Blocks(BlockFormat):
    """Codes of `bits` bits, 8 or 4, with one bfloat16 scale for each block of `block` elements."""

    @property
    def _largest(self) -> int:
        return (1 << self.bits - 1) - 1

    @property
    def _greatest_scale(self) -> float:
        return GREATEST_BFLOAT16 / (1 << self.bits - 1)  # times any code it is finite

    @property
    def copies(self) -> bool:
        """Whether `decode` returns memory of its own."""
        return True

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the payload of elements [numel], on their device: bytes [size].

        A block with an infinity or a NaN is one of NaNs.
        """
        numel = values.numel()
        blocks = _padded(values.float(), -numel % self.block).view(-1, self.block)
        scales = (blocks.abs().amax(-1) / self._largest).bfloat16().float()
        scales = scales.where(scales >= LEAST_SCALE, scales * 0)  # a NaN stays one, and an infinity becomes one below
        scales = scales.clamp(max=self._greatest_scale).where(scales.isfinite(), scales * torch.nan)
        codes = blocks / scales.where(scales != 0, 1).unsqueeze(-1)  # below a scale that is too small all round to 0
        codes = codes.round_().clamp_(-self._largest, self._largest).to(torch.int8).view(-1)[:numel]
        if self.bits == 4:
            half = (numel + 1) // 2
            codes = (codes[:half] & 15) | (_padded(codes[half:], numel % 2) << 4)
        return torch.cat((scales.bfloat16().view(torch.uint8), codes.view(torch.uint8)))

    def decode(self, payload: Buffer, numel: int) -> torch.Tensor:
        """Returns the elements of a payload of that many: float32 [numel], in memory of its own."""
        return self.values(tensor_from(payload, "uint8"), numel)

    def values(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns the elements of what `encode` has returned, on its device: float32 [numel]."""
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
        """Whether all of a payload's elements are finite: its scales are from 0 to the greatest."""
        # As many scales as fit: 2 bytes of each 2 + block * bits / 8, of which the last block may have fewer.
        count = -(-len(payload) // (2 + self.block * self.bits // 8))
        scales = tensor_from(memoryview(payload)[: 2 * count], "bfloat16").float()
        return bool(((scales >= 0) & (scales <= self._greatest_scale)).all())


Codec = Cast | Blocks


def _padded(values: torch.Tensor, zeros: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, zeros)) if zeros else values


# Tensors as they are: initial values, what a script assigns, optimizer state, and all that is not float32.
PLAIN: dict[str, Cast] = {name: Cast(name) for name in DATA_TYPES}
BLOCKS: dict[str, Blocks] = {each.name: Blocks(each.name, each.bits, each.block) for each in BLOCK_FORMATS.values()}


def plain_codec(bucket: BucketSpec) -> Cast:
    """Returns how a bucket lies in memory, a shared segment too."""
    return PLAIN[bucket.dtype]


def gradient_codec(spec: JobSpec, bucket: BucketSpec) -> Codec:
    """Returns how the gradients of a bucket travel."""
    name = gradient_format(spec, bucket)
    return BLOCKS.get(name) or PLAIN[name]


def weight_codec(spec: JobSpec, bucket: BucketSpec) -> Codec:
    """Returns how the weights of a bucket travel; what no optimizer steps travels as it is."""
    name = weight_format(spec, bucket)
    return BLOCKS.get(name) or PLAIN[name]


def row_codec(name: str) -> Cast:
    """Returns how rows of tables travel in a job with this wire format: as float32 where that has blocks.

    Each step trains other rows, so what a narrow one lost would reach its row late or never.
    """
    return PLAIN["float32" if name in BLOCKS else name]
