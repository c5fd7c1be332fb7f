"""Embedding and EmbeddingBag: torch's modules, whose ids are any 64-bit numbers and whose rows are in a table.

A module has one parameter, `weight`, of shape [0, dim]: a handle, for optimizers, groups and schedulers to hold. The
optimizer that has it steps the rows, unless the module has its own. `state_dict()` has the rows as bytes beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.tables.ahead import IdsOf, flat_ids
from ps_worker.tables.given import GivenRows, RowFile
from ps_worker.tables.lookups import LookedUp, Lookups, expanded, with_divided_gradient
from ps_worker.tables.optimizers import TableOptimizer
from ps_worker.tables.rows import Exchange, LocalRows, Rows, TableSettings
from ps_worker.tables.stepping import check, joined_group, register

T = TypeVar("T", bound="Embedding")


class Embedding(nn.Module):
    """As torch's nn.Embedding, without a number of embeddings: an id is any int64, and its row comes with training.

    dim:          elements of a row, float32
    optimizer:    of the rows: ps_torch.RowWiseAdagrad or ps_torch.Ftrl; by default that of the handle's group,
                  lazily: a step moves the rows of its batch, and no others
    initial, scale, seed: how a row begins: "normal" with this standard deviation, "uniform" in [-scale, scale), or the
                  scale itself as a "constant"; by default the seed is one of torch's random numbers. An id that
                  training has not seen has this value, also in evaluation; looking it up makes no row
    admit_after:  an id becomes a row with the step in which it has occurred so often; 0 and 1: at once
    expire_after: a row is forgotten when so many steps that trained others have not trained it; 0: never
    max_rows:     beyond, the rows trained longest ago are forgotten; 0: as many as fit into memory
    padding_idx:  an id that reads as zeros, and is never trained: it has no row. Any id may be it; None: none is
    scale_grad_by_freq: the gradient of a row is divided by how often its id occurs in the lookup
    max_norm, norm_type: refused: see Raises
    lazy_decay:   the optimizer may have a weight_decay, though a row then decays only in the steps that have it
    ids:          finds this table's ids in a batch of a prepared loader, as the loader makes it: a tensor, or a list of
                  tensors. On servers, a step then brings the rows of the next batch along. `announce` does so by hand

    What a script does through `model.parameters()`, to values or gradients, reaches the handle, and no row.

    Raises InvalidRequest for settings that no table can have, Unsupported for max_norm: torch writes rows anew in a
    lookup, and here nothing but a step does.
    """

    padding_idx: int | None = None  # of a pickle of an earlier version
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
        limits = admit_after, expire_after, max_rows
        self.settings = TableSettings(optimizer, initial, scale, seed, *limits, lazy_decay)
        if optimizer is not None and not isinstance(optimizer, TableOptimizer):
            raise InvalidRequest(
                f"optimizer must be ps_torch.RowWiseAdagrad(...) or ps_torch.Ftrl(...), got {str(optimizer)[:80]}"
            )
        self.local: Rows = LocalRows(self.settings, dim)
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.lookups = Lookups(joined_group)
        register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register(self)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name
        """Returns rows: [...] ids of int64 or int32, to [..., dim]."""
        each, _ = self._each(input)
        return each

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows as they are now, apart from any training: [...] to [..., dim]."""
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
        """Returns a table that begins with these rows, as nn.Embedding.from_pretrained.

        ids:      [n] int64 or int32, each once; or a RowFile, which has the vectors, too
        vectors:  [n, dim], of a floating type; rows are float32. Also an array that is mapped from a file
        freeze:   the rows are not trained
        settings: those of the class but for `dim`

        Tensors and files are not copied: leave them as they are until `prepare`, or until the first lookup. On servers
        rank 0 reads them piece by piece, and sends each piece to its shards; the others read no vector. Other rows
        begin as ever. Raises InvalidRequest for what are no vectors; for a vector that is not finite the call that
        reads it does.
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
        """Sets rows, of ids that have one or not: before `prepare`, or between two steps.

        ids:     [n] int64 or int32, each once; or a RowFile, which has the vectors, too
        vectors: [n, dim], of a floating type, finite

        Rows that are set begin without a state of the optimizer. Before `prepare` a RowFile is read as by
        `from_pretrained`. On servers, and in ddp, any worker may call it. Its own lookups see the rows at once, those
        of others after its next step: that update begins from them. Raises InvalidRequest for what are no vectors of
        this table, LimitExceeded for more than a step takes along to a shard; nothing is set then.
        """
        given = GivenRows(self.weight.shape[1], self.padding_idx)
        given.add(ids, vectors)
        self.local.assign(given, lazily=isinstance(ids, RowFile))

    def announce(self, ids: torch.Tensor | Sequence[torch.Tensor] | None) -> None:
        """Says which ids the next batch looks up, so that the next step brings their rows along; None takes it back.

        It changes no result: ids that were not announced are pulled when they are looked up. To be called before
        `optimizer.step()`; the argument `ids` does it by itself. It does nothing where rows are in this process.
        Raises InvalidRequest for what are no ids.
        """
        flat = None if ids is None else flat_ids(ids)
        if flat is not None and self.padding_idx is not None:
            flat = flat[flat != self.padding_idx]
        self.local.announce(flat)

    def get_extra_state(self) -> torch.Tensor:
        """Returns what `state_dict` has of the table beside its handle: all rows, as bytes of a safetensors file."""
        return torch.frombuffer(bytearray(self.local.state()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Has the rows of a `state_dict`, and no others. Raises InvalidRequest if they fit no such table."""
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            got = state.dtype if isinstance(state, torch.Tensor) else type(state).__name__
            raise InvalidRequest(f"a table's extra state is bytes, a tensor of uint8, got {got}")
        self.local.load(state.cpu().numpy().tobytes())

    def __len__(self) -> int:
        """How many rows the table has."""
        return len(self.local)

    def __bool__(self) -> bool:
        return True  # also without a row

    def extra_repr(self) -> str:
        """Describes it in the model's text."""
        usual = asdict(TableSettings())
        changed = [f"{name}={value!r}" for name, value in vars(self.settings).items() if value != usual[name]]
        if self.padding_idx is not None:
            changed.append(f"padding_idx={self.padding_idx}")
        if self.scale_grad_by_freq:
            changed.append("scale_grad_by_freq=True")
        return ", ".join([str(self.weight.shape[1]), *changed])

    def _each(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the row of each id, [...] to [..., dim], and which ids are padding; None: none can be.

        A row for each id, not for each distinct one: `expanded` adds up their gradients in the order of the ids.
        """
        rows, places, padding = self._find(ids)
        each = expanded(rows, places)
        return (each if padding is None else each.masked_fill(padding.unsqueeze(-1), 0.0)), padding

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # hashing ids is no work for a compiler
    def _find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the distinct rows of ids, the place of each id among them, and which are padding: these have place 0,
        with any row there."""
        if self.padding_idx is None:
            rows, places = self.lookups.find(self.local, self.weight, ids)
            return self._scaled(rows, places), places, None
        flat = torch.from_numpy(flat_ids([ids]))
        padding = flat == self.padding_idx
        rows, found = self.lookups.find(self.local, self.weight, flat[~padding])
        rows, padding = self._scaled(rows, found), padding.to(rows.device)
        places = torch.zeros(len(flat), dtype=torch.int64, device=rows.device)
        places[~padding] = found
        if not len(rows):  # all is padding
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return rows, places.view(ids.shape), padding.view(ids.shape)

    def _scaled(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns the distinct rows of a lookup, whose gradients are divided by how often they occur, if that is to be.

        places: of its ids among the rows
        """
        if not self.scale_grad_by_freq:
            return rows
        return with_divided_gradient(rows, torch.bincount(places.reshape(-1), minlength=len(rows)))


class EmbeddingBag(Embedding):
    """As torch's nn.EmbeddingBag, without a number of embeddings; see Embedding for the table.

    mode: how the rows of a bag become one: "sum", "mean" or "max"
    include_last_offset: offsets have the end of the last bag, too
    padding_idx: an id that is left out of its bag, also of the number in a mean
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

        per_sample_weights: shaped as the ids, for mode "sum"
        """
        each, padding = self._each(input)
        each = each.reshape(-1, each.shape[-1])
        # torch wants one row at least, also where all bags are empty.
        each = each if len(each) else torch.cat([each, each.new_zeros(1, each.shape[1])])
        numbers, left_out = torch.arange(input.numel(), device=each.device), None
        if padding is not None and bool(padding.any()):
            # All that is padding is one row: torch leaves out one.
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
    if padding_idx is not None and not (
        isinstance(padding_idx, int) and not isinstance(padding_idx, bool) and -(2**63) <= padding_idx < 2**63
    ):
        raise InvalidRequest(f"padding_idx must be an id of 64 bits, got {padding_idx!r}")
    return padding_idx


def named_tables(models: Sequence[nn.Module]) -> dict[str, Embedding]:
    """Returns the tables of some models by name: that of the module in the model, of several models with the model's
    number in front, as parameters are named. Raises InvalidRequest for two modules that share one weight."""
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
    """Returns what was looked up in some tables, in all of them together."""
    each = [module.lookups.looked_up for module in modules]
    return LookedUp(sum(one.ids for one in each), sum(one.distinct for one in each))


def prepare_tables(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    exchange: Exchange | None = None,
    rank: int = 0,
) -> Collection[Embedding]:
    """Makes the tables of some models ready to be trained by these optimizers, or by others later; returns them.

    exchange: in ddp, what the ranks tell each other with; all begin with the rows of rank 0
    rank:     of this process
    Raises InvalidRequest or Unsupported for tables that cannot be trained so.
    """
    tables: Mapping[str, Embedding] = named_tables(models)
    for name, module in tables.items():
        module.local.name = name
    check(list(tables.values()), optimizers)
    for module in tables.values():
        module.local.share(exchange, rank)
    return tables.values()
