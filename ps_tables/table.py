"""A table: its rows are created, trained, read, and removed when they expire.

    pull     reads rows; an id without a row has its initial value. It changes nothing
    apply    makes one update: admits ids, creates rows for them, and steps the rows of the update
    changes  returns what changed after a version, for readers. It changes nothing
    copy     copies the table, or what changed after a version, for a checkpoint, while the table is trained

A row expires when `expire_after` updates have passed since the last one that trained it: from then on its id has no
row. Expiry is decided at versions that are a multiple of a period. It depends neither on reads nor on the other rows of
the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.row_ids import Ids, chance_order, mix
from ps_protocol.tables import TableSpec
from ps_tables.candidates import Candidates
from ps_tables.changed_rows import RowWalk
from ps_tables.cold import ColdFile, WithFile
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.copies import CopiedColumn, EntriesCopy, TableCopy
from ps_tables.entries import Entries
from ps_tables.initial import initial_rows
from ps_tables.optimizing_rows import row_optimizer
from ps_tables.positions import InMemory, RowPositions
from ps_tables.removed import RemovedIds
from ps_tables.row_arrays import RowArray, RowNumbers

_ASSIGNED = 2**16  # rows that are set at a time
PERIODS = 16  # expiry is decided so often in `expire_after` updates: a row may stay for one such period longer


@dataclass(frozen=True)
class Beyond:
    """The file for the rows of a table that do not fit into memory, and the most rows in memory."""

    file: ColdFile
    in_memory: int


@dataclass(frozen=True)
class Applied:
    """The result of one update, in numbers of rows.

    stepped:  rows in the update
    admitted: of these, rows that were created
    waiting:  ids that have not occurred often enough to become rows: their gradients are dropped
    no_room:  ids for whose rows the table has no room: their gradients are dropped
    expired:  rows that were not trained for too long
    evicted:  rows that were removed to make room
    """

    stepped: int
    admitted: int
    waiting: int = 0
    no_room: int = 0
    expired: int = 0
    evicted: int = 0


@dataclass(frozen=True)
class InFile:
    """The rows of a table that are in its file.

    rows:   their number
    nbytes: bytes of the file
    read:   how many rows were read from it since the table was made
    """

    rows: int = 0
    nbytes: int = 0
    read: int = 0


class Table:
    """The rows of one table on one shard. For one caller at a time.

    optimizer: a name of row_optimizers.ROW_OPTIMIZERS
    values:    its hyper-parameters
    capacity:  the most rows here; beyond it, those trained longest ago are removed
    salt:      see Index
    beyond:    where rows lie that do not fit into memory; None if all fit
    """

    def __init__(
        self,
        spec: TableSpec,
        optimizer: str,
        values: HyperParameters,
        capacity: int,
        salt: int = 0,
        beyond: Beyond | None = None,
    ) -> None:
        self.spec, self._capacity = spec, capacity
        self._name, self._values = optimizer, dict(values)
        self._rows = Entries(capacity, salt)
        self._weights = RowArray(capacity, spec.dim)
        self._optimizer = row_optimizer(optimizer, values, capacity, spec.dim)
        arrays = self._in_memory()
        self._positions: RowPositions = InMemory(arrays, capacity)
        if beyond is not None:
            self._positions = WithFile(arrays, capacity, beyond.in_memory, beyond.file)
        self._candidates = Candidates(spec.admit_after, capacity, salt) if spec.admit_after > 1 else None
        self._removed = RemovedIds(capacity)
        self._copy: TableCopy | None = None  # the last copy that was begun
        self.version = 0  # updates made

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including rows that have expired and are not reused yet."""
        rows = self._positions.memory_rows * 4 * sum(array.dim for array in self._in_memory().values())
        waiting = self._candidates.nbytes if self._candidates is not None else 0
        return self._rows.nbytes + self._positions.nbytes + rows + waiting + self._removed.nbytes

    @property
    def in_file(self) -> InFile:
        """The rows in the file, and how many were read from it."""
        positions = self._positions
        return InFile(positions.file_rows, positions.file_bytes, positions.read_from_file)

    def pull(self, ids: Ids, out: torch.Tensor) -> int:
        """Reads rows: ids [n], which may repeat, into `out`, [n, dim] float32 contiguous. Returns how many of the ids
        have a row.

        An id without a row gets its initial value.
        """
        numbers = self._rows.find(ids)
        self._positions.read(numbers, {"weights": out})
        if _all_found(numbers):
            return len(ids)
        untrained = np.flatnonzero(numbers < 0)
        out[torch.from_numpy(untrained)] = initial_rows(self.spec.initializer, ids[untrained], self.spec.dim)
        return len(ids) - len(untrained)

    def apply(self, update: RowGradients, count: int, version: int, values: HyperParameters | None = None) -> Applied:
        """Makes one update with a mean gradient.

        update:  the sums of gradients; all must be finite
        count:   the divisor of the mean
        version: the number of this update, one more than that of the last
        values:  hyper-parameters to use from this update on; None: unchanged
        """
        self._values.update(values or {})
        self.version = version
        self._rows.limit = self._positions.limit
        numbers, sums, applied = self._used(update, version)
        self._optimizer.step(self._weights, self._positions.of(numbers), sums, count, self._values, version)
        expired = self._expire(version)
        self._positions.settle(self._rows, version)
        return replace(applied, expired=expired) if expired else applied

    def _used(self, update: RowGradients, version: int) -> tuple[RowNumbers, torch.Tensor, Applied]:
        """Finds the rows of an update, and records their use.

        Returns their numbers, the sums of their gradients, and the result of the update so far.
        """
        numbers = self._rows.find(update.ids)
        if _all_found(numbers) and len(self._rows) <= self._rows.limit:
            self._rows.use(numbers, version)  # most updates of a table that has been filled
            return numbers, update.gradients, Applied(len(numbers), 0)
        return self._made_and_used(update, numbers, version)

    def _made_and_used(
        self, update: RowGradients, numbers: RowNumbers, version: int
    ) -> tuple[RowNumbers, torch.Tensor, Applied]:
        """As `_used`, where some ids have no row, or more rows are there than may be: makes rows, and room for them.

        numbers: of the rows that the update finds; gets those of the new rows
        """
        unknown = np.flatnonzero(numbers < 0)
        new = self._admitted(update, unknown, version)
        waiting = len(unknown) - len(new)
        self._rows.use(numbers[numbers >= 0], version)
        made, evicted = self._make(update.ids, numbers, new, version)
        if len(made):
            positions = self._positions.of_new(numbers[made])
            self._weights.write(positions, initial_rows(self.spec.initializer, update.ids[made], self.spec.dim))
            self._optimizer.reset(positions, self._values)
        numbers, sums = _of_rows(numbers, update.gradients)
        return numbers, sums, Applied(len(numbers), len(made), waiting, len(new) - len(made), 0, evicted)

    def assign(self, rows: RowValues, version: int) -> Applied:
        """Sets rows, and resets their optimizer state. An id without a row gets one, even if it waits for admission.

        version: the number of the last update, or of the next one, whose `apply` follows
        """
        self.version = version
        self._rows.limit = self._positions.limit
        numbers = self._rows.find(rows.ids)
        self._rows.use(numbers[numbers >= 0], version)
        new = np.flatnonzero(numbers < 0)
        made, evicted = self._make(rows.ids, numbers, new, version)
        self._positions.of_new(numbers[made])
        if self._candidates is not None:
            self._candidates.forget(rows.ids[made], version)
        for first in range(0, len(numbers), _ASSIGNED):  # a few at a time: memory need not hold them all
            here = first + np.flatnonzero(numbers[first : first + _ASSIGNED] >= 0)
            positions = self._positions.of(numbers[here])
            self._weights.write(positions, rows.values[torch.from_numpy(here)])
            self._optimizer.reset(positions, self._values)
            self._positions.settle(self._rows, version)
        return Applied(0, len(made), 0, len(new) - len(made), 0, evicted)

    def _make(self, ids: Ids, numbers: RowNumbers, new: np.ndarray, version: int) -> tuple[np.ndarray, int]:
        """Creates rows for ids, as many as there is room for. Returns the positions in `ids` of those that got a row,
        and how many other rows were removed to make room.

        numbers: gets the numbers of the new rows
        new:     the positions in `ids` of those that need a row
        """
        evicted = self._forget(np.concatenate(self._rows.make_room(len(new), version)), version)
        room = max(0, self._rows.limit - len(self._rows))
        if len(new) > room:
            new = new[np.argsort(chance_order(ids[new]), kind="stable")[:room]]
        if len(new):
            numbers[new] = self._rows.add(ids[new], version)
        return new, evicted

    def changes(self, since: int | None) -> RowWalk:
        """Returns a walk over the rows that changed after a version.

        since: the version, at most the table's; None: the walk returns all rows. It also does if the ids that were
               removed since that version are no longer known
        """
        removed = None if since is None else self._removed.after(since)
        known = 0 if since is None or removed is None else since
        return RowWalk(self._rows, self._positions.columns["weights"], known, self.version, removed)

    @property
    def capacity(self) -> int:
        """The number of rows that fit now."""
        return self._positions.limit

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the table's whole state, with rows sorted by the ids' hashes (`row_ids.mix`).

        ids [n], weights [n, dim], state.OPTIMIZER.* [n, dim] or [n, 1], and last [n], the version that trained each;
        waiting.ids, waiting.counts and waiting.last of ids that wait for admission; version [1]
        """
        ids, numbers = _in_order(*self._rows.entries())
        found = {"ids": ids, "last": self._rows.versions(numbers), "version": np.array([self.version])}
        if self._candidates is not None:
            waiting = self._candidates.snapshot()
            order = np.argsort(mix(waiting["ids"]))
            found |= {f"waiting.{name}": values[order] for name, values in waiting.items()}
        tensors = {name: torch.from_numpy(values) for name, values in found.items()}
        arrays = {
            name: torch.empty(len(ids), array.dim, dtype=torch.float32, device="cpu")
            for name, array in self._in_memory().items()
        }
        self._positions.read(numbers, arrays)
        return tensors | arrays

    def copy(self, since: int | None = None) -> TableCopy:
        """Begins a copy of the table as it is now, which is made some rows at a time. An earlier copy that is not
        complete is abandoned.

        since: copy only the changes after this version; None: copy all rows. All rows are also copied if the ids that
               were removed since that version, or the exact versions of rows, are no longer known
        """
        if self._copy is not None:
            self._copy.end()
        waiting = self._candidates
        exact = [self._rows.exact_since, *([] if waiting is None else [waiting.entries.exact_since])]
        removed = {"": self._removed} | ({} if waiting is None else {"waiting.": waiting.removed})
        if since is not None and (since < max(exact) or any(each.after(since) is None for each in removed.values())):
            since = None
        others: dict[str, np.ndarray] = {"version": np.array([self.version])}
        if since is not None:
            others["since"] = np.array([since])
            for prefix, each in removed.items():
                others[f"{prefix}removed"] = np.concatenate([np.empty(0, np.int64), *(each.after(since) or ())])
            others["oldest"] = np.array([self._rows.oldest])
        if since is not None and waiting is not None:
            others["waiting.oldest"] = np.array([waiting.entries.oldest])
        columns = {name: CopiedColumn(each.dim, torch.float32) for name, each in self._in_memory().items()}
        rows = EntriesCopy(self._rows, self.version, since or 0, columns, self._positions.read)
        waits = waiting.copy(self.version, since or 0) if waiting is not None else None
        self._copy = TableCopy(rows, waits, since, {name: torch.from_numpy(each) for name, each in others.items()})
        return self._copy

    @property
    def values(self) -> HyperParameters:
        """The optimizer's hyper-parameters, as last used."""
        return dict(self._values)

    def restore(
        self, tensors: Mapping[str, torch.Tensor], values: HyperParameters | None = None, more: int = 0
    ) -> None:
        """Adds the rows of a snapshot to an empty table. Raises InvalidRequest if they do not fit this table.

        A snapshot may come in several calls: first the rows that were trained longest ago, and of waiting ids those
        that occurred last. If the snapshot is of another optimizer, all rows begin without state.

        values: hyper-parameters to continue with; None: unchanged
        more:   how many rows later calls will add
        """
        self._values.update(values or {})
        arrays = self._in_memory()
        if not arrays.keys() <= tensors.keys():
            arrays = {"weights": self._weights}
        capacity = self._positions.limit - len(self)
        ids = _checked(tensors, self.spec, capacity, {name: array.dim for name, array in arrays.items()})
        if len(self) and bool((self._rows.find(ids) >= 0).any()):
            raise InvalidRequest(f"table {self.spec.name!r}: expected ids once each, got some in two parts")
        waiting = self._candidates if "waiting.ids" in tensors else None
        if waiting is not None and bool((waiting.entries.find(tensors["waiting.ids"].numpy()) >= 0).any()):
            raise InvalidRequest(f"table {self.spec.name!r}: expected waiting.ids once each, got some in two parts")

        def write(which: slice | RowNumbers, positions: RowNumbers) -> None:
            self._optimizer.reset(positions, self._values)
            for name, array in arrays.items():
                array.write(positions, tensors[name][which].contiguous())

        last = tensors["last"].numpy()
        self._positions.fill(self._rows.add(ids, last), last, write, more)
        if waiting is not None:
            ids, counts, last = (tensors[f"waiting.{name}"].numpy() for name in ("ids", "counts", "last"))
            waiting.restore(ids, counts, last, int(tensors["version"]))
        self.version = int(tensors["version"])
        self._removed = RemovedIds(self._capacity, self.version)

    def _in_memory(self) -> dict[str, RowArray]:
        """Returns the arrays of rows, which are indexed by a row's position in memory. The columns of `_positions`,
        which also read the file, are indexed by a row's number.
        """
        kept = self._optimizer.state.items()
        return {"weights": self._weights, **{f"state.{self._name}.{name}": each for name, each in kept}}

    def _admitted(self, update: RowGradients, unknown: np.ndarray, version: int) -> np.ndarray:
        """Counts the update's ids without a row. Returns those that become rows now, as positions in the update.

        unknown: the positions in the update of ids without a row
        """
        if self._candidates is None or not len(unknown):
            return unknown
        return unknown[self._candidates.admit(update.ids[unknown], update.counts[unknown], version)]

    def _forget(self, ids: Ids, version: int) -> int:
        """Removes the rows of ids; returns how many there were."""
        self._removed.add(version, ids, len(self._rows))
        return len(ids)

    def _expire(self, version: int) -> int:
        """Expires rows if it is time. Returns their number. Releases some memory of rows that expired earlier."""
        expired = 0
        if self.spec.expire_after and version % max(1, self.spec.expire_after // PERIODS) == 0:
            expired = self._forget(self._rows.expire(version - self.spec.expire_after), version)
            if self._candidates is not None:
                self._candidates.entries.expire(version - self.spec.expire_after)
        self._rows.sweep()
        if self._candidates is not None:
            self._candidates.entries.sweep()
        return expired


def _all_found(numbers: RowNumbers) -> bool:
    """Returns whether each of these is the number of a row."""
    return bool(numbers.min(initial=0) == 0)


def _of_rows(numbers: RowNumbers, gradients: torch.Tensor) -> tuple[RowNumbers, torch.Tensor]:
    """Returns the part of an update that is about rows; the update itself if all of it is."""
    stepped = np.flatnonzero(numbers >= 0)
    if len(stepped) == len(numbers):
        return numbers, gradients
    return numbers[stepped], gradients[torch.from_numpy(stepped)]


def _in_order(ids: Ids, numbers: RowNumbers) -> tuple[Ids, RowNumbers]:
    order = np.argsort(mix(ids))
    return ids[order], numbers[order]


def _checked(tensors: Mapping[str, torch.Tensor], spec: TableSpec, capacity: int, arrays: Mapping[str, int]) -> Ids:
    """Returns the ids of a snapshot. Raises InvalidRequest if it is no snapshot of a table, or does not fit this one.

    arrays: by name, the elements of a row that are expected
    """
    missing = {"ids", "last", "version", "weights"} - tensors.keys()
    if missing:
        raise InvalidRequest(f"table {spec.name!r}: expected rows as they were saved, got none of {sorted(missing)}")
    ids, version = tensors["ids"], int(tensors["version"])
    if len(ids) > capacity:
        raise InvalidRequest(f"table {spec.name!r} has room for {capacity} rows, got {len(ids)}")
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((len(ids), dim), torch.float32) for name, dim in arrays.items()
    }
    for prefix in ("", "waiting.") if "waiting.ids" in tensors else ("",):
        count = len(tensors[f"{prefix}ids"])
        named = ("ids", "last", "counts") if prefix else ("ids", "last")
        expected |= {prefix + name: ((count,), torch.int64) for name in named}
    for name, (shape, dtype) in expected.items():
        got = tensors.get(name)
        if got is None or tuple(got.shape) != shape or got.dtype != dtype:
            found = "nothing" if got is None else f"{tuple(got.shape)} of {got.dtype}"
            raise InvalidRequest(f"table {spec.name!r}: expected {name} to be {shape} of {dtype}, got {found}")
        if name.endswith("ids") and len(np.unique(got.numpy())) < len(got):
            raise InvalidRequest(f"table {spec.name!r}: expected {name} once each, got some twice")
        if name.endswith("last") and len(got) and not 1 <= int(got.min()) <= int(got.max()) <= version:
            raise InvalidRequest(
                f"table {spec.name!r}: expected {name} to be updates from 1 to {version}, got {int(got.min())} to "
                f"{int(got.max())}"
            )
    return ids.numpy()
