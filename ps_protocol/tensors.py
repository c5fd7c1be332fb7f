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
