"""The settings of a script that belong to the job, which a worker that joins late gets from another worker.

These are the states of schedulers, of a GradScaler, and of everything else given to `prepare`, except for `own`; and
the hyper-parameters of the parameter groups, which schedulers change. Random states, positions in the data and the
model's buffers belong to the worker.

The new worker adopts them at its first step, directly before the update. By then its script has gone through the
finished passes, and has stepped a schedule after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.job import MAX_SCRIPT_BYTES
from ps_runtime.troubles import Troubles
from ps_worker.state.documents import UNREADABLE, copied, plain, read_document, value_of, write_document

log = logging.getLogger("ps_worker")

DEEPEST_STATE = 8  # levels of nested state that are searched for a scheduler
FORMAT = 1  # the format of a worker's whole state, from which this state is read, too


@dataclass(frozen=True)
class JobState:
    """The state of each object given to `prepare`, and the hyper-parameters of each group.

    kinds: the names of the objects' types; None: unknown
    stateful: None for an object whose state belongs to the worker
    stage: the stage of the script that has these groups
    """

    clock: int
    kinds: list[str] | None
    stateful: list[Any]
    groups: list[dict[str, Any]]
    stage: int = 0

    def encode(self) -> bytes:
        """Returns the state as bytes. Raises Unsupported for a value of an unknown type."""
        tensors: dict[str, torch.Tensor] = {}
        document = {
            "clock": self.clock,
            "kinds": self.kinds,
            "stateful": plain(self.stateful, tensors),
            "groups": plain(self.groups, tensors, "groups"),
            "stage": self.stage,
        }
        return write_document(document, tensors, FORMAT)

    @classmethod
    def decode(cls, data: bytes) -> JobState:
        """Reads the bytes of `encode`, or this part of a worker's whole state. Raises InvalidRequest."""
        try:
            document, tensors = read_document(data, FORMAT)

            def decoded(value: Any) -> Any:
                return value_of(value, tensors.__getitem__)

            at_step = document.get("at_step")  # the state of a worker without a loader
            stateful, groups = (document["stateful"], document["groups"]) if at_step is None else at_step[1:]
            stage = int(document.get("stage" if at_step is None else "stage_at_step", 0))  # earlier versions have none
            kinds = document.get("kinds")
            return cls(int(document["clock"]), kinds, list(decoded(stateful)), list(decoded(groups)), stage)
        except UNREADABLE as error:
            raise InvalidRequest(f"what another worker told of its script cannot be read: {error}") from None


