"""The rows of one table as files for other programs.

    safetensors  NAME.safetensors: a tensor each
    npy          NAME/ids.npy and so on: an array each, which numpy.load maps into memory
    parquet      NAME.parquet: a row each; needs pyarrow

All formats have the same names: ids [n] int64; weights [n, dim] float32; state.* of the optimizer, [n, dim] or [n, 1]
float32; and last [n] int64, the last update of the table that trained the row. Rows are in the order of their mixed
(hashed) ids.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from ps_protocol.errors import InvalidRequest

Rows = Mapping[str, torch.Tensor]  # the rows of a table, as Table.snapshot returns them

ROW_GROUP_BYTES = 2**26  # before compression; a Parquet file is written one group at a time


def check_format(name: str) -> None:
    """Raises InvalidRequest for a format that does not exist, or whose package is not installed."""
    if name not in WRITERS:
        raise InvalidRequest(f"the format of tables is one of {', '.join(WRITERS)}, got {name!r}")
    if name == "parquet":
        _pyarrow()


def write_rows(rows: Rows, folder: Path, name: str, form: str) -> None:
    """Writes the rows of a table. form: see `check_format`. Raises OSError or SafetensorError."""
    folder.mkdir(exist_ok=True)
    WRITERS[form](rows, folder / name.replace("/", "_"))


def save_tensors(tensors: Rows, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes tensors in the format of safetensors, in a file with the mode of any other new file.

    The library makes its file readable for its owner alone, whatever the umask. Raises OSError or SafetensorError.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # the mode that the umask gives, or that of the file that is replaced
    safetensors.torch.save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def _write_safetensors(rows: Rows, path: Path) -> None:
    save_tensors(rows, path.with_name(f"{path.name}.safetensors"))


def _write_npy(rows: Rows, path: Path) -> None:
    path.mkdir(exist_ok=True)
    for old in path.glob("*.npy"):  # files of an earlier export, which may have had other columns
        old.unlink()
    for name, tensor in rows.items():
        np.save(path / f"{name}.npy", tensor.numpy(), allow_pickle=False)


def _write_parquet(rows: Rows, path: Path) -> None:
    arrow, parquet = _pyarrow()
    # Ids that wait for admission are no rows: they have another length, and are left out.
    columns = {name: tensor for name, tensor in rows.items() if name != "version" and not name.startswith("waiting.")}
    made = {name: _column(arrow, tensor.contiguous().numpy()) for name, tensor in columns.items()}
    table = arrow.table(made).replace_schema_metadata({"version": str(int(rows["version"]))})
    row_bytes = sum(tensor[:1].nbytes for tensor in columns.values())
    # Dictionaries are for values that repeat: numbers of rows hardly do.
    parquet.write_table(
        table, f"{path}.parquet", row_group_size=max(1, ROW_GROUP_BYTES // max(1, row_bytes)), use_dictionary=False
    )


def _column(arrow: Any, values: np.ndarray[Any, Any]) -> Any:
    """Returns a column of numbers, or of lists of numbers of equal length, without a copy."""
    flat = arrow.array(values.reshape(-1))
    return flat if values.ndim == 1 else arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _pyarrow() -> tuple[Any, Any]:
    """Returns pyarrow and its Parquet. Raises InvalidRequest if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidRequest("Parquet needs the package pyarrow: pip install pyarrow") from None
    return pyarrow, pyarrow.parquet


WRITERS: Mapping[str, Callable[[Rows, Path], None]] = {
    "safetensors": _write_safetensors,
    "parquet": _write_parquet,
    "npy": _write_npy,
}
