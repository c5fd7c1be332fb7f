"""A model as flat buffers, so that pushing packs nothing and a pull lands in place.

buffers     the memory: slices of these tensors are buckets (buffers.py)
weights     the parameters as parts of them, and which of them a script has changed (`Weights`)
gradients   the gradients as parts of them; which are ready, changed, not finite (`Gradients`). In local:H the base lies
            in this memory (base.py)
FlatModel   encodes a bucket as bytes for the transports, and decodes pulled bytes into the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec, Layout
from ps_protocol.messages.data import PulledBucket
from ps_protocol.segment_layout import SegmentMap
from ps_protocol.tensors import (
    TORCH_DTYPES,
    Blocks,
    Codec,
    Memory,
    bytes_of,
    element_name,
    flat_parts,
    gradient_codec,
    parts_of,
    plain_codec,
    weight_codec,
    whole_of,
)
from ps_worker.model.base import Base
from ps_worker.model.buffers import FlatBuffers, Gradients, Weights
from ps_worker.model.gpu import GpuStaging
from ps_worker.model.residual import Leaving, Residuals


class FlatModel:
    """The tensors of a model in the layout of its job. They stay in their own memory until the first `move`.

    Any thread may read buckets and write pulled ones; all else is for the training thread.

    tensors:  the model's tensors, in the order of the job's parameters. Those that an optimizer steps are nn.Parameters
              and move into the flat buffers. The others stay where they are, and are only written once, at the start
    on_ready: is called with a parameter's index when backward has finished its gradient
    """

    def __init__(
        self, spec: JobSpec, tensors: Sequence[torch.Tensor], layout: Layout, on_ready: Callable[[int], None]
    ) -> None:
        self.spec = spec
        self.layout = layout
        self._tensors = tensors
        self._buffers = FlatBuffers(spec, tensors, layout)
        self.weights = Weights(self._buffers)
        self.gradients = Gradients(self._buffers, on_ready)
        narrowed = [b for b in layout.trained if isinstance(gradient_codec(spec, b), Blocks)]
        sizes = {bucket.index: bucket.numel for bucket in narrowed}
        self._rounded = sizes.keys()
        self.residuals = Residuals(sizes, self._buffers.device, self._on_its_way_out)
        self._left: dict[int, Leaving] = {}  # by bucket, its gradient that left last
        self._versions: dict[int, int] = {}  # by bucket, the version of the pulled weights, if the model still has them
        self.base = Base(self._buffers, self.weights)
        self._staging: GpuStaging | None = None

    def move(self, segment: SegmentMap | None) -> None:
        """Moves the model into a segment that is shared with shards; None: into memory of its own.

        No call may be under way, and the shards must have unmapped the old segment.
        """
        self._versions.clear()
        before = dict(self._buffers.gradient_views)
        self.gradients.forget()
        if self._staging is not None:
            self._staging.release()
        if self._buffers.lie_in(segment):
            self.weights.move_in()
            self.gradients.move_in(before)
        if self._buffers.device.type == "cuda":
            self._staging = GpuStaging(self._buffers.device, segment)
        if not before:
            self.weights.watch()
            if self.spec.local is None:  # otherwise gradients are the script's own
                self.gradients.watch()
        self.weights.mark()

    def frozen(self) -> dict[int, torch.Tensor]:
        """Returns the tensors that no optimizer steps, by index, without pieces that other members of a group hold."""
        each = enumerate(zip(self.spec.parameters, self._tensors, strict=True))
        return {index: tensor for index, (spec, tensor) in each if spec.param_group is None and not tensor.is_meta}

    def release(self) -> None:
        """Ends the session's hold on the model: removes its hooks. The tensors stay in the buffers."""
        self.gradients.release()
        self.weights.release()
        if self.base.alike is not None:
            self.base.alike.release()

    # -- gradients, on their way out ---------------------------------------------------------------------------------

    @property
    def has_sharded(self) -> bool:
        """Whether parameters that an optimizer steps are DTensors."""
        return bool(self._buffers.sharded)

    @property
    def in_segment(self) -> bool:
        """Whether gradients are made in the segment that is shared with shards."""
        return self._buffers.gradients_in_segment

    def leaving(self, bucket: BucketSpec) -> Leaving:
        """Marks a bucket's gradient as complete. The training thread calls it before another thread sends
        the bucket.
        """
        leaving = Leaving(bucket, None if self._staging is None else self._staging.mark())
        self._left[bucket.index] = leaving
        return leaving

    def _on_its_way_out(self) -> AbstractContextManager[object]:
        return nullcontext() if self._staging is None else self._staging.down()

    def gradient(self, leaving: Leaving, absent: Sequence[int] = (), memory: Memory | None = None) -> memoryview:
        """Returns a bucket's gradient in its wire format. Without a conversion it is the buffers' own memory.

        absent: positions of slices without a gradient
        memory: allocates the converted gradient; see Cast.encode
        """
        codec, gradient = gradient_codec(self.spec, leaving.bucket), self._buffers.gradients(leaving.bucket)

        def encode() -> torch.Tensor:
            if isinstance(codec, Blocks):
                return self.residuals.encode(leaving, gradient, codec, absent)
            return codec.encode(gradient, memory if self._staging is None else None)

        if self._staging is not None:
            assert leaving.made is not None
            return bytes_of(self._staging.fetch(encode, leaving.made))
        return bytes_of(encode())

    def left(self, buckets: Iterable[BucketSpec]) -> list[Leaving]:
        """Returns the gradients of these buckets that left last, for `count`. Only those in a wire format of blocks are
        among them: others have no rounding error to count, nor has a gradient in the segment.
        """
        left, rounded = self._left, self._rounded
        return [left[bucket.index] for bucket in buckets if bucket.index in rounded and bucket.index in left]

    def count(self, left: Iterable[Leaving]) -> None:
        """Records that these gradients count: the rounding error of their wire format is added to the next push."""
        for leaving in left:
            self.residuals.count(leaving)

    def held_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the memory of the gradients, or differences. After a `move` pass it to `hold_gradients`."""
        return self._buffers.all_gradients()

    def hold_gradients(self, held: Mapping[str, torch.Tensor]) -> None:
        """Copies gradients from the memory that they had before a `move`. held: the result of `held_gradients`"""
        for space, gradients in self._buffers.all_gradients().items():
            if gradients.data_ptr() != held[space].data_ptr():
                gradients.copy_(held[space])

    def share_gradient(self, bucket: BucketSpec) -> None:
        """Copies a bucket's gradient into the segment, unless it lies there."""
        assert self._buffers.segment is not None
        target, gradient = self._buffers.segment.gradient(bucket), self._buffers.gradients(bucket)
        if self._staging is not None:
            made = self._left[bucket.index].made
            assert made is not None
            self._staging.fetch(lambda: gradient.to(target.dtype), made, target)
        elif target.data_ptr() != gradient.data_ptr():
            target.copy_(gradient)

    def gradient_codec(self, bucket: BucketSpec) -> Codec:
        """Returns the codec of a bucket's gradient in messages."""
        return gradient_codec(self.spec, bucket)

    @property
    def is_checked(self) -> bool:
        """Whether gradients are checked for infinities and NaNs before they are pushed."""
        return self.spec.non_finite is not NonFinite.ALLOW

    # -- weights, out and in -----------------------------------------------------------------------------------------

    @property
    def lands_in_place(self) -> bool:
        """Whether shards write weights directly into the model, because its buffers lie in the segment."""
        return self._buffers.weights_in_segment

    def initial(self, bucket: BucketSpec) -> memoryview:
        """Returns a bucket's current value in the model, in the bucket's own type."""
        if not bucket.frozen:
            return self.assigned(bucket)
        flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype], device="cpu")
        for part in bucket.slices:
            whole = flat_parts(self._tensors[part.parameter])
            flat[part.offset : part.offset + part.length] = whole[part.start : part.start + part.length].cpu()
        return bytes_of(flat)

    def assigned(self, bucket: BucketSpec) -> memoryview:
        """Returns the current weights of a trained bucket, in the bucket's own type."""
        return bytes_of(self._buffers.own(bucket).cpu())

    def weight_bytes(self, bucket: BucketSpec, wire_format: str) -> int:
        """Returns the bytes of a bucket's weights in a wire format; empty: the bucket's own type."""
        return self._came_as(bucket, wire_format).size(bucket.numel)

    def changed_weights(self) -> set[int]:
        """Returns the indices of the parameters that the script has changed. Their buckets no longer have the pulled
        version.

        Raises InvalidRequest, as `Weights.changed`.
        """
        changed = self.weights.changed()
        if changed and self._versions:
            for bucket in self.layout.buckets:
                if any(part.parameter in changed for part in bucket.slices):
                    self._versions.pop(bucket.index, None)
        return changed

    def copies(self, parameters: Iterable[int]) -> dict[int, torch.Tensor]:
        """Returns copies of parameters' weights. All weights must be in the buffers."""
        return {index: self._buffers.weight_views[index].clone() for index in parameters}

    def put_back(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Sets parameters to values that the script had set. Their buckets no longer have the pulled version."""
        for index, copy in copies.items():
            self._buffers.weight_views[index].copy_(copy)
        for bucket in self.layout.buckets if copies else ():
            if any(part.parameter in copies for part in bucket.slices):
                self._versions.pop(bucket.index, None)
        self.weights.landed()

    def has_before(self, index: int, clock: int) -> bool:
        """Whether the model has a bucket unchanged at the clock before `clock`, so that a change can be added to it.

        True for formats that send weights whole.
        """
        bucket = self.layout.buckets[index]
        return not isinstance(weight_codec(self.spec, bucket), Blocks) or self._versions.get(index) == clock - 1

    def begin_pull(self) -> None:
        """Begins a pull. The kernels of backward, which read the old weights, must be queued on the GPU."""
        if self._staging is not None:
            self._staging.begin()

    def land(self, bucket: BucketSpec, pulled: PulledBucket) -> None:
        """Writes a pulled bucket into the model.

        Raises InvalidRequest if its size or format is wrong, or if it is a change from a version that the model does
        not have.
        """
        codec = self._checked(bucket, pulled, len(pulled.payload))
        values = codec.decode(pulled.payload, bucket.numel)
        if bucket.frozen:
            self._land_frozen(bucket, values)
            return
        self._write(bucket, values, shared=False, add=isinstance(codec, Blocks))
        self._versions[bucket.index] = pulled.version

    def landing_place(self, bucket: BucketSpec, pulled: PulledBucket, size: int) -> memoryview | None:
        """Returns the model's memory for a bucket, to receive its payload there; None if the payload must be converted,
        or the model is on another device.

        Raises InvalidRequest as `land`.
        """
        codec = self._checked(bucket, pulled, size)
        if bucket.frozen or not codec.keeps(bucket) or self._buffers.device.type != "cpu":
            return None
        self._versions.pop(bucket.index, None)  # unknown until the whole bucket has come
        return bytes_of(self._buffers.weights(bucket))

    def _came_as(self, bucket: BucketSpec, wire_format: str) -> Codec:
        """Returns the codec of pulled weights. A format of blocks may be replaced by whole weights."""
        codec = weight_codec(self.spec, bucket)
        if isinstance(codec, Blocks) and wire_format != codec.name:
            codec = plain_codec(bucket)
        codec.check_format(bucket, wire_format)
        return codec

    def _checked(self, bucket: BucketSpec, pulled: PulledBucket, size: int) -> Codec:
        codec, has = self._came_as(bucket, pulled.wire_format), self._versions.get(bucket.index)
        if size != codec.size(bucket.numel):
            raise InvalidRequest(f"bucket {bucket.index}: expected {codec.size(bucket.numel)} bytes, got {size}")
        if isinstance(codec, Blocks) and has != pulled.version - 1:
            raise InvalidRequest(
                f"bucket {bucket.index}: expected what leads on from version {has}, got what leads to {pulled.version}"
            )
        return codec

    def land_shared(self, bucket: BucketSpec, wire_format: str) -> None:
        """Copies a bucket from the segment into the model, unless the model lies in the segment."""
        assert self._buffers.segment is not None
        plain_codec(bucket).check_format(bucket, wire_format)
        self._write(bucket, self._buffers.segment.weight(bucket), shared=True)

    def end_pull(self, is_part: bool = False) -> None:
        """Ends a pull, after all weights have landed: the training thread sees them from now on.

        is_part: only a fragment's weights have landed: in the base, and not in the model's weights
        """
        if self._staging is not None:
            self._staging.finish()
        if is_part:
            return
        if self.base.is_separate:
            self.base.arrived()
        self.weights.landed()

    def step_failed(self, counted: Iterable[Leaving] | None) -> None:
        """Keeps the results of a step that has failed, or was interrupted: residuals and pulled weights.

        In local:H it does nothing to weights: if they have overwritten the base, the round has no base any more.

        counted: the gradients that were pushed, if all calls of this process are through, and another member of its
                 group has failed: they count, and all weights have landed. None: weights may land later, which are not
                 the script's changes
        """
        if counted is not None:
            self.count(counted)
        if self.spec.local is not None:
            return
        if counted is None:
            self.weights.pull_failed()
        else:
            self.end_pull()

    def _write(self, bucket: BucketSpec, values: torch.Tensor, shared: bool, add: bool = False) -> None:
        """add: the values are added to the weights"""
        weights = self._buffers.weights(bucket)
        if self._staging is not None:
            self._staging.land(bucket.index, weights, values, pinned=shared, add=add)
        elif add:
            weights += values
        elif values.data_ptr() != weights.data_ptr():
            weights.copy_(values)

    def _land_frozen(self, bucket: BucketSpec, values: torch.Tensor) -> None:
        for part in bucket.slices:
            tensor, pulled = self._tensors[part.parameter], values[part.offset : part.offset + part.length]
            if tensor.is_meta:  # a piece that another member of the group holds
                continue
            with torch.no_grad():
                parts = parts_of(tensor)  # over the tensor's own memory, unless it is channels_last, say
                parts.view(-1)[part.start : part.start + part.length] = pulled.to(tensor.device)
                if parts.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole_of(parts, element_name(tensor.dtype)))
