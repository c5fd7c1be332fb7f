"""The rows of one module in this process, and their steps; a replica of them on each rank of DDP.

In DDP a step adds up the gradients of all ranks, row by row in the order of ranks, and divides by how many there are:
what the shards do in sync. So all replicas stay alike to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizer_state import tensors_kept
from ps_protocol.row_ids import Ids
from ps_protocol.row_optimizers import TORCH_OPTIMIZERS
from ps_protocol.tables import MAX_ROWS, Initializer, TableSpec, validate_table
from ps_tables.contributions import RowGradients
from ps_tables.initial import initial_rows
from ps_tables.saved import saved_rows
from ps_tables.sizes import record_bytes, rows_within
from ps_tables.table import Table
from ps_worker.tables.ahead import SALT, Batch
from ps_worker.tables.optimizers import TableOptimizer

# Returns what all ranks gave, by rank. what: the call, for messages
Exchange = Callable[[bytes, str], Mapping[int, bytes]]


@dataclass(frozen=True)
class TableSettings:
    """What a module asks of its table; see Embedding."""

    optimizer: TableOptimizer | None = None
    initial: str = "normal"
    scale: float = 1.0
    seed: int | None = None
    admit_after: int = 0
    expire_after: int = 0
    max_rows: int = 0
    lazy_decay: bool = False

    def spec(self, name: str, dim: int, seed: int) -> TableSpec:
        """Returns the table that they describe. Raises InvalidRequest for settings that no table can have."""
        start = Initializer(self.initial, self.scale, seed)
        spec = TableSpec(name, dim, start, self.admit_after, self.expire_after, self.max_rows)
        validate_table(spec)
        return spec


class Rows(Protocol):
    """The rows of one module, wherever they are.

    name:     of the module in its model, for messages; once it is prepared
    exchange: in ddp, what the ranks tell each other with; None: a step is this process's alone
    shards:   how many have a part of the rows each
    """

    name: str
    exchange: Exchange | None
    shards: int

    def __len__(self) -> int:
        """How many rows there are."""

    def pull(self, ids: Ids, out: torch.Tensor) -> None:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous."""

    def looked_ahead(self, flat: Ids) -> tuple[Batch, torch.Tensor] | None:
        """Returns the ids and rows of a lookup of exactly the ids that were announced; None: they are to be read."""

    def announce(self, flat: Ids | None) -> None:
        """Takes the ids that the batch after the next step looks up; None: they are not known."""

    def step(self, optimizer: str, values: HyperParameters, own: RowGradients | None) -> None:
        """Makes an update.

        optimizer: a name of row_optimizers.ROW_OPTIMIZERS
        own:       this process's gradients; None: it has none
        """

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Returns a copy of all rows and what belongs to them, as Table.snapshot does; nothing of a table without."""

    def state(self) -> bytes:
        """Returns all rows and what belongs to them: a safetensors file."""

    def load(self, state: bytes) -> None:
        """Has the rows that another one's `state` returned, and no others. Raises InvalidRequest for what is none."""

    def share(self, exchange: Exchange | None, rank: int) -> None:
        """Begins to step together with other ranks, with the rows of rank 0 on all; None: this process is alone."""


