"""Embedding and EmbeddingBag: torch's modules over a table, whose ids are any 64-bit numbers.

A module has one parameter, `weight`, of shape [0, dim]. It is a handle: optimizers, parameter groups and schedulers
refer to the table by it. The optimizer that has the handle steps the rows, unless the module has an optimizer of its
own. `state_dict()` contains the rows as bytes beside the handle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.numpy_numbers import as_python
from ps_worker.tables.ahead import IdsOf, flat_ids
from ps_worker.tables.given_rows import GivenRows, RowFile
from ps_worker.tables.lookups import LookedUp, Lookups, expanded, with_divided_gradient
from ps_worker.tables.own_rows import Exchange, LocalRows, Rows, TableSettings
from ps_worker.tables.stepping import check, joined_group, register
from ps_worker.tables.table_optimizers import TableOptimizer

T = TypeVar("T", bound="Embedding")


class Embedding(nn.Module):
    """Like torch's nn.Embedding, without a number of embeddings: an id is any int64, and training creates its row.

    The module's parameter `weight` is a handle of shape [0, dim]. Changes that a script makes through
    `model.parameters()`, to values or to gradients, reach the handle and no row.

    Args:
        dim: Elements of a row, float32.
        optimizer: The optimizer of the rows, `ps_torch.RowWiseAdagrad(...)` or `ps_torch.Ftrl(...)`. By default the
            optimizer that has the handle steps them lazily: a step changes the rows of its batch and no others.
        initial, scale, seed: The first value of a row: "normal" with standard deviation `scale`, "uniform" in [-scale,
            scale), or the "constant" `scale`. By default the seed is one of torch's random numbers. An id that training
            has not seen has this value, also in evaluation; a lookup creates no row.
        admit_after: The number of occurrences after which an id gets a row; with 0 and 1 the first one is enough.
        expire_after: The number of steps without training after which a row is removed. Only steps that trained other
            rows count. 0: never.
        max_rows: The largest number of rows. Beyond it the rows that were trained longest ago are removed. 0: no limit.
        padding_idx: An id whose vector is zero and is never trained. It has no row, and may be any id. None: no id.
        scale_grad_by_freq: Whether the gradient of a row is divided by the number of times that its id occurs in the
            lookup.
        max_norm, norm_type: Not supported, see Raises.
        lazy_decay: Whether the optimizer may have a weight_decay. A row then decays only in steps whose batch has it.
        ids: A function that returns this table's ids in a batch of a prepared loader: a tensor, or a list of tensors.
            With it a step on servers also fetches the rows of the next batch. `announce` does the same by hand.

    Raises:
        InvalidRequest: A setting is out of range.
        Unsupported: `max_norm` is set. torch then rewrites rows in each lookup; in a table only steps change rows.

    Example:
        embedding = ps_torch.Embedding(8, admit_after=2)
        vectors = embedding(torch.tensor([[3, 2**60], [3, -1]]))  # [2, 2, 8]
    """

    padding_idx: int | None = None  # also for a module unpickled from an earlier version
    scale_grad_by_freq = False

    def __init__(
        self,
        dim: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        optimizer: TableOptimizer | None = None,
        initial: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 0,
        expire_after: int = 0,
        max_rows: int = 0,
        lazy_decay: bool = False,
        ids: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise Unsupported(
                f"max_norm ({max_norm}) would have a lookup write rows, and only steps do: leave it out, and shorten "
                "what the lookup returns, as by torch.renorm"
            )
        self.padding_idx = _checked_padding(padding_idx)
        self.scale_grad_by_freq = scale_grad_by_freq
        self.ids_of = IdsOf(ids)
        dim, scale, seed = as_python(dim), as_python(scale), as_python(seed)
        limits = as_python(admit_after), as_python(expire_after), as_python(max_rows)
        self.settings = TableSettings(optimizer, initial, scale, seed, *limits, lazy_decay)
        if optimizer is not None and not isinstance(optimizer, TableOptimizer):
            raise InvalidRequest(
                f"optimizer must be ps_torch.RowWiseAdagrad(...) or ps_torch.Ftrl(...), got {str(optimizer)[:80]}"
            )
        self.local: Rows = LocalRows(self.settings, dim)
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.lookups = Lookups(joined_group)
        register(self)
        _compile_no_lookup()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register(self)
        _compile_no_lookup()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """Returns the rows of ids, of int64 or int32: [...] to [..., dim]."""
        each, _ = self._each(input)
        return each

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the current rows of ids, outside of training: [...] to [..., dim]."""
        with torch.no_grad():
            each, _ = self._each(ids)
            return each

    @classmethod
    def from_pretrained(
        cls: type[T],
        ids: torch.Tensor | np.ndarray[Any, Any] | RowFile,
        vectors: torch.Tensor | np.ndarray[Any, Any] | None = None,
        freeze: bool = True,
        **settings: Any,
    ) -> T:
        """Returns a table that begins with given rows, as nn.Embedding.from_pretrained does.

        Tensors and files are not copied. Do not change them until `prepare`, or until the first lookup. On servers rank
        0 reads the vectors piece by piece and sends each piece to its shards; other workers read no vector. Ids without
        a vector begin with the table's `initial`.

        Args:
            ids: [n] int64 or int32, each once; or a RowFile, which contains the vectors.
            vectors: [n, dim], of a floating type; the table keeps float32. It may be an array that is mapped from a
                file.
            freeze: Whether the rows stay untrained.
            settings: The arguments of the class except `dim`.

        Raises:
            InvalidRequest: These are no ids or no vectors. A vector that is not finite is found by the call that reads
                it.

        Example:
            ids = torch.tensor([10, 20, 30])
            words = ps_torch.Embedding.from_pretrained(ids, torch.randn(3, 8), freeze=False)
        """
        given = GivenRows.sized(ids, vectors, settings.get("padding_idx"))
        table = cls(given.dim, **settings)
        table.weight.requires_grad_(not freeze)
        table.local.assign(given, lazily=True)
        return table

    def assign(
        self,
        ids: torch.Tensor | np.ndarray[Any, Any] | RowFile,
        vectors: torch.Tensor | np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Sets rows, of new ids or of ids that have a row. Call it before `prepare`, or between two steps.

        Assigned rows have no optimizer state at first. Before `prepare` a RowFile is read as in `from_pretrained`. On
        servers and in ddp any worker may make the call. Its own lookups return the new rows at once. The next step of
        this worker carries them to the others, and that step's update begins from them.

        Args:
            ids: [n] int64 or int32, each once; or a RowFile, which contains the vectors.
            vectors: [n, dim], of a floating type, finite.

        Raises:
            InvalidRequest: These are no ids, or no vectors of this table. No row is set.
            LimitExceeded: There are more bytes than one step can carry to a shard. No row is set.

        Example:
            embedding.assign(torch.tensor([3]), torch.zeros(1, 8))
        """
        given = GivenRows(self.weight.shape[1], self.padding_idx)
        given.add(ids, vectors)
        self.local.assign(given, lazily=isinstance(ids, RowFile))

    def announce(self, ids: torch.Tensor | Sequence[torch.Tensor] | None) -> None:
        """Announces the ids of the next batch, so that the next step fetches their rows.

        Call it before `optimizer.step()`; with the argument `ids` the module does so itself. No result depends on it: a
        lookup pulls rows that were not announced. Without servers the call does nothing.

        Args:
            ids: The ids, in one tensor or several. None cancels the announcement.

        Raises:
            InvalidRequest: These are no ids.
        """
        flat = None if ids is None else flat_ids(ids)
        if flat is not None and self.padding_idx is not None:
            flat = flat[flat != self.padding_idx]
        self.local.announce(flat)

    def get_extra_state(self) -> torch.Tensor:
        """Returns all rows as bytes of a safetensors file. torch puts them into `state_dict` beside the handle."""
        return torch.frombuffer(bytearray(self.local.state()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Replaces all rows by those of a `state_dict`. Raises InvalidRequest if they do not fit this table."""
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            got = state.dtype if isinstance(state, torch.Tensor) else type(state).__name__
            raise InvalidRequest(f"a table's extra state is bytes, a tensor of uint8, got {got}")
        self.local.load(state.cpu().numpy().tobytes())

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.local)

    def __bool__(self) -> bool:
        return True  # as any module: with __len__ alone a table without rows would be false

    def extra_repr(self) -> str:
        """Returns the settings that differ from the defaults, for `print(model)`."""
        usual = asdict(TableSettings())
        changed = [f"{name}={value!r}" for name, value in vars(self.settings).items() if value != usual[name]]
        if self.padding_idx is not None:
            changed.append(f"padding_idx={self.padding_idx}")
        if self.scale_grad_by_freq:
            changed.append("scale_grad_by_freq=True")
        return ", ".join([str(self.weight.shape[1]), *changed])

    def _each(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns a row for each id, [...] to [..., dim], and a mask of the padding ids, or None if there is no
        padding.

        Equal ids get rows of their own, so that `expanded` adds their gradients in the order of the ids.
        """
        rows, places, padding = self._find(ids)
        each = expanded(rows, places)
        return (each if padding is None else each.masked_fill(padding.unsqueeze(-1), 0.0)), padding

    def _find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the distinct rows of ids, the index of each id among them, and a mask of padding.

        The index of a padding id is 0, and the row there means nothing.
        """
        if self.padding_idx is None:
            rows, places = self.lookups.find(self.local, self.weight, ids)
            return self._scaled(rows, places), places, None
        flat = torch.from_numpy(flat_ids([ids]))
        padding = flat == self.padding_idx
        rows, found = self.lookups.find(self.local, self.weight, flat[~padding])
        rows, padding = self._scaled(rows, found), padding.to(rows.device)
        places = torch.zeros(len(flat), dtype=torch.int64, device=rows.device)
        places[~padding] = found
        if not len(rows):  # every id is padding
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return rows, places.view(ids.shape), padding.view(ids.shape)

    def _scaled(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns the distinct rows of a lookup. With scale_grad_by_freq their gradients are divided by the ids'
        counts.

        places: the index of each id among the rows
        """
        if not self.scale_grad_by_freq:
            return rows
        return with_divided_gradient(rows, torch.bincount(places.reshape(-1), minlength=len(rows)))


@cache
def _compile_no_lookup() -> None:
    """Excludes lookups from the graphs of torch.compile: ids are looked up in numpy, and on servers.

    Called with the first table: torch imports its compiler for this, which takes as long as torch itself, and a process
    that imports this package may have no table.
    """
    Embedding._find = torch.compiler.disable(Embedding._find)  # type: ignore[method-assign]


class EmbeddingBag(Embedding):
    """Like torch's nn.EmbeddingBag, without a number of embeddings. See Embedding for the table and the other
    arguments.

    Args:
        mode: How the rows of a bag become one: "sum", "mean" or "max".
        include_last_offset: Whether the offsets end with the end of the last bag.
        padding_idx: An id that is left out of its bag, and of the count in a mean.

    Example:
        bag = ps_torch.EmbeddingBag(8, mode="sum")
        vectors = bag(torch.tensor([1, 2, 2**40]), torch.tensor([0, 1]))  # two bags: [2, 8]
    """

    def __init__(
        self,
        dim: int,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        optimizer: TableOptimizer | None = None,
        initial: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 0,
        expire_after: int = 0,
        max_rows: int = 0,
        lazy_decay: bool = False,
        ids: Callable[[Any], Any] | None = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise InvalidRequest(f"mode must be sum, mean or max, got {mode!r}")
        if mode == "max" and scale_grad_by_freq:
            raise Unsupported('scale_grad_by_freq is for the modes "sum" and "mean", as in torch, got "max"')
        super().__init__(
            dim,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            optimizer=optimizer,
            initial=initial,
            scale=scale,
            seed=seed,
            admit_after=admit_after,
            expire_after=expire_after,
            max_rows=max_rows,
            lazy_decay=lazy_decay,
            ids=ids,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,  # torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns one row a bag: [bags, n] ids, or [n] ids and [bags] offsets, to [bags, dim].

        Args:
            input: The ids.
            offsets: The first index of each bag, where `input` has one dimension.
            per_sample_weights: A weight for each id, for mode "sum".
        """
        each, padding = self._each(input)
        each = each.reshape(-1, each.shape[-1])
        # torch's embedding_bag needs at least one row, even if all bags are empty.
        each = each if len(each) else torch.cat([each, each.new_zeros(1, each.shape[1])])
        numbers, left_out = torch.arange(input.numel(), device=each.device), None
        if padding is not None and bool(padding.any()):
            # torch's padding_idx is one row, so all padding ids share the first one's.
            left_out = int(padding.reshape(-1).nonzero()[0])
            numbers[padding.reshape(-1)] = left_out
        return functional.embedding_bag(
            numbers.view(input.shape),
            each,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=left_out,
        )


def _checked_padding(padding_idx: int | None) -> int | None:
    padding_idx = as_python(padding_idx)
    if padding_idx is not None and not (
        isinstance(padding_idx, int) and not isinstance(padding_idx, bool) and -(2**63) <= padding_idx < 2**63
    ):
        raise InvalidRequest(f"padding_idx must be an id of 64 bits, got {padding_idx!r}")
    return padding_idx


def named_tables(models: Sequence[nn.Module]) -> dict[str, Embedding]:
    """Returns the tables of some models by name, which is that of the module in its model. With several models the
    model's number comes first, as in the names of parameters. Raises InvalidRequest for two modules that share one
    weight."""
    found: dict[str, Embedding] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, Embedding) and module not in found.values():
                found[f"{number}.{name}" if len(models) > 1 else name or "table"] = module
    by_weight: dict[int, str] = {}
    for name, module in found.items():
        first = by_weight.setdefault(id(module.weight), name)
        if first != name:
            raise InvalidRequest(f"the tables {first!r} and {name!r} share one weight: use one module twice instead")
    return found


def looked_up(modules: Iterable[Embedding]) -> LookedUp:
    """Returns the counts of the ids looked up in some tables, summed over the tables."""
    each = [module.lookups.looked_up for module in modules]
    return LookedUp(sum(one.ids for one in each), sum(one.distinct for one in each))


def prepare_tables(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    exchange: Exchange | None = None,
    rank: int = 0,
) -> Collection[Embedding]:
    """Prepares the tables of some models to be trained by these optimizers, or by later ones. Returns the tables.

    exchange: ddp's means to exchange values between ranks; all tables begin with the rows of rank 0
    rank: the rank of this process
    Raises InvalidRequest or Unsupported for tables that cannot be trained so.
    """
    tables: Mapping[str, Embedding] = named_tables(models)
    for name, module in tables.items():
        module.local.name = name
    check(list(tables.values()), optimizers)
    for module in tables.values():
        module.local.share(exchange, rank)
    return tables.values()
