"""A model's parameters and gradients as flat buffers, so that pushing packs nothing and a pull lands in place.

As in DDP and FSDP, `param.data` and `param.grad` become views into one contiguous tensor for each element type, in the
order of the job's layout. Buckets are slices of these tensors. With a segment shared with the shards, and no conversion
on the way, these tensors lie in the segment itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.job import JobSpec, travels_as
from ps_protocol.layout import DATA_TYPES, Bucket, Layout
from ps_protocol.segments import SegmentMap
from ps_protocol.tensors import TORCH_DTYPES, bytes_of, is_finite, tensor_from
from ps_worker.staging import GpuStaging


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
        self._device = next(t for p, t in zip(spec.parameters, tensors, strict=True) if p.group is not None).device
        self._make_spaces()
        self._staging = GpuStaging(self._device, segment) if self._device.type == "cuda" else None
        self._made: dict[int, Any] = {}  # by bucket, the point on the GPU at which its gradient is there
        self._gradient_views: dict[int, torch.Tensor] = {}  # by parameter, in its shape
        self._hooks: list[RemovableHandle] = []
        for index, (parameter, tensor) in enumerate(zip(spec.parameters, tensors, strict=True)):
            if parameter.group is None:
                tensor.data = tensor.data.contiguous()  # so that a part of it can be written
            else:
                self._move_in(index, tensor)

    def _make_spaces(self) -> None:
        trained = {bucket.space: bucket.dtype for bucket in self.layout.buckets if not bucket.held}
        weights, gradients = (self._segment.weights, self._segment.gradients) if self._segment else ({}, {})
        self._weights = {space: self._space(space, dtype, weights) for space, dtype in trained.items()}
        self._gradients = {space: self._space(space, dtype, gradients) for space, dtype in trained.items()}

    def _space(self, space: str, dtype: str, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        """The flat tensor of one space: the segment's own where that holds the same type on the same device."""
        wanted = TORCH_DTYPES[dtype]
        if space in shared and self._device.type == "cpu" and shared[space].dtype == wanted:
            return shared[space].zero_()
        return torch.zeros(self.layout.space_sizes[space], dtype=wanted, device=self._device)

    def _move_weights(self, index: int, tensor: torch.Tensor) -> None:
        space = self._spec.parameters[index].dtype
        weights = self._view(self._weights[space], index)
        weights.copy_(tensor.data)
        tensor.data = weights
        self._gradient_views[index] = self._view(self._gradients[space], index)

    def _move_in(self, index: int, tensor: torch.Tensor) -> None:
        self._move_weights(index, tensor)
        assert isinstance(tensor, nn.Parameter)
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
                    tensor.grad = self._gradient_views[index].copy_(view)

    def release(self) -> None:
        """Looks at no gradient any more: the model goes on without this session. Its tensors stay where they are."""
        for hook in self._hooks:
            hook.remove()

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
        if gradient.shape != view.shape:
            raise InvalidRequest(f"the gradient of {name}: expected {tuple(view.shape)}, got {tuple(gradient.shape)}")
        view.copy_(gradient)
        tensor.grad = view
        return True

    def gather(self) -> set[int]:
        """Moves every gradient into the flat buffers. Returns the parameters that have none in this step."""
        absent = set()
        for index in self._gradient_views:
            if self._tensors[index].grad is None:
                absent.add(index)
            elif self._adopt(index):
                self._finite.pop(index, None)  # not the one that backward made
        return absent

    def versions(self) -> list[int]:
        """Numbers that grow with every in-place change of a gradient, by whomever."""
        return [flat._version for flat in self._gradients.values()]

    def not_finite(self, absent: set[int], changed: bool) -> str | None:
        """The name of a parameter whose gradient holds an infinity or a NaN, if there is one.

        changed: gradients were changed after backward, so what was seen then does not count. Forgets what was seen.
        """
        seen, self._finite = ({} if changed else self._finite), {}
        if not self._check:
            return None
        unseen = {i: v for i, v in self._gradient_views.items() if i not in absent and not seen.get(i, False)}
        if self._staging is not None and unseen:
            totals = torch.stack([view.sum(dtype=torch.float32) for view in unseen.values()])
            if bool(torch.isfinite(totals).all()):  # one answer to wait for, instead of one each
                return None
        return next((self._spec.parameters[i].name for i, view in unseen.items() if not is_finite(view)), None)

    def saw_not_finite(self, bucket: Bucket) -> bool:
        """Whether backward has made a gradient in this bucket that is not finite."""
        return any(self._finite.get(segment.parameter) is False for segment in bucket.segments)

    def was_looked_at(self, bucket: Bucket) -> bool:
        """Whether a bucket that leaves was looked at for infinities and NaNs, in the very bytes that leave: a half type
        has infinities where float32 has none."""
        return self._check and travels_as(bucket.dtype, self._spec.gradient_wire) == bucket.dtype

    @property
    def in_segment(self) -> bool:
        """Whether every gradient is made in the segment that is shared with the shards."""
        return self._segment is not None and _are_those(self._gradients, self._segment.gradients)

    @property
    def lands_in_place(self) -> bool:
        """Whether what shards write into the segment are the model's weights themselves."""
        return self._segment is not None and _are_those(self._weights, self._segment.weights)

    def leaving(self, bucket: Bucket) -> None:
        """A bucket's gradient is complete: called by the thread that made it, before another one sends it."""
        if self._staging is not None:
            self._made[bucket.index] = self._staging.mark()

    def gradient(self, bucket: Bucket) -> memoryview:
        """A bucket's gradient as bytes in its wire format: the flat buffer's own memory where nothing is converted."""
        wire = TORCH_DTYPES[travels_as(bucket.dtype, self._spec.gradient_wire)]
        mine = self._slice(self._gradients, bucket)
        if self._staging is not None:
            return bytes_of(self._staging.fetch(mine, wire, self._made[bucket.index]))
        return bytes_of(mine.to(wire))

    def share_gradient(self, bucket: Bucket) -> None:
        """Puts a bucket's gradient into the segment, unless it is made there."""
        assert self._segment is not None
        target, mine = self._segment.gradient(bucket), self._slice(self._gradients, bucket)
        if self._staging is not None:
            self._staging.fetch_into(target, mine, self._made[bucket.index])
        elif target.data_ptr() != mine.data_ptr():
            target.copy_(mine)

    # -- weights -----------------------------------------------------------------------------------------------------

    def initial(self, bucket: Bucket) -> memoryview:
        """A bucket's value as the model has it now, as bytes in its own type."""
        if not bucket.held:
            return bytes_of(self._slice(self._weights, bucket).cpu())
        flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])
        for part in bucket.segments:
            whole = self._tensors[part.parameter].detach().reshape(-1)
            flat[part.offset : part.offset + part.length] = whole[part.start : part.start + part.length].cpu()
        return bytes_of(flat)

    def land(self, bucket: Bucket, payload: memoryview) -> None:
        """Writes a pulled bucket into the model. Raises InvalidRequest if its size is not the bucket's."""
        wire = bucket.dtype if bucket.held else travels_as(bucket.dtype, self._spec.weight_wire)
        if len(payload) != self.weight_bytes(bucket):
            raise InvalidRequest(
                f"bucket {bucket.index}: expected {self.weight_bytes(bucket)} bytes, got {len(payload)}"
            )
        values = tensor_from(payload, wire)
        if not bucket.held:
            self._write(bucket, values, shared=False)
            return
        for part in bucket.segments:
            tensor, found = self._tensors[part.parameter], values[part.offset : part.offset + part.length]
            with torch.no_grad():
                tensor.view(-1)[part.start : part.start + part.length] = found.to(tensor.device)

    def gradient_bytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket's gradient in its wire format."""
        return bucket.numel * DATA_TYPES[travels_as(bucket.dtype, self._spec.gradient_wire)].itemsize

    def weight_bytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket's weights in their wire format; what no optimizer steps travels as it is."""
        wire = bucket.dtype if bucket.held else travels_as(bucket.dtype, self._spec.weight_wire)
        return bucket.numel * DATA_TYPES[wire].itemsize

    def land_shared(self, bucket: Bucket) -> None:
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

    def _write(self, bucket: Bucket, values: torch.Tensor, shared: bool) -> None:
        mine = self._slice(self._weights, bucket)
        if self._staging is not None:
            self._staging.land(bucket.index, mine, values, pinned=shared)
        elif values.data_ptr() != mine.data_ptr():
            mine.copy_(values)

    def _view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        parameter, offset = self._spec.parameters[index], self.layout.offsets[index]
        return flat[offset : offset + parameter.numel].view(parameter.shape)

    @staticmethod
    def _slice(spaces: dict[str, torch.Tensor], bucket: Bucket) -> torch.Tensor:
        return spaces[bucket.space][bucket.start : bucket.start + bucket.numel]


def _are_those(mine: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> bool:
    return all(space in shared and flat is shared[space] for space, flat in mine.items())
