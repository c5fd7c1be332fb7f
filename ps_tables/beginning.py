"""The rows that a table begins with because they were trained before its job, and their encoding in messages.

They travel in several messages: first those with rows, then those with ids that are not admitted yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_optimizers import state_kept

_WAITING = ("waiting.ids", "waiting.counts", "waiting.last")


def row_columns(optimizer: str, values: HyperParameters, dim: int, with_state: bool) -> dict[str, int]:
    """Returns the columns of rows by name, as in Table.snapshot, with the number of elements of each."""
    kept = state_kept(optimizer, values, dim) if with_state else {}
    return {"weights": dim, **{f"state.{optimizer}.{name}": numbers for name, numbers in kept.items()}}


def row_size(columns: Mapping[str, int]) -> int:
    """Returns the bytes of a row in a message. columns: see row_columns; empty: the bytes of an id that waits for
    admission
    """
    return 16 + 4 * sum(columns.values()) if columns else 8 * len(_WAITING)


def encoded(tensors: Mapping[str, torch.Tensor], columns: Mapping[str, int]) -> bytes:
    """Encodes rows, or ids that wait for admission. columns: of the rows; empty: the tensors are of waiting ids"""
    named = ("ids", "last", *columns) if columns else _WAITING
    types = {torch.int64: "<i8", torch.float32: "<f4"}
    return b"".join(tensors[name].numpy().astype(types[tensors[name].dtype], copy=False).tobytes() for name in named)


def decoded(payload: Buffer, count: int, columns: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Decodes `count` rows or ids: see `encoded`. Raises InvalidRequest for another number of bytes."""
    if len(payload) != count * row_size(columns):
        what = "rows" if columns else "ids that wait"
        raise InvalidRequest(
            f"expected {count * row_size(columns)} bytes ({count} {what} of {row_size(columns)}), got {len(payload)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    position = 0
    for name in ("ids", "last") if columns else _WAITING:
        tensors[name] = torch.from_numpy(np.frombuffer(payload, "<i8", count, position).astype(np.int64))
        position += 8 * count
    for name, numbers in columns.items():
        values = np.frombuffer(payload, "<f4", count * numbers, position).astype(np.float32)
        tensors[name] = torch.from_numpy(values).view(count, numbers)
        position += values.nbytes
    return tensors
