"""The loops of a library, as functions of arrays. loops.h describes each.

They release the GIL. Each checks that its arrays fit together. Arrays that are only read may have any strides; arrays
that are written must be contiguous and aligned. The C code checks that indices are in range. If a check fails, an error
is raised before anything is written.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Slots = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]
T = TypeVar("T", bound=np.generic)

# The most that `distinct` accepts, which counts with 32 bits. `are_distinct` accepts as many ids.
MOST_IDS, MOST_SHARDS = 2**29, 2**16
# Most slots of an array that `distinct` and `are_distinct` keep for a later call. They keep one array, of up to 4 MiB,
# for each of the calls that ran at the same time.
_KEPT_SLOTS = 2**20


class Foreign(Protocol):
    """The part of cffi's FFI that is used here."""

    def from_buffer(self, kind: str, buffer: Any, require_writable: bool = False) -> Any:
        """Returns a pointer to an array's memory. Raises ValueError if it is not contiguous, or must be writable and is
        not.
        """


class Loops:
    """The loops of a library.

    library: has the functions of loops.h
    level:   the processor level that it was compiled for
    """

    def __init__(self, foreign: Foreign, library: Any, level: str) -> None:
        self._foreign, self._library, self.level = foreign, library, level
        self._spare: list[npt.NDArray[np.int32]] = []  # slots of `_free_slots`, all free, for the next call

    # -- rows --------------------------------------------------------------------------------------------------------

    def gather(self, records: Records, positions: Longs, out: Records) -> None:
        """Copies the records at `positions`, like np.take with mode="clip".

        Raises IndexError if there are no records.
        """
        _check_length(out, len(positions))
        _check_record(out, records.itemsize)
        self._done(len(records) > 0 or len(positions) == 0)
        self._library.ps_gather(
            *(self._bytes(records), len(records), records.itemsize),
            *(self._read(positions), len(positions), self._bytes(out, written=True)),
        )

    def rows_at(self, rows: Floats, positions: Longs, out: Floats) -> None:
        """Copies rows: rows [m, dim], positions [n], out [n, dim]. Raises IndexError for an index outside of `rows`."""
        _check_length(out, len(positions))
        _check_dim(out, rows.shape[1])
        self._done(
            self._library.ps_rows_at(
                *(self._floats(rows), *rows.shape, self._read(positions), len(positions)),
                self._floats(out, written=True),
            )
        )

    def scatter(self, records: Records, positions: Longs, values: Records) -> None:
        """Writes records at the indices `positions`. Raises IndexError for an index outside of the array."""
        _check_length(values, len(positions))
        _check_record(values, records.itemsize)
        self._done(
            self._library.ps_scatter(
                *(self._bytes(records, written=True), len(records), records.itemsize),
                *(self._read(positions), len(positions), self._bytes(values)),
            )
        )

    def are_finite(self, numbers: Floats) -> bool:
        """Returns whether all numbers are finite."""
        return bool(self._library.ps_are_finite(self._floats(_as_c_has_it(numbers)), numbers.size))

    def copy(self, numbers: Floats, out: Floats) -> bool:
        """Copies numbers. Returns whether all of them are finite."""
        if out.size != numbers.size:
            raise ValueError(f"expected room for {numbers.size} numbers, got {out.size}")
        numbers_at = self._floats(_as_c_has_it(numbers))
        return bool(self._library.ps_copy(numbers_at, numbers.size, self._floats(out, written=True)))

    # -- sums and steps ----------------------------------------------------------------------------------------------

    def add(self, sums: Floats, positions: Longs, values: Floats) -> None:
        """Adds rows in order: sums [m, dim], positions [n], values [n, dim]. Raises IndexError for an index outside of
        `sums`.
        """
        self._done(self._library.ps_add(*self._rows_and_values(sums, positions, values)))

    def sum(self, sums: Floats, positions: Longs, values: Floats) -> None:
        """Does the same as `add`, but `sums` is first set to zeros."""
        arguments = self._rows_and_values(sums, positions, values)
        self._done(self._library.ps_sum(*arguments, self._pointer("uint8_t[]", np.empty(len(sums), np.uint8))))

    def sgd(self, weights: Floats, positions: Longs, sums: Floats, count: float, lr: float) -> None:
        """Steps distinct rows with plain SGD: weights [capacity, dim], positions [n], sums [n, dim].

        count: the divisor of the mean
        """
        self._done(self._library.ps_sgd(*self._rows_and_values(weights, positions, sums), count, lr))

    def adagrad(
        self, weights: Floats, squares: Floats, positions: Longs, sums: Floats, count: float, lr: float, eps: float
    ) -> None:
        """Steps distinct rows with row-wise Adagrad: weights [capacity, dim], squares [capacity, 1], positions [n],
        sums [n, dim].

        count: the divisor of the mean
        """
        _check_length(squares, len(weights))
        _check_dim(squares, 1)
        rows, *more = self._rows_and_values(weights, positions, sums)
        self._done(self._library.ps_adagrad(rows, self._floats(squares, written=True), *more, count, lr, eps))

    def _rows_and_values(self, rows: Floats, positions: Longs, values: Floats) -> list[Any]:
        """Returns arguments: rows that are written, and values for some of them."""
        _check_length(values, len(positions))
        _check_dim(values, rows.shape[1])
        return [
            self._floats(rows, written=True),
            *rows.shape,
            self._read(positions),
            len(positions),
            self._floats(_as_c_has_it(values)),
        ]

    # -- ids ---------------------------------------------------------------------------------------------------------

    def find(self, slots: Slots, salt: int, ids_of_rows: Longs, ids: Longs) -> Longs:
        """Returns the row of each id in an index, -1 where it has none."""
        found = np.empty(len(ids), np.int64)
        index = self._slots(slots), len(slots) - 1, salt, self._longs(ids_of_rows), len(ids_of_rows)
        self._library.ps_find(*index, self._read(ids), len(ids), self._longs(found))
        return found

    def insert(self, slots: Slots, salt: int, ids: Longs, rows: Longs) -> int:
        """Inserts distinct ids with a row each into an index. Returns how many slots are used that were never used
        before.
        """
        _check_length(rows, len(ids))
        if len(ids) >= len(slots):
            raise ValueError(f"expected fewer ids than the {len(slots)} slots, got {len(ids)}")
        index = self._slots(slots, written=True), len(slots) - 1, salt
        return int(self._library.ps_insert(*index, self._read(ids), self._read(rows), len(ids)))

    def are_of_shard(self, ids: Longs, shards: int, shard: int) -> bool:
        """Returns whether all ids are of one shard, out of fewer than 2**32."""
        return bool(self._library.ps_are_of_shard(self._read(ids), len(ids), shards, shard))

    def are_distinct(self, ids: Longs, salt: int) -> bool:
        """Returns whether no id comes twice, out of at most MOST_IDS."""
        count = len(ids)
        if count > MOST_IDS:
            raise ValueError(f"expected up to {MOST_IDS} ids, got {count}")
        needed = 1 << (2 * count).bit_length()
        slots, taken = self._free_slots(needed), np.empty(count, np.int32)
        found = self._library.ps_are_distinct(
            *(self._read(ids), count, salt, self._pointer("int32_t[]", slots), needed - 1),
            self._pointer("int32_t[]", taken),
        )
        self._keep_slots(slots)
        return bool(found)

    def distinct(self, ids: Longs, salt: int, shards: int) -> tuple[Longs, Longs, Longs, Longs]:
        """Returns the fields of distinct.Distinct. Raises ValueError for more than MOST_IDS or MOST_SHARDS."""
        count = len(ids)
        if count > MOST_IDS or not 1 <= shards <= MOST_SHARDS:
            raise ValueError(f"expected up to {MOST_IDS} ids of up to {MOST_SHARDS} shards, got {count} of {shards}")
        needed = 1 << (2 * count).bit_length()
        slots = self._free_slots(needed)
        both, scratch, ends = np.empty((2, count), np.int64), np.empty((2, count), np.int64), np.empty(shards, np.int64)
        found, counts = both
        positions, met = np.empty(count, np.int64), scratch[0]
        many = self._library.ps_distinct(
            *(self._read(ids), count, salt, shards, self._pointer("int32_t[]", slots), needed - 1),
            self._pointer("int32_t[]", scratch[1].view(np.int32)),
            *(self._longs(each) for each in (met, found, positions, counts, ends)),
        )
        self._keep_slots(slots)
        return found[:many].copy(), positions, counts[:many].copy(), ends

    def _keep_slots(self, slots: npt.NDArray[np.int32]) -> None:
        """Keeps an array of slots, which are all free again, for a later call."""
        if len(slots) <= _KEPT_SLOTS:
            self._spare.append(slots)

    def _free_slots(self, count: int) -> npt.NDArray[np.int32]:
        """Returns an array of slots that are all free. The array of an earlier call is used again if it is large
        enough.
        """
        while self._spare:
            try:
                slots = self._spare.pop()
            except IndexError:  # another thread took them
                break
            if len(slots) >= count:
                return slots
        return np.full(count, -1, np.int32)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _read(self, array: Longs) -> Any:
        return self._longs(_as_c_has_it(array))

    def _longs(self, array: Longs) -> Any:
        return self._pointer("int64_t[]", array)

    def _slots(self, array: Slots, written: bool = False) -> Any:
        return self._pointer("uint64_t[]", array, written)

    def _floats(self, array: Floats, written: bool = False) -> Any:
        return self._pointer("float[]", array, written)

    def _bytes(self, array: Records, written: bool = False) -> Any:
        return self._foreign.from_buffer("char[]", array, require_writable=written)

    def _pointer(self, kind: str, array: npt.NDArray[Any], written: bool = False) -> Any:
        if array.dtype != _TYPES[kind]:
            raise TypeError(f"expected an array of {_TYPES[kind]}, got {array.dtype}")
        if not array.flags.aligned:
            raise ValueError("expected an array that is aligned")
        return self._foreign.from_buffer(kind, array, require_writable=written)

    def _done(self, is_inside: int) -> None:
        if not is_inside:
            raise IndexError("a position is outside of the array")


