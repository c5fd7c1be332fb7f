"""The weights of a model as parts of flat buffers, and which of them a script has changed.

A script may change parameters itself, and may move them elsewhere (`model.to(...)`, `p.data = ...`): `changed` detects
that before each step, and copies them back into the buffers.

Three kinds of parameters keep memory of their own, and are copied to and from the buffers in their logical order: those
that are not contiguous (channels_last), those on another device than most (a model spread over several), and those that
the script shares with other processes after `prepare` (`share_memory()`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ps_worker.model.buffers import FlatBuffers
from ps_worker.model.sharded import like, local
from ps_worker.model.storage import with_own_storage
from ps_worker.model.tracked import Touched, Touches, set_values, unwatch, values, watch


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
        # No mark tells of their changes: torch counts none of a local shard.
        self._sharded = buffers.sharded
        self._touches = Touches()
        self._marks: list[tuple[int, int]] = []  # of each parameter, since weights last landed

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
        """Takes the current parameters as unchanged by the script."""
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
            if index in changed or index not in self._apart:  # else what has landed of a failed pull would be lost
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
        """Notes that weights of a failed pull may land in the buffers at any time. Parameters with memory of their own
        are compared with what they are now, to find what the script changes.
        """
        for index in self._apart:
            self._touches.touched(index, self._buffers.trained[index], None)

    def _take_in(self, index: int, even_shared: bool = False) -> None:
        """Copies a parameter's values into the buffers, and moves it there if it can lie there."""
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
        """Returns for each parameter a mark that differs once it was changed in place, or put elsewhere."""
        tensors = self._buffers.trained.values()
        here = map(local, tensors) if self._sharded else tensors
        return [(tensor._version, tensor.data_ptr()) for tensor in here]

    def _is_changed(self, index: int, version: int) -> bool:
        tensor, view = local(self._buffers.trained[index]), self._buffers.weight_views[index]
        before = self._touches.before.get(index)
        if before is None and (index in self._apart or tensor.data_ptr() != view.data_ptr()):
            before = view  # only landing weights have written it
        if before is None:
            return bool(tensor._version != version)
        return not torch.equal(values(tensor).to(before.device), before)


def _ignore(_: torch.Tensor | None) -> None:
    """Notes nothing of a parameter that changes in each step."""