class JobThings:
    """The objects of a script whose state belongs to the job.

    state_of: returns an object's state in Python's own types and tensors. Raises Unsupported
    groups: returns the live groups of all optimizers
    """

    def __init__(self, state_of: Callable[[Any], Any], groups: Callable[[], Sequence[dict[str, Any]]]) -> None:
        self._state_of, self._groups = state_of, groups
        self._things: list[Any] = []
        self._own: list[bool] = []
        self._troubles = Troubles(log, None)  # nothing of this worker is lost

    def add(self, thing: Any, own: bool) -> None:
        """Adds an object. own: whether its state belongs to this worker alone"""
        self._things.append(thing)
        self._own.append(own)

    @property
    def are_some(self) -> bool:
        """Whether there is an object whose state belongs to the job."""
        return not all(self._own)

    def report(self, clock: int, stage: int) -> bytes | None:
        """Returns the encoded state for other workers; None if no object's state belongs to the job, or if it is too
        large.
        """
        if not self.are_some:
            return None
        encoded = self.state(clock, stage).encode()
        if len(encoded) <= MAX_SCRIPT_BYTES:
            return encoded
        sizes = {_kind(thing): len(JobState(0, None, [self._state_of(thing)], []).encode()) for thing in self._things}
        self._troubles.met(
            "size",
            "what was handed to prepare has a state of %d bytes, of which %s has the most, and at most %d travel to "
            "workers that join later: these begin with the state that their scripts make. Name what is of each worker "
            "alone: prepare(..., own=[...])",
            *(len(encoded), max(sizes, key=lambda kind: sizes[kind]), MAX_SCRIPT_BYTES),
        )
        return None

    def state(self, clock: int, stage: int) -> JobState:
        """Returns the present state."""
        pairs = list(zip(self._things, self._own, strict=True))
        return JobState(
            clock,
            [_kind(thing) for thing in self._things],
            [None if own else self._state_of(thing) for thing, own in pairs],
            [copied({key: value for key, value in group.items() if key != "params"}) for group in self._groups()],
            stage,
        )

    def adopt(self, state: JobState, force: bool) -> str | None:
        """Adopts a state as a whole. Returns None, or the reason why nothing is adopted.

        force: whether a schedule may go back
        """
        kinds = [_kind(thing) for thing in self._things]
        if len(state.stateful) != len(kinds) or state.kinds not in (None, kinds):
            return f"it is of {state.kinds or len(state.stateful)}, and here prepare was given {kinds}"
        others = [
            (thing, saved)
            for thing, own, saved in zip(self._things, self._own, state.stateful, strict=True)
            if not own and saved is not None
        ]
        if not force and any(_goes_back(thing, saved) for thing, saved in others):
            return None  # the script has brought itself as far
        before = self.state(0, 0)
        try:
            self._set([(thing, saved) for thing, saved in others], state.groups)
        except Exception as error:  # an error of the objects themselves
            self._set(
                [(thing, kept) for thing, kept in zip(self._things, before.stateful, strict=True) if kept is not None],
                before.groups,
            )
            return f"{type(error).__name__}: {error}"
        log.info("schedules and the like are those of the job at clock %d", state.clock)
        return None

    def _set(self, states: Collection[tuple[Any, Any]], groups: Sequence[dict[str, Any]]) -> None:
        set_groups(self._groups(), groups)
        for thing, state in states:
            thing.load_state_dict(copied(state))


def set_groups(groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    """Sets the hyper-parameters of groups. Groups that were added after the state was saved keep theirs."""
    for group, values in zip(groups, saved, strict=False):
        for key, value in copied(values).items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _kind(thing: Any) -> str:
    return type(thing).__name__


def _goes_back(thing: Any, state: Any) -> bool:
    """Whether a schedule is ahead of the state that another worker has sent."""
    here, saved = getattr(thing, "last_epoch", None), state.get("last_epoch") if isinstance(state, dict) else None
    return isinstance(here, int) and isinstance(saved, int) and saved < here


def has_schedule(thing: Any) -> bool:
    """Whether an object is a scheduler of torch, or has one, as a framework's wrapper of one does: in an attribute, or
    anywhere if the scheduler's state is a part of the object's.
    """
    kinds = torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    held = [each for value in getattr(thing, "__dict__", {}).values() for each in _each(value)]
    if any(isinstance(each, kinds) for each in (thing, *held)):
        return True
    with suppress(Exception):  # `state_dict` of the script's own object: its error is raised when its state is saved
        return _has_state_of_schedule(thing.state_dict())
    return False


def _has_state_of_schedule(state: Any, depth: int = 0) -> bool:
    """Whether the state of a scheduler is a part of this one. depth: of how many others this one is a part"""
    if isinstance(state, dict) and "last_epoch" in state and ("_last_lr" in state or "num_bad_epochs" in state):
        return True
    held = (each for each in _parts(state) if isinstance(each, dict | list | tuple))  # a list may be of all indices
    return depth < DEEPEST_STATE and any(_has_state_of_schedule(each, depth + 1) for each in held)


def _parts(value: Any) -> Sequence[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []


def _each(value: Any) -> Sequence[Any]:
    return _parts(value) or [value]


def steers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of torch was made for an optimizer: it has patched the optimizer's `step`."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))
