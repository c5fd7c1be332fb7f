"""The position of a script's loops over one loader, and moving it.

A loop of the script is usually one pass over the data. After a rollback it may be longer: the rest of an earlier pass,
and the passes up to the script's present one. In a new process that continues from a checkpoint it may be empty, as the
passes before the checkpoint yield nothing.

    loop   begins -> asks for batches -> ends, or the script leaves it. At each of these points the worker's state may
           be captured or restored through LoopHooks, which the checkpoint implements
    pass   begins -> is opened after its used batches -> ends, or continues with the next pass
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.data.loaders import ShareSampler, epoch_sampler
from ps_worker.data.look_ahead import LookAhead
from ps_worker.state.encoding import LoaderState, PassStart, RandomState, ScriptState

log = logging.getLogger("ps_worker")

# The settings at the beginning of so many passes are kept.
REMEMBERED_PASSES = 256

_END = object()


class LoopHooks(Protocol):
    """The points of a loop at which state is captured or restored, and the facts that a loop needs. Loaders are named
    by their index."""

    @property
    def device(self) -> torch.device:
        """The device whose random state is captured."""

    @property
    def steps(self) -> int:
        """The number of steps of this process, which a rollback does not change."""

    def loop_begins(self, loader: int) -> None:
        """Captures the requested state at the beginning of a loop, unless another loop in progress will do so."""

    def capture(self, loader: int | None = None) -> None:
        """Captures the requested state, if there is a request, at this point of a loader's loop."""

    def yielded(self, loader: int) -> None:
        """Records that the loop yields a batch."""

    def target(self, loader: int) -> LoaderState | None:
        """Returns the target position if a state will be restored at this point; otherwise None."""

    def is_over(self, loader: int, number: int) -> bool:
        """Whether a state will be restored in a loop over another loader, and pass `number` was made before it."""

    def restore(self, loader: int) -> int:
        """Restores everything but the position of the asking loader. Returns the number of batches that this loader
        must skip."""

    def script_state(self) -> ScriptState:
        """Returns the script's settings, and the positions of all its loops."""

    def set_script_state(self, state: ScriptState, loader: int) -> None:
        """Sets the script's settings, and moves all loaders to their saved positions, except this one and those in a
        loop."""


@dataclass(frozen=True)
class PassBegin:
    """The script's settings at the beginning of a pass. epoch: that of a sampler whose epoch the script sets; None
    without one
    """

    script: ScriptState
    epoch: int | None