_TYPES = {
    "int64_t[]": np.dtype(np.int64),
    "uint64_t[]": np.dtype(np.uint64),
    "int32_t[]": np.dtype(np.int32),
    "uint8_t[]": np.dtype(np.uint8),
    "float[]": np.dtype(np.float32),
}


def check_complete(library: Any) -> None:
    """Raises AttributeError if a library lacks a function of loops.h: cffi looks functions up only when
    they are used.
    """
    _ = library.ps_gather, library.ps_rows_at, library.ps_scatter, library.ps_are_finite, library.ps_copy
    _ = library.ps_add, library.ps_sum, library.ps_sgd, library.ps_adagrad
    _ = library.ps_find, library.ps_insert, library.ps_distinct
    _ = library.ps_are_of_shard, library.ps_are_distinct


def _as_c_has_it(array: npt.NDArray[T]) -> npt.NDArray[T]:
    """Returns an array as C can read it: contiguous and aligned. An array from a message may be neither."""
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def _check_length(array: npt.NDArray[Any], length: int) -> None:
    if len(array) != length:
        raise ValueError(f"expected {length} elements, got {len(array)}")


def _check_record(array: Records, nbytes: int) -> None:
    if array.itemsize != nbytes:
        raise TypeError(f"expected records of {nbytes} bytes, got {array.itemsize}")


def _check_dim(array: npt.NDArray[Any], dim: int) -> None:
    if array.shape[1] != dim:
        raise ValueError(f"expected rows of {dim}, got {array.shape[1]}")
