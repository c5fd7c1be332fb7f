"""The rows that a step has looked up, and their gradients.

A forward pulls each distinct row once, into a tensor of its own that autograd counts as a leaf. When backward has
finished its gradient, that leaf joins the parameter group of its table's handle, until the step. So `zero_grad` of the
optimizer, gradient scaling, and clipping over the optimizer's groups see it as a parameter like any other. The handle
is in the graph too, so that it gets an (empty) gradient when its rows do. If this gradient was removed or set to zeros,
the script has called a `zero_grad` that does not know the leaves: a module's, or that of an optimizer whose groups have
none. Then the gradients of all rows are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ps_protocol.row_ids import Ids
from ps_tables.contributions import Counts, RowGradients
from ps_tables.row_sums import added_up, rows_at
from ps_worker.tables.ahead import Batch, flat_ids

_LEAVES = 8  # the most leaves that wait for a step; more are added up, unless a group has them


class Source(Protocol):
    """The source of rows. shards: the number of shards that share them"""

    shards: int

    def pull(self, ids: Ids, out: torch.Tensor, ends: Ids) -> object:
        """Reads rows: [n] distinct ids, into [n, dim] float32, contiguous. ends: as in Batch"""

    def looked_ahead(self, flat: Ids) -> tuple[Batch, torch.Tensor] | None:
        """Returns the ids and rows of a lookup if exactly these ids were announced; None: pull them."""


class LookedUp(NamedTuple):
    """Counts of looked-up ids, and of the distinct ones in each lookup."""

    ids: int = 0
    distinct: int = 0


@dataclass(frozen=True)
class _Leaf:
    """The rows of a lookup: [n, dim], a leaf of autograd.

    ends:  see RowGradients
    group: the parameters of the group that it has joined; None: none
    """

    rows: torch.Tensor
    ids: Ids
    counts: Counts
    ends: Ids | None
    group: list[Any] | None

    def gradients(self) -> RowGradients:
        """Returns its gradient, on the CPU."""
        assert self.rows.grad is not None
        gradients = self.rows.grad.detach().to("cpu", torch.float32).contiguous()
        return RowGradients(self.ids, self.counts, gradients, self.ends)

    def leave(self) -> None:
        """Removes the lookup from its group."""
        if self.group is not None:
            self.group[:] = [each for each in self.group if each is not self.rows]

    def end(self) -> None:
        """Removes the leaf from its group, and drops its gradient: another backward of its graph makes a new one."""
        self.leave()
        self.rows.grad = None


class Lookups:
    """The lookups of one table since the last step. For the training thread.

    group:     returns the parameters of the group that has a handle, if rows may join it
    looked_up: the counts since this table was made; any thread may read them
    """

    def __init__(self, group: Callable[[nn.Parameter], list[Any] | None]) -> None:
        self._group = group
        self.looked_up = LookedUp()
        self._leaves: list[_Leaf] = []  # in the order of backward
        self._sum: RowGradients | None = None  # the sum of gradients whose leaves were dropped
        self._zeroing = Zeroing()

    def find(self, source: Source, handle: nn.Parameter, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the distinct rows of some ids, [n, dim], and the index of each id among them, in the shape of the
        ids.

        handle: the table's parameter, [0, dim]. Raises InvalidRequest for tensors of another type.
        """
        flat = flat_ids([ids])  # a lookup takes one tensor, and no list
        found = source.looked_ahead(flat)
        if found is None:
            batch = Batch.of(flat, source.shards)
            rows = empty_rows(len(batch.ids), handle.shape[1])
            source.pull(batch.ids, rows, batch.ends)
        else:
            batch, rows = found
        places = batch.places
        self.looked_up = LookedUp(self.looked_up.ids + len(places), self.looked_up.distinct + len(batch.ids))
        rows = rows.to(handle.device)
        if torch.is_grad_enabled() and handle.requires_grad:
            self._zeroing.follow(handle)
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: self._has_gradient(leaf, handle, batch))
            rows = _Joined.apply(rows, handle, self._gets_gradient)  # type: ignore[no-untyped-call]
        return rows.to(handle.dtype), torch.from_numpy(places.reshape(ids.shape)).to(rows.device)

    def take(self, handle: nn.Parameter) -> RowGradients | None:
        """Ends the step; returns the summed gradients of its rows. None: no row has one."""
        # Gradients that `zero_grad` has cleared do not count.
        if not self._zeroing.keeps(handle):
            self._forget()
        parts = [leaf.gradients() for leaf in self._leaves if leaf.rows.grad is not None]
        parts = [self._sum, *parts] if self._sum is not None else parts
        self._forget()
        return RowGradients.union(parts) if parts else None

    def give_back(self, handle: nn.Parameter, gradients: RowGradients) -> None:
        """Restores gradients that `take` has returned: the step was refused, and the script may repair it and step
        again.
        """
        leaf = empty_rows(len(gradients), handle.shape[1]).to(handle.device).requires_grad_()
        # A copy: calls of the step that was broken off may still send the others, and the script may change its own.
        leaf.grad = gradients.gradients.to(handle.device, copy=True)
        self._join(leaf, handle, gradients)

    def leave_groups(self) -> Callable[[], None]:
        """Removes all rows from their groups; returns a function that puts them back."""
        before = [(leaf.group, list(leaf.group)) for leaf in self._leaves if leaf.group is not None]
        for leaf in self._leaves:
            leaf.leave()

        def back() -> None:
            for group, parameters in before:
                group[:] = parameters

        return back

    def _gets_gradient(self, leaf: torch.Tensor, handle: nn.Parameter) -> None:
        """Before backward adds to a leaf: drops all gradients if a `zero_grad` has cleared the handle's."""
        if not handle.requires_grad:
            return
        if not self._zeroing.keeps(handle):
            self._forget()
            leaf.grad = None  # the gradient of an earlier backward through a retained graph
            # Now: backward may break off before autograd comes to the handle.
            self._zeroing.begin(handle)
        # Until backward ends, DDP replaces the parameters' gradients by its own.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._zeroing.follow(handle))

    def _has_gradient(self, leaf: torch.Tensor, handle: nn.Parameter, batch: Batch) -> None:
        if not handle.requires_grad:  # frozen since the lookup
            leaf.grad = None
            return
        if any(other.rows is leaf for other in self._leaves):
            return  # a second backward through the same graph
        self._join(leaf, handle, batch)

    def _join(self, leaf: torch.Tensor, handle: nn.Parameter, of: Batch | RowGradients) -> None:
        gone = [other for other in self._leaves if other.rows.grad is None]  # `zero_grad` of the optimizer
        for other in gone:
            other.leave()
        group = self._group(handle)
        if group is not None:
            group.append(leaf)
        self._leaves = [other for other in self._leaves if other not in gone]
        self._leaves.append(_Leaf(leaf, of.ids, of.counts, of.ends, group))
        self._add_up()

    def _add_up(self) -> None:
        """Replaces the gradients by their sum, so that unused ones cannot grow without limit."""
        if len(self._leaves) > _LEAVES and all(leaf.group is None for leaf in self._leaves):
            parts = [leaf.gradients() for leaf in self._leaves]
            total = RowGradients.union([self._sum, *parts] if self._sum is not None else parts)
            self._forget()
            self._sum = total

    def _forget(self) -> None:
        for leaf in self._leaves:
            leaf.end()
        self._leaves, self._sum = [], None

    def __deepcopy__(self, memo: dict[int, Any]) -> Lookups:
        return Lookups(self._group)

    def __reduce__(self) -> Any:
        return Lookups, (self._group,)