class LoaderPosition:
    """The position of one loader. Passes are counted from 1; `begun` is the number of the last that has begun.

    going: whether that pass is in progress
    """

    def __init__(
        self,
        hooks: LoopHooks,
        loader: DataLoader[Any],
        index: int,
        look_ahead: LookAhead,
        catch_up: Callable[[], object] = lambda: None,
    ) -> None:
        """look_ahead: whether the batches of a pass may be read ahead; catch_up: makes a rollback of the job that this
        process has heard of
        """
        self.index = index
        self._catch_up = catch_up
        self.going = False
        self._hooks = hooks
        self._passes = RepeatablePasses(loader, look_ahead)
        self._script = 0  # loops that the script has begun; more than `begun` while a loop makes up for earlier passes
        self._begun = 0
        self._taken = 0
        # Where the script has loaded a position from its own file: pass k is the k-th but for `_shift`, and so many
        # samples of the pass under way, or of the next one, are over.
        self._shift = self._over = 0
        self._start: PassStart | None = None
        self._loop: object = None  # the last one; None: the script has left it
        self._since = 0  # steps made before that loop began, or before the script left it
        self._left_over = 0  # `_over` of the pass that the script has left
        self._began: dict[int, PassBegin] = {}  # by pass
        self._broken_off: dict[int, int] = {}  # by pass, after how many batches the script left its loop
        self._target: LoaderState | None = None
        self._leave_out = 0

    def state(self) -> LoaderState:
        """Returns the present position."""
        return self._state(self.going)

    def state_within(self) -> LoaderState:
        """Returns the position for a script that is interrupted: a loop that the interruption has left is still in
        progress."""
        left = self._loop is None and self._start is not None and self._since == self._hooks.steps
        return self._state(self.going or left)

    def _state(self, going: bool) -> LoaderState:
        generator = self._passes.generator_state()
        over = self._over if going == self.going else self._left_over
        return LoaderState(self._begun, going, self._taken, self._start, generator, self._shift, over)

    @property
    def is_divided(self) -> bool:
        """Whether all workers divide the data, so that one position in it holds for all of them."""
        return self._passes.is_divided

    def follow(self, state: LoaderState) -> None:
        """Moves to the saved position when another loader is restored: at once, or when its own loop asks for a batch.

        Raises Unsupported if its loop is over.
        """
        if self.going or (state.going and self._script < state.begun):
            self._target = state
            if not self.going:  # the next loop is the one of the saved pass
                self._script = max(self._script, state.begun - 1)
        elif state.going:
            raise Unsupported(
                "the job was rolled back into a loop over another loader, and this script is past that: start it again"
            )
        else:
            self._begun = self._script = state.begun
            self._shift, self._over = state.shift, state.over
            self._passes.set_generator(state.generator)

    # -- for a file of the script's own ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the script's position in the data: see ReadPosition."""
        return self._passes.position(self._hooks.target(self.index) or self._target or self.state())

    def load_state_dict(self, state: Any) -> None:
        """Sets the position of the next pass. Is overridden if the worker continues from a checkpoint of the servers.

        Raises InvalidRequest during a loop over the loader.
        """
        if self.going:
            raise InvalidRequest("a loop over this loader is under way: load its state before the loop begins")
        epoch, self._over = self._passes.read_position(state)
        self._shift = epoch - self._begun

    # -- one loop of the script --------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """Yields the batches of one loop of the script."""
        loop = self._loop = object()
        iterator = self._begin_loop()
        self._since = self._hooks.steps
        try:
            while iterator is not None:
                iterator = self._asked(iterator)
                batch = _END if iterator is None or self._is_broken_off() else next(iterator, _END)
                if batch is _END:
                    iterator = self._end_pass()
                    continue
                self._taken += 1
                self._hooks.yielded(self.index)
                yield batch
        except GeneratorExit:
            if self._loop is loop:
                self._leave()
            raise

    def _begin_loop(self) -> Iterator[Any] | None:
        self._script += 1
        if self.going:  # a loop that the script left behind does not count
            self.going, self._over = False, 0
        self._hooks.loop_begins(self.index)
        target = self._hooks.target(self.index) or self._target
        if target is None and not self._hooks.is_over(self.index, self._script):
            return self._begin_pass()
        if target is None or target.begun > self._script:
            self._begun = self._script
            return None  # this pass was made before the checkpoint
        return self._go_to_target()

    @property
    def is_at_begin(self) -> bool:
        """Whether the script has taken no more than one batch of a pass that is not its first."""
        return self._begun > 1 and self._taken <= 1

    @property
    def is_asked_after_step(self) -> bool:
        """Whether a loop is in progress that began before the last step: it will ask for a batch again, or end."""
        return self.going and self._since < self._hooks.steps

    def _asked(self, iterator: Iterator[Any]) -> Iterator[Any] | None:
        """Captures a requested state, and restores a pending one. Is called when the script asks for a batch.

        iterator: the batches that are left of the current pass
        Returns the iterator to go on with: the same one, or after a restore the one that `_go_to_target` returns.
        """
        if self.is_asked_after_step:
            self._hooks.capture(self.index)
        if self._target is not None or self._hooks.target(self.index) is not None:
            return self._go_to_target()
        return iterator

    def _is_broken_off(self) -> bool:
        """Whether this pass is repeated, and the script had left its loop at this point."""
        return self._begun < self._script and self._broken_off.get(self._begun) == self._taken

    def _end_pass(self) -> Iterator[Any] | None:
        self._catch_up()  # while this loop can still repeat what a rollback has undone
        if self._hooks.target(self.index) is not None:
            return self._go_to_target()
        self.going, self._over = False, 0
        return self._following()

    def _following(self) -> Iterator[Any] | None:
        return self._cross() if self._begun < self._script else None

    def _leave(self) -> None:
        """Ends a loop that the script leaves early."""
        is_asked = self.is_asked_after_step
        self.going, self._loop, self._since = False, None, self._hooks.steps
        self._left_over, self._over = self._over, 0
        if is_asked:
            self._hooks.capture(self.index)
        self._broken_off[self._begun] = self._taken
        self._script = self._begun

    # -- passes ------------------------------------------------------------------------------------------------------

    def _begin_pass(self) -> Iterator[Any]:
        self._begun += 1
        self.going, self._taken = True, 0
        start = self._start = self._passes.start(self._hooks.device)
        if self._begun == self._script:
            self._began.setdefault(self._begun, PassBegin(self._hooks.script_state(), start.epoch))
            self._began.pop(self._begun - REMEMBERED_PASSES, None)
        return self._open(start, 0)

    def _cross(self) -> Iterator[Any]:
        """Continues with the next pass in the same loop, with the settings that the script had before it."""
        began = self._began.get(self._begun + 1)
        if began is None:
            log.warning("what the script did between passes %d and %d is not known", self._begun, self._begun + 1)
        else:
            self._hooks.set_script_state(began.script, self.index)
            self._passes.set_epoch(began.epoch)
            self._passes.set_generator(began.script.loaders[self.index].generator)
        return self._begin_pass()

    def _go_to_target(self) -> Iterator[Any] | None:
        """Moves the loop to its target position, after a restore that is due at this point."""
        target = self._hooks.target(self.index)
        if target is not None:
            self._leave_out = self._hooks.restore(self.index)
        else:
            target, self._leave_out = self._target, 0
        assert target is not None
        self._target = None
        self._begun, self.going, self._taken, self._start = target.begun, target.going, 0, target.start
        self._shift, self._over = target.shift, target.over
        if not target.going:
            self._passes.set_generator(target.generator)
            return self._following()
        assert target.start is not None
        now = RandomState.now(self._hooks.device)
        target.start.random.restore(self._hooks.device)
        self._passes.set_generator(target.start.generator)
        self._passes.set_epoch(target.start.epoch)
        iterator = self._open(target.start, target.taken)
        now.restore(self._hooks.device)
        self._passes.set_generator(target.generator)
        return iterator

    def _open(self, start: PassStart, over: int) -> Iterator[Any]:
        """Opens pass `begun` after its used batches, and skips as many of the batches to leave out as it has."""
        skip = over + self._leave_out
        iterator, self._taken = self._passes.open(self._begun - 1 + self._shift, start, skip, self._over)
        self._leave_out = skip - self._taken
        return iterator


