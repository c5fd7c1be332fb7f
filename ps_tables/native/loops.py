"""The compiled loops, as functions of arrays. loops.h says what each does.

They release the interpreter's lock. Each checks the types of its arrays, and that those it writes to may be written;
the C code checks that places are inside. What does not fit raises an error, and writes nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Slots = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]

# Loops that compute with floats: torch rounds in one way or another, by its version and the processor.
SGD, SGD_FUSED, ADD_SCALED, ADD = "sgd", "sgd_fused", "add_scaled", "add"
OF_FLOATS = (SGD, SGD_FUSED, ADD_SCALED, ADD)


class Foreign(Protocol):
    """What is used of cffi's FFI."""

    def from_buffer(self, kind: str, buffer: Any, require_writable: bool = False) -> Any:
        """Returns a pointer to an array's memory. Raises ValueError where that does not lie in one piece, or is only to
        be read."""


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
        """Copies records: as np.take with mode="clip". Raises IndexError where there is none to copy."""
        _check_length(out, len(places))
        _check_record(out, records.itemsize)
        self._done(len(records) > 0 or len(places) == 0)
        self._library.ps_gather(
            *(self._bytes(records), len(records), records.itemsize),
            *(self._read(places), len(places), self._bytes(out, written=True)),
        )

    def scatter(self, records: Records, places: Longs, values: Records) -> None:
        """Sets records. Raises IndexError for a place that is none."""
        _check_length(values, len(places))
        _check_record(values, records.itemsize)
        self._done(
            self._library.ps_scatter(
                *(self._bytes(records, written=True), len(records), records.itemsize),
                *(self._read(places), len(places), self._bytes(values)),
            )
        )

    def add(self, sums: Floats, places: Longs, values: Floats) -> None:
        """Adds rows to rows in their order: [m, dim], [n], [n, dim]. Raises IndexError for a place that is none."""
        _check_length(values, len(places))
        _check_dim(values, sums.shape[1])
        self._done(
            self._library.ps_add(
                *(self._floats(sums, written=True), *sums.shape),
                *(self._read(places), len(places), self._floats(values)),
            )
        )

    def sgd(self, fused: bool, weights: Floats, places: Longs, sums: Floats, count: int, lr: float) -> None:
        """Steps distinct rows with plain SGD: [capacity, dim], [n], [n, dim]."""
        _check_length(sums, len(places))
        _check_dim(sums, weights.shape[1])
        step = self._library.ps_sgd_fused if fused else self._library.ps_sgd
        rows = self._floats(weights, written=True), *weights.shape
        self._done(step(*rows, self._read(places), len(places), self._floats(sums), count, lr))

    def add_scaled(self, weights: Floats, places: Longs, means: Floats, scales: Floats) -> None:
        """Adds means to distinct rows, each times a number of its own: [capacity, dim], [n], [n, dim], [n]."""
        _check_length(means, len(places))
        _check_length(scales, len(places))
        _check_dim(means, weights.shape[1])
        rows = self._floats(weights, written=True), *weights.shape
        each = self._read(places), len(places), self._floats(means), self._floats(scales)
        self._done(self._library.ps_add_scaled(*rows, *each))

    # -- ids ---------------------------------------------------------------------------------------------------------

    def find(self, slots: Slots, salt: int, ids_of_rows: Longs, ids: Longs) -> Longs:
        """Returns the row of each id in an index, -1 where it has none."""
        found = np.empty(len(ids), np.int64)
        index = self._slots(slots), len(slots) - 1, salt, self._longs(ids_of_rows), len(ids_of_rows)
        self._library.ps_find(*index, self._read(ids), len(ids), self._longs(found))
        return found

    def insert(self, slots: Slots, salt: int, ids: Longs, rows: Longs) -> int:
        """Gives distinct ids without a row one each; returns how many slots are not empty now that were."""
        _check_length(rows, len(ids))
        index = self._slots(slots, written=True), len(slots) - 1, salt
        return int(self._library.ps_insert(*index, self._read(ids), self._read(rows), len(ids)))

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

    def _read(self, array: Longs) -> Any:
        """A pointer to numbers that are only read: they may lie anyhow."""
        return self._longs(np.ascontiguousarray(array))

    def _longs(self, array: Longs) -> Any:
        return self._pointer("int64_t[]", array, np.int64, False)

    def _slots(self, array: Slots, written: bool = False) -> Any:
        return self._pointer("uint64_t[]", array, np.uint64, written)

    def _ints(self, array: npt.NDArray[np.int32]) -> Any:
        return self._pointer("int32_t[]", array, np.int32, False)

    def _floats(self, array: Floats, written: bool = False) -> Any:
        return self._pointer("float[]", array, np.float32, written)

    def _bytes(self, array: Records, written: bool = False) -> Any:
        return self._foreign.from_buffer("char[]", array, require_writable=written)

    def _pointer(self, kind: str, array: npt.NDArray[Any], dtype: type, written: bool) -> Any:
        if array.dtype != dtype:
            raise TypeError(f"expected an array of {dtype.__name__}, got {array.dtype}")
        return self._foreign.from_buffer(kind, array, require_writable=written)

    def _done(self, is_inside: int) -> None:
        if not is_inside:
            raise IndexError("a place is outside of the array")


def check_complete(library: Any) -> None:
    """Raises AttributeError where a library lacks a function of loops.h: each is looked up when it is first named."""
    _ = library.ps_gather, library.ps_scatter, library.ps_add, library.ps_add_scaled
    _ = library.ps_sgd, library.ps_sgd_fused, library.ps_has_fused
    _ = library.ps_find, library.ps_insert, library.ps_distinct


def _check_length(array: npt.NDArray[Any], length: int) -> None:
    if len(array) != length:
        raise ValueError(f"expected {length} elements, got {len(array)}")


def _check_record(array: Records, nbytes: int) -> None:
    if array.itemsize != nbytes:
        raise TypeError(f"expected records of {nbytes} bytes, got {array.itemsize}")


def _check_dim(array: npt.NDArray[Any], dim: int) -> None:
    if array.shape[1] != dim:
        raise ValueError(f"expected rows of {dim}, got {array.shape[1]}")
