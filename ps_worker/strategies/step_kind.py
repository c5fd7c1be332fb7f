"""The kind of a job's steps: the part of training that differs between gradients and local steps.

The step loop (job_training.py) pushes, pulls, waits, and replaces a lost place. It asks a StepKind for the rest:

gradient_steps.py   each `optimizer.step()` is a step on the servers: sync, ssp:K and async
local_rounds.py     optimizers step on this worker, and the servers step once a round: local:H, local:H/F and local:Ts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from ps_worker.state.checkpoint import Save, WorkerCheckpoint
from ps_worker.strategies.unfinished import Unfinished


class StepKind(Protocol):
    """The kind of a job's steps. For the training thread, except for `steps` and `leaving`."""

    # -- the script asks -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The script's steps, counted from the job's beginning."""

    def prepared(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers that the script must step, in place of those that it has passed to `prepare`."""

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers that the script must step, in place of those of a later `prepare`. Raises Unsupported
        or InvalidRequest.
        """

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns the servers' weights by the id of the parameter; only of parameters whose weights in the model may
        differ.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only add to the gradients."""

    def check_leased(self) -> None:
        """Raises Unsupported if steps of this kind cannot use leased batches."""

    @property
    def counted(self) -> int:
        """Those of `steps` that a rollback of the job may undo; if rounds end by time, the rounds."""

    # -- the loop asks ---------------------------------------------------------------------------------------------

    def make_checkpoint(self, device: torch.device, save: Save) -> WorkerCheckpoint:
        """Returns this worker's own part of the job's checkpoints. It is called once, before all else."""

    def begun(self) -> None:
        """Is called when the loop has begun, at the clock of the first place."""

    def tell_script(self) -> None:
        """Begins to answer requests of workers that join late for the script's settings."""

    def end(self, index: int | None) -> Unfinished:
        """Ends the current step on this worker. Raises NonFiniteGradient or InvalidRequest if it must not be pushed.

        index: the number of the optimizer that steps; None: none does
        """

    def empty_step(self) -> None:
        """Makes a step for a worker that has no data while others wait for its clock."""

    def finished(self) -> None:
        """Is called when a pushed step counts, and its weights have landed."""

    def losing(self) -> None:
        """Is called when the worker has lost its place and has not yet joined again."""

    def moved(self, is_kept: bool, is_undone: bool, at_hand: Unfinished | None) -> None:
        """Is called when another place is taken.

        is_kept:   the current step is pushed again from there
        is_undone: this worker was rolled back: gradients that are in no step are of batches that come again
        at_hand:   the step that had ended on this worker; None if it was between two steps
        """

    def leaving(self) -> None:
        """Is called before the worker leaves, while it still has its place and its connections. For any thread."""
