"""Going back to a clock: a worker's own part of a checkpoint, caught and put back.

The weights live on the servers. What else decides how a run ends is caught here: the place in the data, random states,
everything that was handed to `prepare`, and the model's buffers. Scripts step their scheduler after `optimizer.step()`,
so the state of a clock is caught when the script asks for the next batch, and put back at the same point.

caught     the loader that fed step C is asked for its next batch
put back   the loader that feeds is asked for its next batch: everything is as it was then, and the loader goes to where
           it was. Where that is an earlier pass over the data than the script's loop is in, this iteration of the loop
           yields the rest of that pass and crosses into the following ones by itself, with what the script had set
           between them, so that a plain loop over passes ends after the same number of batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ps_protocol.errors import PSError, Unsupported
from ps_worker.state.encoding import LoaderState, RandomState, Settings, WorkerState, copied, decode, encode
from ps_worker.state.loader_position import LoaderPosition

log = logging.getLogger("ps_worker")

Save = Callable[[int, bytes], None]


class WorkerCheckpoint:
    """One worker's own state, caught when a checkpoint asks for it and put back when the job is set back.

    device: whose random state counts
    save:   takes a clock and the bytes of its state; returns at once
    """

    def __init__(self, device: torch.device, save: Save) -> None:
        self.device = device
        self.steps = 0  # made by this process, whatever the clock
        self.loaders: list[LoaderPosition] = []
        self._save = save
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._group_counts: list[int] = []  # of each optimizer, at the beginning
        self._untrained: dict[int, Untrained] = {}
        self._stateful: list[Any] = []
        self._left_out: set[str] = set()
        self._fed: LoaderPosition | None = None  # the loader that yielded last
        self._taken = 0  # batches since the last step
        self._per_step = 1
        self._wanted: int | None = None  # the clock whose state is to be caught
        self._back: WorkerState | None = None  # the state to be put back
        self._leave_out = 0  # batches of steps that others made while this worker was away

    # -- what belongs to it ------------------------------------------------------------------------------------------

    def watch(self, optimizers: Sequence[torch.optim.Optimizer], untrained: Mapping[int, torch.Tensor]) -> None:
        """Sees to optimizers' groups, and to what they do not step: by index among the job's parameters."""
        self._optimizers = optimizers
        self._group_counts = [len(optimizer.param_groups) for optimizer in optimizers]
        self._untrained = {index: Untrained(tensor) for index, tensor in untrained.items()}

    def trains(self, indices: Sequence[int]) -> None:
        """What no optimizer of this job steps is trained beside it from here on."""
        for index in indices:
            self._untrained[index].trains = True

    def add(self, thing: Any) -> None:
        """Sees to a scheduler, or anything else with a state. Raises Unsupported if that cannot be saved."""
        self._state_of(thing)
        self._stateful.append(thing)

    def add_loader(self, loader: DataLoader[Any]) -> LoaderPosition:
        """Sees to a loader, whose batches come from what is returned."""
        self.loaders.append(LoaderPosition(self, loader, len(self.loaders)))
        return self.loaders[-1]

    # -- steps -------------------------------------------------------------------------------------------------------

    def want(self, clock: int) -> None:
        """The state at this clock is wanted, at which the worker is before its next step."""
        self._wanted = clock

    def stepping(self) -> None:
        """A step begins: what is still to be caught of the one before is caught now, if late."""
        if self._wanted is not None and any(loader.going for loader in self.loaders):
            log.warning(
                "the checkpoint of clock %d is within a batch of several steps: a job that is set back to it goes on "
                "behind that batch",
                self._wanted,
            )
        self.catch()

    def stepped(self) -> None:
        """A step is over."""
        self.steps += 1
        self._per_step, self._taken = max(1, self._taken), 0
        if not any(loader.going for loader in self.loaders):
            self.catch()

    def go_back(self, state: bytes, clock: int) -> None:
        """The worker goes on at `clock`, from what it had saved, maybe at an earlier one. Raises InvalidRequest."""
        self._back = decode(state)
        self._wanted, self._taken = None, 0
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers of a new process look at it
        missed = clock - self._back.clock
        if missed > 0:
            log.warning(
                "this worker's state is of clock %d: the data of %d steps is left out", self._back.clock, missed
            )
        self._leave_out = max(0, missed) * self._back.per_step

    def settle(self) -> None:
        """What needs no loader is put back now: after a step, and after `prepare`."""
        back = self._back
        if back is not None and back.feeding is None:
            counts = len(back.settings.stateful), len(back.loaders)
            if counts == (len(self._stateful), len(self.loaders)):  # else more is to be prepared
                self._put_back(back)

    def close(self) -> None:
        """The script ends: what is still to be caught is caught now."""
        self.catch()

    @property
    def is_due(self) -> bool:
        """Whether a state is to be put back when the script asks a loader for its next batch."""
        return self._back is not None and self._back.feeding is not None

    @property
    def at_pass_begin(self) -> bool:
        """Whether the step at hand is the first of a pass over the data that feeds it, but not of the first pass."""
        return self._fed is not None and self._fed.is_at_begin

    # -- catching ----------------------------------------------------------------------------------------------------

    def wants(self) -> bool:
        """Whether a state is still to be caught."""
        return self._wanted is not None

    def catch(self, feeding: LoaderPosition | None = None) -> None:
        """Catches the state that is wanted, if there is one; `feeding`: the loader whose loop is at this point."""
        if self._wanted is None:
            return
        clock, self._wanted = self._wanted, None
        feeding = feeding or self._fed
        state = WorkerState(
            clock=clock,
            settings=self.settings(),
            loaders=self.places(),
            feeding=None if feeding is None else feeding.index,
            per_step=self._per_step,
            tensors={index: found.copy() for index, found in self._untrained.items() if found.changed()},
        )
        try:
            self._save(clock, encode(state))
        except PSError as error:
            log.warning("this worker's state at clock %d is not in the checkpoint: %s", clock, error)

    def settings(self) -> Settings:
        """What the script has set, now."""
        groups = self._groups()
        return Settings(
            RandomState.now(self.device),
            [self._state_of(thing) for thing in self._stateful],
            [copied({k: v for k, v in group.items() if k != "params"}, "a group") for group in groups],
        )

    def _groups(self) -> list[dict[str, Any]]:
        """The live groups; those that were added later are behind all others."""
        counted = list(zip(self._optimizers, self._group_counts, strict=True))
        first = [group for optimizer, count in counted for group in optimizer.param_groups[:count]]
        return first + [group for optimizer, count in counted for group in optimizer.param_groups[count:]]

    def places(self) -> list[LoaderState]:
        """Where all loaders are, now."""
        return [loader.place() for loader in self.loaders]

    def _state_of(self, thing: Any) -> Any:
        state, name = thing.state_dict(), type(thing).__name__
        if not isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            return copied(state, name)
        found = {}
        for key, value in state.items():
            try:
                found[key] = copied(value, f"{name}.{key}")
            except Unsupported as error:  # a function, say: it stays what it is, for what is loaded may be partial
                if f"{name}.{key}" not in self._left_out:
                    self._left_out.add(f"{name}.{key}")
                    log.info("not part of checkpoints: %s", error)
        return found

    # -- putting back ------------------------------------------------------------------------------------------------

    def put(self, settings: Settings) -> None:
        """Sets all that a script sets beside the model."""
        for group, values in zip(self._groups(), settings.groups, strict=False):
            for key, value in copied(values).items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        for thing, state in zip(self._stateful, settings.stateful, strict=True):
            thing.load_state_dict(copied(state))
        settings.random.restore(self.device)

    def _put_back(self, state: WorkerState) -> None:
        """All but the loaders' places. Raises Unsupported if the state is of another script."""
        # A state from before a group was added is put back all the same: the group keeps what it has.
        mine = min(len(self._groups()), len(state.settings.groups)), len(self._stateful), len(self.loaders)
        found = len(state.settings.groups), len(state.settings.stateful), len(state.loaders)
        if mine != found or not all(
            index in self._untrained and self._untrained[index].takes(tensor) for index, tensor in state.tensors.items()
        ):
            raise Unsupported(
                "what this worker had saved is of another script: (groups, things with a state, loaders) were "
                f"{found} and are {mine}, or the model's buffers differ"
            )
        self._back = None
        self.put(state.settings)
        for index, tensor in state.tensors.items():
            self._untrained[index].put(tensor)
        log.info("this worker's own state is that of clock %d", state.clock)

    # -- what loaders ask --------------------------------------------------------------------------------------------

    def yielded(self, loader: LoaderPosition) -> None:
        """A loader has yielded a batch."""
        if self._fed is not loader:
            self._fed, self._taken = loader, 0
        self._taken += 1

    def due(self, loader: LoaderPosition) -> LoaderState | None:
        """Where this loader is to go, if it is the one at whose next batch the state is put back."""
        back = self._back
        if back is None or back.feeding != loader.index:
            return None
        return back.loaders[loader.index]

    def put_back(self, loader: LoaderPosition) -> int:
        """Puts everything back but the place of the loader that asks; returns the batches that it is to leave out."""
        state = self._back
        assert state is not None
        self._put_back(state)
        for other, place in zip(self.loaders, state.loaders, strict=True):
            if other is not loader:
                other.follow(place)
        left_out, self._leave_out = self._leave_out, 0
        return left_out


class Bystander(WorkerCheckpoint):
    """Of a job that goes beside another: all that is beside the weights belongs to that one."""

    def put(self, settings: Settings) -> None:
        """Nothing: the other job's state says it."""


class Untrained:
    """A tensor of the model that no optimizer steps, with what it was at the beginning."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # A frozen parameter may be large, and its version tells; that of a buffer does not (BatchNorm's statistics).
        self._version = tensor._version
        self._first = None if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        self.trains = False  # an optimizer has it since, in a job beside this one

    def changed(self) -> bool:
        """Whether the value has changed since `prepare`."""
        if self.trains:
            return True
        if self._first is None:
            return self._tensor._version != self._version
        return not torch.equal(self._tensor, self._first)

    def copy(self) -> torch.Tensor:
        """Its value now, on the host."""
        return self._tensor.detach().to("cpu", copy=True)

    def takes(self, value: torch.Tensor) -> bool:
        """Whether a value fits."""
        return value.shape == self._tensor.shape and value.dtype == self._tensor.dtype

    def put(self, value: torch.Tensor) -> None:
        """Sets its value."""
        with torch.no_grad():
            self._tensor.copy_(value)
