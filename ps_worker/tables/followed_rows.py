"""The rows of a module in a process that does not train: a copy in memory, which follows a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import torch

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_ids import Ids
from ps_tables.contributions import RowGradients
from ps_tables.saved import saved_rows
from ps_worker.tables.given_rows import GivenRows
from ps_worker.tables.own_rows import Exchange, LocalRows


class FollowedTable(Protocol):
    """A copy of a job's whole table, which follows training."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    @property
    def version(self) -> int:
        """The number of updates that all rows contain at least."""

    @property
    def seed(self) -> int:
        """The seed of rows that are not trained yet."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows: [...] ids to [..., dim] float32, on the CPU."""

    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids that have a row, [n] int64, and their rows, [n, dim] float32: a copy."""


class FollowedRows:
    """The rows of one module, in the copy of a feed. They replace its LocalRows; only training changes them.

    before: the module's LocalRows, without rows
    """

    exchange: Exchange | None = None
    shards = 1  # a lookup need not sort its ids by shard

    def __init__(self, name: str, feed: FollowedTable, before: LocalRows) -> None:
        self.name, self.feed, self.before = name, feed, before

    def __len__(self) -> int:
        return len(self.feed)

    def pull(self, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous. ends: not used"""
        rows = self.feed.rows(torch.from_numpy(ids))
        if rows.shape != out.shape:
            raise InvalidRequest(
                f"table {self.name!r}: rows have {out.shape[1]} elements in the model, and {rows.shape[1]} in the "
                "job's present run"
            )
        out.copy_(rows)

    def looked_ahead(self, flat: Ids) -> None:
        """Returns None: rows in this process need not be pulled ahead."""

    def announce(self, flat: Ids | None) -> None:
        """Does nothing: rows in this process need not be pulled ahead."""

    def step(self, optimizer: str, values: HyperParameters, own: RowGradients | None) -> None:
        """Raises Unsupported."""
        self._refuse("no optimizer of this process steps them")

    def assign(self, given: GivenRows, lazily: bool) -> None:
        """Raises Unsupported."""
        self._refuse("a worker of the job may assign rows")

    def load(self, state: bytes) -> None:
        """Raises Unsupported."""
        self._refuse("load_state_dict cannot replace them")

    def share(self, exchange: Exchange | None, rank: int) -> None:
        """Raises Unsupported."""
        self._refuse("train another model, or a copy of this one")

    def _refuse(self, why: str) -> NoReturn:
        raise Unsupported(f"the rows of table {self.name!r} are those of a job that this model follows: {why}")

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Returns a copy of all rows in the form of Table.snapshot, without optimizer state.

        A feed has no version for each row: all count as trained by the last update.
        """
        ids, rows = self.feed.all_rows()
        version = max(1, self.feed.version)
        return {
            "ids": ids,
            "weights": rows,
            "last": torch.full((len(ids),), version, dtype=torch.int64),
            "version": torch.tensor([version]),
        }

    def state(self) -> bytes:
        """Returns all rows as the bytes of a safetensors file, without optimizer state."""
        return saved_rows(self.snapshot(), self.feed.seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        return self.before.like(self.state())

    def __reduce__(self) -> Any:
        return self.__deepcopy__({}).__reduce__()
