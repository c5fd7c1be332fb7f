"""The base of a round of local steps (mode `local:H`): the weights that it begins with.

It lies where gradients do in other modes: `.grad` is the script's own here, and no bucket leaves before the round ends.
Then the weights are taken from it, in place, and the difference is there to be pushed.
"""

from __future__ import annotations

import torch

from ps_protocol.job import NonFinite
from ps_protocol.tensors import is_finite
from ps_worker.model.buffers import FlatBuffers
from ps_worker.model.weights import Weights


class Base:
    """The base of one model. For the training thread.

    is_there: the buffers hold the base, and not yet the difference
    """

    def __init__(self, buffers: FlatBuffers, weights: Weights) -> None:
        self.is_there = False
        self._buffers = buffers
        self._weights = weights

    def keep(self) -> None:
        """Makes the weights, as they are, the base."""
        self._buffers.copy_weights(back=False)
        self.is_there = True

    def arrived(self) -> None:
        """Makes what was pulled the weights: it lies there already."""

    def go_back(self) -> None:
        """Makes the weights the base again."""
        self._weights.gather()
        self._buffers.copy_weights(back=True)
        self._weights.landed()

    def subtract(self) -> None:
        """Takes the weights from the base: the difference, in its place."""
        self._buffers.take_weights()
        self.is_there = False

    def values(self) -> dict[int, torch.Tensor]:
        """Returns the base by the id of the parameter: the buffers' own memory."""
        views = self._base_views()
        return {id(tensor): views[index] for index, tensor in self._buffers.trained.items()}

    def _base_views(self) -> dict[int, torch.Tensor]:
        """Returns the base by parameter, each in its shape."""
        return self._buffers.gradient_views

    def not_finite(self) -> str | None:
        """Returns the name of a parameter whose difference is not finite, if there is one and the job has it looked
        for. The weights are in the buffers.
        """
        if self._buffers.spec.non_finite is NonFinite.ALLOW:
            return None
        base = self._base_views()
        for index, view in self._buffers.weight_views.items():
            # Of finite weights the difference is finite, too, but in float16.
            half = view.dtype == torch.float16
            if not is_finite(view) or (half and not is_finite(base[index] - view)):
                return self._buffers.spec.parameters[index].name
        return None
