"""Tables whose rows are on parameter servers, which look them up, and step them with the worker's step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch

from ps_protocol.errors import InvalidRequest, LimitExceeded, Unsupported
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import NonFinite
from ps_protocol.row_ids import Ids, shards_of
from ps_protocol.tables import MAX_PUSHED_BYTES, JobTable, assigned_bytes
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.row_sums import are_finite
from ps_tables.saved import saved_rows
from ps_worker.tables.ahead import Batch, RowsAhead
from ps_worker.tables.assigned import Assigned, AssignedRows
from ps_worker.tables.given_rows import GivenRows
from ps_worker.tables.lookups import LookedUp, empty_rows
from ps_worker.tables.modules import Embedding, looked_up
from ps_worker.tables.own_rows import Exchange, LocalRows
from ps_worker.tables.stepping import check, group_of, optimizer_of

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class TableStep:
    """One table's part of a step.

    table:     its index in the job's list
    rows:      the gradients; None if the step has none for the table
    took_part: without rows: True: zeros in the mean; False: the mean leaves the step out
    values:    the hyper-parameters of its optimizer
    """

    table: int
    rows: RowGradients | None = None
    took_part: bool = False
    values: HyperParameters = field(default_factory=dict)


@dataclass(frozen=True)
class RowsOfShard:
    """The rows of a table on one shard.

    content: a safetensors file, with the tensors of Table.snapshot; empty if only the number of rows was requested
    count:   the number of rows
    seed:    the seed of rows that are not trained
    """

    content: bytes
    count: int
    seed: int


@dataclass(frozen=True)
class FirstRows:
    """A table's rows from before `prepare`, on this worker.

    name:  the table's name
    rows:  in the form of Table.snapshot; empty if there are none
    seed:  the seed of rows that are not trained
    given: vectors that are still to be read, instead of rows
    """

    name: str
    rows: Mapping[str, torch.Tensor]
    seed: int
    given: GivenRows | None = None

    def __bool__(self) -> bool:
        return self.given is not None or bool(len(self.rows.get("ids", ())) or len(self.rows.get("waiting.ids", ())))


class Servers(Protocol):
    """The interface for reading rows from the shards: a job's training."""

    def pull_rows(self, table: int, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        """Reads rows of a table at the worker's clock: [n] distinct ids by shard, into [n, dim] float32, contiguous.

        ends: the end of each shard's ids
        """

    def pull_table(self, table: int, count_only: bool) -> list[RowsOfShard]:
        """Returns all rows of a table at the worker's clock, of each shard; or only how many there are."""

    @property
    def is_past(self) -> bool:
        """Whether the job was rolled back, and the script still works on a batch that its loader will yield again."""

    def await_rows(self, ahead: RowsAhead) -> bool:
        """Waits for rows that were requested with the last step; returns whether they have come."""


class ServerRows:
    """The rows of one module, on the shards. They replace its LocalRows. A copy of the module gets LocalRows again.

    before: the module's LocalRows
    number: the table's index in the job's list
    shards: the job's number of shards
    """

    exchange: Exchange | None = None  # steps are exchanged by the servers

    def __init__(self, before: LocalRows, number: int, servers: Servers, shards: int) -> None:
        self.name, self.shards = before.name, shards
        self.before, self._number, self._servers = before, number, servers
        self._stepped: TableStep | None = None
        self._announced: Ids | None = None
        self._ahead: RowsAhead | None = None  # the rows that the last step has requested
        self.assigned = Assigned()

    def pull(self, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        """Reads rows, as `Servers.pull_rows`."""
        self._pull(ids, out, ends)
        self.assigned.cover(ids, out)

    def _pull(self, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        ahead = self._rows_ahead()
        if ahead is None:
            self._fetch(ids, out, ends)
            return
        places = ahead.batch.find(ids)
        here, missing = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
        rows = empty_rows(len(missing), out.shape[1])
        self._fetch(ids[missing], rows, np.searchsorted(missing, ends))
        if self._ahead is not ahead:  # the worker's place was lost meanwhile, and its requested rows with it
            self._fetch(ids, out, ends)
            return
        out[torch.from_numpy(here)] = ahead.out[torch.from_numpy(places[here])]
        out[torch.from_numpy(missing)] = rows

    def _fetch(self, ids: Ids, out: torch.Tensor, ends: Ids) -> None:
        if len(ids):
            self._servers.pull_rows(self._number, ids, out, ends)

    def looked_ahead(self, flat: Ids) -> tuple[Batch, torch.Tensor] | None:
        """Returns the ids and rows of a lookup if exactly these ids were announced; None: pull them."""
        ahead = self._rows_ahead()
        if ahead is None or len(self.assigned) or not np.array_equal(ahead.batch.flat, flat):
            return None
        return ahead.batch, ahead.out.detach()

    def _rows_ahead(self) -> RowsAhead | None:
        """Returns the rows that the last step has requested, once they have come. In no_grad mode, lookups read the
        present rows instead.

        None: none were requested, or the worker's place is lost.
        """
        ahead = self._ahead
        if ahead is None or not ahead.pulls or not torch.is_grad_enabled():
            return None
        ahead.used = True
        if not ahead.here:
            self._ahead = None  # unless it comes
            if not self._servers.await_rows(ahead):
                return None
            ahead.here, self._ahead = True, ahead
        return ahead

    def assign(self, given: GivenRows, lazily: bool) -> None:
        """Sets rows, with the next step. Raises LimitExceeded for more bytes than a step can carry to a shard."""
        ids = np.union1d(self.assigned.ids, given.ids())
        counts = np.bincount(shards_of(ids, self.shards), minlength=self.shards)
        if assigned_bytes(self.before.dim, int(counts.max())) > MAX_PUSHED_BYTES:
            raise LimitExceeded(
                f"table {self.name!r}: a step takes {MAX_PUSHED_BYTES} bytes of assigned rows along to a shard, and "
                f"{len(ids)} rows are more: assign some of them, make a step, and go on with the others"
            )
        given.check()
        for rows in given.pieces() if not self._servers.is_past else ():
            self.assigned.add(RowValues(rows.ids, rows.values.clone()))  # the script may write its own in place

    def announce(self, flat: Ids | None) -> None:
        """Records the ids that the batch after the next step looks up; None: unknown."""
        self._announced = None if flat is None else flat.copy()  # the script may write its batch in place

    def ask_ahead(self) -> RowsAhead | None:
        """Returns the rows to request with the current step. Rows that the last step has requested are dropped as too
        old.
        """
        announced, before, self._announced, self._ahead = self._announced, self._ahead, None, None
        if announced is not None:
            batch = Batch.of(announced, self.shards)
        elif before is not None and not before.used:
            batch = before.batch
        else:
            return None
        if not len(batch.ids):
            return None
        out = torch.empty(len(batch.ids), self.before.dim, dtype=torch.float32, device="cpu")
        self._ahead = RowsAhead(self._number, batch, out)
        return self._ahead

    def forget_ahead(self) -> None:
        """Forgets the requested rows, because the place that requested them is lost."""
        self._announced = self._ahead = None

    def step(self, optimizer: str, values: HyperParameters, own: RowGradients | None) -> None:
        """Keeps the table's part of the optimizer's step, for the push that comes next."""
        self._stepped = TableStep(self._number, own, True, values)

    def take(self) -> TableStep:
        """Returns the table's part of the step: a skip if the table's optimizer was not stepped."""
        stepped, self._stepped = self._stepped, None
        return stepped or TableStep(self._number)

    def share(self, exchange: Exchange | None, rank: int) -> None:
        """Raises Unsupported: a module trains in one session at a time."""
        raise Unsupported(f"table {self.name!r} is on the servers of another session already")

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Returns all rows with their state, fetched from the shards."""
        rows, _ = self._fetched()
        return rows

    def state(self) -> bytes:
        """Returns all rows with their state, fetched from the shards, as the bytes of a safetensors file."""
        return saved_rows(*self._fetched())

    def _fetched(self) -> tuple[dict[str, torch.Tensor], int]:
        """Returns all rows, in the form of Table.snapshot, and the seed of rows that are not trained."""
        parts = self._servers.pull_table(self._number, count_only=False)
        each = [safetensors.torch.load(part.content) for part in parts]
        rows = {name: torch.cat([tensors[name] for tensors in each]) for name in each[0] if name != "version"}
        version = max(int(tensors["version"]) for tensors in each)
        return {**rows, "version": torch.tensor([version])}, parts[0].seed

    def load(self, state: bytes) -> None:
        """Raises Unsupported: rows are loaded before `prepare`."""
        raise Unsupported(f"the rows of table {self.name!r} are on the servers: load_state_dict cannot replace them")

    def __len__(self) -> int:
        return sum(part.count for part in self._servers.pull_table(self._number, count_only=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalRows:
        return self.before.like(self.state())

    def __reduce__(self) -> Any:
        return self.__deepcopy__({}).__reduce__()


class ServerTables:
    """The tables of one job, in the order of its list. For the training thread.

    are_some: whether there is a table; a step without tables calls no method of this class
    """

    def __init__(self, modules: Mapping[str, Embedding], non_finite: NonFinite) -> None:
        self.are_some = bool(modules)
        self._modules, self._non_finite = modules, non_finite
        self._rows: list[ServerRows] = []
        self._taken: list[TableStep] = []  # and not sent yet

    def first_rows(self) -> list[FirstRows]:
        """Returns each table's rows from before `prepare`."""
        each = [(name, module.local) for name, module in self._modules.items()]
        return [
            FirstRows(name, {} if local.unread else local.snapshot(), local.seed, local.unread)
            for name, local in each
            if isinstance(local, LocalRows)
        ]

    def warn_of_ignored(self, clock: int) -> None:
        """Warns that rows from before `prepare` are not used, if there are any. clock: the job's"""
        each = self._modules.items()
        names = [repr(name) for name, module in each if isinstance(module.local, LocalRows) and module.local.are_some]
        if names:
            log.warning(
                "the job was at clock %d when this worker joined, and takes none of the rows that it has from before: "
                "those on the servers count (tables: %s)",
                *(clock, ", ".join(names)),
            )

    def connect(self, servers: Servers, shards: int) -> Callable[[], None]:
        """Makes the modules look up their rows on the job's shards from now on. Returns a function that restores their
        own rows.
        """
        for number, module in enumerate(self._modules.values()):
            assert isinstance(module.local, LocalRows)
            module.local = rows = ServerRows(module.local, number, servers, shards)
            self._rows.append(rows)
        return self._disconnect

    def _disconnect(self) -> None:
        for module, rows in zip(self._modules.values(), self._rows, strict=True):
            module.local = rows.before
        self._rows = []

    def forget(self) -> None:
        """Drops the modules' own rows: the shards have them now."""
        for rows in self._rows:
            rows.before.forget()

    def take(self) -> list[TableStep]:
        """Returns each table's part of the current step, and begins the next one."""
        self._taken = [rows.take() for rows in self._rows]
        return self._taken

    def sent(self) -> None:
        """Forgets the result of `take`: it has been sent, or does not count."""
        self._taken = []

    def drop(self) -> None:
        """Removes the gradients of all lookups that no optimizer has stepped."""
        for module in self._modules.values():
            module.lookups.take(module.weight)
            module.weight.grad = None

    def give_back(self) -> None:
        """Gives the gradients that were not sent back to the modules, because other parameters still have theirs.

        The step was refused, before or after `take`. The script may repair the step and make it again.
        """
        pushes = self._taken or [rows.take() for rows in self._rows]
        for module, push in zip(self._modules.values(), pushes, strict=True):
            if push.rows is not None:
                module.lookups.give_back(module.weight, push.rows)
        self.sent()

    @property
    def look_ahead(self) -> bool:
        """Whether a table finds its ids in the next batch."""
        return any(module.ids_of.of is not None for module in self._modules.values())

    def announce(self, batch: Any) -> None:
        """Announces a batch to the tables that can find their ids in it; None if there is no next batch.

        Raises InvalidRequest, which names the table, if one does not find them.
        """
        for name, module in self._modules.items():
            if module.ids_of.of is None:
                continue
            try:
                module.announce(None if batch is None else module.ids_of.of(batch))
            except Exception as error:
                raise InvalidRequest(
                    f"table {name!r}: ids= of the next batch ({type(batch).__name__}) raised "
                    f"{type(error).__name__}: {str(error)[:200]}"
                ) from error

    def assigned(self) -> dict[int, RowValues]:
        """Returns the rows that the script has set and that no step has sent yet, by the table's index in the job."""
        return {number: rows.assigned.rows for number, rows in enumerate(self._rows) if rows.assigned.rows is not None}

    def forget_assigned(self) -> None:
        """Forgets the rows of `assigned`: a step has included them, or they were refused, or the job was rolled
        back.
        """
        for rows in self._rows:
            if rows.assigned.rows is not None:  # in most steps there are none
                rows.assigned = Assigned()

    def keep_assigned(self, kept: AssignedRows) -> None:
        """Includes rows, by table, in the next step. Rows that the script has set since replace them."""
        for number, rows in kept.items():
            table = self._rows[number]
            later, table.assigned = table.assigned.rows, Assigned()
            for each in (rows, later):
                if each is not None:
                    table.assigned.add(each)

    def ask_ahead(self) -> list[RowsAhead]:
        """Returns the rows to request with the current step; see ServerRows.ask_ahead."""
        return [ahead for rows in self._rows if (ahead := rows.ask_ahead()) is not None]

    def forget_ahead(self) -> None:
        """Forgets the rows that the last step has requested."""
        for rows in self._rows:
            rows.forget_ahead()

    def looked_up(self) -> LookedUp:
        """Returns the counts of ids that were looked up in all tables."""
        return looked_up(self._modules.values())

    def left_out(self) -> list[TableStep]:
        """Returns the parts of a step that leaves all tables out."""
        return [TableStep(number) for number in range(len(self._rows))]

    def not_finite(self, pushes: Sequence[TableStep]) -> str | None:
        """Returns the name of a table whose gradient is not finite, if the job does not allow that."""
        if self._non_finite is NonFinite.ALLOW:
            return None
        found = (push for push in pushes if push.rows is not None and not are_finite(push.rows.gradients))
        return next((f"table {list(self._modules)[push.table]!r}" for push in found), None)


def described_tables(
    modules: Mapping[str, Embedding], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[JobTable, ...]:
    """Returns the tables of a job's models, each with its optimizer. Raises InvalidRequest or Unsupported for tables
    that cannot be trained so.

    modules: by name; see named_tables
    """
    for name, module in modules.items():
        if not isinstance(module.local, LocalRows):
            raise Unsupported(f"table {name!r} is on the servers of another session already")
        module.local.name = name
    check(list(modules.values()), optimizers)
    return tuple(_described(name, module, optimizers) for name, module in modules.items())


def _described(name: str, module: Embedding, optimizers: Sequence[torch.optim.Optimizer]) -> JobTable:
    assert isinstance(module.local, LocalRows)
    spec = module.settings.spec(name, module.weight.shape[1], module.local.seed)
    spec = replace(spec, initial_rows=True)
    owner = next((optimizer for optimizer in optimizers if group_of(optimizer, module.weight) is not None), None)
    if owner is None:  # it stays as it is: no step ever reaches it
        return JobTable(spec, "SGD", {"lr": 0.0})
    return JobTable(spec, *optimizer_of(module, owner))
