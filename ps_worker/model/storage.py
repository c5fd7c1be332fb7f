"""Gives a slice of a flat buffer a storage of its own.

Code that saves models treats tensors with the same storage as one shared tensor. safetensors, and with it Accelerate
and the Hugging Face Hub, would drop all but one of a model's parameters; `torch.save` of one parameter would write them
all. So each parameter and each gradient has a storage that begins and ends with it, at its place in the buffer.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

_DEVICES = ("cpu", "cuda")


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous part of a buffer as a tensor with a storage of its own: it is not a view.

    The storage keeps the buffer's memory alive. In-place changes count in the tensor's own `_version`. On devices that
    DLPack does not support, the view itself is returned.
    """
    if view.device.type not in _DEVICES:
        return view
    flat = view.detach().reshape(-1).view(torch.uint8)  # DLPack does not know all types in all versions of torch
    # To torch, memory imported through DLPack belongs to another library: the tensor gets a storage of its own.
    alone: torch.Tensor = torch.from_dlpack(to_dlpack(flat))  # type: ignore[attr-defined]
    return alone.view(view.dtype).view(view.shape).detach()


def counting_with(view: torch.Tensor) -> torch.Tensor:
    """Does the same as `with_own_storage`, except that in-place changes count in the whole buffer's `_version`."""
    counting = view.detach()
    counting.data = with_own_storage(view)  # takes the memory, and keeps the count
    return counting
