"""The ids of a batch, and the announced ids of the next one, whose rows are pulled ahead.

    announced  A loader that reads a batch ahead, or the script, announces the ids of the next batch.
    asked      The step of the present batch sends its push, and with it asks for the rows of the announced ids.
    used       The lookups of the next batch use these rows, and pull only the rows of ids that were not announced.

The rows are those of the clock after the step that asked for them. The step after it drops them; if no lookup has used
them, it pulls them again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import Ids
from ps_tables.contributions import Counts
from ps_tables.distinct import distinct

SALT = int.from_bytes(os.urandom(8), "little", signed=True)  # so that ids that share a slot cannot be chosen

_ID_TYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Batch:
    """The ids of a lookup: as given; distinct; the index of each given id among the distinct ones; and how often each
    occurs.

    ends: the end of each shard's ids among the distinct ones
    """

    flat: Ids
    ids: Ids
    places: npt.NDArray[np.int64]
    counts: Counts
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, flat: Ids, shards: int) -> Batch:
        """Returns the batch of some ids.

        flat:   the ids of the lookup, with repeats
        shards: the number of shards that have the table; the distinct ids are ordered by their shard
        """
        return cls(flat, *distinct(flat, SALT, shards))

    @cached_property
    def sorted(self) -> tuple[Ids, npt.NDArray[np.int64]]:
        """The distinct ids in ascending order, and their indices."""
        order = np.argsort(self.ids)
        return self.ids[order], order

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Returns the index of each id among the distinct ones; -1 for unknown ids."""
        ordered, places = self.sorted
        at = np.searchsorted(ordered, ids).clip(max=len(ordered) - 1)
        return np.where(ordered[at] == ids, places[at], -1)


@dataclass(eq=False)
class RowsAhead:
    """Rows of a table that are pulled before they are looked up.

    table: the table's index in the job's list
    out:   memory for the distinct rows: [n, dim] float32, contiguous
    pulls: the pulls of these rows
    here:  all rows have come
    used:  a lookup has used them
    ends:  the pulls end the step, which counts them with its own
    """

    table: int
    batch: Batch
    out: torch.Tensor
    pulls: list[Future[Any]] = field(default_factory=list)
    here: bool = False
    used: bool = False
    ends: bool = False


class IdsOf:
    """The function that finds a table's ids in a batch. Copies of a module keep it; a pickle does not, since lambdas
    cannot be pickled.
    """

    def __init__(self, of: Callable[[Any], Any] | None = None) -> None:
        if of is not None and not callable(of):
            raise InvalidRequest(f"ids must be a function from a batch to ids, got {type(of).__name__}")
        self.of = of

    def __deepcopy__(self, memo: dict[int, Any]) -> IdsOf:
        return self

    def __reduce__(self) -> Any:
        return IdsOf, ()


def flat_ids(ids: Any) -> Ids:
    """Returns ids in one dimension, on the CPU: of a tensor, or of several, one after the other.

    Raises InvalidRequest for tensors of another type.
    """
    tensors = ids if isinstance(ids, list | tuple) else [ids]
    for each in tensors:
        if not isinstance(each, torch.Tensor) or each.dtype not in _ID_TYPES:
            got = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
            raise InvalidRequest(f"ids are a tensor of int64 or int32, got {got}")
    each = [tensor.detach().reshape(-1).to("cpu", torch.int64).numpy() for tensor in tensors]
    return each[0] if len(each) == 1 else np.concatenate([np.empty(0, np.int64), *each])
