"""A model's parameters and gradients as flat buffers, so that pushing packs nothing and a pull lands in place.

As in DDP and FSDP, `param.data` and `param.grad` become views into one contiguous tensor for each element type, in the
order of the job's layout. Buckets are slices of these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.layout import Bucket, Layout, ParameterSpec
from ps_protocol.tensors import TORCH_DTYPES, bytes_of, is_finite, tensor_from


class FlatModel:
    """The tensors of a model in the layout of its job.

    tensors: the model's tensors in the order of the job's parameters. Those that an optimizer steps are nn.Parameters
             and move into the flat buffers; the others stay where they are, and are only written once, at the start.
    """

    def __init__(self, specs: Sequence[ParameterSpec], tensors: Sequence[torch.Tensor], layout: Layout) -> None:
        self._specs = specs
        self._tensors = tensors
        self.layout = layout
        device = next(t for s, t in zip(specs, tensors, strict=True) if s.group is not None).device
        trained = {bucket.space for bucket in layout.buckets if not bucket.held}
        self._weights = {  # by space, [size of the space]
            space: torch.zeros(layout.space_sizes[space], dtype=TORCH_DTYPES[space], device=device) for space in trained
        }
        self._gradients = {space: torch.zeros_like(flat) for space, flat in self._weights.items()}
        self._gradient_views: dict[int, torch.Tensor] = {}  # by parameter, in its shape
        for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
            if spec.group is None:
                tensor.data = tensor.data.contiguous()  # so that a part of it can be written
            else:
                weights = self._view(self._weights[spec.dtype], index)
                weights.copy_(tensor.data)
                tensor.data = weights
                self._gradient_views[index] = self._view(self._gradients[spec.dtype], index)
                assert isinstance(tensor, nn.Parameter)
                frozen = not tensor.requires_grad
                tensor.requires_grad_()  # a frozen one takes no hook, and may be thawed later
                tensor.register_post_accumulate_grad_hook(lambda _, index=index: self.adopt(index))
                tensor.requires_grad_(not frozen)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def adopt(self, index: int) -> None:
        """Moves a parameter's gradient into the flat buffer, wherever it was made; frees the memory it came in."""
        tensor, view = self._tensors[index], self._gradient_views[index]
        gradient = tensor.grad
        if gradient is None or gradient.data_ptr() == view.data_ptr():
            return
        name = self._specs[index].name
        if gradient.is_sparse:
            raise Unsupported(f"the gradient of {name} is sparse; use sparse=False")
        if gradient.shape != view.shape:
            raise InvalidRequest(
                f"the gradient of {name}: expected shape {tuple(view.shape)}, got {tuple(gradient.shape)}"
            )
        view.copy_(gradient)
        tensor.grad = view

    def gather(self) -> set[int]:
        """Moves every gradient into the flat buffers. Returns the parameters that have none in this step."""
        absent = set()
        for index in self._gradient_views:
            if self._tensors[index].grad is None:
                absent.add(index)
            else:
                self.adopt(index)
        return absent

    def not_finite(self, absent: set[int]) -> str | None:
        """The name of a parameter whose gradient holds an infinity or a NaN, if there is one."""
        for index, view in self._gradient_views.items():
            if index not in absent and not is_finite(view):
                return self._specs[index].name
        return None

    def gradient(self, bucket: Bucket) -> memoryview:
        """A bucket's gradient as bytes: the flat buffer's own memory on a CPU, a copy on the host from elsewhere."""
        return bytes_of(self._slice(self._gradients, bucket).cpu())

    # -- weights -----------------------------------------------------------------------------------------------------

    def initial(self, bucket: Bucket) -> memoryview:
        """A bucket's value as the model has it now, as bytes."""
        if not bucket.held:
            return bytes_of(self._slice(self._weights, bucket).cpu())
        flat = torch.zeros(bucket.numel, dtype=TORCH_DTYPES[bucket.dtype])
        for segment in bucket.segments:
            whole = self._tensors[segment.parameter].detach().reshape(-1)
            flat[segment.offset : segment.offset + segment.length] = whole[
                segment.start : segment.start + segment.length
            ].cpu()
        return bytes_of(flat)

    def land(self, bucket: Bucket, payload: memoryview) -> None:
        """Writes a pulled bucket into the model. Raises InvalidRequest if its size is not the bucket's."""
        if len(payload) != bucket.nbytes:
            raise InvalidRequest(f"bucket {bucket.index}: expected {bucket.nbytes} bytes, got {len(payload)}")
        values = tensor_from(payload, bucket.dtype)
        if not bucket.held:
            self._slice(self._weights, bucket).copy_(values)
            return
        for segment in bucket.segments:
            tensor = self._tensors[segment.parameter]
            found = values[segment.offset : segment.offset + segment.length]
            with torch.no_grad():
                if segment.length == tensor.numel():
                    tensor.copy_(found.view(tensor.shape))
                else:
                    tensor.view(-1)[segment.start : segment.start + segment.length] = found.to(tensor.device)

    def _view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        spec, offset = self._specs[index], self.layout.offsets[index]
        return flat[offset : offset + spec.numel].view(spec.shape)

    @staticmethod
    def _slice(spaces: dict[str, torch.Tensor], bucket: Bucket) -> torch.Tensor:
        return spaces[bucket.space][bucket.start : bucket.start + bucket.numel]
