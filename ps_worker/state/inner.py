"""The state of optimizers that step on the worker (mode `local:H`), at the rounds that checkpoints keep.

It may be twice as large as the weights (Adam), too large for every checkpoint. Therefore a worker keeps copies of the
last two requested states in its own memory. After a rollback to one of these it continues bit for bit. A new process
has no copy: it gets a small state from the checkpoint, and otherwise begins without state, as a new optimizer does. A
warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ps_protocol.errors import Unsupported
from ps_protocol.tensors import is_finite
from ps_runtime.troubles import Troubles
from ps_worker.model.sharded import cut_again, cuts_of, is_cut_alike, is_sharded, like, local
from ps_worker.state.documents import copied

log = logging.getLogger("ps_worker")

MOST_BYTES = 2**20  # the largest state that is part of checkpoints
COPIES = 2  # one for the last requested checkpoint, which may fail, and one for the checkpoint before it

# Of each optimizer, by the position of a parameter, its state.
InnerState = list[dict[int, dict[str, Any]]]

CUTS = "cuts"  # in place of a DTensor that is not cut as its parameter: where it is cut, its shape and its local shard


class Inner(Protocol):
    """The interface of the state of optimizers that step on the worker, for the worker's part of a checkpoint."""

    def captured(self, clock: int) -> InnerState | None:
        """Copies the present state, after `clock` rounds, into memory. Returns the copy if it is small
        enough for a checkpoint (MOST_BYTES), otherwise None."""

    def now(self) -> InnerState | None:
        """Returns a copy of the present state if it is small, otherwise None."""

    def restore(self, clock: int, saved: InnerState | None) -> None:
        """Restores the state after `clock` rounds, from memory or from `saved`, the state in the checkpoint."""


class NoInner:
    """No optimizer steps on the worker."""

    def captured(self, clock: int) -> None:
        """Keeps nothing."""

    def now(self) -> None:
        """Returns nothing."""

    def restore(self, clock: int, saved: InnerState | None) -> None:
        """Does nothing."""


class InnerStates:
    """The state of the script's own optimizers. Only the training thread uses it.

    fresh:  called when the optimizers begin without state in a running job
    on_all: given a condition of this member, returns whether it holds on all members of the worker's group
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        fresh: Callable[[], None],
        on_all: Callable[[bool], bool] = bool,
    ) -> None:
        self._optimizers = optimizers
        self._fresh, self._on_all = fresh, on_all
        self._kept: dict[int, InnerState] = {}  # by round
        self._troubles = Troubles(log, None)  # ps_worker_fresh_inner_state_total counts what it may lead to

    def enter(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Replaces the optimizers. Copies of the earlier ones are dropped."""
        self._optimizers = optimizers
        self._kept.clear()

    def captured(self, clock: int) -> InnerState | None:
        """Copies the present state, after `clock` rounds, into memory. Returns it if it is small, otherwise None."""
        try:
            states = self._copied()
        except Unsupported as error:
            self._troubles.met("copy", "the state of this worker's optimizer cannot be kept: %s", error)
            return None
        self._troubles.over("copy")
        self._kept.pop(clock, None)
        self._kept[clock] = states
        while len(self._kept) > COPIES:
            del self._kept[next(iter(self._kept))]
        return states if sum(tensor.nbytes for tensor in _tensors(states)) <= MOST_BYTES else None

    def now(self) -> InnerState | None:
        """Returns a copy of the present state if it is small, otherwise None."""
        try:
            states = self._copied()
        except Unsupported:
            return None
        return states if sum(tensor.nbytes for tensor in _tensors(states)) <= MOST_BYTES else None

    def restore(self, clock: int, saved: InnerState | None) -> None:
        """Restores the state after `clock` rounds, from memory or from `saved`, the state in the checkpoint.

        If neither fits, the optimizers begin without state.
        """
        states = self._kept.get(clock, saved)
        fits = states is not None and self._fits(states)
        try:
            fits = self._on_all(fits)  # pieces are of unlike sizes, and some may be too large to keep
        except BaseException:  # a signal during the wait: all other state is that of `clock` already
            self.begin_anew()
            raise
        if fits and states is not None:
            self._put(states)
        else:
            self.begin_anew()

    def _put(self, states: InnerState) -> None:
        for optimizer, parameters, state in zip(self._optimizers, self._parameters(), states, strict=True):
            optimizer.state.clear()
            for position, values in state.items():
                parameter, group = parameters[position]
                optimizer.state[parameter] = {
                    key: _placed(key, value, parameter, group) for key, value in values.items()
                }

    def begin_anew(self) -> None:
        """Clears the state of the script's own optimizers in a running job, and logs a warning."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
            if isinstance(optimizer, torch.optim.Adagrad):  # makes its state in its constructor: no step without
                groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
                optimizer.state.update(torch.optim.Adagrad(groups, **optimizer.defaults).state)
        log.warning("this worker's own optimizer begins without its state (moments), in a job that is under way")
        self._fresh()

    @property
    def is_empty(self) -> bool:
        """Whether no optimizer has any state."""
        return not any(optimizer.state for optimizer in self._optimizers)

    @property
    def is_finite(self) -> bool:
        """Whether the state contains no infinity and no NaN."""
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return all(is_finite(local(tensor)) for tensor in _tensors(states) if tensor.is_floating_point())

    def _copied(self) -> InnerState:
        return [
            {
                position: copied(_here(dict(optimizer.state[parameter]), parameter), "the optimizer's state")
                for position, (parameter, _) in enumerate(parameters)
                if parameter in optimizer.state
            }
            for optimizer, parameters in zip(self._optimizers, self._parameters(), strict=True)
        ]

    def _parameters(self) -> list[list[tuple[torch.Tensor, Mapping[str, Any]]]]:
        """Returns the parameters of each optimizer, each with its group."""
        return [
            [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self._optimizers
        ]

    def _fits(self, states: InnerState) -> bool:
        counts = [len(parameters) for parameters in self._parameters()]
        return len(states) == len(counts) and all(
            position < count for state, count in zip(states, counts, strict=True) for position in state
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _here(value: Any, parameter: Any) -> Any:
    """Returns a value in which DTensors are replaced by their local shards; one that is not cut as its parameter, by
    its local shard with its shape and cuts. An optimizer of the script's own may keep means of rows so.
    """
    if isinstance(value, torch.Tensor):
        if not is_sharded(value) or not is_sharded(parameter) or is_cut_alike(value, parameter):
            return local(value)
        return {CUTS: cuts_of(value, parameter.device_mesh), "shape": list(value.shape), "here": local(value)}
    if isinstance(value, Mapping):
        return {name: _here(item, parameter) for name, item in value.items()}
    return type(value)(_here(item, parameter) for item in value) if type(value) in (list, tuple) else value


def _placed(key: str, value: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Returns a copy of state on the devices where torch keeps it: the parameter's, except for the step count."""
    if isinstance(value, torch.Tensor):
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        placed = value.to("cpu" if on_host else parameter.device, copy=True)
        return placed if key == "step" else like(parameter, placed)
    if isinstance(value, Mapping):
        if CUTS in value:
            here = value["here"].to(parameter.device, copy=True)
            return cut_again(parameter, here, value[CUTS], value["shape"])
        return {name: _placed(name, item, parameter, group) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(key, item, parameter, group) for item in value)
    return value


