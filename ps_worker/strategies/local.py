"""Local steps: the modes `local:H` and `local:Ts`.

prepare  The models join a job whose optimizer, on the servers, is the outer one. The script keeps its own optimizers,
         whatever they are: their hooks count its steps.
step     `optimizer.step()` steps on this worker. The last step of a round then pushes what the round's steps took from
         its base, pulls the weights, and begins the next round (ps_worker/model/local_round.py). It waits as in sync.
time     In local:Ts a round ends with the first step after so long, and its difference has a weight.
early    A round may end before it has all its steps: where this worker has no more data and others wait for it, and
         where its place is lost in the middle of it. Of a round that is broken off at the end nothing is pushed.
lost     As in job_training.py, in rounds. Batches that the worker had leased are leased anew, but for those of a round
         of which shards have had a part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ps_protocol.data import MAX_PUSH_RANGES
from ps_protocol.errors import InvalidRequest, NonFiniteGradient, Unsupported
from ps_protocol.local import Local
from ps_worker.data.leased import LeasedLoader
from ps_worker.data.loaders import PreparedLoader
from ps_worker.model.job_spec import check_known
from ps_worker.model.local_round import LocalRound
from ps_worker.model.stages import tensors_in
from ps_worker.state.checkpoint import LocalCheckpoint
from ps_worker.state.ending import is_cut_short
from ps_worker.state.inner import InnerStates
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.parameter_server import ParameterServer
from ps_worker.strategies.strategy import Prepared
from ps_worker.strategies.unfinished import Unfinished
from ps_worker.values import PrepareOptions, SavedState

log = logging.getLogger("ps_worker")


class LocalSteps(ParameterServer):
    """The strategy of local:H, for one job."""

    _local: LocalTraining | None = None  # from the end of `prepare` on

    @property
    def clock(self) -> int:
        """The script's steps, counted from the job's beginning."""
        return self._local.steps if self._local else 0

    @property
    def round(self) -> int:
        """Rounds finished, counted from the job's beginning."""
        return self._local.clock if self._local else 0

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns the base of the round, by the id of the parameter."""
        return self._local.base() if self._local else {}

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> Prepared:
        """Joins the job; returns the models with rank 0's weights, and the optimizers as they are, watched."""
        assert options.local is not None
        held = {id(tensor): tensor for each in optimizers for group in each.param_groups for tensor in group["params"]}
        outer = _outer_optimizer(options.local, list(held.values()))
        training = self._join(models, [outer], options, partial(self._training_class, optimizers=optimizers))
        assert isinstance(training, LocalTraining)
        self._local = training
        self._alone.know(optimizers, optimizers)
        return models, optimizers

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers as they are, watched. Raises Unsupported for parameters that were frozen before."""
        assert self._local is not None
        check_known(models, optimizers)
        self._local.follow(optimizers)
        self._alone.take_over(optimizers, optimizers)
        return optimizers

    @property
    def _training_class(self) -> type[LocalTraining]:
        return LocalTraining

    def prepare_loader(self, loader: DataLoader[Any], seed: int) -> PreparedLoader | LeasedLoader:
        """Returns a loader as in sync. Raises Unsupported where a round would use more batches than a push names."""
        prepared = super().prepare_loader(loader, seed)
        steps = self._local.steps_of_a_round if self._local else 0  # of a time: one at least, and it ends early
        if isinstance(prepared, LeasedLoader) and steps > MAX_PUSH_RANGES:
            raise Unsupported(
                f"a round of an elastic job uses up to {MAX_PUSH_RANGES} leased batches, and one of local:{steps} has "
                f"{steps} steps: use local:{MAX_PUSH_RANGES} at most, or a job with a world size"
            )
        return prepared

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: gradients stay on the worker."""
        return nullcontext()


def _outer_optimizer(local: Local, parameters: list[torch.Tensor]) -> torch.optim.SGD:
    """Returns the optimizer that is the servers', with its hyper-parameters of after the warm-up."""
    return torch.optim.SGD(parameters, **local.outer(local.warm_up + 1))  # type: ignore[arg-type]


