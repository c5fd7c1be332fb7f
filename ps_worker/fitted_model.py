"""How a model fits a job: what each of its tensors is made of, and which tables of the job its modules read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ps_feed.edition import Contents
from ps_protocol.errors import InvalidRequest
from ps_protocol.tables import TableSpec
from ps_worker.edition_tensors import Edition, MadeOf
from ps_worker.tables.modules import Embedding, named_tables

Names = Mapping[str, str | MadeOf] | Callable[[str], str | MadeOf]


class Slot(NamedTuple):
    """A tensor of a model, and the job's tensors that it is made of."""

    name: str
    target: torch.Tensor
    source: MadeOf


class TableSlot(NamedTuple):
    """A module with a table, its name in the model, and the name of the job's table that it reads."""

    name: str
    module: Embedding
    table: str


class Fit(NamedTuple):
    """All that a model takes from a job."""

    slots: list[Slot]
    tables: list[TableSlot]


def fit(model: nn.Module, edition: Edition, job: str, names: Names | None) -> Fit:
    """Returns what a model takes from a job. Raises InvalidRequest if the two do not fit.

    names: the job's names by the model's; None if they are the same
    """
    contents = edition.arrays.contents
    known = set(edition.names())
    modules = named_tables([model])
    handles = {id(module.weight) for module in modules.values()}
    targets: dict[str, torch.Tensor] = dict(model.named_parameters())  # each once, tied ones too
    not_saved = {id(each._buffers.get(name)) for each in model.modules() for name in each._non_persistent_buffers_set}
    targets |= {name: each for name, each in model.named_buffers() if contents.is_part or id(each) not in not_saved}
    slots = [Slot(name, target, _source(name, names)) for name, target in targets.items()]
    sources = {id(slot.target): slot.source for slot in slots}
    tables = [TableSlot(name, each, _table(name, sources[id(each.weight)])) for name, each in modules.items()]
    slots = [slot for slot in slots if id(slot.target) not in handles]
    if contents.is_part:  # the others stay as they are
        slots = [slot for slot in slots if not known.isdisjoint(slot.source.names)]
        tables = [slot for slot in tables if slot.table in contents.tables]
    _check_memory({**{slot.name: slot.target for slot in slots}, **{slot.name: slot.module.weight for slot in tables}})
    problems = {**_tensor_problems(slots, edition), **_table_problems(tables, contents)}
    said = [f"{problem} {first_three(names)}" for problem, names in problems.items() if names]
    if said:
        raise InvalidRequest(f"the model does not fit job {job!r}: {'; '.join(said)}")
    return Fit(slots, tables)


def _check_memory(targets: Mapping[str, torch.Tensor]) -> None:
    nowhere = next((name for name, target in targets.items() if target.is_meta), None)
    if nowhere is not None:
        raise InvalidRequest(
            f"{nowhere} is on the meta device, where it has no memory: call to_empty(device=...) first"
        )


def _tensor_problems(slots: Sequence[Slot], edition: Edition) -> dict[str, list[str]]:
    """Returns the names of the tensors that do not fit, by what is wrong with them."""
    contents, known = edition.arrays.contents, set(edition.names())
    wanted = {name for slot in slots for name in slot.source.names}
    there = [slot for slot in slots if known.issuperset(slot.source.names)]
    return {
        "`parameters` lack" if contents.is_part else "the job has no": [
            name for slot in slots for name in slot.source.names if name not in known
        ],
        "the model has no": [
            name for name in (edition.names() if contents.is_part else edition.state_dict()) if name not in wanted
        ],
        "the shapes differ of": [why for slot in there if (why := _differs(slot, edition))],
    }


def _table_problems(slots: Sequence[TableSlot], contents: Contents) -> dict[str, list[str]]:
    """Returns the names of the tables that do not fit, by what is wrong with them.

    The model may lack tables of the job, unless they were asked for by name: they may be larger than this process.
    """
    wanted = {slot.table for slot in slots}
    each = [(slot, contents.tables[slot.table]) for slot in slots if slot.table in contents.tables]
    return {
        "the job has no table": [slot.table for slot in slots if slot.table not in contents.tables],
        "the model has no table": [name for name in contents.tables if contents.is_part and name not in wanted],
        "the tables differ of": [why for slot, rows in each if (why := _table_differs(slot, rows))],
    }


def _source(name: str, names: Names | None) -> MadeOf:
    """Returns the job's tensors that a tensor of the model is made of."""
    if names is None:
        found: str | MadeOf = name
    else:
        found = names.get(name, name) if isinstance(names, Mapping) else names(name)
    return MadeOf(found) if isinstance(found, str) else found


def _table(name: str, handle: MadeOf) -> str:
    """Returns the job's table for a module's name in the model, and the source of its handle."""
    if not handle.is_one:
        raise InvalidRequest(f"table {name!r} is one table of the job, and is made of no others: give it a name")
    found = handle.names[0]
    return "table" if found == "weight" else found.removesuffix(".weight")  # "weight": the model itself is the table


def first_three(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + others


def _differs(slot: Slot, edition: Edition) -> str:
    """Returns why the job's tensor, or the one made of several, does not fit the model; empty: it fits."""
    try:
        shape = slot.source.tensor(edition).shape
    except Exception as error:  # the function is a user's
        return f"{slot.name}, which cannot be made of {', '.join(slot.source.names)} ({error})"
    return "" if shape == slot.target.shape else f"{slot.name} {list(slot.target.shape)} for {list(shape)}"


def _table_differs(slot: TableSlot, rows: TableSpec) -> str:
    """Returns why the job's table does not fit a module; empty: it fits."""
    dim, settings, start = slot.module.weight.shape[1], slot.module.settings, rows.initializer
    if dim != rows.dim:
        return f"{slot.name} of {dim} elements for {rows.dim}"
    if (settings.initial, settings.scale) != (start.kind, start.scale):
        return f"{slot.name} with initial {settings.initial} {settings.scale} for {start.kind} {start.scale}"
    return ""
