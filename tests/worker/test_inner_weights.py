"""A worker's own weights, where fragments are mixed into them: put back at the round that they are of, or never."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from ps_worker.state.inner import InnerWithWeights


class Own:
    """The weights of a worker."""

    def __init__(self) -> None:
        self.weights = torch.zeros(3)

    def own(self) -> dict[int, torch.Tensor]:
        return {0: self.weights.clone()}

    def takes(self, own: dict[int, torch.Tensor]) -> bool:
        return own[0].shape == self.weights.shape

    def put(self, own: dict[int, torch.Tensor]) -> None:
        self.weights = own[0]


def states_of(own: Own, is_between: bool, rounds: Callable[[], int]) -> InnerWithWeights:
    """The state of a worker without optimizers, before or after the first step of a round."""
    return InnerWithWeights((), lambda: None, bool, own, lambda: is_between, rounds, lambda: None)


def test_weights_of_an_earlier_round_stay_away_from_a_job_that_has_gone_on() -> None:
    rounds, own = [3], Own()

    def inner() -> InnerWithWeights:
        return states_of(own, True, lambda: rounds[0])

    first = inner()
    own.weights += 1
    saved = first.captured(3)
    own.weights = torch.zeros(3)
    inner().restore(3, saved)  # of a new process
    assert own.weights.tolist() == [1, 1, 1]
    own.weights = torch.zeros(3)
    first.restore(3, None)
    assert own.weights.tolist() == [1, 1, 1]
    rounds[0] = 5
    own.weights = torch.full((3,), 9.0)
    inner().restore(3, saved)
    inner().restore(5, saved)  # a state that a worker left keeps its weights, whatever the job's round is called
    assert own.weights.tolist() == [9, 9, 9]


def interrupted(_: bool) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("on_all", [bool, lambda _: False, interrupted], ids=["it fits", "not on all", "interrupted"])
def test_members_meet_at_the_end_of_each_restore(on_all: Callable[[bool], bool]) -> None:
    """Whether what one of them has fits or not: the others hand on what they hold alike."""
    met: list[str] = []
    own = Own()
    given = own, lambda: True, lambda: 3, lambda: met.append("all")
    states = InnerWithWeights((), lambda: None, on_all, *given)
    with suppress(KeyboardInterrupt):
        states.restore(3, states.captured(3))
    assert met == ["all"]


def test_what_is_left_in_the_middle_of_a_round_has_no_weights() -> None:
    own = Own()
    states = states_of(own, False, lambda: 3).now()
    own.weights += 1
    states_of(own, True, lambda: 3).restore(3, states)
    assert own.weights.tolist() == [1, 1, 1]