class LocalTraining(JobTraining):
    """Trains models in one job of local:H. Its clock counts rounds.

    optimizers: the script's own
    """

    def __init__(self, *arguments: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(*arguments)
        spec = self._model.spec
        assert spec.local is not None
        self._local = spec.local
        self._round = LocalRound(spec, spec.local, self._steps, self._metrics)
        self._own = optimizers
        self._groups = [len(optimizer.param_groups) for optimizer in optimizers]
        self._inner = self._states_of(optimizers)
        self.checkpoint = LocalCheckpoint(self.checkpoint.device, self._sender.send, self._local, self._inner)
        self._hooks: dict[int, list[RemovableHandle]] = {}  # by the id of the optimizer
        self._began: SavedState | None = None  # what the script had set that is the job's when this round began

    def _states_of(self, optimizers: Sequence[torch.optim.Optimizer]) -> InnerStates:
        """Returns what keeps the state of the script's own optimizers."""
        return InnerStates(optimizers, self._metrics.fresh_inner_state)

    def begin(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        frozen: Mapping[int, torch.Tensor],
        checkpoint_wanted: bool,
    ) -> None:
        """Begins at the round of the first place, and counts the steps of the script's own optimizers from here on."""
        if self._round.before is not None:
            self.checkpoint.add(self._round.before)
        super().begin(self._own, frozen, checkpoint_wanted)
        self._begin_round()
        self._metrics.rounds.begin()
        if self.clock and self.participation.connection.place.state is None and self._inner.is_empty:
            self._inner.begin_anew()
        for optimizer in self._own:
            self._watch(optimizer)
            self._metrics.watch_gradients(optimizer)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        # Functions, not methods: a copied or pickled optimizer has no hooks, and no session in them.
        self._hooks[id(optimizer)] = [
            optimizer.register_step_pre_hook(lambda *_: self._stepping()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Has these optimizers step on this worker from the next step on, in place of those that had any of their
        parameters. A round that is under way goes on. Raises Unsupported for parameters that the job does not train."""
        trained = {id(tensor): index for index, tensor in enumerate(self._tensors) if index in self._steps.stage.owner}
        taken = {id(tensor): tensor for each in optimizers for tensor in tensors_in(each)}
        if any(tensor.requires_grad and key not in trained for key, tensor in taken.items()):
            raise Unsupported(
                "in local:H a job trains the parameters that its first optimizers had: give them all before prepare, "
                "and set requires_grad=False on those that do not train yet"
            )
        replaced = [each for each in self._own if any(id(tensor) in taken for tensor in tensors_in(each))]
        for each in replaced:
            for hook in self._hooks.pop(id(each)):
                hook.remove()
        self._own = [*(each for each in self._own if id(each) in self._hooks), *optimizers]
        self._groups = [len(each.param_groups) for each in self._own]
        for each in optimizers:
            self._watch(each)
        self._inner.enter(self._own)
        self._assignments.note_between_passes(self.clock + 1)
        self.checkpoint.enter(self.checkpoint.stage + 1, self._own)

    def close(self) -> None:
        """Leaves the job as JobTraining does. The script's own optimizers step on without it."""
        if not self._closing:
            self._say_if_never_warm()
            if self._began is not None and not self._round.made:
                self._began = self._told()  # whoever goes on begins the round after the last one
        for hook in [hook for hooks in self._hooks.values() for hook in hooks]:
            hook.remove()
        super().close()

    def _say_if_never_warm(self) -> None:
        """Warns at the end of a script that was shorter than the warm-up: it has trained as in sync, at sync's cost."""
        local = self._local
        if 0 < self.steps <= local.warm_up and self.participation.is_main and not is_cut_short():
            log.warning(
                "mode %s never left its warm-up: all %d steps of this job were rounds of one step, as in sync "
                "(prepare(..., outer={'warm_up': N}) makes the warm-up of %d steps shorter)",
                *(local.mode, self.steps, local.warm_up),
            )

    # -- rounds ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps of the script, counted from the job's beginning."""
        return self._round.steps

    @property
    def steps_of_a_round(self) -> int:
        """Steps of a round after the warm-up."""
        return self._local.steps

    def base(self) -> Mapping[int, torch.Tensor]:
        """Returns the weights that this round began with, by the id of the parameter.

        Raises InvalidRequest where calls have failed that were to push the round: the difference is in their place.
        """
        if not self._model.base.is_there:
            raise InvalidRequest(
                f"the weights that round {self._round.number} began with are gone, as calls have failed that were to "
                "push it: the next step pulls the servers' weights"
            )
        return self._model.base.values()

    def _begin_round(self) -> None:
        self._round.begin(self.clock)
        self._metrics.at(self.steps)

    def _stepping(self) -> None:
        """Begins a step of one of the script's optimizers."""
        for optimizer, count in zip(self._own, self._groups, strict=True):
            if len(optimizer.param_groups) != count:
                raise Unsupported(
                    f"{type(optimizer).__name__} had {count} parameter groups at prepare and has "
                    f"{len(optimizer.param_groups)} now: in local:H no parameter is added later. Give the optimizer "
                    "all of them before prepare, and set requires_grad=False on those that do not train yet"
                )
        self._follow_job()
        if not self._round.made:
            self._began = self._told()
        self.checkpoint.stepping()
        self._metrics.timer.stepping()

    def _tell(self) -> None:
        self.participation.script.begin(lambda: self._began, at_any_time=True)  # a newcomer begins with a round

    def _stepped(self) -> None:
        """Ends a step of one of the script's optimizers, and with the last step of a round the round."""
        if self._rolled_back and self.checkpoint.waits_for_loader:
            # One of the remaining steps of a batch: the job was rolled back to before its first.
            self._round.begin_anew()
            return
        self._round.stepped()
        made, taken = self._round.made, self.data.taken
        # A push names so many leased batches: where a step uses several, the next one may be too many.
        if self._round.is_full or taken * (made + 1) > MAX_PUSH_RANGES * made:
            self._push_round()
        else:
            self._metrics.stepped_alone(self.steps)

    def empty_step(self) -> None:
        """Ends the round at hand, where others wait for it: with the steps that it has, or as an empty one."""
        if self._round.made:
            self._push_round()
        else:
            with self._metrics.rounds.exchanging():
                super().empty_step()

    def _push_round(self) -> None:
        with self._metrics.rounds.exchanging():
            self.step(0)

    def _end(self, index: int | None) -> None:
        alone = self.participation.options.world_size == 1 and self._local.averages(self._round.number)
        if index is not None and not alone:
            self._unfinished = Unfinished(self._round.end(index), self.clock)
            return
        if index is not None and self._round.end_alone():
            self._assignments.set_all()
            self._gather_assignments()
        self._unfinished = Unfinished(self._round.end_empty(), self.clock)

    def _finish(self, *sent: Any) -> None:
        super()._finish(*sent)
        self._metrics.rounds.ended()
        self._begin_round()
        if self._round.left_out and not self._inner.is_finite:
            self._inner.begin_anew()

    def _roll_back(self, saved: SavedState | None) -> None:
        super()._roll_back(saved)
        if saved is None:
            self._inner.restore(self.clock, None)

    def come_back(self) -> bool:
        """Goes on in a new place, with the weights there. A round that is at hand ends with it, and counts as a whole:
        see JobTraining.come_back."""
        if self._unfinished is None and self._sent is None and not self._rolled_back:
            self._end_early()
        return super().come_back()

    def _end_early(self) -> None:
        """Ends the round at hand, if it has steps, with those that it has. Leased batches come again instead."""
        if not self._round.made or not self._model.base.is_there or self.data.accounts:
            return
        with suppress(NonFiniteGradient):  # of which nothing is pushed: the round begins anew with the servers' weights
            self._end(0)
        if self._unfinished is not None:
            self._unfinished.is_early = True

    def _take_place(self) -> bool:
        counts = super()._take_place()
        is_kept = self._unfinished is not None
        # What this worker had leased may be another's by now. A batch that both have used would take the others of its
        # round along: a difference is whole, or left out.
        self.data.rollback(keep_using=is_kept)
        if not is_kept:
            for tensors in (group["params"] for optimizer in self._own for group in optimizer.param_groups):
                for tensor in tensors:
                    if tensor.grad is not None:  # of batches that come again
                        tensor.grad.zero_()
            self._begin_round()
        self._metrics.rounds.begin()
        return counts
