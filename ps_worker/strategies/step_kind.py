"""What one step of a job is: the part of training that is not the same for gradients and for local steps.

The step loop (job_training.py) pushes, pulls, waits, and takes another place where one is lost, whatever it is that it
pushes. It asks one of these, which knows the rest:

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
    """What one step of a job is. For the training thread, but `steps` and `leaving`."""

    # -- the script asks -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The script's steps, counted from the job's beginning."""

    def prepared(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Returns what the script steps from now on, for those that it has handed to `prepare`."""

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns what the script steps from now on, for the optimizers of a later `prepare`. Raises Unsupported or
        InvalidRequest."""

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns the servers' weights by the id of the parameter, of those where the model's own may differ."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes only add to the gradients."""

    def check_leased(self) -> None:
        """Raises Unsupported where such steps cannot use batches that are leased."""

    # -- the loop asks ---------------------------------------------------------------------------------------------

    def make_checkpoint(self, device: torch.device, save: Save) -> WorkerCheckpoint:
        """Returns this worker's own part of the job's checkpoints. It is called once, before all else."""

    def begun(self) -> None:
        """The loop has begun, at the clock of the first place."""

    def tell_script(self) -> None:
        """Has other workers that join late hear what the script has set, from here on."""

    def end(self, index: int | None) -> Unfinished:
        """Ends the step at hand on this worker, of one optimizer by number, or of none. Raises NonFiniteGradient or
        InvalidRequest where it must not be pushed."""

    def empty_step(self) -> None:
        """Makes a step for a worker that has no data while others wait for its clock."""

    def finished(self) -> None:
        """A step that was pushed counts, and its weights have landed."""

    def losing(self) -> None:
        """Is called when the worker has lost its place and has not yet joined again."""

    def moved(self, is_kept: bool) -> None:
        """Another place is taken. is_kept: the step at hand is pushed again from there"""

    def leaving(self) -> None:
        """The worker leaves, and has its place and its connections still. For any thread."""
