"""The flat buffers that a model lies in: one contiguous tensor for the weights and one for the gradients of each space.

`param.data` and `param.grad` come to lie in these tensors, in the order of the job's layout, and buckets are slices of
them. Each is a tensor with a storage of its own there (storage.py). With a segment shared with the shards, and no
conversion on the way, these tensors lie in the segment itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, Layout, space_of
from ps_protocol.segment_layout import SegmentMap
from ps_protocol.tensors import TORCH_DTYPES, whole_of
from ps_worker.model.sharded import is_sharded, local


class FlatBuffers:
    """The buffers of the parameters that a job trains, and where each parameter lies in them.

    trained:        the parameters that an optimizer steps, by index in the job
    device:         the device of the buffers: the one with most bytes of the model
    sharded:        parameters that are DTensors: only their local shards are trained
    segment:        the segment that is shared with shards on this host; None: there is none
    weight_views:   by parameter, its part of the weights in its shape; empty before the first `lie_in`
    gradient_views: by parameter, its part of the gradients
    elsewhere:      parameters that keep memory of their own: those on another device (a model spread over several), and
                    DTensors, whose memory torch lays out
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
        self._own: dict[str, torch.Tensor] = {}  # by space, the model's weights: those below, or beside the base
        self._weights: dict[str, torch.Tensor] = {}  # by space
        self._gradients: dict[str, torch.Tensor] = {}

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return is_sharded(tensor) or not _is_same(tensor.device, self.device)

    def lie_in(self, segment: SegmentMap | None) -> bool:
        """Allocates the buffers, in `segment` if it can hold them. Returns whether there are new buffers, which are
        empty.
        """
        first, before, self.segment = not self.weight_views, self.segment, segment
        if not first and (self.device.type == "cuda" or (before is None and segment is None)):
            return False
        # Not those of the buckets: a parameter without elements lies in none.
        trained = [self.spec.parameters[index] for index in self.trained]
        spaces = {space_of(parameter): parameter.dtype for parameter in trained}
        weights, gradients = (segment.weights, segment.gradients) if segment else ({}, {})
        self._weights = {space: self._space(space, dtype, weights) for space, dtype in spaces.items()}
        self._gradients = {space: self._space(space, dtype, gradients) for space, dtype in spaces.items()}
        is_separate = self.spec.has_separate_base
        beside = {space: self._space(space, dtype, {}) for space, dtype in spaces.items() if is_separate}
        self._own = beside or self._weights
        for index in self.trained:
            space = space_of(self.spec.parameters[index])
            self.weight_views[index] = self._view(self._own[space], index)
            self.gradient_views[index] = self._view(self._gradients[space], index)
        return True

    def _space(self, space: str, dtype: str, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the buffer of one space: the segment's own where that holds the same type on the same device."""
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
        """Returns the part of the pulled weights that belongs to a parameter, in its shape."""
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
        return self._gradients[bucket.space][bucket.start : bucket.start + bucket.numel]

    def all_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of all buckets, by space."""
        return dict(self._gradients)

    def copy_weights(self, back: bool) -> None:
        """Copies all weights to the memory of the gradients. back: the other way round"""
        for space, flat in self._weights.items():
            source, target = (self._gradients[space], flat) if back else (flat, self._gradients[space])
            target.copy_(source)

    def take_weights(self) -> None:
        """Subtracts all weights from the content of the gradients' memory, in place."""
        for space, flat in self._weights.items():
            self._gradients[space].sub_(flat)

    def gradient_versions(self, spaces: Iterable[str]) -> list[int]:
        """Returns torch's `_version` of the gradients of each of these spaces: it counts writes in place."""
        return [self._gradients[space]._version for space in spaces]

    # -- where they lie ----------------------------------------------------------------------------------------------

    @property
    def gradients_in_segment(self) -> bool:
        """Whether the gradients' buffers lie in the segment."""
        return self.segment is not None and _are_same(self._gradients, self.segment.gradients)

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
        if not _is_same(tensor.device, device):
            raise InvalidRequest(
                f"{parameter.name} is on {tensor.device} now, and the job trains it on {device}: move the model before "
                "prepare, or back before optimizer.step()"
            )


def _main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        sizes[tensor.device] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else torch.device("cpu")  # a model of tables alone has none


def _is_same(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are the same: `cpu` and `cpu:0` are."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _are_same(buffers: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> bool:
    return all(space in shared and flat is shared[space] for space, flat in buffers.items())
