"""The worker's own part of a model: frozen tensors, and the residuals of its gradients.

The servers have the weights. The residual (model/residual.py) is as large as the weights, which may be more than the
coordinator stores for a worker. It then stays in the memory of this process. That suffices for a rollback after a shard
was lost; a new process begins without it, and logs a warning.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch

from ps_protocol.tensors import element_name, parts_of, whole_of
from ps_worker.state.encoding import OwnTensors, Residual

log = logging.getLogger("ps_worker")

# A worker's own state may have 16 MiB (--max-state-bytes), with what a script keeps beside this.
MOST_RESIDUAL_BYTES = 12 * 2**20
# Clocks whose residual stays in memory: of the checkpoint that is being made, and of the one before, which is the last
# until that one is complete.
KEPT_CLOCKS = 2


class SavedResiduals(Protocol):
    """The residuals of a model's gradients: see ps_worker/model/residual.py."""

    def copy(self) -> Residual:
        """Returns a copy of all residuals in host memory, by bucket."""

    def takes(self, errors: Residual) -> bool:
        """Whether these residuals fit the model's buckets."""

    def put(self, errors: Residual) -> None:
        """Replaces all residuals."""


class Teller(Protocol):
    """Sends tensors that no optimizer steps to the shards, for readers of the weights: see
    ps_worker/cluster/reader_buffers.py.
    """

    def stepped(self, changed: Callable[[], Collection[int]], is_last: bool = False) -> None:
        """Sends the tensors that have changed since the job began, if it is time to, or if it is the last time."""


class JobModel(Protocol):
    """A job's model as flat buffers: see ps_worker/model/flat.py."""

    @property
    def residuals(self) -> SavedResiduals:
        """The residuals of its gradients."""

    def frozen(self) -> dict[int, torch.Tensor]:
        """Returns the tensors that no optimizer steps, by index."""


class ModelState:
    """A model's own state in a worker's checkpoints.

    frozen: the tensors that no optimizer steps, by index among the job's parameters
    residuals: the residuals of the model's buckets; None if the wire format has no residuals
    teller: called after each step; None if there is none
    """

    def __init__(
        self,
        frozen: Mapping[int, torch.Tensor],
        residuals: SavedResiduals | None = None,
        teller: Teller | None = None,
    ) -> None:
        self._frozen = {index: FrozenTensor(tensor) for index, tensor in frozen.items()}
        self._residuals, self._teller = residuals, teller
        self.tells = teller is not None and bool(self._frozen)  # whether changed tensors are sent to readers
        self._kept: OrderedDict[int, Residual] = OrderedDict()  # by clock, residuals that are too large to be saved

    @staticmethod
    def of(model: JobModel, teller: Teller) -> ModelState:
        """Returns the state of a job's model."""
        return ModelState(model.frozen(), model.residuals, teller)

    def trains(self, indices: Sequence[int]) -> None:
        """Records that another job now trains parameters that no optimizer of this job steps."""
        for index in indices:
            self._frozen[index].trains = True

    def stepped(self, is_last: bool = False) -> None:
        """Sends changed tensors for readers of the weights, after a step, or because it was the last one."""
        if self._teller is not None:
            self._teller.stepped(self._changed, is_last)

    def _changed(self) -> list[int]:
        return [index for index, tensor in self._frozen.items() if not tensor.trains and tensor.changed()]

    def copy(self, clock: int) -> OwnTensors:
        """Returns a copy of the present state, at a clock. A residual that is too large for a checkpoint stays in
        memory.
        """
        frozen = {index: tensor.copy() for index, tensor in self._frozen.items() if tensor.changed()}
        residual = {} if self._residuals is None else self._residuals.copy()
        if sum(error.nbytes for error in residual.values()) <= MOST_RESIDUAL_BYTES:
            return OwnTensors(frozen, residual)
        self._kept.pop(clock, None)
        self._kept[clock] = residual
        while len(self._kept) > KEPT_CLOCKS:
            self._kept.popitem(last=False)
        return OwnTensors(frozen, None)

    def takes(self, own: OwnTensors) -> bool:
        """Whether a state fits this model."""
        fit = all(index in self._frozen and self._frozen[index].takes(t) for index, t in own.frozen.items())
        return fit and (not own.residual or (self._residuals is not None and self._residuals.takes(own.residual)))

    def put(self, own: OwnTensors, clock: int) -> None:
        """Sets the state of a clock. If the residual is not in it, uses the one in memory; without one warns, and
        clears it.
        """
        for index, tensor in self._frozen.items():
            if index in own.frozen:
                tensor.put(own.frozen[index])
            else:
                tensor.reset()  # it had not changed by then
        residual = self._kept.get(clock) if own.residual is None else own.residual
        if residual is None:
            log.warning(
                "what the gradients before clock %d have lost on the wire is lost: it was too large for this worker's "
                "state in the checkpoint, and this process did not have it",
                clock,
            )
        self.put_residual(residual or {})

    def put_residual(self, residual: Residual) -> None:
        """Sets the residuals, by bucket. An empty mapping clears them."""
        if self._residuals is not None:
            self._residuals.put(residual)


class FrozenTensor:
    """A tensor of the model that no optimizer steps, with its value at the beginning."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # A frozen parameter may be large, and its `_version` shows changes; a buffer's does not (BatchNorm's
        # statistics).
        self._version = tensor._version
        self._first = None if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        self.trains = False  # an optimizer has it since, in a job beside this one

    def changed(self) -> bool:
        """Whether the value has changed since `prepare`."""
        if self.trains:
            return True
        if self._first is None:
            return self._tensor._version != self._version
        # As its parts: torch compares no float8, for one.
        return not torch.equal(parts_of(self._tensor), parts_of(self._first))

    def copy(self) -> torch.Tensor:
        """Returns its present value on the host, as the parts of its elements."""
        return parts_of(self._tensor).to("cpu", copy=True)

    def reset(self) -> None:
        """Sets a buffer to its first value. A frozen parameter stays: no copy of its first value is kept."""
        if self._first is not None and not self.trains:
            with torch.no_grad():
                self._tensor.copy_(self._first)

    def takes(self, value: torch.Tensor) -> bool:
        """Whether a value has the shape and the type of the tensor."""
        parts = parts_of(self._tensor)
        return value.shape == parts.shape and value.dtype == parts.dtype

    def put(self, value: torch.Tensor) -> None:
        """Sets its value."""
        with torch.no_grad():
            self._tensor.copy_(whole_of(value.contiguous(), element_name(self._tensor.dtype)))
