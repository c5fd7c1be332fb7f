"""The rows of one module in this process, and their steps; a replica of them on each rank of DDP.

In DDP a step sums the gradients of all ranks, row by row in the order of ranks, and divides by the number of ranks, as
shards do in sync. So all replicas stay equal to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizer_state import tensors_kept
from ps_protocol.row_ids import Ids
from ps_protocol.row_optimizers import TORCH_OPTIMIZERS
from ps_protocol.tables import MAX_ROWS, Initializer, TableSpec, validate_table
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.initial import initial_rows
from ps_tables.saved import saved_rows
from ps_tables.sizes import record_bytes, rows_within
from ps_tables.table import Table
from ps_worker.tables.ahead import SALT, Batch
from ps_worker.tables.assigned import Assigned
from ps_worker.tables.given_rows import GivenRows
from ps_worker.tables.table_optimizers import TableOptimizer

# Exchanges values between ranks; returns them by rank. Second argument: the call's name, for messages.
Exchange = Callable[[bytes, str], Mapping[int, bytes]]


@dataclass(frozen=True)
class TableSettings:
    """The settings of a module's table; see Embedding."""

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
    """The rows of one module, in this process or on servers.

    name:     the module's name in its model, for messages; set when it is prepared
    exchange: in ddp, exchanges values between the ranks; None if this process steps alone
    shards:   the number of shards that share the rows
    """

    name: str
    exchange: Exchange | None
    shards: int

    def __len__(self) -> int:
        """Returns the number of rows."""

    def pull(self, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous. ends: as in Batch"""

    def looked_ahead(self, flat: Ids) -> tuple[Batch, torch.Tensor] | None:
        """Returns the ids and rows of a lookup if exactly these ids were announced; None: pull them."""

    def announce(self, flat: Ids | None) -> None:
        """Records the ids that the batch after the next step looks up; None: unknown."""

    def step(self, optimizer: str, values: HyperParameters, own: RowGradients | None) -> None:
        """Makes an update.

        optimizer: a name of row_optimizers.ROW_OPTIMIZERS
        own:       this process's gradients; None if it has none
        """

    def assign(self, given: GivenRows, lazily: bool) -> None:
        """Sets rows. lazily: they may be read later. Raises InvalidRequest, and sets none, for vectors that are not
        finite; if they are read later, the call that reads them raises it.
        """

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Returns a copy of all rows with their state, in the form of Table.snapshot; empty without a table."""

    def state(self) -> bytes:
        """Returns all rows with their state, as the bytes of a safetensors file."""

    def load(self, state: bytes) -> None:
        """Replaces all rows by those that another `state` has returned. Raises InvalidRequest for other bytes."""

    def share(self, exchange: Exchange | None, rank: int) -> None:
        """Begins to step together with other ranks, all with the rows of rank 0.

        exchange: exchanges values between the ranks; None if this process steps alone
        """


class LocalRows:
    """The rows of one module in this process.

    seed:     of rows without training: the settings' seed, or one of torch's random numbers
    name:     the module's name in its model, for messages; set when it is prepared
    exchange: in ddp, exchanges values between the ranks; None if this process steps alone
    dim:      elements of a row
    """

    def __init__(self, settings: TableSettings, dim: int) -> None:
        seed = settings.seed
        self.seed = int(torch.randint(2**62, ())) if seed is None else seed
        self.name = ""
        self.exchange: Exchange | None = None
        self.shards = 1
        self.dim = dim
        self._settings = settings
        # The table's optimizer, and the names of its state for a row
        self._kind: tuple[str, tuple[str, ...]] = ("SGD", ())
        self._table: Table | None = None  # made when there are rows
        # Rows of a state_dict, until the first step determines the optimizer
        self._loaded: dict[str, torch.Tensor] = {}
        self._given: list[GivenRows] = []  # vectors that nothing has read yet: there is no table then
        self._assigned = Assigned()  # in ddp
        self._spec()

    def _spec(self) -> TableSpec:
        return self._settings.spec(self.name, self.dim, self.seed)

    def __len__(self) -> int:
        table = self._read_table()
        return 0 if table is None else len(table)

    @property
    def are_some(self) -> bool:
        """Whether the table has a row or was given one. Reads no row."""
        return bool(self._given) or bool(self._table)

    def pull(self, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous. ends: not used"""
        table = self._read_table()
        if table is None:
            out.copy_(initial_rows(self._spec().initializer, ids, self.dim))
        else:
            table.pull(ids, out)
        self._assigned.cover(ids, out)

    def assign(self, given: GivenRows, lazily: bool) -> None:
        """Sets rows: now, or in ddp with the next step of all ranks.

        lazily: they may be read when rows are needed, if there are none yet
        """
        if lazily and self._table is None and self.exchange is None:
            self._given.append(given)
            return
        given.check()
        if self.exchange is not None:
            for rows in given.pieces():
                self._assigned.add(RowValues(rows.ids, rows.values.clone()))
            return
        self._read_table()
        self._set(given)

    def _read_table(self) -> Table | None:
        """Returns the table, after it has read all given vectors; None if it has no row."""
        if self._given:
            given = GivenRows.together(self._given)
            given.check()
            self._set(given)
            self._given = []
        return self._table

    def _set(self, given: GivenRows) -> None:
        """Sets rows of which all are finite."""
        table = self._table
        if table is None:
            table = self._made(self._spec(), "SGD", {"lr": 0.0})  # to be read, until a step names its optimizer
        if len(given.ids()) > table.capacity:
            raise LimitExceeded(
                f"table {self.name!r} has room for {table.capacity} rows, by max_rows or by memory, and "
                f"{len(given.ids())} are to be set"
            )
        self._table = table
        for rows in given.pieces():
            table.assign(rows, max(1, table.version))
        if self._loaded:
            own = self._settings.optimizer
            first_sum = own.values.get("initial_accumulator_value") if own is not None else None
            first_sum = first_sum if isinstance(first_sum, float) else 0.0
            self._loaded = _with_states(table.snapshot(), self._loaded, given.ids(), first_sum)

    def looked_ahead(self, flat: Ids) -> None:
        """Returns None: rows in this process need not be pulled ahead."""

    def announce(self, flat: Ids | None) -> None:
        """Does nothing: rows in this process need not be pulled ahead."""

    def step(self, optimizer: str, values: HyperParameters, own: RowGradients | None) -> None:
        """Makes an update, unless no rank has a gradient.

        optimizer: a name of row_optimizers.ROW_OPTIMIZERS; if it has changed, rows begin without a state
        own:       this rank's gradients; None if it has none
        """
        assigned: list[RowValues] = []
        if self.exchange is None:
            contributions = [own] if own is not None else []
            count = 1
        else:
            every = self.exchange(_encoded(own, self._assigned.take()), f"the step of table {self.name!r}")
            parts = [_decoded(every[rank]) for rank in sorted(every) if every[rank]]
            contributions = [gradients for gradients, _ in parts if gradients is not None]
            assigned = [rows for _, rows in parts if rows is not None]
            count = len(every)
        if contributions or assigned:
            table = self._table_with(optimizer, values)
            version = table.version + 1
            for rows in reversed(assigned):  # the lowest rank's count, so they come last
                table.assign(rows, version)
            update = RowGradients.union(contributions) if contributions else RowGradients.none(self.dim)
            table.apply(update, count, version, values)

    def _table_with(self, optimizer: str, values: HyperParameters) -> Table:
        kept = tensors_kept(optimizer, values) if optimizer in TORCH_OPTIMIZERS else ()
        self._read_table()
        if self._table is None or self._loaded or self._kind != (optimizer, kept):
            table = self._made(self._spec(), optimizer, values)
            rows = self._loaded or (self._table.snapshot() if self._table is not None else {})
            if rows:
                table.restore(rows)
            self._table, self._kind, self._loaded = table, (optimizer, kept), {}
        return self._table

    def _made(self, spec: TableSpec, optimizer: str, values: HyperParameters) -> Table:
        """Returns an empty table. Without `max_rows` it has as many rows as fit into this machine's memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        record = record_bytes(spec, optimizer, values)
        capacity = min(MAX_ROWS, spec.max_rows) or rows_within(memory, record, spec.admit_after > 1)
        return Table(spec, optimizer, values, capacity, SALT)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Returns a copy of all rows with their state, in the form of Table.snapshot; empty without a table."""
        table = self._read_table()
        return self._loaded or ({} if table is None else table.snapshot())

    @property
    def unread(self) -> GivenRows | None:
        """The vectors that the table begins with, if nothing has read them yet and there are no other rows; None
        otherwise.
        """
        return GivenRows.together(self._given) if self._given else None

    def state(self) -> bytes:
        """Returns all rows with their state, as the bytes of a safetensors file."""
        return saved_rows(self.snapshot(), self.seed)

    def load(self, state: bytes) -> None:
        """Replaces all rows by those that another `state` has returned. Raises InvalidRequest for other bytes."""
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
        self._given, self._assigned = [], Assigned()

    def forget(self) -> None:
        """Drops all rows: the servers have them now."""
        self._table, self._loaded, self._kind = None, {}, ("SGD", ())
        self._given = []

    def share(self, exchange: Exchange | None, rank: int) -> None:
        """Begins to step together with other ranks, all with the rows of rank 0.

        exchange: exchanges values between the ranks; None if this process steps alone
        """
        self.exchange = exchange
        if exchange is not None:
            rows = exchange(self.state() if rank == 0 else b"", f"the rows of table {self.name!r}")[0]
            if rank != 0:
                self.load(rows)

    def like(self, state: bytes) -> LocalRows:
        """Returns rows with the same settings, and with the rows of a `state`, for this process alone."""
        return _again(self._settings, self.dim, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        return self.like(self.state())

    def __reduce__(self) -> Any:
        return _again, (self._settings, self.dim, self.state())


def _again(settings: TableSettings, dim: int, state: bytes) -> LocalRows:
    """Returns a copy that shares no rows with the original and is this process's alone."""
    rows = LocalRows(settings, dim)
    rows.load(state)
    return rows


def _encoded(gradients: RowGradients | None, assigned: RowValues | None) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    if gradients is not None:
        arrays = {"ids": torch.from_numpy(gradients.ids), "counts": torch.from_numpy(gradients.counts)}
        tensors |= {**arrays, "gradients": gradients.gradients}
    if assigned is not None:
        tensors |= {"assigned.ids": torch.from_numpy(assigned.ids), "assigned.values": assigned.values}
    return safetensors.torch.save(tensors) if tensors else b""


def _decoded(data: bytes) -> tuple[RowGradients | None, RowValues | None]:
    tensors = safetensors.torch.load(data)
    gradients, assigned = None, None
    if "ids" in tensors:
        gradients = RowGradients(tensors["ids"].numpy(), tensors["counts"].numpy(), tensors["gradients"])
    if "assigned.ids" in tensors:
        assigned = RowValues(tensors["assigned.ids"].numpy(), tensors["assigned.values"])
    return gradients, assigned


def _with_states(
    rows: dict[str, torch.Tensor], before: Mapping[str, torch.Tensor], anew: Ids, first_sum: float
) -> dict[str, torch.Tensor]:
    """Returns a table's rows with their earlier optimizer states. Rows in `anew`, and new rows, begin without state.

    rows, before: see Table.snapshot
    first_sum:    the initial value of the optimizer's sums
    """
    ids, old = rows["ids"].numpy(), before["ids"].numpy()
    order = np.argsort(old)
    at = order[np.searchsorted(old[order], ids).clip(max=len(old) - 1)] if len(old) else np.zeros(len(ids), np.int64)
    kept = torch.from_numpy((old[at] == ids) & ~np.isin(ids, anew) if len(old) else np.zeros(len(ids), bool))
    states = {}
    for name, column in before.items():
        if name.startswith("state."):
            first = first_sum if name.endswith(".sum") else 0.0
            states[name] = torch.full((len(ids), column.shape[1]), first, dtype=torch.float32, device="cpu")
            states[name][kept] = column[torch.from_numpy(at)[kept]]
    return {**rows, **states}
