"""The gradients of a model as parts of flat buffers: which parameters have one, and which are changed or not finite.

Autograd makes each gradient in memory of its own. As soon as it is there, it is moved into the buffers, and `.grad`
lies there. A script may change gradients after backward (clip, scale, drop): `marks` detects that, whatever code does
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import is_finite
from ps_worker.model.buffers import FlatBuffers
from ps_worker.model.sharded import as_placed, local
from ps_worker.model.storage import counting_with
from ps_worker.model.tracked import unwatch_gradient, watched_gradient


class Gradients:
    """The gradients of the trained parameters. Hooks run on autograd's thread, all else on the training thread.

    on_ready: called with a parameter's index when backward has finished its gradient
    """

    def __init__(self, buffers: FlatBuffers, on_ready: Callable[[int], None]) -> None:
        self._buffers = buffers
        self._on_ready = on_ready
        self._on_gpu = buffers.device.type == "cuda"
        self._check = buffers.spec.non_finite is not NonFinite.ALLOW
        self._finite: dict[int, bool] = {}  # by parameter, of those checked in this step
        self._touches = 0  # how often a script has asked for some gradient's `.data`
        self._hooks: list[RemovableHandle] = []
        self._own: dict[int, torch.Tensor] = {}  # by parameter, its view with a storage of its own

    def watch(self) -> None:
        """Registers a hook on each parameter that moves its gradient into the buffers as soon as backward has finished
        it.
        """
        for index, tensor in self._buffers.trained.items():
            frozen = not tensor.requires_grad
            tensor.requires_grad_()  # a frozen one takes no hook, and may be thawed later
            self._hooks.append(tensor.register_post_accumulate_grad_hook(self._on_accumulated(index)))
            tensor.requires_grad_(not frozen)

    def _on_accumulated(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self._accumulated(index)

    def release(self) -> None:
        """Removes the hooks, also those of gradients that a script keeps. Such a gradient would keep all buffers alive,
        as Python's garbage collector does not see references through torch's objects.
        """
        for hook in self._hooks:
            hook.remove()
        for tensor in self._buffers.trained.values():
            unwatch_gradient(tensor.grad)

    def forget(self) -> None:
        """Forgets the results of the checks for infinities and NaNs."""
        self._finite.clear()

    def move_in(self, before: dict[int, torch.Tensor]) -> None:
        """Moves gradients from earlier buffers into new ones. before: the views of the earlier buffers"""
        self._own.clear()
        for index, view in before.items():
            tensor = self._buffers.trained[index]
            if tensor.grad is not None and local(tensor.grad).data_ptr() == view.data_ptr():
                self._buffers.gradient_views[index].copy_(view)
                tensor.grad = self._shown(index)

    def gather(self, indices: Iterable[int]) -> set[int]:
        """Moves these parameters' gradients into the buffers. Returns those that have none in this step."""
        absent = set()
        for index in indices:
            gradient = self._buffers.trained[index].grad
            if gradient is None:
                absent.add(index)
            elif index in self._buffers.sharded and self._is_here(index):
                continue  # as backward has finished it. No version tells: torch counts no changes of a local shard
            elif self._adopt(index):
                # The script has replaced it. (On another device backward's own comes here, too: no mark tells which.)
                self._finite.pop(index, None)
        return absent

    def marks(self, spaces: Iterable[str]) -> list[int]:
        """Returns numbers that rise with each change of a gradient in these spaces, whatever code makes it."""
        return [self._touches, *self._buffers.gradient_versions(spaces)]

    def not_finite(self, present: Iterable[int], changed: bool) -> str | None:
        """Returns the name of one of these parameters whose gradient has an infinity or a NaN; None if there is none.

        changed: gradients were changed after backward, so that the checks made then do not count. These checks are
                 forgotten.
        """
        present = list(present)
        seen = {} if changed else dict(self._finite)
        for index in present:
            self._finite.pop(index, None)
        if not self._check:
            return None
        views = self._buffers.gradient_views
        unseen = {index: views[index] for index in present if not seen.get(index, False)}
        if self._on_gpu and unseen:
            real = [torch.view_as_real(view) if view.is_complex() else view for view in unseen.values()]
            totals = torch.stack([view.sum(dtype=torch.float32) for view in real])
            if bool(torch.isfinite(totals).all()):  # waits for the GPU once, not once for each
                return None
        return next((self._buffers.spec.parameters[i].name for i, view in unseen.items() if not is_finite(view)), None)

    def saw_not_finite(self, bucket: BucketSpec) -> bool:
        """Whether backward has made a gradient in this bucket that is not finite."""
        return any(self._finite.get(part.parameter) is False for part in bucket.slices)

    def _accumulated(self, index: int) -> None:
        self._adopt(index)
        if self._check and not self._on_gpu:  # where the answer would have to be waited for
            self._finite[index] = is_finite(self._buffers.gradient_views[index])  # now, while it is in the cache
        self._on_ready(index)

    def _is_here(self, index: int) -> bool:
        """Whether the buffers have the gradient of a DTensor as it is."""
        return torch.equal(local(self._buffers.trained[index].grad), self._buffers.gradient_views[index])

    def _adopt(self, index: int) -> bool:
        """Moves a gradient into the buffers, and frees the memory it was made in; returns whether it was elsewhere."""
        tensor, view = self._buffers.trained[index], self._buffers.gradient_views[index]
        if index in self._buffers.sharded:
            as_placed(tensor)
        gradient = local(tensor.grad) if index in self._buffers.sharded else tensor.grad
        if gradient is None or gradient.data_ptr() == view.data_ptr():
            return False
        name = self._buffers.spec.parameters[index].name
        if gradient.is_sparse:
            raise Unsupported(f"the gradient of {name} is sparse; use sparse=False")
        self._buffers.check_form(index)
        if gradient.shape != view.shape:
            raise InvalidRequest(f"the gradient of {name}: expected {tuple(view.shape)}, got {tuple(gradient.shape)}")
        view.copy_(gradient.detach())  # which has a graph of its own after backward(create_graph=True)
        if index not in self._buffers.elsewhere:
            tensor.grad = self._shown(index)
        return True

    def _shown(self, index: int) -> torch.Tensor:
        """Returns a gradient as a script gets it from `.grad`."""
        view, own = self._buffers.gradient_views[index], self._own.get(index)
        if own is None or own.data_ptr() != view.data_ptr():  # share_memory() moves a storage
            own = self._own[index] = counting_with(view)
        return watched_gradient(own, self._touched)

    def _touched(self, _: torch.Tensor | None) -> None:
        self._touches += 1
