"""A worker's own part of a checkpoint: captured at a clock, and restored when the job is rolled back to it.

The weights live on the servers. All else that decides how a run ends is here: the position in the data, random states,
schedulers and the like, and the model's buffers. Scripts step their scheduler after `optimizer.step()`, so the state of
a clock is captured when the script asks for the next batch, and restored at the same point.

captured  when the loader that fed step C is asked for its next batch
restored  when the loader that feeds is asked for its next batch: all is as it was then, and the loader goes to its
          position of then. Where that is an earlier pass over the data than the script's loop is in, this iteration of
          the loop yields the rest of that pass and crosses into the following ones by itself, with the settings that
          the script had made between them, so that a plain loop over passes ends after the same number of batches.

Without a loader nothing says where one turn of the script's loop ends. So there are two moments for each clock. The
state is captured at the end of step C, and what the script has set once more where step C + 1 begins: the scheduler's
step lies between the two, wherever in the loop it is. A rollback restores the first inside `step()`, and what the
script does then is done again. A new process is at the top of its loop: it begins with the random states of the first
and the schedulers of the second. In both cases the second is restored once more where step C + 1 begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from ps_protocol.errors import InvalidRequest, PSError, Unsupported
from ps_protocol.local import Local
from ps_runtime.troubles import Troubles
from ps_worker.data.look_ahead import LookAhead
from ps_worker.state.documents import copied
from ps_worker.state.encoding import LoaderState, RandomState, ScriptState, Settings, WorkerState, decode, encode
from ps_worker.state.inner import Inner, InnerStates, NoInner
from ps_worker.state.job_state import JobState, JobThings, set_groups, steers
from ps_worker.state.loader_position import LoaderPosition
from ps_worker.state.model_state import ModelState

log = logging.getLogger("ps_worker")

Save = Callable[[int, bytes], None]

# Without a loader, so long the next step may take to begin: a checkpoint waits for this state, by default a minute.
NEXT_STEP_SECONDS = 5.0


@dataclass(frozen=True)
class LastStep:
    """The last step that was made: the loader that fed it, and how many batches it took."""

    fed_by: int | None = None
    batches: int = 1


class WorkerCheckpoint:
    """One worker's own state, captured when a checkpoint asks for it and restored when the job is rolled back.

    device: the one whose random state counts
    save:   takes a clock and the bytes of its state; returns at once
    steps:  made by this process, whatever the clock
    stage:  of the script: it has handed over other optimizers so often
    inner:  the state of optimizers that step on this worker
    """

    inner: Inner = NoInner()

    def __init__(self, device: torch.device, save: Save) -> None:
        self.device = device
        self.steps = self.stage = 0
        self.loaders: list[LoaderPosition] = []
        self._save = save
        self._optimizers: list[tuple[torch.optim.Optimizer, int]] = []  # each, and how many groups it began with
        self._model = ModelState({})
        self._stateful: list[Any] = []
        self.job = JobThings(self._state_of, self._groups)
        self._troubles = Troubles(log, None)  # ps_checkpoints_without_states_total counts what matters
        self._fed: int | None = None  # the loader that yielded last
        self._taken = 0  # batches since the last step
        self._step = LastStep()
        self._wanted: int | None = None  # the clock whose state is to be captured
        self._target: WorkerState | None = None  # the state to be restored
        self._captured: WorkerState | None = None  # at the end of a step; the next one has not begun
        self._captured_lock = threading.Lock()
        self._at_step: Settings | None = None  # to be restored where the next step begins
        self._leave_out = 0  # batches of steps that others made while this worker was away

    # -- what belongs to it ------------------------------------------------------------------------------------------

    def watch(self, optimizers: Sequence[torch.optim.Optimizer], model: ModelState) -> None:
        """Takes in optimizers' groups, and what of the model is the worker's own."""
        self._optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]
        self._model = model

    def enter(self, stage: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begins a stage of the script, in which these optimizers step."""
        self.stage = stage
        self._optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]
        if self._target is not None:
            for optimizer in optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # as in `rollback`

    def trains(self, indices: Sequence[int]) -> None:
        """Notes that another job trains parameters from here on that no optimizer of this one steps."""
        self._model.trains(indices)

    def add(self, thing: Any, own: bool = False) -> None:
        """Takes in a scheduler, or anything else with a state. Raises Unsupported if that cannot be saved.

        own: its state is this worker's alone: no other worker begins with it
        """
        self._state_of(thing)
        self._stateful.append(thing)
        self.job.add(thing, own)

    def add_loader(self, loader: DataLoader[Any], look_ahead: LookAhead) -> LoaderPosition:
        """Takes in a loader; returns its position, which yields its batches. look_ahead: may read a pass ahead"""
        self.loaders.append(LoaderPosition(self, loader, len(self.loaders), look_ahead))
        return self.loaders[-1]

    # -- steps -------------------------------------------------------------------------------------------------------

    def want(self, clock: int) -> None:
        """Asks for the state at this clock, at which the worker is before its next step."""
        self._wanted = clock

    def stepping(self, is_empty: bool = False) -> None:
        """Begins a step; captures, late, the state of the one before if no loop has.

        is_empty: it has no gradient: the script may be anywhere between two steps of its own
        """
        if not is_empty:
            if self._at_step is not None:
                settings, self._at_step = self._at_step, None
                self.set_settings(settings)
            self._save_captured(True)
        if self._wanted is not None and self._is_in_loop:
            self._troubles.met(
                "within a batch",
                "the checkpoint of clock %d is within a batch of several steps: a job that is rolled back to it "
                "continues after that batch",
                self._wanted,
            )
        self.capture()

    def stepped(self) -> None:
        """Ends a step; captures its state if no loop will."""
        self.steps += 1
        self._step, self._taken = LastStep(self._fed, max(1, self._taken)), 0
        if self._wanted is not None and not self._is_in_loop:
            clock, self._wanted = self._wanted, None
            self._capture_first(clock)

    def between_steps(self, clock: int, has_begun: bool) -> None:
        """Saves the state at a clock to which the worker has come in another way than by a step of its own.

        has_begun: the step that comes next has, and may be made anew from there: batches that it has taken come again
        """
        if self._is_in_loop or self._target is not None:
            self._save_at(clock, lambda: self.last_state(clock, counts=False))
        elif has_begun:
            state = self._state(clock, self._fed)
            self._send(replace(state, at_step=state.script.settings))
        else:
            self._capture_first(clock)

    @property
    def _is_in_loop(self) -> bool:
        return any(loader.going for loader in self.loaders)

    def _capture_first(self, clock: int) -> None:
        """Captures the first of the two moments of a clock, where no loop is under way."""
        self._save_captured(False)
        self._captured = captured = self._state(clock, self._fed)
        # Not from this thread: it is in the script's code, which may be minutes of it.
        timer = threading.Timer(NEXT_STEP_SECONDS, lambda: self._save_captured(False, captured))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread can be had: better the first of the two moments than none
            self._save_captured(False, captured)

    def comes_late(self) -> None:
        """Notes that the job is under way: a script may step its schedulers, behind past passes, before it steps."""
        for optimizer, _ in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns of the order

    def rollback(self, state: bytes, clock: int, saved_at: int | None = None) -> None:
        """Has the worker go on at `clock` from a state that it saved, maybe an earlier one. Raises InvalidRequest.

        saved_at: the clock up to which the state holds: that of a worker which left holds for all clocks since; None:
                  the one at which it was captured
        """
        target = self._target = decode(state)
        self._wanted, self._taken = None, 0
        self._captured = self._at_step = None
        self.comes_late()
        missed = clock - (target.clock if saved_at is None else saved_at)
        if missed > 0:
            log.warning("this worker's state is of clock %d: the data of %d steps is left out", clock - missed, missed)
        self._leave_out = max(0, missed) * target.per_step

    def try_restore(self) -> None:
        """Restores a state that waits for no loader: after a step, and after `prepare`."""
        target = self._target
        if target is not None and target.feeding is None:
            counts = len(target.script.settings.stateful), len(target.script.loaders)
            if counts == (len(self._stateful), len(self.loaders)):  # otherwise more is to be prepared
                self._restore(target)

    def forget(self) -> None:
        """Goes on from an earlier clock without a state of it."""
        self._model.put_residual({})

    @property
    def waits_for_loader(self) -> bool:
        """Whether a state is to be restored when the script asks a loader for its next batch."""
        return self._target is not None and self._target.feeding is not None

    @property
    def at_pass_begin(self) -> bool:
        """Whether the step at hand is the first of a pass over the data that feeds it, but not of the first pass."""
        return self._fed is not None and self.loaders[self._fed].is_at_begin

    # -- capture -----------------------------------------------------------------------------------------------------

    def loop_begins(self, loader: int) -> None:
        """Captures the state that is wanted where a loop begins, unless a loop that is under way will do so."""
        if not any(position.is_asked_after_step for position in self.loaders):
            self.capture(loader)

    def yielded(self, loader: int) -> None:
        """Notes that a loader yields a batch."""
        if self._fed != loader:
            self._fed, self._taken = loader, 0
        self._taken += 1

    def capture(self, loader: int | None = None) -> None:
        """Captures the state that is wanted, if one is; `loader`: the one whose loop is at this point."""
        if self._wanted is None:
            return
        clock, self._wanted = self._wanted, None
        self._send(self._state(clock, self._fed if loader is None else loader))

    def _state(self, clock: int, feeding: int | None) -> WorkerState:
        return WorkerState(
            clock=clock,
            script=self.script_state(),
            feeding=feeding,
            per_step=self._step.batches,
            own=self._model.copy(clock),
            inner=self.inner.captured(clock),
        )

    def _save_captured(self, is_at_step: bool, only: WorkerState | None = None) -> None:
        """Saves what was captured at the end of the last step, if that is not done yet; from any thread.

        is_at_step: the next step begins at this moment
        only:       this one alone
        """
        with self._captured_lock:
            captured = self._captured
            if captured is None or (only is not None and captured is not only):
                return
            self._captured = None
        self._send(replace(captured, at_step=self._settings()) if is_at_step else captured)

    def _send(self, state: WorkerState) -> None:
        self._save_at(state.clock, lambda: encode(state))

    def _save_at(self, clock: int, state: Callable[[], bytes]) -> None:
        try:
            self._save(clock, state())
        except PSError as error:
            self._troubles.met("save", "this worker's state at clock %d is not in the checkpoint: %s", clock, error)
        else:
            self._troubles.over("save")

    def close(self) -> None:
        """Saves what is captured: no step begins any more."""
        self._save_captured(False)

    def last_state(self, clock: int, counts: bool, cut_short: bool = True) -> bytes:
        """Returns the state of a worker that stops here, maybe in the middle of a step.

        clock:     of its last step that counts
        counts:    the batches since the step before are those of that step; otherwise they are to come again
        cut_short: the script does not come to its end: the loop that it is in, or has just left, is under way
        """
        if self._target is not None:
            return encode(self._target)  # it stops before it has gone on from there
        script = self.script_state()
        feeding = self._fed if counts or self._step.fed_by is None else self._step.fed_by
        back = self._taken if feeding == self._fed and not counts else 0
        loaders = [_before_pass(state) for state in script.loaders]
        if feeding is not None:
            position, is_last = self.loaders[feeding], feeding == self._fed
            loaders[feeding] = _rewound(position.state_within() if cut_short and is_last else position.state(), back)
        inner, own = self.inner.now(), self._model.copy(clock)
        script, per_step = replace(script, loaders=loaders), self._step.batches
        return encode(WorkerState(clock, script, feeding, per_step, own, inner, self._at_step))

    def script_state(self) -> ScriptState:
        """Returns what the script has set, and where all its loops are."""
        return ScriptState(self._settings(), [position.state() for position in self.loaders])

    def _settings(self) -> Settings:
        return Settings(
            RandomState.now(self.device),
            [self._state_of(thing) for thing in self._stateful],
            [copied({k: v for k, v in group.items() if k != "params"}, "a group") for group in self._groups()],
            self.stage,
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the live groups; those that were added later are behind all others."""
        first = [group for optimizer, count in self._optimizers for group in optimizer.param_groups[:count]]
        return first + [group for optimizer, count in self._optimizers for group in optimizer.param_groups[count:]]

    def _state_of(self, thing: Any) -> Any:
        state, name = thing.state_dict(), type(thing).__name__
        if not isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            return copied(state, name)
        saved = {}
        for key, value in state.items():
            try:
                saved[key] = copied(value, f"{name}.{key}")
            except Unsupported as error:  # a function, say: a restored scheduler keeps its own
                self._troubles.met((name, key), "not part of checkpoints: %s", error, level=logging.INFO)
        return saved

    # -- what is the job's -------------------------------------------------------------------------------------------

    def tells(self, clock: int) -> bytes | None:
        """Returns what the script has set that is the job's, for workers that join late; None: there is nothing."""
        return None if self._target is not None else self.job.told(clock, self.stage)

    def adopt(self, told: bytes | None, clock: int, force: bool) -> int:
        """Takes over what another worker has told of its script, at the first step of a process that came late.

        Returns the stage at which that worker's script was. Of a later one than this script's, nothing is taken: those
        are other optimizers, and maybe other things. Where this script is in a later one, its own state counts.
        force: also where a schedule goes back
        """
        what = "the schedules and other things that were handed to prepare begin anew at clock %d: %s"
        state, why = None, None
        try:
            state = None if told is None else JobState.decode(told)
            if state is None:
                why = "no live worker and no checkpoint has their state"
            elif state.stage == self.stage:
                why = self.job.adopt(state, force)
        except InvalidRequest as error:
            why = str(error)
        if why is not None:
            log.warning(what, clock, why)
        return self.stage if state is None else state.stage

    @property
    def has_unknown_scheduler(self) -> bool:
        """Whether an optimizer has a scheduler, and nothing was handed over whose state is the job's."""
        return not self.job.are_some and any(steers(optimizer) for optimizer, _ in self._optimizers)

    @property
    def restored_clock(self) -> int | None:
        """The clock at which the state was captured that is to be restored; None: there is none."""
        return None if self._target is None else self._target.clock

    # -- restore -----------------------------------------------------------------------------------------------------

    def target(self, loader: int) -> LoaderState | None:
        """Returns where a loader has to go, if it is the one at whose next batch a state is to be restored."""
        if self._target is None or self._target.feeding != loader:
            return None
        return self._target.script.loaders[loader]

    def restore(self, loader: int) -> int:
        """Restores all but the position of the loader that asks; returns how many batches that one has to leave out.

        Raises Unsupported if the state is of another script.
        """
        target = self._target
        assert target is not None
        self._restore(target)
        for position, state in zip(self.loaders, target.script.loaders, strict=False):
            if position.index != loader:
                position.follow(state)
        left_out, self._leave_out = self._leave_out, 0
        return left_out

    def set_script_state(self, state: ScriptState, loader: int) -> None:
        """Sets what the script had set, and sends all loaders but this one, and those under way, to where they were."""
        self.set_settings(state.settings)
        for position, loader_state in zip(self.loaders, state.loaders, strict=False):
            if position.index != loader and not position.going:
                position.follow(loader_state)

    def set_settings(self, settings: Settings) -> None:
        """Sets random states, hyper-parameters, and the state of schedulers and the like.

        Those of an earlier stage name other optimizers' groups, and fewer things.
        """
        is_of_now = settings.stage == self.stage
        set_groups(self._groups(), settings.groups if is_of_now else [])
        for thing, state in zip(self._stateful, settings.stateful, strict=is_of_now):
            thing.load_state_dict(copied(state))
        settings.random.restore(self.device)

    def _restore(self, state: WorkerState) -> None:
        """Restores all but the loaders' positions."""
        settings, loaders = state.script.settings, state.script.loaders
        # A state from before a group was added is restored all the same: the group keeps its settings.
        here = min(len(self._groups()), len(settings.groups)), len(self._stateful), len(self.loaders)
        saved = len(settings.groups), len(settings.stateful), len(loaders)
        # So is one from an earlier stage, in which less was prepared.
        if settings.stage < self.stage and saved[1] <= here[1] and saved[2] <= here[2]:
            here = saved
        if here != saved or not self._model.takes(state.own):
            raise Unsupported(
                "what this worker had saved is of another script: (groups, things with a state, loaders) were "
                f"{saved} and are {here}, or the model's buffers differ"
            )
        self._target, self._at_step = None, state.at_step
        if self.steps == 0 and state.at_step is not None:  # a new process, at the top of its loop
            then = state.at_step
            settings = replace(settings, stateful=then.stateful, groups=then.groups, stage=then.stage)
        self.set_settings(settings)
        self._model.put(state.own, state.clock)
        self.inner.restore(state.clock, state.inner if state.script.settings.stage == self.stage else None)
        log.info("this worker's own state is that of clock %d", state.clock)


def _rewound(state: LoaderState, batches: int) -> LoaderState:
    """Returns the position of a loader without the last batches of its pass."""
    return replace(state, taken=max(0, state.taken - batches)) if state.going else state


def _before_pass(state: LoaderState) -> LoaderState:
    """Returns the position of a loader before the pass that is under way: an evaluation is made again as a whole."""
    if not state.going or state.start is None:
        return state
    return LoaderState(state.begun - 1, False, 0, None, state.start.generator, state.shift, state.over)


class BesideCheckpoint(WorkerCheckpoint):
    """The state of a job beside another one of the same script, to which all that a script sets belongs."""

    def set_settings(self, settings: Settings) -> None:
        """Sets nothing: the other job's state does."""


class LocalCheckpoint(WorkerCheckpoint):
    """The state of a worker whose own optimizers step (mode local:H): theirs belongs to it, and clocks count rounds."""

    def __init__(self, device: torch.device, save: Save, local: Local, inner: InnerStates) -> None:
        super().__init__(device, save)
        self._local = local
        self.inner = inner

    def rollback(self, state: bytes, clock: int, saved_at: int | None = None) -> None:
        """Has the worker go on after `clock` rounds. Rounds that it has missed have as many steps as the job says."""
        super().rollback(state, clock, saved_at)
        assert self._target is not None
        saved = self._target.clock if saved_at is None else saved_at
        steps = self._local.clock(clock) - self._local.clock(saved)
        self._leave_out = max(0, steps) * max(1, self._target.per_step // self._local.steps_of(saved))
