"""Files of tensors, in the format of safetensors, written and read as a stream.

    8 bytes   the length of the header, little-endian
    header    JSON: tensor's name -> {dtype, shape, data_offsets}; "__metadata__" -> texts by name
    data      the tensors, one after the other without a gap

A file is read once, from its beginning to its end. Each tensor is read directly into its destination, and the checksum
is computed on the way. So a shard of many gigabytes needs no second copy of a tensor. Other programs read these files
with the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from ps_protocol.framing import Buffer
from ps_protocol.layout import DATA_TYPES
from ps_protocol.tensors import DTYPE_NAMES, bytes_of

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses a longer header
_ALIGNMENT = 8
_READ_BYTES = 2**20
_CODES = {dtype: DATA_TYPES[name].code for dtype, name in DTYPE_NAMES.items()}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """The description of one tensor in a header. `nbytes`: its bytes in the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    def empty(self) -> torch.Tensor:
        """Returns an uninitialised tensor of this entry's shape and type."""
        return torch.empty(self.shape, dtype=self.dtype)


# -- writing ---------------------------------------------------------------------------------------------------------


def file_chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """Yields the bytes of a file of tensors, without a copy of them. Raises ValueError if the header becomes
    too large.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {len(text)} bytes, {MAX_HEADER_BYTES} are allowed: use larger buckets")
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            yield bytes_of(tensor.contiguous().reshape(-1))


# -- reading ---------------------------------------------------------------------------------------------------------


class TensorReader:
    """Reads a file of tensors from its beginning to its end. Methods raise OSError, and ValueError for other content.

    size: of the file, in bytes
    on_progress: called now and then with the number of bytes read
    """

    def __init__(self, file: BinaryIO, size: int, on_progress: Callable[[int], object] = lambda count: None) -> None:
        self._file, self._on_progress = file, on_progress
        self._digest = hashlib.sha256()
        length = int.from_bytes(self._bytes(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes is longer than a file of {size} can have")
        header = _header(self._bytes(length))
        self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
        self.entries = _entries(header, size - 8 - length)

    def tensors(
        self, wanted: Callable[[TensorEntry], torch.Tensor | None]
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yields the wanted tensors in the order of the data, and skips the others. Iterate to the end.

        wanted: returns the tensor to fill, of the entry's shape and type; None: skip the entry
        """
        passed_over = bytearray(_READ_BYTES)
        for entry in self.entries:
            tensor = wanted(entry)
            if tensor is not None:
                if entry.nbytes:
                    self._fill(bytes_of(tensor.reshape(-1)))
                yield entry, tensor
                continue
            left = entry.nbytes
            while left:
                part = min(left, _READ_BYTES)
                self._fill(memoryview(passed_over)[:part])
                left -= part

    def sha256(self) -> str:
        """Returns the checksum of the bytes read so far."""
        return self._digest.hexdigest()

    def _bytes(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        for start in range(0, len(view), _READ_BYTES):
            piece = view[start : start + _READ_BYTES]
            position = 0
            while position < len(piece):
                count = self._file.readinto(piece[position:])  # type: ignore[attr-defined]
                if not count:
                    raise ValueError("it ends too early")
                position += count
            self._digest.update(piece)
            self._on_progress(len(piece))


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no dictionary")
    return header


def _entries(header: Mapping[str, Any], data_bytes: int) -> list[TensorEntry]:
    """Returns the tensors in the order of the data. Raises ValueError unless they fill it without a gap."""
    entries: list[TensorEntry] = []
    end = 0
    for name, described in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, stop = described["data_offsets"]
        dtype, shape = _DTYPES.get(described["dtype"]), tuple(described["shape"])
        if dtype is None or any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
            raise ValueError(f"{name[:80]!r}: expected a type out of {', '.join(_DTYPES)}, and sizes from 0")
        numel = 1
        for length in shape:
            numel *= length
        expected = end, end + numel * dtype.itemsize
        if (start, stop) != expected:
            raise ValueError(f"{name[:80]!r}: expected bytes {expected[0]} to {expected[1]}, found {start} to {stop}")
        entries.append(TensorEntry(name, dtype, shape, stop - start))
        end = stop
    if end != data_bytes:
        raise ValueError(f"it has {data_bytes} bytes of tensors, and its header describes {end}")
    return entries
