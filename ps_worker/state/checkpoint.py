"""A worker's own part of a checkpoint: captured at a clock, and restored when the job is rolled back to it.

The servers have the weights. A worker has the rest of the state that determines a run: the position in the data, random
states, schedulers and similar objects, and the model's buffers. Scripts step their scheduler after `optimizer.step()`,
so the state of a clock is captured when the script asks for the next batch, and restored at the same point.

captured  when the script asks the loader that fed step C for its next batch
restored  when the script asks the feeding loader for its next batch. Settings and position become those of the capture.
          If the captured position lies in an earlier pass than the script's loop, this loop yields the rest of that
          pass and then the following passes, with the settings that the script had made between them. A plain loop over
          passes therefore ends after the same number of batches.

Without a loader nothing marks the end of an iteration of the script's loop, so each clock has two moments. The whole
state is captured at the end of step C, and the script's settings again at the beginning of step C + 1; the scheduler's
step lies between the two. A rollback restores the first inside `step()`, and the script then repeats its code after the
step. A new process is at the top of its loop, so it begins with the random states of the first and the schedulers of
the second. In both cases the second is restored again at the beginning of step C + 1.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
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
from ps_worker.state.job_state import JobState, JobThings, has_schedule, set_groups, steers
from ps_worker.state.loader_position import LoaderPosition
from ps_worker.state.model_state import ModelState

log = logging.getLogger("ps_worker")

Save = Callable[[int, bytes], None]

# Without a loader: how long to wait for the beginning of the next step. A checkpoint waits for this state, by default a
# minute.
NEXT_STEP_SECONDS = 5.0


@dataclass(frozen=True)
class LastStep:
    """The last step: the loader that fed it, and the number of its batches.

    loaders: all that yielded a batch for it, in loops with steps
    """

    fed_by: int | None = None
    batches: int = 1
    loaders: frozenset[int] = frozenset()


class WorkerCheckpoint:
    """One worker's own state, captured when a checkpoint asks for it and restored when the job is rolled back.

    device: the device whose random state is captured
    save: takes a clock and the bytes of its state; returns at once
    steps: the number of steps of this process, which a rollback does not change
    stage: the stage of the script, the number of times that it has changed optimizers
    inner: the state of optimizers that step on this worker
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
        self._troubles = Troubles(log, None)  # the metric is ps_checkpoints_without_states_total
        self._yielded: list[int] = []  # the loaders, the one that yielded last at the end
        self._taken: Counter[int] = Counter()  # by loader, its batches since the last step
        self._trains = False  # whether gradients were enabled when the last batch was taken
        self._feeders: frozenset[int] = frozenset()  # loaders in whose loops a step was made
        self._feeds_itself = False  # a step was made outside of such loops, and without a batch since the step before
        self._unfed = 0  # how many such steps the last ones were: one may be the last of a loop, two are behind it
        self._returns = False  # the script has made two such steps, and then entered a loop
        self._has_skipped = False  # since the last rollback
        self._step = LastStep()
        self._wanted: int | None = None  # the clock whose state is to be captured
        self._target: WorkerState | None = None  # the state to be restored
        self._captured: WorkerState | None = None  # at the end of a step; the next one has not begun
        self._captured_lock = threading.Lock()
        self._at_step: Settings | None = None  # to be restored where the next step begins
        self._leave_out = 0  # batches of steps that others made while this worker was away

    # -- objects with a state ------------------------------------------------------------------------------------------

    def watch(self, optimizers: Sequence[torch.optim.Optimizer], model: ModelState) -> None:
        """Adds the groups of optimizers, and the worker's own part of the model."""
        self._optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]
        self._model = model

    def enter(self, stage: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begins a stage of the script, with other optimizers."""
        self.stage = stage
        self._optimizers = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]
        if self._target is not None:
            for optimizer in optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # as in `rollback`

    def trains(self, indices: Sequence[int]) -> None:
        """Records that another job now trains parameters that no optimizer of this job steps."""
        self._model.trains(indices)

    def add(self, thing: Any, own: bool = False) -> None:
        """Adds a scheduler, or another object with a state. Raises Unsupported if its state cannot be saved.

        own: whether the state belongs to this worker alone, so that no other worker gets it
        """
        self._state_of(thing)
        self._stateful.append(thing)
        self.job.add(thing, own)

    def add_loader(
        self, loader: DataLoader[Any], look_ahead: LookAhead, catch_up: Callable[[], object] = lambda: None
    ) -> LoaderPosition:
        """Adds a loader. Returns its position, which yields its batches. The rest is as for LoaderPosition."""
        self.loaders.append(LoaderPosition(self, loader, len(self.loaders), look_ahead, catch_up))
        return self.loaders[-1]

    # -- steps -------------------------------------------------------------------------------------------------------

    def want(self, clock: int) -> None:
        """Requests the state of the worker's present clock, before its next step."""
        self._wanted = clock

    def stepping(self, is_empty: bool = False) -> None:
        """Begins a step. Captures the state of the step before if no loop has.

        is_empty: whether the step has no gradient; the script may then be anywhere between two steps of its own
        """
        if not is_empty:
            if self._target is not None and self._feeds_itself_anew(self._target):
                self._restore_here(self._target)
            if self._at_step is not None:
                settings, self._at_step = self._at_step, None
                self.set_settings(settings)
            if self._captured is not None:
                self._save_captured(True)
        if self._wanted is None:
            return
        if self._is_in_loop:
            self._troubles.met(
                "within a batch",
                "the checkpoint of clock %d is within a batch of several steps: a job that is rolled back to it "
                "continues after that batch",
                self._wanted,
            )
        self.capture()

    def stepped(self) -> None:
        """Ends a step. Captures its state if no loader is iterating."""
        self.steps += 1
        if self._model.tells:
            self._model.stepped()
        fed, going = self._feeding(), {loader.index for loader in self.loaders if loader.going}
        self._count_unfed(is_in_loop=bool(going))
        self._feeders |= going
        self._feeds_itself = self._feeds_itself or not (self._feeders or self._taken)
        batches = self._taken[fed] if fed is not None else 0
        self._step = LastStep(fed, max(1, batches), frozenset(self._taken) & self._feeders)
        self._taken.clear()
        if self._wanted is not None and not going:
            clock, self._wanted = self._wanted, None
            self._capture_first(clock)

    def skip(self) -> None:
        """Leaves out a step, because its batch will be yielded again. After two steps in a row without a loader's batch
        the script is behind its last loop. A state that was captured there is restored at once. Raises Unsupported if
        the state was captured in a loop, unless the script has gone from such steps to a loop before.
        """
        self._count_unfed(self._is_in_loop)
        target = self._target
        if target is not None and self._unfed > 1 and self._is_behind_loops(target):
            self._restore_here(target)
        elif self._unfed > 1 and not self._returns:
            raise Unsupported("the job was rolled back into a loop that is over in this script: start it again")
        elif not self._has_skipped:
            self._has_skipped = True
            log.warning("step() makes no step until the script asks its loader for a batch: the job was rolled back")

    def _count_unfed(self, is_in_loop: bool) -> None:
        """Counts a step in `_unfed`, before its batches are forgotten."""
        if not is_in_loop and self._feeders.isdisjoint(self._taken):
            self._unfed += 1
        else:
            self._returns = self._returns or self._unfed > 1
            self._unfed = 0

    def _restore_here(self, target: WorkerState) -> None:
        self._target = replace(target, feeding=None)
        self.try_restore()

    def _feeds_itself_anew(self, target: WorkerState) -> bool:
        """Whether a new process makes a step with a gradient, and its state waits for a loader that can have fed no
        step: it evaluates."""
        if self.steps or target.feeding in target.feeders or self._is_in_loop or self._taken:
            return False
        return any(tensor.grad is not None for group in self._groups() for tensor in group["params"])

    def _is_behind_loops(self, state: WorkerState) -> bool:
        """Whether a state is of behind all loops with steps that this script has made until now."""
        pairs = zip(self.loaders, state.script.loaders, strict=False)
        now = [(loader.state(), then) for loader, then in pairs if loader.index in self._feeders]
        return all(not then.going and then.begun == loader.begun for loader, then in now)

    def between_steps(self, clock: int, has_begun: bool) -> None:
        """Saves the state at a clock that the worker has reached without a step of its own.

        has_begun: whether the next step has begun; if it is repeated from this state, it gets its batches again
        """
        if self._is_in_loop or self._target is not None:
            self._save_at(clock, lambda: self.last_state(clock, counts=False))
        elif has_begun:
            state = self._state(clock, self._feeding())
            self._send(replace(state, at_step=state.script.settings))
        else:
            self._capture_first(clock)

    @property
    def _is_in_loop(self) -> bool:
        return any(loader.going for loader in self.loaders)

    def _feeding(self) -> int | None:
        """Returns the loader that feeds the current step; None: none does. An evaluation may take batches of another
        loader between two steps.
        """
        going = [loader for loader in self._yielded if self.loaders[loader].going]
        if going:
            return going[-1]
        if self._step.fed_by in self._feeders:
            return self._step.fed_by
        # A step after a loop may have the gradients of the whole loop. An evaluation makes none.
        return self._yielded[-1] if self._taken and self._trains and not self._feeds_itself else None

    def _capture_first(self, clock: int) -> None:
        """Captures the first of the two moments of a clock, if no loop is in progress."""
        self._save_captured(False)
        self._captured = captured = self._state(clock, self._step.fed_by if self.steps else self._feeding())
        # Not from this thread: it is in the script's code, which may be minutes of it.
        timer = threading.Timer(NEXT_STEP_SECONDS, lambda: self._save_captured(False, captured))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the system has no thread to give: the first of the two moments is better than none
            self._save_captured(False, captured)

    def comes_late(self) -> None:
        """Records that this worker joins a running job: its script may step its schedulers for past passes before it
        steps."""
        for optimizer, _ in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns of the order

    def rollback(self, state: bytes, clock: int, saved_at: int | None = None) -> None:
        """Continues at `clock` from a saved state, possibly of an earlier clock. Raises InvalidRequest.

        saved_at: the last clock for which the state is valid: the state of a worker that left is valid for all later
        clocks; None: the clock of its capture
        """
        target = decode(state)
        if target.feeding not in self._feeders:  # captured before a first evaluation, or behind one
            fed = self._step.fed_by
            if fed in self._feeders and fed < len(target.script.loaders):
                target = replace(target, feeding=fed)
            elif self._feeds_itself:
                target = replace(target, feeding=None)
        if self._unfed > 1 and self._is_behind_loops(target):
            target = replace(target, feeding=None)
        self._has_skipped = False
        self._target, self._wanted = target, None
        self._taken.clear()
        self._captured = self._at_step = None
        self.comes_late()
        missed = clock - (target.clock if saved_at is None else saved_at)
        if missed > 0:
            log.warning("this worker's state is of clock %d: the data of %d steps is left out", clock - missed, missed)
        self._leave_out = max(0, missed) * target.per_step

    def try_restore(self) -> None:
        """Restores a state that needs no loader: after a step, and after `prepare`."""
        target = self._target
        if target is not None and target.feeding is None:
            counts = len(target.script.settings.stateful), len(target.script.loaders)
            if counts == (len(self._stateful), len(self.loaders)):  # otherwise more is to be prepared
                self._restore(target)
                for position, state in zip(self.loaders, target.script.loaders, strict=True):
                    if not (position.going or state.going):
                        position.follow(state)

    def forget(self) -> None:
        """Continues from an earlier clock for which there is no saved state."""
        self._model.put_residual({})

    @property
    def waits_for_loader(self) -> bool:
        """Whether a state will be restored when the script asks a loader for its next batch."""
        return self._target is not None and self._target.feeding is not None

    @property
    def at_pass_begin(self) -> bool:
        """Whether the current step is the first of a pass over the loader that feeds it, but not of the first pass."""
        fed = self._feeding()
        return fed is not None and self.loaders[fed].is_at_begin

    # -- capture -----------------------------------------------------------------------------------------------------

    def loop_begins(self, loader: int) -> None:
        """Captures the requested state at the beginning of a loop, unless another loop in progress will do so."""
        if self._wanted is None or any(position.is_asked_after_step for position in self.loaders):
            return
        if self._step.fed_by in (None, loader) or loader in self._feeders:
            self.capture(loader)
        else:  # the loop of an evaluation: the state is restored where a loop trains
            clock, self._wanted = self._wanted, None
            self._capture_first(clock)

    def yielded(self, loader: int) -> None:
        """Records that a loader yields a batch."""
        if self._yielded[-1:] != [loader]:
            self._yielded = [other for other in self._yielded if other != loader] + [loader]
        self._taken[loader] += 1
        self._trains = torch.is_grad_enabled()

    def capture(self, loader: int | None = None) -> None:
        """Captures the requested state, if there is a request. loader: the loader whose loop is at this point; None:
        none is
        """
        if self._wanted is None:
            return
        clock, self._wanted = self._wanted, None
        if self._target is not None:  # this process has not gone on from there
            self._save_at(clock, lambda: self.last_state(clock, counts=False))
        else:
            self._send(self._state(clock, self._feeding() if loader is None else loader))

    def _state(self, clock: int, feeding: int | None) -> WorkerState:
        return WorkerState(
            clock=clock,
            script=self.script_state(),
            feeding=feeding,
            per_step=self._step.batches,
            own=self._model.copy(clock),
            inner=self.inner.captured(clock),
            feeders=self._feeders,
        )

    def _save_captured(self, is_at_step: bool, only: WorkerState | None = None) -> None:
        """Saves the state that the last step has captured, once. Thread-safe.

        is_at_step: whether the next step begins at this moment
        only: the state to save, if it is still that one
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
        """Saves the captured state: no further step begins."""
        self._save_captured(False)
        self._model.stepped(is_last=True)

    def last_state(self, clock: int, counts: bool, cut_short: bool = True) -> bytes:
        """Returns the state of a worker that stops now, possibly in the middle of a step.

        clock: of its last step that counts
        counts: whether the batches since the step before belong to that step; otherwise they will be yielded again
        cut_short: whether the script was interrupted: the loop that it is in, or has just left, is then unfinished
        """
        if self._target is not None:
            return encode(self._target)  # the script stops before it has returned to the state of the checkpoint
        script = self.script_state()
        now = self._feeding()
        feeding = now if counts or self._step.fed_by is None else self._step.fed_by
        # Those in whose loops the script is: a script may take batches of several in step.
        present = frozenset(self._taken) & self._feeders or self._step.loaders
        if feeding in present:  # if there are several, the one that is asked first
            feeding = next(loader for loader in self._yielded if loader in present)
        loaders, last = [_before_pass(state) for state in script.loaders], next(iter(self._yielded[-1:]), None)
        for index in {*present, *(() if feeding is None else (feeding,))}:
            position, is_last = self.loaders[index], last == index or {index, last} <= present
            back = 0 if counts else self._taken[index]
            loaders[index] = _rewound(position.state_within() if cut_short and is_last else position.state(), back)
        inner, own = self.inner.now(), self._model.copy(clock)
        script, per_step = replace(script, loaders=loaders), self._step.batches
        return encode(WorkerState(clock, script, feeding, per_step, own, inner, self._at_step, self._feeders))

    def script_state(self) -> ScriptState:
        """Returns the script's settings, and the positions of all its loops."""
        return ScriptState(self._settings(), [position.state() for position in self.loaders])

    def _settings(self) -> Settings:
        return Settings(
            RandomState.now(self.device),
            [self._state_of(thing) for thing in self._stateful],
            [copied({k: v for k, v in group.items() if k != "params"}, "a group") for group in self._groups()],
            self.stage,
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the live groups; groups that were added later come last."""
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

    # -- settings of the job -------------------------------------------------------------------------------------------

    def tells(self, clock: int) -> bytes | None:
        """Returns the script's settings that belong to the job, for workers that join late; None without any."""
        return None if self._target is not None else self.job.report(clock, self.stage)

    def adopt(self, report: bytes | None, clock: int, force: bool) -> int:
        """Adopts the settings of another worker's script, at the first step of a process that joins late.

        Returns the stage of that worker's script. If it is later than this script's, nothing is adopted: it has other
        optimizers, and maybe other things. If it is earlier, this script's own settings count.

        force: whether a schedule may go back
        """
        what = "the schedules and other things that were handed to prepare begin anew at clock %d: %s"
        state, why = None, None
        try:
            state = None if report is None else JobState.decode(report)
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
        """Whether an optimizer has a scheduler, but `prepare` was given none."""
        has_one = any(steers(optimizer) for optimizer, _ in self._optimizers)
        return has_one and not any(has_schedule(thing) for thing in self._stateful)

    @property
    def restored_clock(self) -> int | None:
        """The clock of the state that will be restored; None without one."""
        return None if self._target is None else self._target.clock

    # -- restore -----------------------------------------------------------------------------------------------------

    def target(self, loader: int) -> LoaderState | None:
        """Returns the target position of a loader if a state will be restored at its next batch; otherwise None."""
        target = self._target
        # A new process may come to another loop in which the state was before it comes to the feeding loader's.
        if target is None or not (target.feeding == loader or (self.steps == 0 and loader in target.feeders)):
            return None
        state = target.script.loaders[loader]
        return state if target.feeding == loader or state.going else None

    def is_over(self, loader: int, number: int) -> bool:
        """Whether a state will be restored in a loop over another loader, and pass `number` was made before it."""
        if self._target is None or loader not in self._target.feeders:
            return False
        state = self._target.script.loaders[loader]
        return number <= state.begun - state.going

    def restore(self, loader: int) -> int:
        """Restores everything but the position of the asking loader. Returns the number of batches that this loader
        must skip.

        Raises Unsupported if the state belongs to another script.
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
        """Sets the script's settings, and moves all loaders to their saved positions, except this one and those in a
        loop."""
        self.set_settings(state.settings)
        for position, loader_state in zip(self.loaders, state.loaders, strict=False):
            if position.index != loader and not position.going:
                position.follow(loader_state)

    def set_settings(self, settings: Settings) -> None:
        """Sets random states, hyper-parameters, and the state of schedulers and similar objects.

        If the settings are of an earlier stage, hyper-parameters are not set, as the groups were other ones.
        """
        is_of_now = settings.stage == self.stage
        set_groups(self._groups(), settings.groups if is_of_now else [])
        for thing, state in zip(self._stateful, settings.stateful, strict=is_of_now):
            thing.load_state_dict(copied(state))
        settings.random.restore(self.device)

    def _restore(self, state: WorkerState) -> None:
        """Restores everything but the loaders' positions."""
        settings, loaders = state.script.settings, state.script.loaders
        # A state from before a group was added is restored all the same: the group keeps its settings.
        here = min(len(self._groups()), len(settings.groups)), len(self._stateful), len(self.loaders)
        saved = len(settings.groups), len(settings.stateful), len(loaders)
        # A state from an earlier stage, in which the script had prepared less, is restored, too.
        if settings.stage < self.stage and saved[1] <= here[1] and saved[2] <= here[2]:
            here = saved
        if here != saved or not self._model.takes(state.own):
            raise Unsupported(
                "what this worker had saved is of another script: (groups, things with a state, loaders) were "
                f"{saved} and are {here}, or the model's buffers differ"
            )
        self._target, self._at_step = None, state.at_step
        self._feeders |= state.feeders
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
    """Returns the position of a loader before its current pass, so that an evaluation is repeated as a whole."""
    if not state.going or state.start is None:
        return state
    return LoaderState(state.begun - 1, False, 0, None, state.start.generator, state.shift, state.over)


class BesideCheckpoint(WorkerCheckpoint):
    """The state of a further job of a script. The script's settings belong to its first job."""

    def set_settings(self, settings: Settings) -> None:
        """Sets nothing: the first job's state does."""


class LocalCheckpoint(WorkerCheckpoint):
    """The state of a worker whose own optimizers step (mode local:H). It includes theirs, and clocks count rounds."""

    def __init__(self, device: torch.device, save: Save, local: Local, inner: InnerStates) -> None:
        super().__init__(device, save)
        self._local = local
        self.inner = inner

    def rollback(self, state: bytes, clock: int, saved_at: int | None = None) -> None:
        """Continues after `clock` rounds from a saved state: see WorkerCheckpoint.rollback. Clocks count rounds here.

        The data of the rounds that the worker has missed is left out. Each of these rounds counts with the number of
        steps that the mode gives it; with the fewest, if rounds end by time.
        """
        super().rollback(state, clock, saved_at)
        assert self._target is not None
        saved = self._target.clock if saved_at is None else saved_at
        steps = self._local.clock(clock) - self._local.clock(saved)
        self._leave_out = max(0, steps) * max(1, self._target.per_step // self._local.steps_of(saved))
