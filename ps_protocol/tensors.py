"""Bytes as tensors and tensors as bytes, without copying: little-endian and contiguous, as every host stores them.

A job knows few element types (DATA_TYPES), and torch many more. A tensor of another type has its parts in the job, with
one more dimension that counts them: [6, 4] of complex64 is [6, 4, 2] of float32 where an optimizer steps it, as torch's
own optimizers see it. What no optimizer steps is [6, 4, 8] of uint8, whatever the type: bytes, which are only kept.
"""

from __future__ import annotations

import math
import sys
import warnings

import torch

from ps_protocol.framing import Buffer
from ps_protocol.layout import DATA_TYPES

if sys.byteorder != "little":
    raise ImportError("tensors travel as little-endian bytes; this host is big-endian")

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DATA_TYPES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

with warnings.catch_warnings():
    # torch warns once a process that the memory of `bytes` must not be written. It is only read here: the one warning
    # comes now, and is not shown.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


_ALL = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_ELEMENT_TYPES: dict[str, torch.dtype] = {str(each).removeprefix("torch."): each for each in _ALL}
# The parts of complex elements, which optimizers step one by one, as they do in torch.
REAL_PARTS: dict[torch.dtype, torch.dtype] = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def element_name(dtype: torch.dtype) -> str:
    """Returns what a job calls an element type that it knows by its parts; empty for one that it knows itself."""
    return "" if dtype in DTYPE_NAMES else str(dtype).removeprefix("torch.")


def element_type(name: str) -> torch.dtype | None:
    """Returns the type of that name; None where this version of torch has none."""
    return _ELEMENT_TYPES.get(name)


def flat_parts(tensor: torch.Tensor, trained: bool = False) -> torch.Tensor:
    """Returns the parts of a tensor's elements: [numel * parts], over its memory where it is contiguous.

    trained: an optimizer steps it
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.dtype in DTYPE_NAMES:
        return flat
    return flat.view(REAL_PARTS[flat.dtype] if trained else torch.uint8)


def parts_of(tensor: torch.Tensor, trained: bool = False) -> torch.Tensor:
    """Returns the same as [*shape, parts]; [*shape] for a type that a job knows itself."""
    parts = flat_parts(tensor, trained)
    each = () if tensor.dtype in DTYPE_NAMES else (tensor.dtype.itemsize // parts.dtype.itemsize,)
    return parts.view((*tensor.shape, *each))


def whole_of(parts: torch.Tensor, element: str) -> torch.Tensor:
    """Returns the tensor of that element type whose parts these are, over the same memory if it may lie there.

    parts: contiguous. They stay as they are where the type is not known here, or has other parts.
    """
    dtype = element_type(element)
    if dtype is None or not parts.shape or parts.shape[-1] * parts.dtype.itemsize != dtype.itemsize:
        return parts
    if parts.data_ptr() % dtype.itemsize:
        parts = parts.clone()  # bytes in the middle of a file, say: torch crashes on complex numbers that lie there
    return parts.reshape(-1).view(dtype).view(parts.shape[:-1])


def tensor_from(payload: Buffer, dtype: str) -> torch.Tensor:
    """Returns a flat tensor over the payload's memory. Read from it, never write: the memory may be immutable."""
    if len(payload) == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(payload, dtype=TORCH_DTYPES[dtype])


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor of one dimension, as bytes."""
    return flat.view(torch.uint8).numpy().data


def is_finite(values: torch.Tensor) -> bool:
    """Returns True when no element is an infinity or a NaN.

    One pass in the ordinary case: a sum is finite only if every term is. A sum of finite terms can overflow, so only
    then each element is checked. bfloat16 has float32's range, and torch adds it up in float32 of itself: to ask for
    that takes more than twice as long (measured).
    """
    if values.is_complex():
        return is_finite(torch.view_as_real(values))
    if not values.dtype.is_floating_point or values.numel() == 0:
        return True
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(values).all())