# -- with weights of the worker's own ----------------------------------------------------------------------------------

# In mode `local:H/F` a worker's weights always differ from the servers', so they are part of the worker's state. They
# are as large as the model. A process without them continues with the servers' weights. So does a process that takes a
# rank after the job has made progress: the servers' weights have moved, and the difference from old weights would undo
# that.


KEY, AT = "weights", "round"


class OwnWeights(Protocol):
    """A worker's own weights, which differ from the servers': see ps_worker/model/base.py."""

    def own(self) -> dict[int, torch.Tensor]:
        """Returns a copy of the model's weights, by parameter."""

    def takes(self, own: dict[int, torch.Tensor]) -> bool:
        """Whether these weights fit the model."""

    def put(self, own: dict[int, torch.Tensor]) -> None:
        """Sets the model's weights."""


class InnerWithWeights(InnerStates):
    """The state of the script's own optimizers and, as one more entry after theirs, the weights that they step.

    is_between: returns whether a round is over and the next one has not begun. If a worker leaves within a round, the
                steps of the round are lost, and so are their weights
    rounds:     returns the number of rounds that are over
    put_back:   called at the end of `restore`, by all members of the group: each has restored the weights of its own
                pieces
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        fresh: Callable[[], None],
        on_all: Callable[[bool], bool],
        weights: OwnWeights,
        is_between: Callable[[], bool],
        rounds: Callable[[], int],
        put_back: Callable[[], None],
    ) -> None:
        super().__init__(optimizers, fresh, on_all)
        self._weights, self._put_back = weights, put_back
        self._is_between, self._rounds = is_between, rounds

    def restore(self, clock: int, saved: InnerState | None) -> None:
        """Restores the state after `clock` rounds as InnerStates does, and the weights if they are of that round."""
        try:
            super().restore(clock, saved)
        finally:
            self._put_back()  # also where nothing fits, or a signal has come: the others wait for this member

    def now(self) -> InnerState | None:
        """Returns a copy of the present state if it is small; within a round without the weights."""
        states = super().now()
        return states if states is None or self._is_between() else [*states[:-1], {}]

    def _copied(self) -> InnerState:
        rounds = self._rounds()
        return [*super()._copied(), {index: {KEY: value, AT: rounds} for index, value in self._weights.own().items()}]

    def _put(self, states: InnerState) -> None:
        super()._put(states[:-1])
        if all(values.get(AT) == self._rounds() for values in states[-1].values()) and states[-1]:
            self._weights.put(_weights_of(states))

    def _fits(self, states: InnerState) -> bool:
        if not states or not super()._fits(states[:-1]):
            return False
        return not states[-1] or self._weights.takes(_weights_of(states))


def _weights_of(states: InnerState) -> dict[int, Any]:
    return {index: values.get(KEY) for index, values in states[-1].items()}
