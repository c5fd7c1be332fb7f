"""A checkpoint wants a worker's state at a clock to which that has come by taking another place, not by a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from ps_protocol.local import Local
from ps_worker.state.checkpoint import LocalCheckpoint, WorkerCheckpoint
from ps_worker.state.inner import InnerStates
from ps_worker.state.model_state import ModelState

STEPS = 3  # before the place is lost


class Script:
    """A loop without a loader, whose learning rate is halved behind each step.

    rates: of all steps that were made
    """

    def __init__(self) -> None:
        self.states: list[bytes] = []
        self.rates: list[float] = []
        self.checkpoint = WorkerCheckpoint(torch.device("cpu"), lambda clock, state: self.states.append(state))
        self._optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        self._scheduler = StepLR(self._optimizer, 1, gamma=0.5)
        self.checkpoint.watch([self._optimizer], ModelState({}))
        self.checkpoint.add(self._scheduler)

    def step(self, loses_place: bool = False, goes_back: bool = False) -> None:
        """Makes a step, in which the place is lost, or the job goes back to the state."""
        self.checkpoint.stepping()
        self.rates.append(self._optimizer.param_groups[0]["lr"])
        if loses_place:
            self.checkpoint.between_steps(STEPS, has_begun=True)
        self._optimizer.step()
        if goes_back:
            self.checkpoint.rollback(self.states[-1], STEPS, STEPS)
            self.checkpoint.try_restore()
        else:
            self.checkpoint.stepped()
        self._scheduler.step()


@pytest.mark.parametrize("in_step", [True, False])
def test_a_schedule_goes_on_from_the_clock_of_the_new_place(in_step: bool) -> None:
    script = Script()
    for _ in range(STEPS):
        script.step()
    if not in_step:  # while it waits for data, say
        script.checkpoint.between_steps(STEPS, has_begun=False)
    script.step(loses_place=in_step)
    assert len(script.states) == 1
    script.step(goes_back=True)
    for _ in range(2):
        script.step()
    expected = [0.5**step for step in range(STEPS + 2)]
    assert script.rates == [*expected, *expected[STEPS:]]


def test_the_state_of_a_workers_own_optimizer_is_of_the_end_of_a_round_and_so_of_the_stage_then() -> None:
    """Its script went on with another optimizer before the next round, which told the second of the two moments."""
    saved: list[bytes] = []

    def local() -> tuple[torch.optim.Optimizer, LocalCheckpoint]:
        optimizer = SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
        inner = InnerStates([optimizer], lambda: None)
        checkpoint = LocalCheckpoint(torch.device("cpu"), lambda clock, state: saved.append(state), Local(2), inner)
        checkpoint.watch([optimizer], ModelState({}))
        return optimizer, checkpoint

    before, first = local()
    before.param_groups[0]["params"][0].sum().backward()
    before.step()
    first.want(1)
    first.stepped()
    first.enter(1, [SGD(before.param_groups[0]["params"], lr=0.5)])
    first.stepping()
    after, second = local()  # a new process is at the top of its script
    second.rollback(saved[-1], 1)
    second.try_restore()
    [state] = after.state.values()
    assert state["momentum_buffer"].tolist() == [1.0, 1.0]
