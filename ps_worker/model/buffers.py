"""A model in flat buffers: their memory, the weights in it and which of them a script has changed, and the gradients.

One contiguous tensor has the weights of each space, and one its gradients. `param.data` and `param.grad` come to lie in
these tensors, in the order of the job's layout, and buckets are slices of them. Each is a tensor with a storage of its
own there (storage.py). With a segment shared with the shards, and no conversion on the way, these tensors lie in the
segment itself.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec, Layout, space_of
from ps_protocol.segment_layout import SegmentMap
from ps_protocol.tensors import TORCH_DTYPES, is_finite, whole_of
from ps_worker.model.sharded import as_placed, is_sharded, like, local
from ps_worker.model.storage import counting_with, with_own_storage
from ps_worker.model.tracked import (
    Touched,
    Touches,
    set_values,
    unwatch,
    unwatch_gradient,
    values,
    watch,
    watched_gradient,
)

_VERSION = attrgetter("_version")  # reads the counter in which torch counts in-place writes to a tensor


class FlatBuffers:
    """The buffers of the parameters that a job trains, with each parameter's position in them.

    trained:        the parameters that an optimizer steps, by index in the job
    device:         the device of the buffers: the one with most bytes of the model
    sharded:        parameters that are DTensors: only their local shards are trained
    segment:        the segment that is shared with shards on this host; None if there is none
    weight_views:   by parameter, its slice of the weights in its shape; empty before the first `lie_in`
    gradient_views: by parameter, its slice of the gradients
    flat_gradients: by space, the gradients
    elsewhere:      parameters that keep their own memory: on another device (a model spread over several), and
                    DTensors, whose memory torch manages
    """

    def __init__(self, spec: JobSpec, tensors: Sequence[torch.Tensor], layout: Layout) -> None:
        self.spec = spec
        self.layout = layout
        self.trained = {
            index: tensor
            for index, (parameter, tensor) in enumerate(zip(spec.parameters, tensors, strict=True))
            if layout.trains(parameter)
        }
        self.device = _main_device(self.trained.values())
        self._devices = {index: tensor.device for index, tensor in self.trained.items()}
        self.sharded = {index for index, tensor in self.trained.items() if is_sharded(tensor)}
        self.elsewhere = {index for index, tensor in self.trained.items() if self._is_elsewhere(tensor)}
        self.segment: SegmentMap | None = None
        self.weight_views: dict[int, torch.Tensor] = {}
        self.gradient_views: dict[int, torch.Tensor] = {}
        # By space, the model's weights: the same memory as `_weights`, unless the base is separate
        self._own: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] = {}  # by space
        self.flat_gradients: dict[str, torch.Tensor] = {}

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return is_sharded(tensor) or not _is_same(tensor.device, self.device)

    def lie_in(self, segment: SegmentMap | None) -> bool:
        """Allocates the buffers, in `segment` if it can hold them. Returns whether there are new buffers, which are
        empty.
        """
        first, before, self.segment = not self.weight_views, self.segment, segment
        if not first and (self.device.type == "cuda" or (before is None and segment is None)):
            return False
        # Not from the buckets: a parameter without elements is in none.
        trained = [self.spec.parameters[index] for index in self.trained]
        spaces = {space_of(parameter): parameter.dtype for parameter in trained}
        weights, gradients = (segment.weights, segment.gradients) if segment else ({}, {})
        self._weights = {space: self._space(space, dtype, weights) for space, dtype in spaces.items()}
        self.flat_gradients = {space: self._space(space, dtype, gradients) for space, dtype in spaces.items()}
        is_separate = self.spec.has_separate_base
        beside = {space: self._space(space, dtype, {}) for space, dtype in spaces.items() if is_separate}
        self._own = beside or self._weights
        for index in self.trained:
            space = space_of(self.spec.parameters[index])
            self.weight_views[index] = self._view(self._own[space], index)
            self.gradient_views[index] = self._view(self.flat_gradients[space], index)
        return True

    def _space(self, space: str, dtype: str, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the buffer of one space: the segment's own memory if that has the same type on the same device."""
        wanted = TORCH_DTYPES[dtype]
        if space in shared and self.device.type == "cpu" and shared[space].dtype == wanted:
            return shared[space].zero_()
        return torch.zeros(self.layout.space_sizes[space], dtype=wanted, device=self.device)

    def _view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        parameter, offset = self.spec.parameters[index], self.layout.offsets[index]
        return whole_of(flat[offset : offset + parameter.numel].view(parameter.shape), parameter.element)

    # -- buckets -----------------------------------------------------------------------------------------------------

    @property
    def trained_buckets(self) -> list[BucketSpec]:
        """The buckets of the parameters that a job trains."""
        return list(self.layout.trained)

    def pulled(self, index: int) -> torch.Tensor:
        """Returns a parameter's slice of the pulled weights, in its shape."""
        return self._view(self._weights[space_of(self.spec.parameters[index])], index)

    def weights(self, bucket: BucketSpec) -> torch.Tensor:
        """Returns a bucket's memory for pulled weights: (numel,)."""
        return self._weights[bucket.space][bucket.start : bucket.start + bucket.numel]

    def own(self, bucket: BucketSpec) -> torch.Tensor:
        """Returns a bucket's weights in the model: (numel,). It is the memory of `weights`, unless there is a separate
        base.
        """
        return self._own[bucket.space][bucket.start : bucket.start + bucket.numel]

    def gradients(self, bucket: BucketSpec) -> torch.Tensor:
        """Returns a bucket's gradients: (numel,)."""
        return self.flat_gradients[bucket.space][bucket.start : bucket.start + bucket.numel]

    def all_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of all buckets, by space."""
        return dict(self.flat_gradients)

    def copy_weights(self, back: bool) -> None:
        """Copies all weights to the memory of the gradients. back: the other way round"""
        for space, flat in self._weights.items():
            source, target = (self.flat_gradients[space], flat) if back else (flat, self.flat_gradients[space])
            target.copy_(source)

    def take_weights(self) -> None:
        """Subtracts all weights from the gradients' memory, in place."""
        for space, flat in self._weights.items():
            self.flat_gradients[space].sub_(flat)

    # -- where they lie ----------------------------------------------------------------------------------------------

    @property
    def gradients_in_segment(self) -> bool:
        """Whether the gradients' buffers lie in the segment."""
        return self.segment is not None and _are_same(self.flat_gradients, self.segment.gradients)

    @property
    def weights_in_segment(self) -> bool:
        """Whether the weights' buffers lie in the segment, so that shards write directly to them."""
        return self.segment is not None and _are_same(self._weights, self.segment.weights)

    def check_form(self, index: int) -> None:
        """Raises InvalidRequest if a parameter has another type, shape or device than at `prepare`."""
        tensor, parameter, device = self.trained[index], self.spec.parameters[index], self._devices[index]
        element = parameter.element or parameter.dtype
        shape = parameter.shape[:-1] if parameter.element else parameter.shape
        here = tuple((local(tensor) if index in self.sharded else tensor).shape)
        if str(tensor.dtype) != f"torch.{element}" or here != shape:
            raise InvalidRequest(
                f"{parameter.name} is {tensor.dtype} {here} now, and the job trains it as {element} "
                f"{shape}: convert the model before prepare, or back before optimizer.step()"
            )
        if tensor.device != device and not _is_same(tensor.device, device):
            raise InvalidRequest(
                f"{parameter.name} is on {tensor.device} now, and the job trains it on {device}: move the model before "
                "prepare, or back before optimizer.step()"
            )


