"""The base of a round of local steps (mode `local:H`): the weights that it begins with.

It lies in one of two places:

where gradients do   `.grad` is the script's own in this mode, and no bucket leaves before the round ends. Then base -
                     weights is computed in place, and this difference is pushed.
where pulls land     The weights then have separate memory, and the difference is computed in the gradients' memory.
                     Fragments (mode `local:H/F`) need this: a pull must not overwrite the weights, which the script
                     steps meanwhile. So do weights that travel as int8 or int4: they come as a difference to the ones
                     before, which must stay the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.job import NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.tensors import is_finite
from ps_worker.model.buffers import FlatBuffers, Weights
from ps_worker.model.replicated import ReplicatedParameters


class Base:
    """The base of one model. For the training thread.

    The methods `arrived`, `leave`, `mix`, `own`, `takes` and `put` are only for a separate base.

    is_separate: the base lies where pulls land, and the weights have memory of their own
    is_there:    the memory has the complete base, and not a difference or a pull under way
    is_overwritten: the pull of all weights in a new place, which lands there, is under way, or has been broken off
    alike:       the parameters that members of the group hold alike; None: there are none
    """

    def __init__(self, buffers: FlatBuffers, weights: Weights) -> None:
        self.is_there = self.is_overwritten = False
        self._buffers = buffers
        self._weights = weights
        self.is_separate = buffers.spec.has_separate_base
        self.alike: ReplicatedParameters | None = None

    def keep(self) -> None:
        """Makes the current weights the base. A separate base is complete already: the pull has written it."""
        if not self.is_separate:
            self._buffers.copy_weights(back=False)
        self.is_there = True

    def arrived(self) -> None:
        """Copies the pulled weights, which are the base, to the model's weights."""
        for bucket in self._buffers.trained_buckets:
            self._buffers.own(bucket).copy_(self._buffers.weights(bucket))

    def go_back(self) -> None:
        """Sets the model's weights back to the base."""
        self._weights.gather()
        if self.is_separate:
            self.arrived()
        else:
            self._buffers.copy_weights(back=True)
        self._weights.landed()
        if self.alike is not None:
            self.alike.go_back()

    def subtract(self) -> None:
        """Computes the difference of the whole model, base - weights. The base is overwritten unless it is separate."""
        if self.is_separate:
            self._weights.gather()
            self.leave(self._buffers.trained_buckets)
        else:
            self._buffers.take_weights()
        self.is_there = False

    def leave(self, buckets: Sequence[BucketSpec]) -> None:
        """Computes the difference of some buckets, base - weights, where gradients lie. All weights must be in the
        buffers.

        Base and weights are not changed, so it can be repeated.
        """
        for bucket in buckets:
            base, own = self._buffers.weights(bucket), self._buffers.own(bucket)
            torch.sub(base, own, out=self._buffers.gradients(bucket))

    def mix(self, buckets: Sequence[BucketSpec], mixing: float) -> None:
        """Mixes the pulled weights of some buckets into the model's: w becomes mixing * w + (1 - mixing) * pulled."""
        self._weights.gather()
        for bucket in buckets:
            base, own = self._buffers.weights(bucket), self._buffers.own(bucket)
            own.lerp_(base, 1 - mixing) if mixing else own.copy_(base)
        self._weights.landed()
        self.is_there = True

    def share_alike(self, is_first: bool = False) -> None:
        """Sends parameters that members of a group hold alike from their owners to the others. is_first: include those
        that no optimizer steps
        """
        if self.alike is not None:
            self.alike.share(self.values() if self._buffers.spec.local is not None else {}, is_first)

    def values(self) -> dict[int, torch.Tensor]:
        """Returns the base by the id of the parameter, as views of the buffers."""
        views = self._views()
        found = {id(tensor): views[index] for index, tensor in self._buffers.trained.items()}
        return found if self.alike is None else found | self.alike.base

    def _views(self) -> dict[int, torch.Tensor]:
        """Returns the base by parameter, each in its shape."""
        if self.is_separate:
            return {index: self._buffers.pulled(index) for index in self._buffers.trained}
        return self._buffers.gradient_views

    def not_finite(self) -> str | None:
        """Returns the name of a parameter whose difference is not finite; None if there is none, or the job does not
        check.

        All weights must be in the buffers.
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

    # -- the worker's own weights, apart from the base -----------------------------------------------------------------

    def own(self) -> dict[int, torch.Tensor]:
        """Returns a copy of the model's weights on the host, by parameter, each in its shape.

        Raises InvalidRequest, as `Weights.gather`.
        """
        self._weights.gather()
        return {index: view.to("cpu", copy=True) for index, view in self._buffers.weight_views.items()}

    def takes(self, own: dict[int, torch.Tensor]) -> bool:
        """Whether these weights have the parameters, shapes and types of this model."""
        views = self._buffers.weight_views
        return own.keys() == views.keys() and all(
            isinstance(value, torch.Tensor) and value.shape == views[index].shape and value.dtype == views[index].dtype
            for index, value in own.items()
        )

    def put(self, own: dict[int, torch.Tensor]) -> None:
        """Sets the model's weights. The base is not changed."""
        self._weights.gather()
        for index, value in own.items():
            self._buffers.weight_views[index].copy_(value)
        self._weights.landed()
