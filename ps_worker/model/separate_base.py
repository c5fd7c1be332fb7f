"""The base of local steps, apart from the model's weights: of each bucket, what was pulled last.

It has memory of its own for one of two reasons:

fragments     In mode `local:H/F` what is pulled must not land in the weights: the script steps them meanwhile.
int8, int4    Weights come as what is to be added to the ones before, so those have to stay as they are, to the bit.

What lands in the buffer of the pulls is the base, and the weights are beside it. What is pushed is made in a third
buffer, where gradients lie in other modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.layout import BucketSpec
from ps_worker.model.base import Base


class SeparateBase(Base):
    """The base of one model, with memory of its own. For the training thread.

    is_there: the base is complete: no pull is landing in it
    """

    def keep(self) -> None:
        """Makes what was pulled the base: it is that already."""
        self.is_there = True

    def arrived(self) -> None:
        """Makes what was pulled the weights, too."""
        for bucket in self._buffers.trained_buckets:
            self._buffers.own(bucket).copy_(self._buffers.weights(bucket))

    def go_back(self) -> None:
        """Makes the weights the base again."""
        self._weights.gather()
        self.arrived()
        self._weights.landed()

    def subtract(self) -> None:
        """Makes the difference of the whole model."""
        self._weights.gather()
        self.leave(self._buffers.trained_buckets)
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

    def _base_views(self) -> dict[int, torch.Tensor]:
        return {index: self._buffers.pulled(index) for index in self._buffers.trained}
