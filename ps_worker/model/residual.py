"""Error feedback: the rounding error of a worker's gradients in the wire format is added to the next ones.

In a wire format of blocks (int8, int4) a worker sends the codes of g + e, where g is its gradient and e the residual:
the rounding error of the steps before. Once the step counts, e becomes g + e - (the values of the codes). So nothing is
lost for good, and the sent values add up to the sum of the gradients (Seide et al., Interspeech 2014).

encode   A bucket's codes and its next residual are computed when the bucket is sent. This may happen twice in a
         step: if a gradient changes after its draft was sent, the bucket is sent again, from the same old residual.
count    When the step counts, the residuals of the last send take effect. A repeated call sends the same bytes.
         If a step is refused, skipped, or lost with the worker's place, all residuals stay as they were. If a step was
         interrupted, gradients of the next one may leave before it is known that it counts. Each is encoded with the
         residual of before. So what a step changes is added to the residual.
GPU      All of this is queued on the stream on which buckets are encoded, whichever thread asks for it. A bucket may
         be encoded by another thread while a step is counted; it has a residual that is complete, or the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import Blocks


@dataclass(eq=False)
class Leaving:
    """A bucket that is being sent. The training thread makes it; the sending thread fills it.

    made:  the event on the GPU after which the gradient is complete; None on the host
    error: [numel] float32, the bucket's next residual; None before it is sent, and in formats without a residual
    before: the residual that it was encoded with; None: zero
    norms: [2], the L2 norms of `error` and of the sent values; None when `error` is
    """

    bucket: BucketSpec
    made: torch.cuda.Event | None
    error: torch.Tensor | None = None
    before: torch.Tensor | None = None
    norms: torch.Tensor | None = None


class Residuals:
    """The residuals of one model, by bucket: [numel] float32, on the gradients' device. A missing residual is zero.

    `encode` may be called from any thread.
    """

    def __init__(
        self, sizes: Mapping[int, int], device: torch.device, queue: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """sizes: the elements of each bucket that may have one

        queue: returns a `with` block whose kernels come behind those of all calls of `encode` until then
        """
        self._sizes, self._device, self._queue = sizes, device, queue
        self._errors: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}  # by bucket, the norms of its residual and of its last sent values

    def encode(self, leaving: Leaving, gradient: torch.Tensor, codec: Blocks, absent: Sequence[int]) -> torch.Tensor:
        """Returns the payload of a gradient [numel] plus the bucket's residual. Fills `leaving`.

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
        leaving.error, leaving.before = left, error
        leaving.norms = torch.stack([torch.linalg.vector_norm(values) for values in (left, sent)])
        return payload

    def count(self, leaving: Leaving) -> None:
        """Keeps the residuals of a bucket's last push: its step counts."""
        index, left, before = leaving.bucket.index, leaving.error, leaving.before
        if left is None:
            return
        now = self._errors.get(index)
        if now is not before:  # another step was counted since
            with self._queue():
                left = left if before is None else left - before
                left = left if now is None else left + now
        self._errors[index], leaving.error, leaving.before = left, None, None
        if leaving.norms is not None:
            self._norms[index] = leaving.norms

    def forget(self, buckets: Iterable[BucketSpec]) -> None:
        """Sets the residuals of these buckets to zero."""
        for bucket in buckets:
            self._errors.pop(bucket.index, None)

    def ratio(self) -> float | None:
        """Returns the norm of all residuals over the norm of the last sent values. Above 1 the format is too coarse.

        None: nothing was sent, or a value is not finite. For any thread.
        """
        norms = [each.tolist() for each in list(self._norms.values())]
        left, sent = (math.hypot(*column) for column in zip(*norms, strict=True)) if norms else (0.0, 0.0)
        return left / sent if sent > 0 and math.isfinite(left) and math.isfinite(sent) else None

    # -- in checkpoints ----------------------------------------------------------------------------------------------

    def copy(self) -> dict[int, torch.Tensor]:
        """Returns the residuals on the host, by bucket."""
        with self._queue():
            return {index: error.to("cpu", copy=True) for index, error in self._errors.items()}

    def takes(self, errors: Mapping[int, torch.Tensor]) -> bool:
        """Whether these residuals have the types and sizes of this model's buckets."""
        sizes = self._sizes
        return all(error.dtype == torch.float32 and error.shape == (sizes.get(i),) for i, error in errors.items())

    def put(self, errors: Mapping[int, torch.Tensor]) -> None:
        """Replaces all residuals."""
        with self._queue():
            self._errors = {index: error.to(self._device, copy=True) for index, error in errors.items()}
