"""The tables of a model in this process, and a replica of them on each rank of DDP.

A step adds up the gradients of all ranks, row by row in the order of ranks, and divides by how many there are: what the
shards do in sync. So all replicas stay alike to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import HyperParameters
from ps_protocol.optimizers import check_change, hyper_parameters, optimizer_name
from ps_protocol.row_ids import Ids
from ps_protocol.tables import MAX_ROWS, TableSpec
from ps_tables.contributions import RowGradients
from ps_tables.optimizers import ROW_OPTIMIZERS
from ps_tables.table import Table
from ps_worker.tables.modules import Embedding, named_tables

# Returns what all ranks gave, by rank. what: the call, for messages
Exchange = Callable[[bytes, str], Mapping[int, bytes]]


@dataclass
class _LocalTable:
    """One table, and what steps it.

    group:   returns the parameter group that has the handle; None: no optimizer has it, and the rows stay as they are
    stepper: the number of that optimizer
    values:  hyper-parameters, as they were last
    """

    module: Embedding
    rows: _Rows
    optimizer: str
    group: Callable[[], dict[str, Any]] | None
    stepper: int | None
    values: HyperParameters

    def read_values(self) -> HyperParameters:
        """Returns the hyper-parameters of the step. Raises InvalidRequest for a change that a table cannot make."""
        if self.module.settings.optimizer is None and self.group is not None:
            values = hyper_parameters(self.optimizer, self.group())
            if values != self.values:
                check_change(self.optimizer, self.values, values)
                if values.get("momentum") and not self.values.get("momentum"):
                    raise InvalidRequest(
                        f"{self.module.name}: momentum cannot be switched on in a table that is trained"
                    )
                self.values = values
        return self.values


class _Rows:
    """Where the lookups of a module find rows: a table that a loaded one may take the place of."""

    def __init__(self, make: Callable[[], Table]) -> None:
        self._make = make
        self.table = make()

    def __len__(self) -> int:
        return len(self.table)

    def pull(self, ids: Ids, out: torch.Tensor) -> int:
        """Reads rows; see Table."""
        return self.table.pull(ids, out)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of all rows."""
        return self.table.snapshot()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Has these rows, and no others."""
        table = self._make()
        table.restore(tensors)
        self.table = table


class LocalTables:
    """The tables of some models. For the training thread.

    Raises InvalidRequest or Unsupported for tables that cannot be trained so.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], exchange: Exchange
    ) -> None:
        self._exchange = exchange
        tables = named_tables(models)
        handles = {id(module.weight) for module in tables.values()}
        if len(handles) < len(tables):
            raise InvalidRequest("two tables share one weight: use one module twice instead")
        self._tables = [_made(name, module, optimizers) for name, module in tables.items()]
        for each in self._tables:
            self._begin_alike(each)
        for index in {each.stepper for each in self._tables if each.stepper is not None}:
            optimizers[index].register_step_pre_hook(partial(self._before, index))

    def _begin_alike(self, each: _LocalTable) -> None:
        """Has a table begin with the rows that its module was given before; on all ranks with those of rank 0."""
        every = self._exchange(each.module.loaded, f"the rows of table {each.module.name!r}")
        if every[min(every)]:
            each.rows.load(safetensors.torch.load(every[min(every)]))
        each.module.loaded = b""

    def _before(
        self, index: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Steps the tables of one optimizer before it steps its own parameters; returns what its `step` is called with.

        A closure is called first, and once: it makes the gradients.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (optimizer, lambda: loss), {}
        for each in self._tables:
            if each.stepper == index:
                self._step(each)
        return args, kwargs

    def _step(self, each: _LocalTable) -> None:
        values = each.read_values()
        own = each.module.lookups.take()
        every = self._exchange(_encoded(own), f"the step of table {each.module.name!r}")
        contributions = [_decoded(every[rank]) for rank in sorted(every)] if len(every) > 1 else [own]
        table = each.rows.table
        table.apply(RowGradients.union(contributions), len(contributions), table.version + 1, values)


def _made(name: str, module: Embedding, optimizers: Sequence[torch.optim.Optimizer]) -> _LocalTable:
    """Returns the table of a module, and has the module know its name and its group."""
    module.name = name
    spec = module.settings.spec(name, module.weight.shape[1])
    found = ((index, partial(_group_of, optimizer, module.weight)) for index, optimizer in enumerate(optimizers))
    stepper, group = next(((index, group) for index, group in found if group()), (None, None))
    optimizer, values = _optimizer_of(module, None if stepper is None else optimizers[stepper])
    rows = _Rows(partial(Table, spec, optimizer, values, _capacity(spec)))
    module.lookups.begin(rows, group)
    return _LocalTable(module, rows, optimizer, group, stepper, values)


def _group_of(optimizer: torch.optim.Optimizer, handle: nn.Parameter) -> dict[str, Any]:
    """Returns the parameter group of an optimizer that has a handle; an empty one if none has."""
    groups = (group for group in optimizer.param_groups if any(each is handle for each in group["params"]))
    return next(groups, {})


def _optimizer_of(module: Embedding, optimizer: torch.optim.Optimizer | None) -> tuple[str, HyperParameters]:
    """Returns the name of a table's optimizer, and its hyper-parameters."""
    own = module.settings.optimizer
    if own is not None:
        return own.name, own.values
    if optimizer is None:
        return "SGD", {"lr": 0.0}  # it is never stepped
    name = optimizer_name(optimizer)
    if name not in ROW_OPTIMIZERS:
        raise Unsupported(f"{module.name}: {name} cannot step rows; these can: {', '.join(ROW_OPTIMIZERS)}")
    values = hyper_parameters(name, _group_of(optimizer, module.weight))
    if values.get("weight_decay") and not module.settings.lazy_decay:
        raise InvalidRequest(
            f"{module.name}: weight_decay is {values['weight_decay']}, and a row would decay only in the steps that "
            "have it: give its weight a group with weight_decay=0, or say lazy_decay=True"
        )
    return name, values


def _capacity(spec: TableSpec) -> int:
    """Returns how many rows a table may have at most: as many as this machine's memory holds, if it does not say."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(MAX_ROWS, spec.max_rows or memory // (4 * spec.dim))


def _encoded(gradients: RowGradients) -> bytes:
    return safetensors.torch.save(
        {
            "ids": torch.from_numpy(gradients.ids),
            "counts": torch.from_numpy(gradients.counts),
            "gradients": gradients.gradients,
        }
    )


def _decoded(data: bytes) -> RowGradients:
    tensors = safetensors.torch.load(data)
    return RowGradients(tensors["ids"].numpy(), tensors["counts"].numpy(), tensors["gradients"])
