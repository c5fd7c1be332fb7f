"""Copies buckets between a GPU and the host, without stopping the GPU or the training thread.

Gradients are copied to the host on a stream of their own, as soon as the kernels that made them are done. The thread
that sends a bucket waits only for that bucket's copy. Weights are copied to the GPU on another stream, after the
kernels that still read the old weights; the training stream waits for it on the device. Nothing waits for the whole
device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ps_protocol.segment_layout import SegmentMap


class GpuStaging:
    """Copies between one GPU and pinned host memory. Methods may be called from any thread."""

    def __init__(self, device: torch.device, segment: SegmentMap | None) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        self._landing: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}  # by bucket
        self._locked = [] if segment is None else [*segment.gradients.values(), *segment.weights.values()]
        for flat in self._locked:
            # Page-locked, so that copies run beside kernels. Where that is refused, copies are only slower.
            torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)

    def release(self) -> None:
        """Waits for all copies, and unpins the segment's memory."""
        self._down.synchronize()
        self._up.synchronize()
        for flat in self._locked:
            torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())
        self._locked = []

    def mark(self) -> torch.cuda.Event:
        """Returns an event after all kernels that are queued on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def down(self) -> AbstractContextManager[object]:
        """Returns a `with` block whose kernels come behind those of earlier calls of `fetch`, on the same stream."""
        return torch.cuda.stream(self._down)

    def fetch(
        self, make: Callable[[], torch.Tensor], after: torch.cuda.Event, target: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs `make` on the GPU after an event, copies its result to the host, and returns it. Blocks until it is
        there.

        target: pinned memory on the host for the result; None: the call allocates some
        """
        with self.down():
            self._down.wait_event(after)
            made = make()
            if target is None:
                target = torch.empty(made.shape, dtype=made.dtype, device="cpu", pin_memory=True)
            target.copy_(made, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._down)
        done.synchronize()
        return target

    def begin(self) -> None:
        """Begins a pull: weights that land from now on wait for the kernels queued on the current stream."""
        self._up.wait_event(self.mark())

    def land(self, bucket: int, target: torch.Tensor, values: torch.Tensor, pinned: bool, add: bool = False) -> None:
        """Queues the copy of values on the host to the GPU.

        pinned: the values lie in pinned memory, and stay there; otherwise they are copied to pinned memory first
        add:    add the values to `target`
        """
        if not pinned:
            staged, landed = self._landing.get(bucket, (None, None))
            if landed is not None:
                landed.synchronize()  # a copy of an earlier step, which is over long ago
            if staged is None or staged.dtype != values.dtype:
                staged = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            values = staged.copy_(values)
        with torch.cuda.stream(self._up):
            if add:
                target += values.to(target.device, non_blocking=True)
            else:
                target.copy_(values, non_blocking=True)
            landed = torch.cuda.Event()
            landed.record(self._up)
        if not pinned:
            self._landing[bucket] = (values, landed)

    def finish(self) -> None:
        """Ends the pull: kernels queued on the current stream from now on see the new weights."""
        event = torch.cuda.Event()
        event.record(self._up)
        torch.cuda.current_stream(self._device).wait_event(event)