class LocalRows:
    """The rows of one module in this process.

    seed: of rows without training; that of the settings, or one of torch's random numbers
    name: of the module in its model, for messages; once it is prepared
    exchange: in ddp, what the ranks tell each other with; None: this process is alone
    dim: elements of a row
    """

    def __init__(self, settings: TableSettings, dim: int) -> None:
        seed = settings.seed
        self.seed = int(torch.randint(2**62, ())) if seed is None else seed
        self.name = ""
        self.exchange: Exchange | None = None
        self.shards = 1
        self.dim = dim
        self._settings = settings
        self._kind: tuple[str, tuple[str, ...]] = ("SGD", ())  # the optimizer of the table, and what it keeps for a row
        self._table: Table | None = None  # made when there are rows
        self._loaded: dict[str, torch.Tensor] = {}  # rows of a state_dict, until a step says with which optimizer
        self._spec()

    def _spec(self) -> TableSpec:
        return self._settings.spec(self.name, self.dim, self.seed)

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    def pull(self, ids: Ids, out: torch.Tensor) -> None:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous."""
        if self._table is None:
            out.copy_(initial_rows(self._spec().initializer, ids, self.dim))
        else:
            self._table.pull(ids, out)

    def looked_ahead(self, flat: Ids) -> None:
        """Returns None: rows of this process need not be looked ahead for."""

    def announce(self, flat: Ids | None) -> None:
        """Does nothing, likewise."""

    def step(self, optimizer: str, values: HyperParameters, own: RowGradients | None) -> None:
        """Makes an update; none where no rank has a gradient.

        optimizer: a name of row_optimizers.ROW_OPTIMIZERS; where it is another one than before, rows begin
                   without a state
        own:       this rank's gradients; None: it has none
        """
        if self.exchange is None:
            contributions = [own] if own is not None else []
            count = 1
        else:
            every = self.exchange(_encoded(own), f"the step of table {self.name!r}")
            contributions = [_decoded(every[rank]) for rank in sorted(every) if every[rank]]
            count = len(every)
        if contributions:
            table = self._table_with(optimizer, values)
            table.apply(RowGradients.union(contributions), count, table.version + 1, values)

    def _table_with(self, optimizer: str, values: HyperParameters) -> Table:
        kept = tensors_kept(optimizer, values) if optimizer in TORCH_OPTIMIZERS else ()
        if self._table is None or self._loaded or self._kind != (optimizer, kept):
            table = self._made(self._spec(), optimizer, values)
            rows = self._loaded or (self._table.snapshot() if self._table is not None else {})
            if rows:
                table.restore(rows)
            self._table, self._kind, self._loaded = table, (optimizer, kept), {}
        return self._table

    def _made(self, spec: TableSpec, optimizer: str, values: HyperParameters) -> Table:
        """Returns an empty table, of as many rows as this machine's memory holds if its settings do not say."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        record = record_bytes(spec, optimizer, values)
        capacity = min(MAX_ROWS, spec.max_rows) or rows_within(memory, record, spec.admit_after > 1)
        return Table(spec, optimizer, values, capacity, SALT)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Returns a copy of all rows and what belongs to them, as Table.snapshot does; nothing of a table without."""
        return self._loaded or ({} if self._table is None else self._table.snapshot())

    def state(self) -> bytes:
        """Returns all rows and what belongs to them: a safetensors file."""
        return saved_rows(self.snapshot(), self.seed)

    def load(self, state: bytes) -> None:
        """Has the rows that another one's `state` returned, and no others. Raises InvalidRequest for what is none."""
        try:
            rows = safetensors.torch.load(state)
            seed = int(rows.pop("seed")) % 2**64
        except (SafetensorError, KeyError) as error:
            raise InvalidRequest(f"table {self.name!r}: expected rows as state_dict has them, got {error}") from None
        table = None
        if rows:
            spec = self._settings.spec(self.name, self.dim, seed)
            table = self._made(spec, "SGD", {"lr": 0.0})  # to be read, until a step names its optimizer
            table.restore(rows)
        self.seed, self._table, self._loaded, self._kind = seed, table, rows, ("SGD", ())

    def forget(self) -> None:
        """Has no row any more: others have them."""
        self._table, self._loaded, self._kind = None, {}, ("SGD", ())

    def share(self, exchange: Exchange | None, rank: int) -> None:
        """Begins to step together with other ranks, with the rows of rank 0 on all; None: this process is alone."""
        self.exchange = exchange
        if exchange is not None:
            rows = exchange(self.state() if rank == 0 else b"", f"the rows of table {self.name!r}")[0]
            if rank != 0:
                self.load(rows)

    def like(self, state: bytes) -> LocalRows:
        """Returns rows of the same settings, with those that a `state` returned, of this process alone."""
        return _again(self._settings, self.dim, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        return self.like(self.state())

    def __reduce__(self) -> Any:
        return _again, (self._settings, self.dim, self.state())


def _again(settings: TableSettings, dim: int, state: bytes) -> LocalRows:
    """Returns a copy with rows of its own, of this process alone."""
    rows = LocalRows(settings, dim)
    rows.load(state)
    return rows


def _encoded(gradients: RowGradients | None) -> bytes:
    if gradients is None:
        return b""
    arrays = {"ids": torch.from_numpy(gradients.ids), "counts": torch.from_numpy(gradients.counts)}
    return safetensors.torch.save({**arrays, "gradients": gradients.gradients})


def _decoded(data: bytes) -> RowGradients:
    tensors = safetensors.torch.load(data)
    return RowGradients(tensors["ids"].numpy(), tensors["counts"].numpy(), tensors["gradients"])
