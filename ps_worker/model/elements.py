"""The description of a model's tensors in a job, whatever their element types.

trained   Parameters that an optimizer steps have a type that shards can step: the real types of DATA_TYPES, or complex
          ones, as pairs of real and imaginary parts, as in torch's optimizers.
frozen    All other tensors are bytes, copied once, at the start. So they may have any type: complex tables of rotary
          positions, int8 and float8 weights. A tensor that consists of others (a quantised weight, a subclass with
          `__tensor_flatten__`) travels as its inner tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ps_protocol.errors import Unsupported
from ps_protocol.layout import DATA_TYPES
from ps_protocol.tensors import DTYPE_NAMES, REAL_PARTS, element_name

_STEPPED = [*(name for name, each in DATA_TYPES.items() if each.floating), *(element_name(each) for each in REAL_PARTS)]


def element_spec(tensor: torch.Tensor, trained: bool) -> tuple[tuple[int, ...], str, str]:
    """Returns a tensor's shape and element type in the job, and the name of its own type; empty if that is the same.

    trained: an optimizer steps the tensor
    """
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype in DTYPE_NAMES:
        return shape, DTYPE_NAMES[dtype], ""
    part = REAL_PARTS[dtype] if trained else torch.uint8
    return (*shape, dtype.itemsize // part.itemsize), DTYPE_NAMES[part], element_name(dtype)


def is_trained(key: str, tensor: torch.Tensor) -> bool:
    """Whether servers step a parameter of an optimizer. False: its type cannot be stepped, and it needs no gradient.

    Raises Unsupported if its type cannot be stepped and it requires a gradient.
    """
    has_parts = is_traceable_wrapper_subclass(tensor)
    if not has_parts and (element_name(tensor.dtype) or DTYPE_NAMES[tensor.dtype]) in _STEPPED:
        return True
    if tensor.requires_grad:
        what = f"is a {type(tensor).__name__}" if has_parts else f"has dtype {tensor.dtype}"
        raise Unsupported(
            f"{key} {what}, and servers step plain tensors of {', '.join(_STEPPED)}: set requires_grad=False to keep "
            "it as it is, or convert it before prepare"
        )
    return False


def parts_that_travel(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a tensor with its name in the job; for one that consists of others, yields these as NAME.INNER.

    Raises Unsupported for a tensor whose memory is not its elements, one after the other.
    """
    if is_traceable_wrapper_subclass(tensor):
        inner, _ = tensor.__tensor_flatten__()
        for name in inner:
            part = getattr(tensor, name)
            if isinstance(tensor, nn.Parameter) and not isinstance(part, nn.Parameter):
                # It shares the memory and the version counter: changes are found without a copy of a large parameter.
                part = part if is_traceable_wrapper_subclass(part) else nn.Parameter(part, requires_grad=False)
            yield from parts_that_travel(f"{key}.{name}", part)
        return
    if tensor.layout != torch.strided:
        raise Unsupported(
            f"{key} is a sparse tensor ({tensor.layout}): keep its indices and its values as two buffers, and make it "
            "of them in forward"
        )
    if tensor.is_quantized:
        raise Unsupported(
            f"{key} has dtype {tensor.dtype}, whose scale is no tensor: keep int_repr() and the scale as two buffers, "
            "or use torchao"
        )
    yield key, tensor
