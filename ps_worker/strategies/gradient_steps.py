"""Steps of gradients, in the modes sync, ssp:K and async: each `optimizer.step()` is a step on the servers.

Weights, rows and optimizer state that the script has set since its last step go with the next (assignments.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ps_worker.model.job_spec import check_next
from ps_worker.model.optimizer import ServerOptimizer
from ps_worker.model.step import StepMaker
from ps_worker.state.checkpoint import BesideCheckpoint, Save, WorkerCheckpoint
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.unfinished import Unfinished


class GradientSteps:
    """The steps of one job: see StepKind. beside: it is a second job of this worker, beside the first"""

    def __init__(self, loop: JobTraining, maker: StepMaker, beside: bool) -> None:
        self._loop, self._maker, self._beside = loop, maker, beside

    @property
    def steps(self) -> int:
        """The script's steps: the clock."""
        return self._loop.clock

    @property
    def counted(self) -> int:
        """The steps that servers have had: all of them."""
        return self._loop.clock

    def prepared(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Returns optimizers that step on the servers."""
        return [ServerOptimizer(optimizer, self._loop, index) for index, optimizer in enumerate(optimizers)]

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns optimizers that step on the servers. Raises Unsupported or InvalidRequest as `prepare`."""
        stages = self._loop.stages
        check_next(models, optimizers, stages.rows_of)
        numbers = stages.begin(optimizers)
        return [ServerOptimizer(each, self._loop, number) for each, number in zip(optimizers, numbers, strict=True)]

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns an empty mapping: after `refresh` the model has the servers' weights."""
        return {}

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward only accumulates gradients. The next backward outside, or `step`, sends
        them.
        """
        return self._loop.no_sync()

    def check_leased(self) -> None:
        """Does nothing: every step uses at least one batch, so leased batches are fine."""

    def make_checkpoint(self, device: torch.device, save: Save) -> WorkerCheckpoint:
        """Returns this worker's own part of the job's checkpoints."""
        return (BesideCheckpoint if self._beside else WorkerCheckpoint)(device, save)

    def begun(self) -> None:
        """Sends parameters that members of a group hold alike from their owners to the others. The next backward begins
        a step.
        """
        self._maker.model.base.share_alike(is_first=True)

    def tell_script(self) -> None:
        """Begins to answer requests of workers that join late for what the script has set."""
        self._loop.participation.script.begin(self._loop.script_report)

    def end(self, index: int | None) -> Unfinished:
        """Ends the current step on this worker, with its gradients and what the script has set before it.

        index: the number of the optimizer that steps; None: a step without a gradient
        """
        loop = self._loop
        changed = loop.model.changed_weights()
        if changed:
            loop.assignments.note_weights(changed)
        step = self._maker.end_empty() if index is None else self._maker.end(index)
        tables = self._maker.tables
        if loop.assignments.are_some or (tables.are_some and tables.assigned()):
            began_late = loop.participation.came_late and not loop.stepped
            loop.gather_assignments(began_late, loop.checkpoint.at_pass_begin)
        return Unfinished(step, loop.clock)

    def empty_step(self) -> None:
        """Makes a step without a gradient."""
        self._loop.make_empty_step()

    def finished(self) -> None:
        """Does nothing: the next backward begins a step."""

    def losing(self) -> None:
        """Does nothing: gradients that are in no step yet belong to the next step, unless the job is rolled back."""

    def moved(self, is_kept: bool, is_undone: bool, at_hand: Unfinished | None) -> None:
        """Removes the gradients of batches that will be yielded again, except those of the step at hand. The script
        continues with the weights of the new place.
        """
        if not is_undone:
            return
        if at_hand is None:
            self._maker.drop()
            return
        stepped = at_hand.step.optimizer
        own = set() if stepped is None else self._maker.parameters_of(stepped)
        for index, tensor in enumerate(self._loop.tensors):
            if index not in own and tensor.grad is not None:
                tensor.grad.zero_()  # still there: a GradScaler refuses an optimizer that has none

    def leaving(self) -> None:
        """Does nothing: the loop waits for a step under way."""
