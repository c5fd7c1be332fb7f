"""A model's parameters and gradients as flat buffers, so that pushing packs nothing and a pull lands in place.

As in DDP and FSDP, `param.data` and `param.grad` become views into one contiguous tensor for each element type, in the
order of the job's layout. Buckets are slices of these tensors. With a segment shared with the shards, and no conversion
on the way, these tensors lie in the segment itself.

Two kinds of parameters keep memory of their own, and are copied to and from the flat tensors in their logical order:
those that are not contiguous (channels_last), and those on another device than most (a model spread over several).

A script may change parameters itself, and may put them elsewhere (`model.to(...)`, `p.data = ...`): `changed` finds
that before each step, and brings them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_protocol.codecs import gradient_codec, weight_codec
from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, Layout, space_of
from ps_protocol.segment_layout import SegmentMap
from ps_protocol.tensors import DTYPE_NAMES, TORCH_DTYPES, bytes_of, is_finite
from ps_worker.model.gpu import GpuStaging
from ps_worker.model.tracked import Touches, set_values, unwatch, values, watch, watched_gradient


class FlatModel:
    """The tensors of a model in the layout of its job.

    tensors:  the model's tensors in the order of the job's parameters. Those that an optimizer steps are nn.Parameters
              and move into the flat buffers; the others stay where they are, and are only written once, at the start.
    segment:  shared with the shards on this host; None where there are none
    check:    whether to look at every gradient for infinities and NaNs as it comes
    on_ready: called with a parameter's index when backward has finished its gradient
    """

    def __init__(
        self,
        spec: JobSpec,
        tensors: list[torch.Tensor],
        layout: Layout,
        segment: SegmentMap | None,
        check: bool,
        on_ready: Callable[[int], None],
    ) -> None:
        self.layout = layout
        self._spec = spec
        self._tensors = tensors
        self._segment = segment
        self._check = check
        self._on_ready = on_ready
        self._finite: dict[int, bool] = {}  # by parameter, of those looked at in this step
        self._trained = {
            i: t for i, (p, t) in enumerate(zip(spec.parameters, tensors, strict=True)) if p.group is not None
        }
        self._device = _main_device(self._trained.values())
        self._make_spaces()
        self._staging = GpuStaging(self._device, segment) if self._device.type == "cuda" else None
        self._made: dict[int, Any] = {}  # by bucket, the point on the GPU at which its gradient is there
        self._weight_views: dict[int, torch.Tensor] = {}  # by parameter, in its shape
        self._gradient_views: dict[int, torch.Tensor] = {}  # likewise
        self._apart: set[int] = set()  # parameters with memory of their own
        self._devices = {index: tensor.device for index, tensor in self._trained.items()}
        self._elsewhere = {index for index, tensor in self._trained.items() if self._is_elsewhere(tensor)}
        self._touches = Touches()
        self._gradient_touches = 0  # how often a script has asked for some gradient's `.data`
        self._hooks: list[RemovableHandle] = []
        for index, tensor in self._trained.items():
            self._move_in(index, tensor)
        self._seen = self._marks()

    def _make_spaces(self) -> None:
        trained = {bucket.space: bucket.dtype for bucket in self.layout.buckets if not bucket.held}
        weights, gradients = (self._segment.weights, self._segment.gradients) if self._segment else ({}, {})
        self._weights = {space: self._space(space, dtype, weights) for space, dtype in trained.items()}
        self._gradients = {space: self._space(space, dtype, gradients) for space, dtype in trained.items()}
        self._bases = self._pointers()

    def _pointers(self) -> list[int]:
        return [flat.data_ptr() for flat in (*self._weights.values(), *self._gradients.values())]

    def _space(self, space: str, dtype: str, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        """The flat tensor of one space: the segment's own where that holds the same type on the same device."""
        wanted = TORCH_DTYPES[dtype]
        if space in shared and self._device.type == "cpu" and shared[space].dtype == wanted:
            return shared[space].zero_()
        return torch.zeros(self.layout.space_sizes[space], dtype=wanted, device=self._device)

    def _move_weights(self, index: int, tensor: torch.Tensor) -> None:
        space = space_of(self._spec.parameters[index])
        self._weight_views[index] = self._view(self._weights[space], index)
        self._gradient_views[index] = self._view(self._gradients[space], index)
        self._take_in(index, tensor)

    def _take_in(self, index: int, tensor: torch.Tensor) -> None:
        """A parameter's values go into the flat tensor, and the parameter too if it can be a view into it."""
        view, mine = self._weight_views[index], values(tensor)
        view.copy_(mine)
        if mine.is_contiguous() and index not in self._elsewhere:
            self._apart.discard(index)
            set_values(tensor, view)
        else:
            self._apart.add(index)

    def _move_in(self, index: int, tensor: torch.Tensor) -> None:
        assert isinstance(tensor, nn.Parameter)
        self._move_weights(index, tensor)
        watch(tensor, lambda given_out: self._touches.touched(index, tensor, given_out))
        frozen = not tensor.requires_grad
        tensor.requires_grad_()  # a frozen one takes no hook, and may be thawed later
        self._hooks.append(tensor.register_post_accumulate_grad_hook(lambda _: self._accumulated(index)))
        tensor.requires_grad_(not frozen)

    def move(self, segment: SegmentMap | None) -> None:
        """Moves into another segment, when the shards have let go of the old one and nothing is under way."""
        before, self._segment = self._segment, segment
        self._finite.clear()
        if self._staging is not None:
            self._staging.release()
            self._staging = GpuStaging(self._device, segment)
        elif before is not None or segment is not None:
            views = dict(self._gradient_views)
            self._make_spaces()
            for index, view in views.items():
                tensor = self._tensors[index]
                self._move_weights(index, tensor)
                if tensor.grad is not None and tensor.grad.data_ptr() == view.data_ptr():
                    self._gradient_views[index].copy_(view)
                    tensor.grad = self._shown(index)
        self._seen = self._marks()

    def release(self) -> None:
        """Looks at no gradient any more: the model goes on without this session. Its tensors stay where they are."""
        for hook in self._hooks:
            hook.remove()
        for tensor in self._trained.values():
            unwatch(tensor)

    # -- what a script does to the weights ---------------------------------------------------------------------------

    def changed(self) -> set[int]:
        """The parameters whose values the script has changed since weights last landed. All are in the flat tensors
        again when this returns.

        Raises InvalidRequest, and changes nothing, if one has another type, shape or device now.
        """
        if self._segment is not None and self._pointers() != self._bases:
            raise Unsupported(
                "the model's memory was moved as a whole (share_memory()), away from the memory that the shards write: "
                "do that before prepare, or use transport grpc"
            )
        before, now = self._seen, self._marks()
        if now == before and not self._touches.before:
            return set()
        suspects = {i for i, was, mark in zip(self._trained, before, now, strict=True) if was != mark}
        suspects |= self._touches.before.keys()
        for index in suspects:
            self._check_form(index)
        versions = {index: version for index, (version, _) in zip(self._trained, before, strict=True)}
        found = {index for index in suspects if self._is_changed(index, versions[index])}
        for index in suspects:
            self._take_in(index, self._trained[index])
        self._seen = self._marks()
        return found

    def _marks(self) -> list[tuple[int, int]]:
        """What tells that a parameter was changed in place, or put elsewhere."""
        return [(tensor._version, tensor.data_ptr()) for tensor in self._trained.values()]

    def _is_changed(self, index: int, version: int) -> bool:
        tensor, view = self._trained[index], self._weight_views[index]
        known = self._touches.before.get(index)
        if known is None and (index in self._apart or tensor.data_ptr() != view.data_ptr()):
            known = view  # nothing but landing weights has written it
        if known is None:
            return tensor._version != version
        return not torch.equal(values(tensor).to(known.device), known)

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return not _is_same(tensor.device, self._device)

    def _check_form(self, index: int) -> None:
        tensor, spec, device = self._trained[index], self._spec.parameters[index], self._devices[index]
        if DTYPE_NAMES.get(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise InvalidRequest(
                f"{spec.name} is {tensor.dtype} {tuple(tensor.shape)} now, and the job trains it as {spec.dtype} "
                f"{spec.shape}: convert the model before prepare, or back before optimizer.step()"
            )
        if not _is_same(tensor.device, device):
            raise InvalidRequest(
                f"{spec.name} is on {tensor.device} now, and the job trains it on {device}: move the model before "
                "prepare, or back before optimizer.step()"
            )

    def landed(self) -> None:
        """New weights are in the flat tensors: they go to the parameters that have memory of their own."""
        for index in self._apart:
            values(self._trained[index]).copy_(self._weight_views[index])
        self._touches.landed(self._trained)  # type: ignore[arg-type]

    def assigned(self, bucket: BucketSpec) -> memoryview:
        """A bucket's weights as they are, as bytes in its own type."""
        return bytes_of(self._slice(self._weights, bucket).cpu())

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _accumulated(self, index: int) -> None:
        """Backward has finished a parameter's gradient."""
        self._adopt(index)
        if self._check and self._staging is None:  # on a GPU the answer would be waited for
            self._finite[index] = is_finite(self._gradient_views[index])  # now, while it is in the cache
        self._on_ready(index)

    def _adopt(self, index: int) -> bool:
        """Moves a gradient into the flat buffer, and frees the memory it was made in; True if it was elsewhere."""
        tensor, view = self._tensors[index], self._gradient_views[index]
        gradient = tensor.grad
        if gradient is None or gradient.data_ptr() == view.data_ptr():
            return False
        name = self._spec.parameters[index].name
        if gradient.is_sparse:
            raise Unsupported(f"the gradient of {name} is sparse; use sparse=False")
        self._check_form(index)
        if gradient.shape != view.shape:
            raise InvalidRequest(f"the gradient of {name}: expected {tuple(view.shape)}, got {tuple(gradient.shape)}")
        view.copy_(gradient.detach())  # it has a graph of its own after backward(create_graph=True)
        if index not in self._elsewhere:
            tensor.grad = self._shown(index)
        return True

    def _shown(self, index: int) -> torch.Tensor:
        """A gradient as the script finds it."""
        return watched_gradient(self._gradient_views[index], self._gradient_touched)

    def _gradient_touched(self, _: torch.Tensor | None) -> None:
        self._gradient_touches += 1

    def gather(self, indices: Iterable[int]) -> set[int]:
        """Moves these parameters' gradients into the flat buffers. Returns those that have none in this step."""
        absent = set()
        for index in indices:
            if self._tensors[index].grad is None:
                absent.add(index)
            elif self._adopt(index):
                # Not the one that backward made; on another device it may be, but a change could not be told.
                self._finite.pop(index, None)
        return absent

    def gradient_marks(self, spaces: Iterable[str]) -> list[int]:
        """Numbers that grow with every change of a gradient in these spaces, by whatever code."""
        return [self._gradient_touches, *(self._gradients[space]._version for space in spaces)]

    def not_finite(self, present: Iterable[int], changed: bool) -> str | None:
        """The name of a parameter out of these whose gradient holds an infinity or a NaN, if there is one.

        changed: gradients were changed after backward, so what was seen then does not count. Forgets what was seen.
        """
        present = list(present)
        seen = {} if changed else dict(self._finite)
        for index in present:
            self._finite.pop(index, None)
        if not self._check:
            return None
        unseen = {index: self._gradient_views[index] for index in present if not seen.get(index, False)}
        if self._staging is not None and unseen:
            totals = torch.stack([view.sum(dtype=torch.float32) for view in unseen.values()])
            if bool(torch.isfinite(totals).all()):  # one answer to wait for, instead of one each
                return None
        return next((self._spec.parameters[i].name for i, view in unseen.items() if not is_finite(view)), None)

    def saw_not_finite(self, bucket: BucketSpec) -> bool:
        """Whether backward has made a gradient in this bucket that is not finite."""
        return any(self._finite.get(segment.parameter) is False for segment in bucket.segments)

    def was_looked_at(self, bucket: BucketSpec) -> bool:
        """Whether a bucket that leaves was looked at for infinities and NaNs, in the very bytes that leave: a half type
        has infinities where float32 has none."""
        return self._check and gradient_codec(self._spec, bucket).keeps(bucket)

    @property
    def in_segment(self) -> bool:
        """Whether every gradient is made in the segment that is shared with the shards."""
        return self._segment is not None and _are_those(self._gradients, self._segment.gradients)

    @property
    def lands_in_place(self) -> bool:
        """Whether what shards write into the segment are the model's weights themselves."""
        return self._segment is not None and _are_those(self._weights, self._segment.weights)

    def leaving(self, bucket: BucketSpec) -> None:
        """A bucket's gradient is complete: called by the thread that made it, before another one sends it."""
        if self._staging is not None:
            self._made[bucket.index] = self._staging.mark()

    def gradient(self, bucket: BucketSpec) -> memoryview:
        """A bucket's gradient as bytes in its wire format: the flat buffer's own memory where nothing is converted."""
        codec, values = gradient_codec(self._spec, bucket), self._slice(self._gradients, bucket)
        if self._staging is not None:
            return bytes_of(self._staging.fetch(values, codec.torch_dtype, self._made[bucket.index]))
        return bytes_of(codec.encode(values))

    def share_gradient(self, bucket: BucketSpec) -> None:
        """Puts a bucket's gradient into the segment, unless it is made there."""
        assert self._segment is not None
        target, mine = self._segment.gradient(bucket), self._slice(self._gradients, bucket)
        if self._staging is not None:
            self._staging.fetch_into(target, mine, self._made[bucket.index])
        elif target.data_ptr() != mine.data_ptr():
            target.copy_(mine)

    # -- weights -----------------------------------------------------------------------------------------------------

    def initial(self, bucket: BucketSpec) -> memoryview:
        """A bucket's value as the model has it now, as bytes in its own type."""
        if not bucket.held:
            return bytes_of(self._slice(self._weights, bucket).cpu())
        flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])
        for part in bucket.segments:
            whole = self._tensors[part.parameter].detach().reshape(-1)
            flat[part.offset : part.offset + part.length] = whole[part.start : part.start + part.length].cpu()
        return bytes_of(flat)

    def land(self, bucket: BucketSpec, payload: memoryview) -> None:
        """Writes a pulled bucket into the model. Raises InvalidRequest if its size is not the bucket's."""
        codec = weight_codec(self._spec, bucket)
        if len(payload) != codec.size(bucket.numel):
            raise InvalidRequest(
                f"bucket {bucket.index}: expected {codec.size(bucket.numel)} bytes, got {len(payload)}"
            )
        values = codec.decode(payload)
        if not bucket.held:
            self._write(bucket, values, shared=False)
            return
        for part in bucket.segments:
            tensor, found = self._tensors[part.parameter], values[part.offset : part.offset + part.length]
            with torch.no_grad():
                whole = tensor.contiguous().view(-1)  # the tensor's own memory, unless it is channels_last, say
                whole[part.start : part.start + part.length] = found.to(tensor.device)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole.view(tensor.shape))

    def gradient_bytes(self, bucket: BucketSpec) -> int:
        """Bytes of a bucket's gradient in its wire format."""
        return gradient_codec(self._spec, bucket).size(bucket.numel)

    def weight_bytes(self, bucket: BucketSpec) -> int:
        """Bytes of a bucket's weights in their wire format; what no optimizer steps travels as it is."""
        return weight_codec(self._spec, bucket).size(bucket.numel)

    def land_shared(self, bucket: BucketSpec) -> None:
        """Takes a bucket that a shard has written into the segment, unless the model lies there."""
        assert self._segment is not None
        self._write(bucket, self._segment.weight(bucket), shared=True)

    def begin_pull(self) -> None:
        """Weights may land from here on: backward has been queued."""
        if self._staging is not None:
            self._staging.begin()

    def end_pull(self) -> None:
        """All weights have come: what the training thread does next sees them."""
        if self._staging is not None:
            self._staging.finish()
        self.landed()

    def _write(self, bucket: BucketSpec, values: torch.Tensor, shared: bool) -> None:
        mine = self._slice(self._weights, bucket)
        if self._staging is not None:
            self._staging.land(bucket.index, mine, values, pinned=shared)
        elif values.data_ptr() != mine.data_ptr():
            mine.copy_(values)

    def _view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        parameter, offset = self._spec.parameters[index], self.layout.offsets[index]
        return flat[offset : offset + parameter.numel].view(parameter.shape)

    @staticmethod
    def _slice(spaces: dict[str, torch.Tensor], bucket: BucketSpec) -> torch.Tensor:
        return spaces[bucket.space][bucket.start : bucket.start + bucket.numel]


def _main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device that holds most bytes."""
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.nbytes
    return sizes.most_common(1)[0][0]


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same: `cpu` and `cpu:0` are."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _are_those(mine: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> bool:
    return all(space in shared and flat is shared[space] for space, flat in mine.items())
