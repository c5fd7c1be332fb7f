"""What a worker's gradients have lost on the wire, and send with the next ones: error feedback.

In a wire format of blocks (int8, int4) a worker sends the codes of g + e, where g is its gradient and e the residual:
what the codes of the steps before have left out. Once the step counts, e becomes g + e - (the values of the codes). So
nothing is lost for good, and what is sent adds up to the sum of the gradients.

leaves   A bucket's codes are made where it leaves, and so is its next residual. Both may happen twice in a step: a
         draft whose gradient was changed since counts for nothing, and the bucket leaves anew, from the same residual.
counts   When the step counts, the residuals of what left last take effect. A repeat of a call sends the same bytes.
does not A step that was refused, skipped, or lost with the worker's place, leaves all residuals as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from ps_protocol.codecs import Blocks
from ps_protocol.layout import BucketSpec


class Leaving:
    """A bucket on its way out. The thread that pushes makes it; the one that sends has it filled.

    made:  the point on the GPU at which the gradient is there; None on the host
    error: [numel] float32, the bucket's residual once this counts; None before it is sent, and without a residual
    norms: [2], the L2 norms of that and of what is sent; likewise
    """

    def __init__(self, bucket: BucketSpec, made: torch.cuda.Event | None) -> None:
        self.bucket = bucket
        self.made = made
        self.error: torch.Tensor | None = None
        self.norms: torch.Tensor | None = None


class Residuals:
    """The residuals of one model, by bucket: [numel] float32, on the gradients' device; zeros where there is none.

    `encode` may be called from any thread, for buckets whose residual does not change meanwhile.
    """

    def __init__(self, sizes: Mapping[int, int], device: torch.device) -> None:
        """sizes: the elements of each bucket that may have one"""
        self._sizes, self._device = sizes, device
        self._errors: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}  # of each bucket's residual, and of what it has sent last

    def encode(self, leaving: Leaving, gradient: torch.Tensor, codec: Blocks, absent: Sequence[int]) -> torch.Tensor:
        """Returns the payload of a gradient [numel] and of what was left out before; fills in what this leaves out.

        absent: positions of slices without a gradient: they are sent as zeros, and keep their residual
        """
        bucket, error = leaving.bucket, self._errors.get(leaving.bucket.index)
        wanted = gradient.float() if error is None else error + gradient
        parts = [slice(part.offset, part.offset + part.length) for part in map(bucket.slices.__getitem__, absent)]
        if parts and wanted.data_ptr() == gradient.data_ptr():
            wanted = wanted.clone()
        for part in parts:
            wanted[part] = 0
        payload = codec.encode(wanted)
        sent = codec.values(payload, bucket.numel)
        left = wanted - sent
        for part in parts:
            left[part] = 0 if error is None else error[part]
        leaving.error = left
        leaving.norms = torch.stack([torch.linalg.vector_norm(values) for values in (left, sent)])
        return payload

    def count(self, leaving: Leaving) -> None:
        """Keeps the residuals of a bucket's last push: its step counts."""
        if leaving.error is not None:
            self._errors[leaving.bucket.index], leaving.error = leaving.error, None
            if leaving.norms is not None:
                self._norms[leaving.bucket.index] = leaving.norms

    def forget(self, buckets: Iterable[BucketSpec]) -> None:
        """Has these buckets begin without a residual."""
        for bucket in buckets:
            self._errors.pop(bucket.index, None)

    def ratio(self) -> float | None:
        """Returns the norm of all residuals over that of what was sent last. Above 1 the format is too coarse.

        None: nothing was sent, or not all of it is finite. May be called from any thread.
        """
        norms = [each.tolist() for each in list(self._norms.values())]
        left, sent = (math.hypot(*column) for column in zip(*norms, strict=True)) if norms else (0.0, 0.0)
        return left / sent if sent > 0 and math.isfinite(left) and math.isfinite(sent) else None

    # -- in checkpoints ----------------------------------------------------------------------------------------------

    def copy(self) -> dict[int, torch.Tensor]:
        """Returns the residuals on the host, by bucket."""
        return {index: error.to("cpu", copy=True) for index, error in self._errors.items()}

    def takes(self, errors: Mapping[int, torch.Tensor]) -> bool:
        """Whether residuals fit."""
        sizes = self._sizes
        return all(error.dtype == torch.float32 and error.shape == (sizes.get(i),) for i, error in errors.items())

    def put(self, errors: Mapping[int, torch.Tensor]) -> None:
        """Replaces all residuals."""
        self._errors = {index: error.to(self._device, copy=True) for index, error in errors.items()}
