"""The base of a round of local steps (mode `local:H`): the weights that it begins with.

It lies in one of two places:

where gradients do   `.grad` is the script's own in this mode, and no bucket leaves before the round ends. Then the
                     weights are taken from the base, in place, and the difference is there to be pushed.
where pulls land     With memory of its own for the weights beside it, and the difference made where gradients lie.
                     Fragments (mode `local:H/F`) need that, because what is pulled must not land in the weights, which
                     the script steps meanwhile. So do weights that travel as int8 or int4: they come as what is to be
                     added to the ones before, so those have to stay as they are, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.job import NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import is_finite
from ps_worker.model.buffers import FlatBuffers
from ps_worker.model.weights import Weights


class Base:
    """The base of one model. For the training thread.

    `arrived`, `leave`, `mix`, `own`, `takes` and `put` are for a base that is separate.

    is_separate: it lies where pulls land, and the weights beside it
    is_there:    the base is complete: it is not a difference yet, and no pull is landing in it
    """

    def __init__(self, buffers: FlatBuffers, weights: Weights) -> None:
        self.is_there = False
        self._buffers = buffers
        self._weights = weights
        self.is_separate = buffers.spec.has_separate_base

    def keep(self) -> None:
        """Makes the weights, as they are, the base. One that lies where pulls land is that already."""
        if not self.is_separate:
            self._buffers.copy_weights(back=False)
        self.is_there = True

    def arrived(self) -> None:
        """Makes what was pulled the weights, too."""
        for bucket in self._buffers.trained_buckets:
            self._buffers.own(bucket).copy_(self._buffers.weights(bucket))

    def go_back(self) -> None:
        """Makes the weights the base again."""
        self._weights.gather()
        if self.is_separate:
            self.arrived()
        else:
            self._buffers.copy_weights(back=True)
        self._weights.landed()

    def subtract(self) -> None:
        """Makes the difference of the whole model: the base without the weights."""
        if self.is_separate:
            self._weights.gather()
            self.leave(self._buffers.trained_buckets)
        else:
            self._buffers.take_weights()
        self.is_there = False

    def leave(self, buckets: Sequence[BucketSpec]) -> None:
        """Makes the difference of some buckets, to be pushed: base - weights. All weights are in the buffers.

        Base and weights stay as they are: it can be made again.
        """
        for bucket in buckets:
            base, own = self._buffers.weights(bucket), self._buffers.own(bucket)
            torch.sub(base, own, out=self._buffers.gradients(bucket))

    def mix(self, buckets: Sequence[BucketSpec], mixing: float) -> None:
        """Mixes what was pulled of some buckets into the weights. mixing: what stays of the weights as they are"""
        self._weights.gather()
        for bucket in buckets:
            base, own = self._buffers.weights(bucket), self._buffers.own(bucket)
            own.lerp_(base, 1 - mixing) if mixing else own.copy_(base)
        self._weights.landed()
        self.is_there = True

    def values(self) -> dict[int, torch.Tensor]:
        """Returns the base by the id of the parameter: the buffers' own memory."""
        views = self._views()
        return {id(tensor): views[index] for index, tensor in self._buffers.trained.items()}

    def _views(self) -> dict[int, torch.Tensor]:
        """Returns the base by parameter, each in its shape."""
        if self.is_separate:
            return {index: self._buffers.pulled(index) for index in self._buffers.trained}
        return self._buffers.gradient_views

    def not_finite(self) -> str | None:
        """Returns the name of a parameter whose difference is not finite, if there is one and the job has it looked
        for. The weights are in the buffers.
        """
        if self._buffers.spec.non_finite is NonFinite.ALLOW:
            return None
        base = self._views()
        for index, view in self._buffers.weight_views.items():
            # Of finite weights the difference is finite, too, but in float16.
            half = view.dtype == torch.float16
            if not is_finite(view) or (half and not is_finite(base[index] - view)):
                return self._buffers.spec.parameters[index].name
        return None

    # -- the worker's own weights, beside the servers' -----------------------------------------------------------------

    def own(self) -> dict[int, torch.Tensor]:
        """Returns a copy of the weights as they are, on the host, by parameter, each in its shape.

        Raises InvalidRequest, as `Weights.gather`.
        """
        self._weights.gather()
        return {index: view.to("cpu", copy=True) for index, view in self._buffers.weight_views.items()}

    def takes(self, own: dict[int, torch.Tensor]) -> bool:
        """Whether weights fit this model."""
        views = self._buffers.weight_views
        return own.keys() == views.keys() and all(
            isinstance(value, torch.Tensor) and value.shape == views[index].shape and value.dtype == views[index].dtype
            for index, value in own.items()
        )

    def put(self, own: dict[int, torch.Tensor]) -> None:
        """Sets the weights, and leaves the base as it is."""
        self._weights.gather()
        for index, value in own.items():
            self._buffers.weight_views[index].copy_(value)
        self._weights.landed()
