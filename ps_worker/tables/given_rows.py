"""Vectors that a script gives a table: from tensors, arrays and files, which are read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import Ids
from ps_tables.contributions import RowValues

PIECE_BYTES = 4 * 2**20  # vectors are read in pieces of this size

_BUFFER = 2**20
_ID_TYPES = (np.dtype(np.int64), np.dtype(np.int32))
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RowFile:
    """A file of ids and vectors, for `Embedding.from_pretrained` and `Embedding.assign`, which read it piece by piece.

    The default names are those in the files that `ps-server export` writes for tables.

    Args:
        path: NAME.safetensors; NAME.parquet, which needs pyarrow; or NAME.npy, which contains the vectors alone.
        ids: The name of the ids in the file: [n] int64 or int32. With a .npy file, the path of another one that
            contains them.
        vectors: The name of the vectors: [n, dim], of any floating type; in Parquet a column of lists of length `dim`.
            With a .npy file it is ignored.
    """

    path: str | Path
    ids: str | Path = "ids"
    vectors: str = "weights"

    def __str__(self) -> str:
        return str(self.path)


class Vectors(Protocol):
    """The vectors of some ids. shape: (n, dim)"""

    ids: Ids
    shape: tuple[int, int]

    def pieces(self, rows: int) -> Iterator[torch.Tensor]:
        """Yields vectors in the order of the ids, `rows` at a time: [rows, dim] each."""


class GivenRows:
    """The rows that a script sets in one table, collected over several calls.

    If several calls give the same id, the vector of the last one counts.

    dim:     elements of a row
    without: an id whose vector is left out; None if there is no such id
    """

    def __init__(self, dim: int, without: int | None = None) -> None:
        self.dim, self._without = dim, without
        self._each: list[tuple[str, Vectors]] = []

    @classmethod
    def sized(cls, ids: Any, vectors: Any, without: int | None) -> GivenRows:
        """Returns rows for a table with rows as long as these vectors. Raises as `add`."""
        name, found = _opened(ids, vectors)
        given = cls(found.shape[1], without)
        given._add(name, found)
        return given

    def add(self, ids: Any, vectors: Any = None) -> None:
        """Adds vectors of a script. Raises InvalidRequest, and adds nothing, if they do not fit the table."""
        self._add(*_opened(ids, vectors))

    def _add(self, name: str, found: Vectors) -> None:
        count, dim = found.shape
        if len(found.ids) != count:
            raise InvalidRequest(f"{name}: expected a vector for each id, got {len(found.ids)} ids and {count} vectors")
        if dim != self.dim:
            raise InvalidRequest(f"{name}: expected vectors of {self.dim} elements, got {dim}")
        ordered = np.sort(found.ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise InvalidRequest(f"{name}: expected ids once each, got {twice[0]} twice")
        self._each.append((name, found))

    @classmethod
    def together(cls, each: Sequence[GivenRows]) -> GivenRows:
        """Joins several, in this order; all of one table."""
        given = cls(each[0].dim, each[0]._without)
        given._each = [call for one in each for call in one._each]
        return given

    def check(self) -> None:
        """Reads all vectors. Raises InvalidRequest for one that is not finite."""
        for _ in self.pieces():
            pass

    def ids(self) -> Ids:
        """Returns all ids, each once, in the order of `pieces`."""
        return np.concatenate([np.empty(0, np.int64), *(found.ids[kept] for _, found, kept in self._kept())])

    def pieces(self) -> Iterator[RowValues]:
        """Yields all rows, some MiB at a time. Raises InvalidRequest for a vector that is not finite."""
        rows = max(1, PIECE_BYTES // (4 * self.dim))
        for name, found, kept in self._kept():
            first = 0
            with _readable(name):
                for piece in found.pieces(rows):
                    some = slice(first, first + len(piece))
                    values = piece.to("cpu", torch.float32).contiguous()
                    finite = torch.isfinite(values).all(1)
                    if not bool(finite.all()):
                        raise InvalidRequest(
                            f"{name}: expected finite vectors of float32, and that of id "
                            f"{found.ids[some][~finite.numpy()][0]} is not"
                        )
                    first += len(piece)
                    here = kept[some]
                    if here.all():
                        yield RowValues(found.ids[some], values)
                    elif here.any():
                        yield RowValues(found.ids[some][here], values[torch.from_numpy(here)])

    def _kept(self) -> list[tuple[str, Vectors, npt.NDArray[np.bool_]]]:
        """Returns each call's vectors, and which of them count."""
        each: list[tuple[str, Vectors, npt.NDArray[np.bool_]]] = []
        later: Ids = np.empty(0, np.int64) if self._without is None else np.array([self._without])
        for number, (name, found) in reversed(list(enumerate(self._each))):
            each.append((name, found, ~np.isin(found.ids, later)))
            if number:
                later = np.concatenate([later, found.ids])
        return each[::-1]


