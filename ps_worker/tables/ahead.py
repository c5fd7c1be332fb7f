"""The ids of a batch: those that a lookup asks for, and those that the next one is said to ask for.

    announced  by a loader that reads a batch ahead, or by the script: which ids the next batch looks up
    asked      with the next step: its push and the pull of these rows leave together
    used       by the lookups after the step. What they ask for besides is pulled then

What was asked for is for the clock of that step. The next step forgets it; where no lookup has used it, it is asked for
anew.
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
    """Ids as they were asked for, each once, the place of each of the batch among those, and how often each occurs.

    ends: where the ids of each shard end, among the distinct ones
    """

    flat: Ids
    ids: Ids
    places: npt.NDArray[np.int64]
    counts: Counts
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, flat: Ids, shards: int) -> Batch:
        """Returns a batch, in which each id is once.

        flat:   the ids as the script asked for them, with repeats
        shards: the number of shards that have the table; the distinct ids are ordered by their shard
        """
        return cls(flat, *distinct(flat, SALT, shards))

    @cached_property
    def sorted(self) -> tuple[Ids, npt.NDArray[np.int64]]:
        """The distinct ids in ascending order, and the place of each."""
        order = np.argsort(self.ids)
        return self.ids[order], order

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Returns the place of each id among the distinct ones, -1 for those that are not there."""
        ordered, places = self.sorted
        at = np.searchsorted(ordered, ids).clip(max=len(ordered) - 1)
        return np.where(ordered[at] == ids, places[at], -1)


@dataclass(eq=False)
class RowsAhead:
    """Rows of a table that are asked for before they are looked up.

    table: its place in the job's list
    out:   takes the distinct rows: [n, dim] float32, contiguous
    pulls: that bring them
    here:  all have come
    used:  a lookup has asked for them
    """

    table: int
    batch: Batch
    out: torch.Tensor
    pulls: list[Future[Any]] = field(default_factory=list)
    here: bool = False
    used: bool = False


class IdsOf:
    """What finds a table's ids in a batch. Copies of a module have it, a pickle has not: lambdas have none."""

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

    Raises InvalidRequest for what are no ids.
    """
    tensors = ids if isinstance(ids, list | tuple) else [ids]
    for each in tensors:
        if not isinstance(each, torch.Tensor) or each.dtype not in _ID_TYPES:
            got = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
            raise InvalidRequest(f"ids are a tensor of int64 or int32, got {got}")
    each = [tensor.detach().reshape(-1).to("cpu", torch.int64).numpy() for tensor in tensors]
    return each[0] if len(each) == 1 else np.concatenate([np.empty(0, np.int64), *each])
