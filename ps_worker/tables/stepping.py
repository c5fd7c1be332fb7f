"""Steps a table with the optimizer that has its handle, made before or after `prepare`.

A hook on all optimizers does it, before an optimizer steps its own parameters. An optimizer that is known beforehand
(from `prepare`, or because it has stepped a table already) has the rows of a step in its groups from backward on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizers import hyper_parameters, optimizer_name
from ps_protocol.row_optimizers import ROW_OPTIMIZERS
from ps_worker.tables.lookups import Lookups
from ps_worker.tables.own_rows import Rows, TableSettings


class Stepped(Protocol):
    """A module with a table."""

    weight: nn.Parameter
    settings: TableSettings
    local: Rows
    lookups: Lookups


_tables = weakref.WeakSet[Any]()  # all modules with a table
_adding = threading.Lock()  # a thread may add a module or an optimizer while another one goes through all
_known = weakref.WeakSet[Optimizer]()
_stands_for: weakref.WeakKeyDictionary[Optimizer, Optimizer] = weakref.WeakKeyDictionary()


def register(table: Stepped) -> None:
    """Registers a module, so that its table is stepped."""
    with _adding:
        _tables.add(table)


def _all_tables() -> list[Any]:
    with _adding:
        return list(_tables)


def know(optimizer: Optimizer) -> None:
    """Makes looked-up rows join this optimizer's groups from backward on. Its state_dict does not contain them."""
    optimizer = _stands_for.get(optimizer, optimizer)  # both have the same groups and hooks
    if optimizer in _known:
        return
    with _adding:
        _known.add(optimizer)
    backs: list[Callable[[], None]] = []

    def leave(optimizer: Optimizer, *_: Any) -> None:
        backs.extend(table.lookups.leave_groups() for table in _tables_of(optimizer))

    def back(*_: Any) -> None:
        while backs:
            backs.pop()()

    optimizer.register_state_dict_pre_hook(leave)
    optimizer.register_state_dict_post_hook(back)
    optimizer.register_load_state_dict_pre_hook(leave)
    optimizer.register_load_state_dict_post_hook(back)


def stand_for(optimizer: Optimizer, wrapped: Optimizer) -> None:
    """Records that an optimizer stands for a wrapped one, whose name and hyper-parameters count."""
    _stands_for[optimizer] = wrapped


def joined_group(handle: nn.Parameter) -> list[Any] | None:
    """Returns the parameters of the group that has a handle, for its rows to join; None if they may not.

    In ddp they may not: they have only this rank's gradients, and a value over all parameters of a group, such as their
    norm, must be the same on all ranks.
    """
    if any(table.weight is handle and table.local.exchange is not None for table in _all_tables()):
        return None
    with _adding:
        known = list(_known)
    groups = (group for optimizer in known if (group := group_of(optimizer, handle)) is not None)
    return next((group["params"] for group in groups), None)


def group_of(optimizer: Optimizer, handle: nn.Parameter) -> dict[str, Any] | None:
    """Returns the group of an optimizer that has a handle."""
    groups = (group for group in optimizer.param_groups if any(each is handle for each in group["params"]))
    return next(groups, None)


def optimizer_of(table: Stepped, optimizer: Optimizer) -> tuple[str, HyperParameters]:
    """Returns the name of the optimizer of a table whose handle this optimizer has, and its present hyper-parameters.

    Raises Unsupported or InvalidRequest for an optimizer that cannot step rows, or would step them differently.
    """
    own, name = table.settings.optimizer, table.local.name or "a table"
    if own is not None:
        return own.name, own.values
    try:
        cls = optimizer_name(_stands_for.get(optimizer, optimizer))
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}; or give the table an optimizer of its own") from None
    if cls not in ROW_OPTIMIZERS:
        raise Unsupported(f"{name}: {cls} cannot step rows; these can: {', '.join(ROW_OPTIMIZERS)}")
    values = hyper_parameters(cls, group_of(optimizer, table.weight) or {})
    if values.get("weight_decay") and not table.settings.lazy_decay:
        raise InvalidRequest(
            f"{name}: weight_decay is {values['weight_decay']}, and a row would decay only in the steps that "
            "have it: give its weight a group with weight_decay=0, or say lazy_decay=True"
        )
    return cls, values


def check(tables: Sequence[Stepped], optimizers: Sequence[Optimizer]) -> None:
    """Raises the errors of `optimizer_of` for a script's tables and optimizers; then calls `know` for these."""
    for optimizer in optimizers:
        for table in _tables_of(optimizer):
            if table in tables:
                optimizer_of(table, optimizer)
    for optimizer in optimizers:
        know(optimizer)


def _tables_of(optimizer: Optimizer) -> list[Any]:
    """Returns the modules whose handles an optimizer has, in the order of their names: the same on all ranks."""
    handles = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return sorted((each for each in _all_tables() if id(each.weight) in handles), key=lambda table: table.local.name)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Steps the tables of an optimizer. Returns the arguments for its `step`. A closure, which makes the gradients, is
    called before, and only once.
    """
    tables = _tables_of(optimizer) if _tables else []
    if not tables:
        return None
    know(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported("LBFGS evaluates the loss several times a step: give it no parameter of a table")
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, kwargs = (optimizer, lambda: loss), {}
    # Attributes that GradScaler sets on a fused optimizer: whether the step must be left out, and the scale of
    # gradients.
    found_inf, scale = (vars(optimizer).get(name) for name in ("found_inf", "grad_scale"))
    if found_inf is not None and bool(found_inf):
        return args, kwargs
    # A table may be refused here. That happens before any table is stepped.
    orders = [(table, *optimizer_of(table, optimizer)) for table in tables]
    for table, name, values in orders:
        own = table.lookups.take(table.weight)
        if own is not None and scale is not None:
            own.gradients.div_(float(scale))
        table.local.step(name, values, own)
    return args, kwargs


register_optimizer_step_pre_hook(_before_step)
