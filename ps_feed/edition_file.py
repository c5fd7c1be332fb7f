"""An edition as a safetensors file, made of views of its memory: only its header is copied, and tensors in pieces.

The format: 8 bytes with the length of a JSON text, little-endian; the text, which says where each tensor lies; and the
tensors, without gaps (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ps_feed.edition import EditionArrays

_NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
    "uint8": "U8",
}
_ALIGNMENT = 8


class TensorFile:
    """An edition as a safetensors file, without tensors that a state_dict leaves out.

    parts:  its header, then its tensors, in the order of the file
    nbytes: of all parts together
    """

    def __init__(self, edition: EditionArrays, job: str) -> None:
        saved = {name: tensor for name, tensor in edition.items() if edition.contents.is_saved(name)}
        # The largest elements first, so that each tensor is aligned as its elements need it.
        names = sorted(saved, key=lambda name: -saved[name].values.itemsize)
        about = {"format": "pt", "job": job, "run": edition.run, "version": str(edition.version)}
        elements = {name: saved[name].element for name in saved if saved[name].element}
        if elements:
            about["element_types"] = json.dumps(elements)
        head: dict[str, object] = {"__metadata__": about}
        arrays: list[npt.NDArray[np.uint8]] = []
        at = 0
        for name in names:
            values, dtype, _ = saved[name]
            arrays.append(values.reshape(-1).view(np.uint8))
            offsets = [at, at + values.nbytes]
            head[name] = {"dtype": _NAMES[dtype], "shape": list(values.shape), "data_offsets": offsets}
            at += values.nbytes
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.parts: Sequence[memoryview] = [
            memoryview(len(text).to_bytes(8, "little") + text),
            *(array.data for array in _joined(arrays)),
        ]
        self.nbytes = sum(part.nbytes for part in self.parts)


def _joined(arrays: Sequence[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.uint8]]:
    """Returns the same bytes in fewer pieces: arrays that follow each other in the memory of one are one."""
    joined: list[npt.NDArray[np.uint8]] = []
    for array in arrays:
        last = joined[-1] if joined else None
        if not array.nbytes:
            continue
        base = array.base
        is_next = last is not None and last.base is base and _end(last) == array.ctypes.data
        if last is not None and is_next and base is not None and base.dtype == np.uint8 and base.ndim == 1:
            start = last.ctypes.data - base.ctypes.data
            joined[-1] = base[start : start + last.nbytes + array.nbytes]
        else:
            joined.append(array)
    return joined


def _end(array: npt.NDArray[np.uint8]) -> int:
    return int(array.ctypes.data) + array.nbytes
