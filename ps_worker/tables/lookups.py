"""The rows that a step has looked up, and their gradients.

A forward pulls each distinct row once, into a tensor of its own that autograd counts as a leaf. When backward has
finished its gradient, that leaf joins the parameter group of its table's handle, until the step. So `zero_grad` of the
optimizer, gradient scaling, and clipping over the optimizer's groups see it as a parameter like any other. The handle
is in the graph, too, so that it has a gradient when its rows do: an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import Ids
from ps_tables.contributions import Counts, RowGradients
from ps_tables.distinct import distinct


class Source(Protocol):
    """Where rows are."""

    def __len__(self) -> int:
        """How many rows there are."""

    def pull(self, ids: Ids, out: torch.Tensor) -> object:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns a copy of all rows, and of what belongs to them."""

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Has these rows, as `snapshot` returned them, and no others."""


_ID_TYPES = (torch.int64, torch.int32)


class Lookups:
    """The lookups of one table since the last step. For the training thread.

    handle: the table's parameter, [0, dim]
    source: where its rows are; None before `begin`
    """

    def __init__(self, handle: nn.Parameter) -> None:
        self.handle = handle
        self.source: Source | None = None
        self._group: Callable[[], dict[str, Any]] | None = None
        self._complete = False  # the handle got a gradient after the rows that have one
        self._leaves: list[tuple[torch.Tensor, Ids, Counts]] = []  # with a gradient, in the order of backward

    def begin(self, source: Source, group: Callable[[], dict[str, Any]] | None) -> None:
        """Has rows come from a source.

        group: returns the parameter group that has the handle: `load_state_dict` of its optimizer makes it anew; None:
               no optimizer has it
        """
        self.source, self._group = source, group
        if self.handle.requires_grad:
            self.handle.register_post_accumulate_grad_hook(self._has_all)

    def find(self, ids: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the distinct rows of some ids, [n, dim], and the place of each id among them, shaped as the ids.

        name: of the module, for messages. Raises InvalidRequest for ids of another type, and before `prepare`.
        """
        if ids.dtype not in _ID_TYPES:
            raise InvalidRequest(f"{name}: ids are int64 or int32, got {ids.dtype}")
        if self.source is None:
            raise InvalidRequest(f"{name}: its rows are there after session.prepare, which got no model that has it")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        wanted, places, counts = distinct(flat)
        rows = torch.empty(len(wanted), self.handle.shape[1])
        self.source.pull(wanted, rows)
        rows = rows.to(self.handle.device)
        if torch.is_grad_enabled() and self.handle.requires_grad:
            if self._group is not None:
                rows.requires_grad_()
                rows.register_post_accumulate_grad_hook(lambda leaf: self._has_gradient(leaf, wanted, counts))
            rows = _Joined.apply(rows, self.handle)  # type: ignore[no-untyped-call]
        return rows.to(self.handle.dtype), torch.from_numpy(places.reshape(ids.shape)).to(rows.device)

    def _has_gradient(self, leaf: torch.Tensor, ids: Ids, counts: Counts) -> None:
        assert self._group is not None
        if (
            self._complete and self.handle.grad is None
        ):  # `zero_grad` of the model since then: it knows the handle alone
            self._complete = False
            self._forget(list(self._leaves))
        for other, _, _ in self._leaves:
            if other is leaf:
                return  # a second backward through the same graph
        self._forget([old for old in self._leaves if old[0].grad is None])
        self._leaves.append((leaf, ids, counts))
        self._group()["params"].append(leaf)

    def _has_all(self, _: torch.Tensor) -> None:
        self._complete = True

    def take(self) -> RowGradients:
        """Ends the step; returns what its rows' gradients are, added up."""
        leaves = list(self._leaves)
        self._forget(leaves)
        # What `zero_grad` has taken away counts no more.
        alive = [leaf for leaf in leaves if leaf[0].grad is not None and self.handle.grad is not None]
        if not alive:
            nothing = np.zeros(0, np.int64)
            return RowGradients(nothing, nothing, torch.zeros(0, self.handle.shape[1]))
        return RowGradients.union(
            [
                RowGradients(ids, counts, leaf.grad.to("cpu", torch.float32).contiguous())  # type: ignore[union-attr]
                for leaf, ids, counts in alive
            ]
        )

    def _forget(self, leaves: list[tuple[torch.Tensor, Ids, Counts]]) -> None:
        gone = {id(leaf) for leaf, _, _ in leaves}
        self._leaves = [each for each in self._leaves if id(each[0]) not in gone]
        if self._group is not None and gone:
            parameters = self._group()["params"]
            parameters[:] = [each for each in parameters if id(each) not in gone]

    def __deepcopy__(self, memo: dict[int, Any]) -> Lookups:
        """A copy of a model (a teacher, an average) reads the same rows, and trains none."""
        copied = Lookups(memo.get(id(self.handle), self.handle))
        copied.source = self.source
        return copied

    def __reduce__(self) -> Any:
        return Lookups, (self.handle,)


def expanded(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns rows by their places: [n, dim] and [...] to [..., dim].

    Backward adds up each row's gradients in the order of places, several times as fast as that of torch's embedding
    (measured).
    """
    found: torch.Tensor = _Expanded.apply(rows, places.reshape(-1))  # type: ignore[no-untyped-call]
    return found.view(*places.shape, rows.shape[1])


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(places)
        context.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = context.saved_tensors
        return gradient.new_zeros(context.count, gradient.shape[1]).index_add(0, places, gradient), None


class _Joined(torch.autograd.Function):
    """Rows as they are, with the handle beside them in the graph: it gets an empty gradient when they get theirs."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
        context.handle = handle.shape, handle.dtype
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype = context.handle
        return gradient, gradient.new_zeros(shape, dtype=dtype)
