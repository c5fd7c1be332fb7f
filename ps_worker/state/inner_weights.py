"""The state of optimizers that step on the worker, with the worker's own weights (mode `local:H/F`).

In this mode a worker's weights always differ from the servers', so they are part of the worker's state. They are as
large as the model; inner.py says how such state is kept. A process without them continues with the servers' weights. So
does a process that takes a rank after the job has made progress: the servers' weights have moved, and the difference
from old weights would undo that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ps_worker.state.inner import InnerState, InnerStates

KEY, AT = "weights", "round"


class OwnWeights(Protocol):
    """The weights of a worker, apart from the servers': see ps_worker/model/base.py."""

    def own(self) -> dict[int, torch.Tensor]:
        """Returns a copy of them, by parameter."""

    def takes(self, own: dict[int, torch.Tensor]) -> bool:
        """Whether weights fit."""

    def put(self, own: dict[int, torch.Tensor]) -> None:
        """Sets them."""


class InnerWithWeights(InnerStates):
    """The state of the script's own optimizers and, as one more entry after theirs, the weights that they step.

    is_between: whether a round is over and the next one has not begun; the steps of an unfinished round are lost with a
    worker that leaves, and so are their weights
    rounds: the number of rounds that are over
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        fresh: Callable[[], None],
        weights: OwnWeights,
        is_between: Callable[[], bool],
        rounds: Callable[[], int],
    ) -> None:
        super().__init__(optimizers, fresh)
        self._weights = weights
        self._is_between, self._rounds = is_between, rounds

    def now(self) -> InnerState | None:
        """Returns a copy of the present state if it is small; within a round without the weights."""
        states = super().now()
        return states if states is None or self._is_between() else [*states[:-1], {}]

    def _copied(self) -> InnerState:
        rounds = self._rounds()
        return [*super()._copied(), {index: {KEY: value, AT: rounds} for index, value in self._weights.own().items()}]

    def _put(self, states: InnerState) -> None:
        super()._put(states[:-1])
        if all(values.get(AT) == self._rounds() for values in states[-1].values()) and states[-1]:
            self._weights.put(_weights_of(states))

    def _fits(self, states: InnerState) -> bool:
        if not states or not super()._fits(states[:-1]):
            return False
        return not states[-1] or self._weights.takes(_weights_of(states))


def _weights_of(states: InnerState) -> dict[int, Any]:
    return {index: values.get(KEY) for index, values in states[-1].items()}
