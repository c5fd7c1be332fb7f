"""An edition as a safetensors file, made of views of its memory. Only its header is copied, and tensors in pieces, when
they are sent.

The format: 8 bytes with the length of a JSON text, little-endian; the text, which says where each tensor lies; and the
tensors, without gaps (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ps_feed.edition import EditionArrays
from ps_protocol.layout import DATA_TYPES
from ps_runtime.downloads import MadeLater, Part

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 8


class EditionFile:
    """An edition as a safetensors file, without tensors that a state_dict leaves out.

    parts:  the header, then the tensors in the order of the file. A tensor that the edition holds in pieces is joined
            only while it is sent
    nbytes: the size of all parts together
    joined_bytes: the most memory that joining takes: the size of the largest tensor in pieces; 0: none is in pieces
    """

    def __init__(self, edition: EditionArrays, job: str) -> None:
        saved = {name: edition.form(name) for name in edition.names() if edition.contents.is_saved(name)}
        # The largest elements first, so that each tensor is aligned as its elements need it.
        names = sorted(saved, key=lambda name: -DATA_TYPES[saved[name].dtype].itemsize)
        about = {"format": "pt", "job": job, "run": edition.run, "version": str(edition.version)}
        elements = {name: saved[name].element for name in saved if saved[name].element}
        if elements:
            about["element_types"] = json.dumps(elements)
        head: dict[str, object] = {"__metadata__": about}
        parts: list[Bytes | MadeLater] = []
        at = self.joined_bytes = 0
        for name in names:
            form = saved[name]
            if edition.is_in_pieces(name):
                parts.append(MadeLater(form.nbytes, partial(_elements, edition, name)))
                self.joined_bytes = max(self.joined_bytes, form.nbytes)
            else:
                parts.append(edition.tensor(name).values.reshape(-1).view(np.uint8))
            head[name] = {
                "dtype": DATA_TYPES[form.dtype].code,
                "shape": list(form.shape),
                "data_offsets": [at, at + form.nbytes],
            }
            at += form.nbytes
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.parts: Sequence[Part] = [
            memoryview(len(text).to_bytes(8, "little") + text),
            *(part if isinstance(part, MadeLater) else part.data for part in _joined(parts)),
        ]
        self.nbytes = sum(part.nbytes for part in self.parts)


def _elements(edition: EditionArrays, name: str) -> memoryview:
    return edition.tensor(name).values.reshape(-1).view(np.uint8).data


def _joined(parts: Sequence[Bytes | MadeLater]) -> list[Bytes | MadeLater]:
    """Returns the same bytes in fewer pieces: arrays that follow each other in the memory of one are one."""
    joined: list[Bytes | MadeLater] = []
    for part in parts:
        last = joined[-1] if joined else None
        if not part.nbytes:
            continue
        if isinstance(part, MadeLater) or last is None or isinstance(last, MadeLater):
            joined.append(part)
            continue
        base = part.base
        is_next = last.base is base and _end(last) == part.ctypes.data
        if is_next and base is not None and base.dtype == np.uint8 and base.ndim == 1:
            start = last.ctypes.data - base.ctypes.data
            joined[-1] = base[start : start + last.nbytes + part.nbytes]
        else:
            joined.append(part)
    return joined


def _end(array: Bytes) -> int:
    return int(array.ctypes.data) + array.nbytes