def empty_rows(count: int, dim: int) -> torch.Tensor:
    """Returns memory for rows on the CPU: [count, dim] float32. Any thread may write to it, even if this one is in
    torch's inference mode.
    """
    with torch.inference_mode(False):
        return torch.empty(count, dim, dtype=torch.float32, device="cpu")


def expanded(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns rows by their indices: [n, dim] and [...] to [..., dim].

    Backward sums each row's gradients in the order of the indices, several times as fast as torch's embedding
    (measured).
    """
    found: torch.Tensor = _Expanded.apply(rows, places.reshape(-1))  # type: ignore[no-untyped-call]
    return found.view(*places.shape, rows.shape[1])


def with_divided_gradient(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the rows, [n, dim]; backward divides their gradients by counts, [n]."""
    divided: torch.Tensor = _Divided.apply(rows, counts)  # type: ignore[no-untyped-call]
    return divided


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(places)
        context.count = len(rows)
        return rows_at(rows, places)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = context.saved_tensors
        return added_up(gradient, places, context.count), None


class _Joined(torch.autograd.Function):
    """Returns its rows, and adds the handle to the graph: the handle gets an empty gradient when the rows get theirs.

    before: called with both, before either gets its gradient
    """

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, handle: nn.Parameter, before: Callable[[torch.Tensor, nn.Parameter], None]
    ) -> torch.Tensor:
        context.rows, context.handle, context.before = rows, handle, before
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, handle = context.rows, context.handle
        context.before(rows, handle)
        return gradient, gradient.new_zeros(handle.shape, dtype=handle.dtype), None


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(counts)
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (counts,) = context.saved_tensors
        return gradient / counts.to(gradient.dtype).unsqueeze(1), None


# -- the gradient of a handle ------------------------------------------------------------------------------------------

# It has no elements, and records when it is set to zeros. `zero_grad(set_to_none=False)` calls `zero_` of each
# gradient. A gradient without elements looks the same afterwards, so its class records the call. All operations work as
# for any tensor, and return plain tensors.
_ZERO = (torch.Tensor.zero_, torch.zero_, torch._foreach_zero_)


class HandleGradient(torch.Tensor):
    """A gradient that records when it is set to zeros. is_zeroed: whether it was"""

    is_zeroed = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Records calls that set gradients to zeros; see torch.overrides."""
        if func in _ZERO:
            for gradient in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                if isinstance(gradient, HandleGradient):
                    gradient.is_zeroed = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Zeroing:
    """Detects whether the gradient of one table's handle was cleared since it was made: set to None, or to zeros."""

    def __init__(self) -> None:
        self._noted: HandleGradient | None = None  # the present gradient, or the last one

    def begin(self, handle: nn.Parameter) -> None:
        """Gives a handle a gradient that counts."""
        if not isinstance(handle.grad, HandleGradient):
            handle.grad = _noting(torch.zeros_like(handle))
        self._noted = handle.grad
        self._noted.is_zeroed = False

    def follow(self, handle: nn.Parameter) -> None:
        """Makes a handle's gradient record zeros, even if a plain tensor has replaced it, as in DDP."""
        gradient, before = handle.grad, self._noted
        if gradient is None or gradient.requires_grad or isinstance(gradient, HandleGradient):
            return
        handle.grad = self._noted = _noting(gradient)
        self._noted.is_zeroed = before is not None and before.is_zeroed

    def keeps(self, handle: nn.Parameter) -> bool:
        """Whether a handle has a gradient that was not set to zeros."""
        gradient = handle.grad
        noted = gradient if isinstance(gradient, HandleGradient) else self._noted
        return gradient is not None and (noted is None or not noted.is_zeroed)


def _noting(gradient: torch.Tensor) -> HandleGradient:
    """Returns a gradient that records when it is set to zeros. It is no view, so `detach_` works on it."""
    return torch.Tensor._make_subclass(HandleGradient, gradient)
