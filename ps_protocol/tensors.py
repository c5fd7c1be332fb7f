"""Conversions between bytes and tensors, without copying: little-endian and contiguous, as every host stores them.

A job knows few element types (DATA_TYPES), and torch has many more. A tensor of another type enters the job as the
parts of its elements, in one more dimension. With an optimizer, [6, 4] of complex64 becomes [6, 4, 2] of float32, which
is how torch's own optimizers see it. Without one, every type becomes bytes, which are only stored: [6, 4, 8] of uint8.
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
    """Returns the type of a name; None if this version of torch has no such type."""
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
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
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
