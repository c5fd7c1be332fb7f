"""The compiled loops, as functions of arrays. loops.h says what each does.

They release the interpreter's lock. Each checks the types of its arrays, and the C code that places are inside: what
does not fit raises an error, and writes nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]

# Loops that compute with floats: torch rounds in one way or another, by its version and the processor.
SGD, SGD_FUSED, ADD_SCALED, ADD = "sgd", "sgd_fused", "add_scaled", "add"
OF_FLOATS = (SGD, SGD_FUSED, ADD_SCALED, ADD)


class Foreign(Protocol):
    """What is used of cffi's FFI."""

    def from_buffer(self, kind: str, buffer: Any, require_writable: bool = False) -> Any:
        """Returns a pointer to an array's memory. Raises ValueError where that does not lie in one piece."""


class Loops:
    """Compiled loops.

    library: has the functions of loops.h
    used:    of OF_FLOATS those that give torch's bits here
    """

    def __init__(self, foreign: Foreign, library: Any, used: frozenset[str] = frozenset(OF_FLOATS)) -> None:
        self._foreign, self._library, self.used = foreign, library, used

    def only(self, used: frozenset[str]) -> Loops:
        """Returns the same loops, of which these are used."""
        return Loops(self._foreign, self._library, used)

    @property
    def has_fused(self) -> bool:
        """Whether the loops round once for a product and a sum in one instruction: otherwise that takes long."""
        return bool(self._library.ps_has_fused())

    # -- rows --------------------------------------------------------------------------------------------------------

    def gather(self, records: Records, places: Longs, out: Records) -> None:
        """Copies records: as np.take with mode="clip"."""
        _check_length(out, len(places))
        self._library.ps_gather(
            self._bytes(records), len(records), records.itemsize, self._read(places), len(places), self._bytes(out)
        )

    def scatter(self, records: Records, places: Longs, values: Records) -> None:
        """Sets records. Raises IndexError for a place that is none."""
        _check_length(values, len(places))
        self._done(
            self._library.ps_scatter(
                *(self._bytes(records), len(records), records.itemsize),
                *(self._read(places), len(places), self._bytes(values)),
            )
        )

    def add(self, sums: Floats, places: Longs, values: Floats) -> None:
        """Adds rows to rows in their order: [m, dim], [n], [n, dim]. Raises IndexError for a place that is none."""
        _check_length(values, len(places))
        _check_dim(values, sums.shape[1])
        self._done(
            self._library.ps_add(
                *(self._floats(sums), *sums.shape, self._read(places), len(places), self._floats(values))
            )
        )

    def sgd(self, fused: bool, weights: Floats, places: Longs, sums: Floats, count: int, lr: float) -> None:
        """Steps distinct rows with plain SGD: [capacity, dim], [n], [n, dim]."""
        _check_length(sums, len(places))
        _check_dim(sums, weights.shape[1])
        step = self._library.ps_sgd_fused if fused else self._library.ps_sgd
        each = self._floats(weights), *weights.shape, self._read(places), len(places), self._floats(sums)
        self._done(step(*each, count, lr))

    def add_scaled(self, weights: Floats, places: Longs, means: Floats, scales: Floats) -> None:
        """Adds means to distinct rows, each times a number of its own: [capacity, dim], [n], [n, dim], [n]."""
        _check_length(means, len(places))
        _check_length(scales, len(places))
        _check_dim(means, weights.shape[1])
        each = self._floats(weights), *weights.shape, self._read(places), len(places), self._floats(means)
        self._done(self._library.ps_add_scaled(*each, self._floats(scales)))

    # -- ids ---------------------------------------------------------------------------------------------------------

    def find(self, keys: Longs, rows: npt.NDArray[np.int32], salt: int, ids: Longs) -> Longs:
        """Returns the row of each id in an index, -1 where it has none."""
        found = np.empty(len(ids), np.int64)
        self._library.ps_find(*self._slots(keys, rows), salt, self._read(ids), len(ids), self._longs(found))
        return found

    def insert(self, keys: Longs, rows: npt.NDArray[np.int32], salt: int, ids: Longs, given: Longs) -> int:
        """Gives distinct ids without a row one each; returns how many slots have a key now that had none."""
        _check_length(given, len(ids))
        slots = self._slots(keys, rows)
        return int(self._library.ps_insert(*slots, salt, self._read(ids), self._read(given), len(ids)))

    def distinct(self, ids: Longs, salt: int, shards: int) -> tuple[Longs, Longs, Longs]:
        """Returns each id once, the place of each, and how often each occurs: see distinct.py. Below 2**31 ids."""
        count = len(ids)
        slots = np.full(1 << (2 * count + 2).bit_length(), -1, np.int32)
        met, found, places, counts = (np.empty(count, np.int64) for _ in range(4))
        many = self._library.ps_distinct(
            *(self._read(ids), count, salt, shards, self._ints(slots), len(slots) - 1),
            *(self._longs(np.zeros(shards, np.int64)), self._ints(np.empty(3 * count, np.int32))),
            *(self._longs(each) for each in (met, found, places, counts)),
        )
        return found[:many].copy(), places, counts[:many].copy()

    # -- memory ------------------------------------------------------------------------------------------------------

    def _slots(self, keys: Longs, rows: npt.NDArray[np.int32]) -> tuple[Any, Any, int]:
        _check_length(rows, len(keys))
        return self._longs(keys), self._ints(rows), len(keys) - 1

    def _read(self, array: Longs) -> Any:
        """A pointer to numbers that are only read: they may lie anyhow."""
        return self._longs(np.ascontiguousarray(array))

    def _longs(self, array: Longs) -> Any:
        return self._pointer("int64_t[]", array, np.int64)

    def _ints(self, array: npt.NDArray[np.int32]) -> Any:
        return self._pointer("int32_t[]", array, np.int32)

    def _floats(self, array: Floats) -> Any:
        return self._pointer("float[]", array, np.float32)

    def _bytes(self, array: Records) -> Any:
        return self._foreign.from_buffer("char[]", array)

    def _pointer(self, kind: str, array: npt.NDArray[Any], dtype: type) -> Any:
        if array.dtype != dtype:
            raise TypeError(f"expected an array of {dtype.__name__}, got {array.dtype}")
        return self._foreign.from_buffer(kind, array)

    def _done(self, is_inside: int) -> None:
        if not is_inside:
            raise IndexError("a place is outside of the array")


def _check_length(array: npt.NDArray[Any], length: int) -> None:
    if len(array) != length:
        raise ValueError(f"expected {length} elements, got {len(array)}")


def _check_dim(array: npt.NDArray[Any], dim: int) -> None:
    if array.shape[1] != dim:
        raise ValueError(f"expected rows of {dim}, got {array.shape[1]}")
