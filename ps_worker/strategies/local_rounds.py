"""Rounds of local steps: the modes `local:H`, `local:H/F` and `local:Ts`.

prepare  The models join a job whose optimizer, on the servers, is the outer one. The script keeps its own optimizers,
         whatever they are: their hooks count its steps.
step     `optimizer.step()` steps on this worker. The last step of a round then pushes what the round's steps took from
         its base, pulls the weights, and begins the next round (ps_worker/model/local_round.py). It waits as in sync.
         With fragments the model leaves in the course of the round instead (fragment_exchange.py).
time     In local:Ts a round ends with the first step after T seconds. Its difference is weighted by the steps made.
early    A round ends before it has all its steps if this worker has no more data and others wait for it, or if the
         place is lost in the middle of it. If the round is broken off at the end of training, nothing of it is pushed.
lost     As in job_training.py, with a round in place of a step. Batches that the worker had leased are leased anew,
         except for those of a round of which shards have had a part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_protocol.batches import MAX_PUSH_RANGES
from ps_protocol.errors import InvalidRequest, NonFiniteGradient, Unsupported
from ps_protocol.local import Local
from ps_protocol.messages.workers import SavedState
from ps_runtime.signals import exit_if_requested, interruptible, is_cut_short
from ps_worker.group import in_call
from ps_worker.metrics import WorkerMetrics
from ps_worker.model.job_spec import check_known
from ps_worker.model.local_round import LocalRound
from ps_worker.model.script_stages import tensors_in
from ps_worker.model.step import StepMaker
from ps_worker.state.checkpoint import LocalCheckpoint, Save, WorkerCheckpoint
from ps_worker.state.inner import InnerStates, InnerWithWeights
from ps_worker.strategies.fragment_exchange import FragmentExchange
from ps_worker.strategies.job_training import JobTraining
from ps_worker.strategies.unfinished import Unfinished

log = logging.getLogger("ps_worker")

LOADING = "next(loader)"  # the call in which a state is put back


def outer_optimizer(local: Local, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.SGD:
    """Returns the servers' optimizer, with its hyper-parameters after the warm-up, over the parameters of the script's
    own.
    """
    held = {id(tensor): tensor for each in optimizers for group in each.param_groups for tensor in group["params"]}
    groups = [{"params": list(held.values())}]  # empty in a member of a group that holds no trained parameter
    return torch.optim.SGD(groups, **local.outer(local.warm_up + 1))  # type: ignore[arg-type]


class LocalRounds:
    """The rounds of one job: see StepKind. The job's clock counts rounds.

    own: the script's own optimizers, which step on this worker
    """

    def __init__(
        self,
        loop: JobTraining,
        local: Local,
        maker: StepMaker,
        metrics: WorkerMetrics,
        own: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._loop, self._local, self._maker, self._metrics, self._own = loop, local, maker, metrics, own
        self._model = maker.model
        self._round = LocalRound(maker.model.spec, local, maker, metrics)
        self._groups = [len(optimizer.param_groups) for optimizer in own]
        self._inner = self._states()
        self._fragments: FragmentExchange | None = None
        if local.fragments is not None:
            given = metrics, self._begin_round, self._begin_inner_anew
            self._fragments = FragmentExchange(loop, self._round, *given)
        self._hooks: dict[int, list[RemovableHandle]] = {}  # by the id of the optimizer
        self._began: SavedState | None = None  # what the script had set that is the job's when this round began

    def _states(self) -> InnerStates:
        """Returns the state of the script's own optimizers; with fragments the weights, too, which are its own then."""
        at_hand, given = self._round, (self._own, self._metrics.fresh_inner_state, partial(self._on_all, call=LOADING))
        if self._local.fragments is None:
            return InnerStates(*given)
        when = lambda: not at_hand.made, lambda: self._loop.clock
        return InnerWithWeights(*given, self._model.base, *when, self._share_alike)

    def _on_all(self, is_so: bool, call: str = "optimizer.step") -> bool:
        """Returns whether `is_so` holds on all members of the group; for a worker of one process, `is_so`.

        call: the call in which the script is, if no other one has been named
        """
        group = self._loop.participation.group
        if group is None:
            return is_so
        with interruptible(), group.during(call):  # another member may hang
            return not group.any_through(lambda: (None, not is_so))[1]

    def _share_alike(self) -> None:
        """Sends parameters that members of the group hold alike from their owners to the others, after own weights were
        restored.
        """
        # No other member is waited for then, so signals need not be let through: one acts at the end of `undisturbed`.
        if self._model.base.alike is None:
            return
        with interruptible(), in_call(self._loop.participation.group, LOADING):
            self._model.base.share_alike()

    def make_checkpoint(self, device: torch.device, save: Save) -> WorkerCheckpoint:
        """Returns this worker's own part of the job's checkpoints. It includes the state of the script's optimizers."""
        checkpoint = LocalCheckpoint(device, save, self._local, self._inner)
        if self._round.before is not None:
            checkpoint.add(self._round.before)
        return checkpoint

    # -- the script ----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps of the script, counted from the job's beginning."""
        return self._round.steps

    @property
    def counted(self) -> int:
        """The script's steps in rounds of which servers have had a part; if rounds end by time, the rounds."""
        at_hand = self._round
        if at_hand.before is not None:
            return self._loop.clock
        return at_hand.steps if at_hand.is_streamed and at_hand.pushed else at_hand.steps - at_hand.made

    def prepared(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers unchanged: in local:H the script's own optimizers step, and hooks count their steps
        towards the round.
        """
        return optimizers

    def begin_stage(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Sequence[torch.optim.Optimizer]:
        """Returns the optimizers unchanged. From now on they step in place of those that had any of their parameters,
        and their steps are counted. The current round goes on.

        Raises Unsupported for parameters that the job does not train.
        """
        check_known(models, optimizers)
        owner = self._maker.stage.owner
        trained = {id(tensor) for index, tensor in enumerate(self._loop.tensors) if index in owner}
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
        self._loop.assignments.note_between_passes(self._loop.clock + 1)
        checkpoint = self._loop.checkpoint
        checkpoint.enter(checkpoint.stage + 1, self._own)
        return optimizers

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        # Functions, not methods: a copied or pickled optimizer has no hooks, and no session in them.
        self._hooks[id(optimizer)] = [
            optimizer.register_step_pre_hook(lambda *_: self._stepping()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]

    def global_values(self) -> Mapping[int, torch.Tensor]:
        """Returns the weights with which this round began, by the id of the parameter.

        With fragments: those last pulled of each fragment; waits for one that is under way. Raises InvalidRequest if
        the round's push has failed, because the memory of the base then has the difference; or if that push, or the
        pull in a new place, was broken off, because pulls write to that memory then.
        """
        base, fragments = self._model.base, self._fragments
        if fragments is not None and fragments.flight is not None:
            call = in_call(self._loop.participation.group, "session.global_weights")
            with self._metrics.rounds.exchanging(), call:
                self._loop.in_place(fragments.await_flight)
            if fragments.flight is not None:
                return base.values()
        if not base.is_there or base.is_overwritten or (fragments is not None and fragments.is_broken_off):
            raise InvalidRequest(
                f"the weights that round {self._round.number} began with are gone, as calls have failed, or were "
                "interrupted, that were to push it, or to fetch the weights in a new place: the next step pulls the "
                "servers' weights"
            )
        return base.values()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: gradients stay on the worker."""
        return nullcontext()

    def check_leased(self) -> None:
        """Raises Unsupported with fragments, or if a round would use more batches than a push can name."""
        if self._fragments is not None:
            raise Unsupported(
                "an elastic job of local:H/F leases no batches, as the steps of one batch are in rounds of different "
                "fragments: give the job a world size, or its loader an IterableDataset, or use local:H"
            )
        steps = self._local.steps  # of a time: one at least, and it ends early
        if steps > MAX_PUSH_RANGES:
            raise Unsupported(
                f"a round of an elastic job uses up to {MAX_PUSH_RANGES} leased batches, and one of local:{steps} has "
                f"{steps} steps: use local:{MAX_PUSH_RANGES} at most, or a job with a world size"
            )

    # -- rounds --------------------------------------------------------------------------------------------------------

    def begun(self) -> None:
        """Begins the first round, and begins to count the steps of the script's optimizers."""
        self._begin_round()
        self._model.base.share_alike(is_first=True)
        self._metrics.rounds.begin()
        is_new = self._loop.participation.connection.place.state is None
        if self._loop.clock and is_new and self._inner.is_empty:
            self._inner.begin_anew()
        for optimizer in self._own:
            self._watch(optimizer)
            self._metrics.watch_gradients(optimizer)

    def _begin_round(self) -> None:
        if self._fragments is not None:
            self._fragments.forget_flight()
        self._round.begin(self._loop.clock)
        self._metrics.at(self.steps)

    def tell_script(self) -> None:
        """Begins to answer requests of workers that join late, with what the script had set when the current round
        began.
        """
        self._loop.participation.script.begin(lambda: self._began, at_any_time=True)

    def _stepping(self) -> None:
        """Begins a step of one of the script's optimizers."""
        exit_if_requested()
        if self._loop.participation.group is not None:
            self._loop.participation.group.neighbours.thread.begins_step()
        for optimizer, count in zip(self._own, self._groups, strict=True):
            if len(optimizer.param_groups) != count:
                raise Unsupported(
                    f"{type(optimizer).__name__} had {count} parameter groups at prepare and has "
                    f"{len(optimizer.param_groups)} now: in local:H no parameter is added later. Give the optimizer "
                    "all of them before prepare, and set requires_grad=False on those that do not train yet"
                )
        if self._model.base.alike is not None:
            with in_call(self._loop.participation.group, "optimizer.step"):
                self._model.base.alike.check()
        self._loop.script.follow(may_ask_again=not self._round.made)
        if not self._round.made:
            self._began = self._loop.script_report()
        self._loop.checkpoint.stepping()
        self._metrics.timer.stepping()

    def _stepped(self) -> None:
        """Ends a step of one of the script's optimizers, and with the last step of a round the round."""
        if self._loop.is_past:
            # The job was rolled back during this batch. The loader will yield the batch again, so the remaining steps
            # of this one do not count.
            self._round.begin_anew()
            self._loop.checkpoint.skip()
            return
        self._loop.rolled_back = None
        if self._fragments is not None and self._round.is_streamed:
            self._fragments.stepped()
            return
        self._round.stepped()
        made, taken = self._round.made, self._loop.data.taken
        # A push names so many leased batches: where a step uses several, the next one may be too many.
        if self._round.is_full or taken * (made + 1) > MAX_PUSH_RANGES * made:
            self._push_round()
        else:
            self._metrics.stepped_alone(self.steps)

    def empty_step(self) -> None:
        """Ends the current round early, because other workers wait for it: with the steps made so far, or as an empty
        round.

        With fragments it advances the round until the next fragment is mixed in.
        """
        if self._fragments is not None and self._round.is_streamed:
            self._fragments.empty_step()
        elif self._round.made:
            self._push_round()
        else:
            with self._metrics.rounds.exchanging():
                self._loop.make_empty_step()

    def _push_round(self) -> None:
        call = in_call(self._loop.participation.group, "optimizer.step")
        with self._metrics.rounds.exchanging(), call:
            is_pushed = self._loop.participation.group is None or self._agree()  # one process decides in `end`
            self._loop.step(0 if is_pushed else None)

    def _agree(self) -> bool:
        """Whether the round, or its next fragment, is pushed: by all members of a group, or by none. Raises as
        LocalRound.agree.
        """
        group = self._loop.participation.group
        return self._round.agree((lambda make: make()) if group is None else group.any_through)

    def end(self, index: int | None) -> Unfinished:
        """Ends the current round on this worker, with its difference. The only worker of an averaging job keeps its
        weights.

        index: None: the round counts as empty. In a group all members have agreed on whether it does
        """
        loop, at_hand = self._loop, self._round
        if index is None or not (loop.participation.group is not None or at_hand.may_count()):
            return Unfinished(at_hand.end_empty(), loop.clock)
        if loop.participation.options.world_size == 1 and self._local.averages(at_hand.number):
            loop.assignments.set_all()
            loop.gather_assignments()
            return Unfinished(at_hand.end_empty(), loop.clock)
        return Unfinished(at_hand.end(index), loop.clock)

    def finished(self) -> None:
        """Begins the next round, after the weights have landed."""
        self._metrics.rounds.ended()
        self._begin_round()
        self._begin_inner_anew()

    def _begin_inner_anew(self) -> None:
        """Resets the script's optimizers if the round was left out, and their state is not finite either."""
        if self._round.left_out and not self._on_all(self._inner.is_finite):
            self._inner.begin_anew()

    # -- lost, and left ------------------------------------------------------------------------------------------------

    def losing(self) -> None:
        """Ends the current round with the steps made so far, if there are any: it counts as a whole; see
        JobTraining.come_back.

        If the round used leased batches, these come again instead. In a group all members end it, or none: one that has
        nothing to push would never come to the others' collective.
        """
        if self._fragments is not None:
            self._fragments.losing()
        if self._on_all(self._ends_early):
            # Of what is not finite nothing is pushed: the round begins anew with the servers' weights.
            with suppress(NonFiniteGradient):
                self._end_early(self._agree())
        if self._fragments is not None:
            self._fragments.lost()

    @property
    def _ends_early(self) -> bool:
        """Whether the steps made so far may be pushed as a whole round, now that the place is lost."""
        loop = self._loop
        if loop.unfinished is not None or loop.rolled_back is not None:
            return False
        if self._fragments is not None and self._round.is_streamed:
            return bool(self._round.step) and not self._fragments.is_broken_off
        return bool(self._round.made and not loop.sent and self._model.base.is_there and not loop.data.accounts)

    def _end_early(self, is_pushed: bool) -> None:
        if self._fragments is None or not self._round.is_streamed:
            self._loop.unfinished = self.end(0 if is_pushed else None)
        elif is_pushed:
            self._loop.unfinished = self._fragments.rest()
        if self._loop.unfinished is not None:
            self._loop.unfinished.is_early = True

    def moved(self, is_kept: bool, is_undone: bool, at_hand: Unfinished | None) -> None:
        """Begins a round with the weights of the new place. is_kept: the current round is pushed again from there"""
        # What this worker had leased may be another's by now. A batch that both have used would take the others of its
        # round along: a difference is whole, or left out.
        self._loop.data.rollback(keep_using=is_kept)
        if not is_kept:
            for tensors in (group["params"] for optimizer in self._own for group in optimizer.param_groups):
                for tensor in tensors:
                    if tensor.grad is not None:  # of batches that come again
                        tensor.grad.zero_()
            self._begin_round()
        self._metrics.rounds.begin()

    def leaving(self) -> None:
        """Ends the exchange under way. The script's own optimizers may go on stepping."""
        if self._fragments is not None:
            try:
                self._fragments.leave()
            except Exception:
                log.exception("the round at hand could not be left out")  # the worker leaves all the same
            if self._fragments.flight is not None:  # the round of a fragment is not over
                self._loop.sent = None
        for hook in [hook for hooks in self._hooks.values() for hook in hooks]:
            hook.remove()
        self._say_if_never_warm()
        if self._began is not None and not self._round.made:
            try:
                self._began = self._loop.script_report()  # whoever goes on begins the round after the last one
            except Exception:
                log.exception("what the script has set could not be caught")  # the worker leaves all the same

    def _say_if_never_warm(self) -> None:
        """Warns at the end of a script that was shorter than the warm-up: it has trained as in sync, at sync's cost."""
        local = self._local
        if 0 < self.steps <= local.warm_up and self._loop.participation.is_main and not is_cut_short():
            log.warning(
                "mode %s never left its warm-up: all %d steps of this job were rounds of one step, as in sync "
                "(prepare(..., outer={'warm_up': N}) makes the warm-up of %d steps shorter)",
                *(local.mode, self.steps, local.warm_up),
            )