def _main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.nbytes
    # A model that only has tables has no trained parameter
    return sizes.most_common(1)[0][0] if sizes else torch.device("cpu")


def _is_same(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are the same: `cpu` and `cpu:0` are."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _are_same(buffers: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> bool:
    return all(space in shared and flat is shared[space] for space, flat in buffers.items())


# -- the weights -------------------------------------------------------------------------------------------------------

# A script may change parameters itself, and may move them elsewhere (`model.to(...)`, `p.data = ...`): `changed`
# detects that before each step, and copies them back into the buffers.
#
# Three kinds of parameters keep memory of their own, and are copied to and from the buffers in their logical order:
# those that are not contiguous (channels_last), those on another device than most (a model spread over several), and
# those that the script shares with other processes after `prepare` (`share_memory()`).


def with_values(model: nn.Module, values_by_id: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """Returns a copy of a model's state_dict with other values for some parameters. values_by_id: by the
    parameter's id
    """
    found = {
        name: like(parameter, values_by_id[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in values_by_id
    }
    return {
        name: found.get(name, value).detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }


class Weights:
    """The parameters that an optimizer steps. For the training thread."""

    def __init__(self, buffers: FlatBuffers) -> None:
        self._buffers = buffers
        self._apart: set[int] = set()  # parameters with memory of their own
        # Marks do not show their changes: torch does not count writes to a local shard.
        self._sharded = buffers.sharded
        self._touches = Touches()
        self._marks: list[tuple[int, int]] = []  # by parameter, its mark at the moment when weights last landed

    def watch(self) -> None:
        """Watches the parameters for changes through `.data` from now on."""
        for index, tensor in self._buffers.trained.items():
            assert isinstance(tensor, nn.Parameter)
            # Where the script's own optimizers step, all weights change in each step.
            ignored = self._buffers.spec.local is not None
            watch(tensor, _ignore if ignored else self._on_touch(index, tensor))

    def _on_touch(self, index: int, tensor: nn.Parameter) -> Touched:
        return lambda given_out: self._touches.touched(index, tensor, given_out)

    def move_in(self) -> None:
        """Moves all parameters into new buffers. The first call also moves those in memory shared between processes:
        each worker that a script has started with one model (`mp.spawn`) trains its own copy.
        """
        is_first = not self._marks
        for index in self._buffers.trained:
            self._take_in(index, even_shared=is_first)
        self.mark()

    def mark(self) -> None:
        """Marks the current parameters as unchanged by the script."""
        self._marks = self._marks_now()

    def release(self) -> None:
        """Stops watching the parameters. They stay in the flat buffers."""
        for tensor in self._buffers.trained.values():
            unwatch(tensor)

    def changed(self) -> set[int]:
        """Returns the parameters that the script has changed since weights last landed. All weights are in the buffers
        afterwards.

        Raises InvalidRequest, and changes nothing, if a parameter's type, shape or device has changed.
        """
        before, now, trained = self._marks, self._marks_now(), self._buffers.trained
        if now == before and not self._touches.before and not self._sharded:
            return set()
        suspects = {index for index, was, mark in zip(trained, before, now, strict=True) if was != mark}
        suspects |= self._touches.before.keys() | self._sharded
        for index in suspects:
            self._buffers.check_form(index)
        versions = {index: version for index, (version, _) in zip(trained, before, strict=True)}
        changed = {index for index in suspects if self._is_changed(index, versions[index])}
        for index in suspects:
            # Otherwise weights of a failed pull that have landed would be lost
            if index in changed or index not in self._apart:
                self._take_in(index)
        self.mark()
        return changed

    def gather(self) -> None:
        """Copies all parameters' values into the buffers, if they lie elsewhere. Raises InvalidRequest, as
        `changed`.
        """
        for index in self._buffers.trained:
            self._buffers.check_form(index)
        for index, tensor in self._buffers.trained.items():
            if index in self._apart or tensor.data_ptr() != self._buffers.weight_views[index].data_ptr():
                self._take_in(index)

    def landed(self) -> None:
        """Copies new weights to the parameters with memory of their own. Only later changes count as the script's."""
        for index in self._apart:
            values(self._buffers.trained[index]).copy_(self._buffers.weight_views[index])
        self._touches.landed(self._buffers.trained)

    def pull_failed(self) -> None:
        """Records that weights of a pull that has failed, or was interrupted, may still land in the buffers. For
        parameters with memory of their own, later changes of the script are found by comparison with their present
        values.
        """
        for index in self._apart:
            self._touches.touched(index, self._buffers.trained[index], None)

    def _take_in(self, index: int, even_shared: bool = False) -> None:
        """Copies a parameter's values into the buffers, and moves the parameter there if possible."""
        tensor, view = self._buffers.trained[index], self._buffers.weight_views[index]
        own = values(tensor)
        view.copy_(own)
        is_shared = own.device.type == "cpu" and own.is_shared() and not even_shared
        if own.is_contiguous() and index not in self._buffers.elsewhere and not is_shared:
            self._apart.discard(index)
            if own.data_ptr() != view.data_ptr() or own.untyped_storage().nbytes() != own.nbytes:
                set_values(tensor, with_own_storage(view))
        else:
            self._apart.add(index)

    def _marks_now(self) -> list[tuple[int, int]]:
        """Returns for each parameter a mark that changes with every write in place, and with its memory."""
        tensors = self._buffers.trained.values()
        here = map(local, tensors) if self._sharded else tensors
        return [(tensor._version, tensor.data_ptr()) for tensor in here]

    def _is_changed(self, index: int, version: int) -> bool:
        tensor, view = local(self._buffers.trained[index]), self._buffers.weight_views[index]
        before = self._touches.before.get(index)
        if before is None and (index in self._apart or tensor.data_ptr() != view.data_ptr()):
            before = view  # only landing weights write the buffer, so it has the values from before the script's change
        if before is None:
            return bool(tensor._version != version)
        return not torch.equal(values(tensor).to(before.device), before)


def _ignore(_: torch.Tensor | None) -> None:
    """Does nothing: for a parameter that changes in each step anyway."""


# -- the gradients -----------------------------------------------------------------------------------------------------

# Autograd makes each gradient in memory of its own. As soon as it is there, it is moved into the buffers, and `.grad`
# lies there. A script may change gradients after backward (clip, scale, drop): `marks` detects that, whatever code does
# it.
#
# The gradient of a DTensor stays in torch's memory, and the buffers have a copy. Backward makes the copy for buckets
# that are sent before the step, and the step then compares it with the gradient. Otherwise only the step copies.


class Gradients:
    """The gradients of the trained parameters. Hooks run on autograd's thread, all else on the training thread.

    on_ready: called with a parameter's index when backward has finished its gradient
    are_late: the gradients of DTensors are copied in the step alone, because no bucket is sent before it
    """

    def __init__(self, buffers: FlatBuffers, on_ready: Callable[[int], None]) -> None:
        self.are_late = False
        self._buffers = buffers
        self._on_ready = on_ready
        self._on_gpu = buffers.device.type == "cuda"
        self._check = buffers.spec.non_finite is not NonFinite.ALLOW
        self._finite: dict[int, bool] = {}  # by parameter, of those checked in this step
        self._late: set[int] = set()  # DTensors whose gradient backward has made, and the step has not copied yet
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
            self._hooks.append(tensor.register_post_accumulate_grad_hook(partial(self._accumulated, index)))
            tensor.requires_grad_(not frozen)

    def release(self) -> None:
        """Removes the hooks, also of gradients that a script still refers to. Such a gradient would keep all buffers
        alive: Python's garbage collector does not see references through torch's objects.
        """
        for hook in self._hooks:
            hook.remove()
        for tensor in self._buffers.trained.values():
            unwatch_gradient(tensor.grad)

    def forget(self) -> None:
        """Forgets the results of the checks for infinities and NaNs."""
        self._finite.clear()

    def drop(self) -> None:
        """Removes all gradients, as zero_grad(set_to_none=True) does."""
        self._late.clear()
        self.forget()
        for tensor in self._buffers.trained.values():
            tensor.grad = None

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
        absent, views = set(), self._buffers.gradient_views
        for index in indices:
            gradient = self._buffers.trained[index].grad
            if gradient is None:
                absent.add(index)
                continue
            if index in self._late:
                self._adopt(index, counts=not self.are_late)
                self._late.discard(index)
                continue
            if index in self._buffers.sharded:
                if self._is_here(index):
                    continue  # unchanged since backward, as far as can be known: torch counts no writes there
            elif gradient.data_ptr() == views[index].data_ptr():
                continue
            if self._adopt(index):
                # The script has replaced the gradient. (Or backward has left a gradient on another device: the two
                # cannot be told apart.)
                self._finite.pop(index, None)
        return absent

    def marks(self, spaces: Iterable[str]) -> list[int]:
        """Returns numbers that rise with each change of a gradient in these spaces, whatever code makes it."""
        return [self._touches, *map(_VERSION, map(self._buffers.flat_gradients.__getitem__, spaces))]

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

    def _accumulated(self, index: int, _: torch.Tensor) -> None:
        if self.are_late and index in self._buffers.sharded:
            as_placed(self._buffers.trained[index])  # here, as it is a collective of backward
            self._late.add(index)
            self._finite.pop(index, None)
        else:
            self._late.discard(index)
            self._adopt(index)
            if self._check and not self._on_gpu:  # where the answer would have to be waited for
                self._finite[index] = is_finite(self._buffers.gradient_views[index])  # now, while it is in the cache
        self._on_ready(index)

    def _is_here(self, index: int) -> bool:
        """Whether the buffers have a DTensor's present gradient."""
        return torch.equal(local(self._buffers.trained[index].grad), self._buffers.gradient_views[index])

    def _adopt(self, index: int, counts: bool = True) -> bool:
        """Moves a gradient into the buffers, and frees its old memory. Returns whether it was outside of the
        buffers.

        counts: `marks` counts it as a change
        """
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
        # `values` of a view is the same memory, whose writes torch counts apart. After backward(create_graph=True) the
        # gradient has a graph of its own.
        (view if counts else values(view)).copy_(gradient.detach())
        if index not in self._buffers.elsewhere:
            tensor.grad = self._shown(index)
        return True

    def _shown(self, index: int) -> torch.Tensor:
        """Returns the gradient for a script's `.grad`."""
        view, own = self._buffers.gradient_views[index], self._own.get(index)
        if own is None or own.data_ptr() != view.data_ptr():  # share_memory() moves a storage
            own = self._own[index] = counting_with(view)
        return watched_gradient(own, self._touched)

    def _touched(self, _: torch.Tensor | None) -> None:
        self._touches += 1
