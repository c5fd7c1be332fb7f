"""Bytes as tensors and tensors as bytes, without copying: little-endian and contiguous, as every host stores them."""

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
# Types that no bucket has: a tensor of these that is never trained travels as its bytes, in a bucket of uint8. Torch's
# quantized types (qint8) are none of them: what they mean is not in their memory alone.
_AS_BYTES = (
    *("complex32", "complex64", "complex128", "int8", "int16", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
BYTES_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _AS_BYTES if hasattr(torch, name)}
BYTES_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BYTES_DTYPES.items()}

with warnings.catch_warnings():
    # torch warns once a process that the memory of `bytes` must not be written. It is only read here: the one warning
    # comes now, and is not shown.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def tensor_from(payload: Buffer, dtype: str) -> torch.Tensor:
    """Returns a flat tensor over the payload's memory. Read from it, never write: the memory may be immutable."""
    if len(payload) == 0:
        return torch.empty(0, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(payload, dtype=TORCH_DTYPES[dtype])


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor of one dimension, as bytes."""
    return flat.view(torch.uint8).numpy().data


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor, flat; its bytes, where no bucket has its type.

    It is the tensor's own memory, unless that is not contiguous (channels_last) or holds conjugates.
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return whole if tensor.dtype in DTYPE_NAMES else whole.view(torch.uint8)


def put_elements(tensor: torch.Tensor, elements: torch.Tensor) -> None:
    """Sets a tensor to what `elements_of` returns of it."""
    with torch.no_grad():
        tensor.copy_(elements.view(tensor.dtype).view(tensor.shape))


def is_finite(values: torch.Tensor) -> bool:
    """Returns True when no element is an infinity or a NaN.

    One pass in the ordinary case: a sum is finite only if every term is. A sum of finite terms can overflow, so only
    then each element is checked. bfloat16 has float32's range, and torch adds it up in float32 of itself: to ask for
    that takes more than twice as long (measured).
    """
    if not values.dtype.is_floating_point or values.numel() == 0:
        return True
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return math.isfinite(total.item()) or bool(torch.isfinite(values).all())