class RepeatablePasses:
    """Passes over a loader that can be repeated from their beginning, because everything that determines their order is
    set.

    look_ahead: wraps the iterator of a pass, so that batches may be read ahead
    """

    def __init__(self, loader: DataLoader[Any], look_ahead: LookAhead) -> None:
        self._loader, self._look_ahead = loader, look_ahead
        self._sampler = loader.sampler if isinstance(loader.sampler, ShareSampler) else None
        self._epochs = epoch_sampler(loader)

    def start(self, device: torch.device) -> PassStart:
        """Returns the beginning of a pass that begins now."""
        share = None if self._sampler is None else self._sampler.share()
        return PassStart(RandomState.now(device), self.generator_state(), share, self.epoch)

    def open(self, epoch: int, start: PassStart, skip: int, over: int = 0) -> tuple[Iterator[Any], int]:
        """Returns the batches of a pass after its first `skip`, and the number of batches skipped; the pass may have
        fewer.

        epoch: of the sampler, from 0
        over: the number of samples that all workers have used
        """
        skipped = 0
        if self._sampler is not None:
            self._sampler.begin(epoch, start.share, 0, over)
            if self._loader.num_workers == 0:  # nothing is loaded that is not wanted
                skipped = min(skip, self._batches(start, over))
                self._sampler.begin(epoch, start.share, skipped * (self._loader.batch_size or 1), over)
        iterator = iter(self._loader)
        while skipped < skip and next(iterator, _END) is not _END:
            skipped += 1
        return self._look_ahead(iterator), skipped

    def _batches(self, start: PassStart, over: int) -> int:
        assert self._sampler is not None
        assert start.share is not None
        samples, each = self._sampler.length(start.share[1], over), self._loader.batch_size or 1
        return samples // each if self._loader.drop_last else -(-samples // each)

    @property
    def is_divided(self) -> bool:
        """Whether all workers divide the data, so that one position in it holds for all of them."""
        return self._sampler is not None

    def position(self, state: LoaderState) -> dict[str, Any]:
        """Returns the position of all workers in the data. The loader must be divided."""
        assert self._sampler is not None
        if not state.going or state.start is None or state.start.share is None:
            return self._sampler.position(state.shift + state.begun, state.over)
        count = state.start.share[1]
        own = min(state.taken * (self._loader.batch_size or 1), self._sampler.length(count, state.over))
        return self._sampler.position(state.shift + state.begun - 1, state.over + own * count)

    def read_position(self, state: Any) -> tuple[int, int]:
        """Returns the epoch in a saved position, and how many of its samples are used. Raises InvalidRequest as the
        sampler does.
        """
        assert self._sampler is not None
        return self._sampler.read_position(state)

    @property
    def epoch(self) -> int | None:
        """The epoch of a sampler whose epoch the script sets; None without one."""
        return None if self._epochs is None else self._epochs.epoch

    def set_epoch(self, epoch: int | None) -> None:
        """Sets the epoch of a sampler whose epoch the script sets. None: does nothing"""
        if self._epochs is not None and epoch is not None:
            self._epochs.set_epoch(epoch)

    def generator_state(self) -> torch.Tensor | None:
        """Returns the state of the loader's own generator; None without one."""
        return None if self._loader.generator is None else self._loader.generator.get_state()

    def set_generator(self, state: torch.Tensor | None) -> None:
        """Sets the state of the loader's own generator."""
        if self._loader.generator is not None and state is not None:
            self._loader.generator.set_state(state)
