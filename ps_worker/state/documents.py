"""Encodes values as one safetensors file: a tensor for each tensor, JSON metadata for the rest. Decodes them, too.

The JSON contains the types of values, so that a tuple is decoded as a tuple. Unlike pickle, the format cannot contain
code: another process's state is read without trusting it.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ps_protocol.errors import Unsupported
from ps_protocol.tensors import element_name, parts_of, whole_of

# The errors of `read_document` and `value_of` for bytes that `write_document` has not written.
UNREADABLE = (SafetensorError, ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError)
MOST_DEPTH = 32

_KEY = "ps_worker"
_SCALARS = (str, int, float, bool, type(None))


def write_document(document: Mapping[str, Any], tensors: dict[str, torch.Tensor], number: int) -> bytes:
    """Returns a document and its tensors as bytes. number: of the format"""
    return save(tensors, {_KEY: json.dumps({"format": number, **document})})


def read_document(data: bytes, number: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the document in some bytes, and its tensors. Raises one of UNREADABLE for other bytes.

    number: of the format
    """
    size = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + size])["__metadata__"][_KEY]
    if not isinstance(text, str):
        raise ValueError("it has no description")
    document = json.loads(text)
    if document["format"] != number:
        raise ValueError(f"its format is {document['format']!r}, known is {number}")
    return document, load(data)


def plain(value: Any, tensors: dict[str, torch.Tensor], where: str = "state") -> Any:
    """Returns a value in JSON's types, and moves its tensors into `tensors`, by name.

    where: what the value is, for the error text
    Raises Unsupported for a value of a type that is neither a tensor nor one of Python's own.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, torch.Tensor):
        return _tensor(value, tensors, where)
    for tag, kind in (("l", list), ("u", tuple), ("s", set)):
        if type(value) is kind:
            return {tag: [plain(item, tensors, where) for item in value]}
    if isinstance(value, Mapping):
        tag = "c" if isinstance(value, Counter) else "d"
        return {tag: [[plain(k, tensors, where), plain(v, tensors, f"{where}.{k}")] for k, v in value.items()]}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return plain(value.item(), tensors, where)
    if isinstance(value, int | str):
        return plain(int(value) if isinstance(value, int) else str(value), tensors, where)
    raise Unsupported(f"{where} holds a {type(value).__name__}, which cannot be saved")


def _tensor(value: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if is_traceable_wrapper_subclass(value):
        raise Unsupported(f"{where} holds a {type(value).__name__}, which consists of other tensors: send these")
    name, own = str(len(tensors)), value.detach().to("cpu", copy=True).contiguous()
    if _is_written(own.dtype):
        tensors[name] = own
        return {"t": name}
    tensors[name] = parts_of(own)
    return {"b": [name, element_name(own.dtype)]}


@functools.cache
def _is_written(dtype: torch.dtype) -> bool:
    """Whether the installed safetensors knows an element type. Tensors of other types are written as bytes."""
    try:
        load(save({"t": torch.empty((), dtype=dtype)}))  # a safetensors may write types that it cannot read
    except (KeyError, SafetensorError):
        return False
    return True


def copied(value: Any, where: str = "state") -> Any:
    """Returns a deep copy, with tensors on the host. Raises Unsupported as `plain` does."""
    tensors: dict[str, torch.Tensor] = {}
    return value_of(plain(value, tensors, where), tensors.__getitem__)


def value_of(value: Any, tensor: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """Returns the value of what `plain` returned. `tensor` finds a tensor by its name. Raises ValueError for anything
    else."""
    if type(value) in _SCALARS and not isinstance(value, float):
        return value
    if not isinstance(value, dict) or len(value) != 1 or depth > MOST_DEPTH:
        raise ValueError(f"a value is not what was written: {str(value)[:60]}")
    [(tag, inside)] = value.items()
    if tag == "f":
        return float.fromhex(inside)
    if tag == "t":
        return tensor(inside)
    if tag == "b":
        name, element = inside
        return whole_of(tensor(name), str(element))
    if tag in ("l", "u", "s"):
        kind = {"l": list, "u": tuple, "s": set}[tag]
        return kind(value_of(item, tensor, depth + 1) for item in inside)
    if tag in ("d", "c"):
        pairs = {value_of(k, tensor, depth + 1): value_of(v, tensor, depth + 1) for k, v in inside}
        return Counter(pairs) if tag == "c" else pairs
    raise ValueError(f"a value has the unknown kind {tag[:20]!r}")
