"""Editions whose tensors a model cannot use as they are: the copies are made in a thread, so that no reader waits.

A model has copies if its element type or its device differs from the edition's, if a `MadeOf` makes a tensor, or if a
job's groups hold one in pieces. All other models use views of an edition, which take no time.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from ps_feed.edition import EditionArrays
from ps_protocol.errors import TryLater
from ps_runtime.background import guarded, start
from ps_worker.edition_tensors import Edition
from ps_worker.fitted_model import Slot

log = logging.getLogger("ps_worker")

EXIT_SECONDS = 2.0  # the time for an open maker's thread to end when the interpreter exits
_open: weakref.WeakSet[EditionMaker] = weakref.WeakSet()


@atexit.register
def _end_open() -> None:
    """Ends the threads of feeds that a script has left open: none may be in native code when the interpreter exits."""
    for each in list(_open):
        each.close(EXIT_SECONDS)


class EditionMaker:
    """A thread that does a feed's work at each new edition, once it is begun. Its methods are thread-safe."""

    def __init__(self) -> None:
        self._woken, self._closing = threading.Event(), threading.Event()
        self._beginning = threading.RLock()  # a signal's handler may close what its thread begins
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        """Whether the thread works."""
        return self._thread is not None and self._thread.is_alive() and not self._closing.is_set()

    def begin(self, work: Callable[[], None]) -> None:
        """Starts the thread, if it has not been. Without one, readers make the tensors, and the next call tries again.

        work: is called after each `wake`
        """
        with self._beginning:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, args=(work,), name="ps-feed-tensors", daemon=True)
                try:
                    start(thread)
                except TryLater as error:
                    log.warning("readers of a model copy each edition themselves, and wait for that: %s", error)
                    return
                self._thread = thread
                _open.add(self)
        self.wake()

    def wake(self) -> None:
        """Has the thread work, as there is a new edition."""
        self._woken.set()

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread. timeout: seconds to wait for it, at most"""
        self._closing.set()
        self._woken.set()
        with self._beginning:  # a thread that `begin` is starting is known here
            _open.discard(self)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self, work: Callable[[], None]) -> None:
        while not self._closing.is_set():
            self._woken.wait()
            self._woken.clear()
            if not self._closing.is_set():
                guarded("ps-feed-tensors", work)


class TensorMaker:
    """Makes the tensors of a feed's models. Except for `used`, methods are called by one thread at a time.

    Models whose tensors have the same types and devices share one copy of each edition.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.device, CudaCopies] = {}
        self._shared: weakref.WeakValueDictionary[tuple[object, ...], torch.Tensor] = weakref.WeakValueDictionary()
        self._arrays: Callable[[], EditionArrays | None] = lambda: None  # the arrays that `_shared` has copies of

    def made(self, slots: Sequence[Slot], edition: Edition) -> list[torch.Tensor]:
        """Returns the tensors of an edition in the types and on the devices of the slots: views of the edition if these
        are the same. Copies to GPUs have come to an end.
        """
        if self._arrays() is not edition.arrays:
            self._shared.clear()
            self._arrays = weakref.ref(edition.arrays)
        tensors = [self._one(slot, edition) for slot in slots]
        for copies in self._copies.values():
            copies.wait()
        return tensors

    def used(self) -> None:
        """Notes that the calling thread has queued its last work with the tensors of a model on GPUs."""
        for copies in list(self._copies.values()):
            copies.used()

    def _one(self, slot: Slot, edition: Edition) -> torch.Tensor:
        device, dtype = slot.target.device, slot.target.dtype
        # A `MadeOf` is that of another model if a mapping gives both; each name makes one of its own.
        key = (slot.source.names if slot.source.is_one else slot.source, device, dtype)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = self._moved(slot.source.tensor(edition), device, dtype)
        return shared

    def _moved(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
            return tensor.to(device, dtype)
        if device not in self._copies:
            self._copies[device] = CudaCopies(device)
        return self._copies[device].copied(tensor, dtype)


class CudaCopies:
    """Copies tensors to a GPU through pinned memory, on a stream of its own: the work of readers goes on meanwhile.

    A tensor that nobody has any more is memory of that stream, which the next copy may write to, while a reader's last
    work with the tensor is still queued on another stream. So each copy waits for the work that `used` has noted. It
    does so after its memory is allocated: what is freed later is not its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pinned = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]  # one is filled, one copied
        self._left = [torch.cuda.Event() for _ in range(2)]  # what was in them has been copied
        self._turn = 0
        self._used: dict[int, torch.cuda.Event] = {}  # by stream, the last work of readers with tensors of the model

    def copied(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a copy on the device, which is there after `wait`. It travels in its own type."""
        self._turn = 1 - self._turn
        self._left[self._turn].synchronize()
        if self._pinned[self._turn].nbytes < tensor.nbytes:
            self._pinned[self._turn] = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        staged = self._pinned[self._turn][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        with torch.cuda.stream(self._stream):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            made = there if dtype == tensor.dtype else torch.empty(tensor.shape, dtype=dtype, device=self._device)
            for event in list(self._used.values()):
                self._stream.wait_event(event)
            there.copy_(staged, non_blocking=True)
            self._left[self._turn].record(self._stream)
            if made is not there:
                made.copy_(there)
        return made

    def used(self) -> None:
        """Notes that the calling thread has queued its last work with tensors of the model."""
        stream = torch.cuda.current_stream(self._device)
        self._used[stream.cuda_stream] = stream.record_event()

    def wait(self) -> None:
        """Waits until all copies are there."""
        self._stream.synchronize()


def is_copied(slot: Slot, edition: Edition) -> bool:
    """Whether a model's tensor is a copy, or made by a script's function: not a view of the edition."""
    if not slot.source.is_one or edition.arrays.is_in_pieces(slot.source.names[0]):
        return True
    tensor = slot.source.tensor(edition)
    return (tensor.device, tensor.dtype) != (slot.target.device, slot.target.dtype)