class _Arrays:
    """Vectors in tensors or arrays, which may be mapped from a file."""

    def __init__(self, name: str, ids: Any, vectors: Any) -> None:
        self.ids = _ids(name, ids)
        if not isinstance(vectors, torch.Tensor | np.ndarray):
            raise InvalidRequest(f"{name}: expected vectors as a tensor or an array, got {type(vectors).__name__}")
        if vectors.ndim != 2:
            raise InvalidRequest(f"{name}: expected vectors of shape [n, dim], got {list(vectors.shape)}")
        self._vectors, self.shape = vectors, (int(vectors.shape[0]), int(vectors.shape[1]))
        _check_float(name, self._piece(0, 0).dtype)

    def pieces(self, rows: int) -> Iterator[torch.Tensor]:
        for first in range(0, self.shape[0], rows):
            yield self._piece(first, first + rows)

    def _piece(self, first: int, end: int) -> torch.Tensor:
        piece = self._vectors[first:end]
        return piece.detach() if isinstance(piece, torch.Tensor) else torch.from_numpy(np.array(piece))


class _Safetensors:
    """Vectors of a safetensors file."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        with safe_open(file.path, "pt") as opened:
            self.ids = _ids(str(file), opened.get_tensor(str(file.ids)))
            vectors = opened.get_slice(file.vectors)
            shape = vectors.get_shape()
            if len(shape) != 2:
                raise InvalidRequest(f"{file}: expected {file.vectors} of shape [n, dim], got {shape}")
            self.shape = shape[0], shape[1]
            _check_float(str(file), vectors[:0].dtype)

    def pieces(self, rows: int) -> Iterator[torch.Tensor]:
        with safe_open(self._file.path, "pt") as opened:
            vectors = opened.get_slice(self._file.vectors)
            for first in range(0, self.shape[0], rows):
                yield vectors[first : first + rows]


class _Parquet:
    """Vectors of a Parquet file."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        opened = _pyarrow_file(file)
        names = opened.schema_arrow.names
        for name in (str(file.ids), file.vectors):
            if name not in names:
                raise InvalidRequest(f"{file}: expected a column {name!r}, got {names[:20]}")
        ids = opened.read([str(file.ids)]).column(0)
        if ids.null_count:
            raise InvalidRequest(f"{file}: expected an id in each row, got {ids.null_count} rows without")
        self.ids = _ids(str(file), ids.to_numpy())
        self.shape = len(self.ids), 0
        first = next(self.pieces(1), None)
        self.shape = len(self.ids), 0 if first is None else int(first.shape[1])

    def pieces(self, rows: int) -> Iterator[torch.Tensor]:
        for batch in _pyarrow_file(self._file).iter_batches(batch_size=rows, columns=[self._file.vectors]):
            column = batch.column(0)
            kind = column.type
            if not hasattr(kind, "value_type") or not hasattr(column, "flatten"):
                raise InvalidRequest(f"{self._file}: expected {self._file.vectors} to be lists of numbers, got {kind}")
            fixed = getattr(kind, "list_size", None)
            lengths = {int(each) for each in np.diff(column.offsets)} if fixed is None else {fixed}
            if self.shape[1]:
                lengths.add(self.shape[1])
            if column.null_count or len(lengths) != 1:
                raise InvalidRequest(f"{self._file}: expected {self._file.vectors} to be lists that are all as long")
            values = torch.from_numpy(np.array(column.flatten().to_numpy(zero_copy_only=False)))
            _check_float(str(self._file), values.dtype)
            yield values.view(len(column), -1)


def _opened(ids: Any, vectors: Any) -> tuple[str, Vectors]:
    """Returns the name of the vectors for error messages, and the vectors, which are given or in a RowFile.

    Raises InvalidRequest for anything else, and for a file that cannot be read.
    """
    if not isinstance(ids, RowFile):
        if vectors is None:
            raise InvalidRequest(f"expected ids and vectors, or a ps_torch.RowFile, got {type(ids).__name__}")
        return "vectors", _Arrays("vectors", ids, vectors)
    if vectors is not None:
        raise InvalidRequest("a ps_torch.RowFile has ids and vectors: leave the vectors out")
    file, suffix = ids, Path(ids.path).suffix
    with _readable(str(file)):
        if suffix == ".safetensors":
            return str(file), _Safetensors(file)
        if suffix == ".parquet":
            return str(file), _Parquet(file)
        if suffix == ".npy":
            numbers = np.load(file.ids, allow_pickle=False)
            return str(file), _Arrays(str(file), numbers, np.load(file.path, mmap_mode="r", allow_pickle=False))
    raise InvalidRequest(f"{file}: expected a file NAME.safetensors, NAME.parquet or NAME.npy")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raises InvalidRequest if a file cannot be read."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{name} cannot be read: {error}") from None


def _ids(name: str, ids: Any) -> Ids:
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(array, np.ndarray) or array.dtype not in _ID_TYPES or array.ndim != 1:
        got = f"{list(array.shape)} of {array.dtype}" if isinstance(array, np.ndarray) else type(ids).__name__
        raise InvalidRequest(f"{name}: expected ids of shape [n], of int64 or int32, got {got}")
    copied: Ids = array.astype(np.int64)  # the script may write its own in place
    return copied


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise InvalidRequest(f"{name}: expected vectors of a floating type, got {dtype}")


def _pyarrow_file(file: RowFile) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InvalidRequest("Parquet needs the package pyarrow: pip install pyarrow") from None
    # A buffer: otherwise all of a row group is read at once, which may be all of the file.
    return parquet.ParquetFile(file.path, buffer_size=_BUFFER)
