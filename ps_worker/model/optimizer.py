"""The optimizers of a session.

stepped on servers  The optimizer that `prepare` returns looks like the user's own (`ServerOptimizer`).
stepped alone       Steps of other optimizers on the session's parameters are detected (`SteppedAlone`): each worker
                    would then train them alone. There are three such habits. A script makes a new optimizer over the
                    prepared model for its next stage. It puts a layer into the prepared model, such as a new head or an
                    adapter, and makes an optimizer for that. Or it steps the optimizer that it has passed to `prepare`
                    instead of the one that was returned. In one process all are right. In DDP the first is right,
                    because there the model averages the gradients, and not the optimizer.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.model.state_transfer import tensors_of
from ps_worker.tables.modules import named_tables
from ps_worker.tables.stepping import stand_for

log = logging.getLogger("ps_worker")

# The state that torch.optim keeps for each parameter.
ParameterStates = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]


class RemoteOptimizers(Protocol):
    """The optimizers of one job, which step on the servers. index: the number of an optimizer in the job"""

    def step(self, index: int) -> None:
        """Pushes gradients and pulls weights."""

    def state(self, index: int) -> ParameterStates:
        """Returns the optimizer's state on the shards, at this worker's clock."""

    def load(self, index: int, states: ParameterStates) -> None:
        """Sets the optimizer state with which the next step begins."""

    def add_group(self, index: int, group: dict[str, Any]) -> None:
        """Trains more of the models' parameters from the next step on."""


_WHERE = (
    "the optimizer's state is on the shards: read it with optimizer.state_dict(), set it with load_state_dict(); "
    "state.clear() has it begin anew"
)


class _StateOnShards(defaultdict[torch.Tensor, Any]):
    """The `state` of a prepared optimizer: it is empty, and its errors explain that the state is on the shards.

    begin_anew: makes the next step begin without any state
    """

    def __init__(self, begin_anew: Callable[[], None]) -> None:
        super().__init__(dict)
        self._begin_anew = begin_anew
        self._has_warned = False

    def __bool__(self) -> bool:
        """Returns True: torch.distributed.checkpoint would make a step with an optimizer whose state is empty."""
        return True

    def __missing__(self, key: torch.Tensor) -> Any:
        raise Unsupported(_WHERE)

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        raise Unsupported(_WHERE)

    def values(self) -> Any:
        """Returns no values. The first call logs where the state is, for a script that wants to change it."""
        if not self._has_warned:  # a script that asks may do so in every step
            self._has_warned = True
            log.warning("%s", _WHERE)
        return super().values()

    def clear(self) -> None:
        """Makes the next step begin without any state."""
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return defaultdict(dict)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)


class ServerOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer it wraps, but `step` pushes gradients and pulls weights.

    It shares the wrapped optimizer's param_groups, so LR schedulers work, made before or after: hyper-parameters ride
    with each push. Its state (momentum, moments) lives on the shards: `state_dict` fetches it, `load_state_dict` sets
    it, and `.state` is empty.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, servers: RemoteOptimizers, index: int) -> None:
        # Deliberately not Optimizer.__init__, which would make new groups: the wrapped one's live objects are shared.
        self.__dict__.update(wrapped.__dict__)
        # Two attributes of the wrapped optimizer are not copied, as they would make it step in this process: a
        # scheduler made before `prepare` has patched its `step`, and a fused optimizer asks GradScaler to leave
        # unscaling to it.
        for name in ("step", "_step_supports_amp_scaling"):
            self.__dict__.pop(name, None)
        self._wrapped = wrapped
        stand_for(self, wrapped)
        self._servers = servers
        self._index = index
        self.__dict__["state"] = _StateOnShards(lambda: servers.load(index, {}))
        self.__class__ = _named_after(type(wrapped))  # type: ignore[arg-type]  # classes are hashable

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how to make a copy: with the groups, without the session, and of this class, which can be
        imported.
        """
        return _bare, (), self.__getstate__()

    @property
    def state(self) -> Any:
        """Empty: the state is on the shards. If a script assigns a value, the next step begins with it."""
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self._servers.load(self._index, {tensor: tensors_of(state) for tensor, state in value.items()})

    # torch's own wrapper calls step hooks, the wrapped optimizer's and the global ones. Optimizer.__init__ puts it on.
    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends this worker's step: when it returns, gradients are staged and weights are as the mode promises.

        Raises NonFiniteGradient for an infinity or a NaN (see `non_finite` of `prepare`), InvalidRequest for a model
        that was moved to another type or device, Fenced for a worker that was replaced, Unreachable for servers that
        do not answer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # schedulers made before `prepare` read it
        self._servers.step(self._index)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # keeps torch from wrapping it a second time

    def state_dict(self) -> dict[str, Any]:
        """Returns groups and state in torch's own layout, fetched from the shards: as large as the optimizer's state.

        Any worker may ask, alone or together with others; in sync it is the state at this worker's clock. Raises
        PSError if the shards do not answer, or the session is closed.
        """
        own = self.__dict__["state"]
        fetched = self._servers.state(self._index)
        self.__dict__["state"] = defaultdict(dict, {tensor: dict(state) for tensor, state in fetched.items()})
        try:
            state_dict: dict[str, Any] = super().state_dict()
            return state_dict
        finally:
            self.__dict__["state"] = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets hyper-parameters at once, and optimizer state with the next step.

        In sync rank 0's state counts; in ssp and async each worker that loads sets the state anew. A worker that joins
        a running job and loads before its first step does not set the job back: its state is ignored, with a warning.

        Raises ValueError, as torch's own, for a state_dict of other groups; InvalidRequest or Unsupported for state
        that the optimizer could not have made. Nothing is changed then.
        """
        # torch's own code does the checking and casting, on an object that nothing else refers to.
        loaded = optimizer_like(self._wrapped, [dict(group) for group in self.param_groups])
        loaded.load_state_dict(state_dict)
        self._servers.load(self._index, {tensor: tensors_of(state) for tensor, state in loaded.state.items()})
        for live, group in zip(self.param_groups, loaded.param_groups, strict=True):
            live.update({key: value for key, value in group.items() if key != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Trains more parameters of the prepared models from the next step on, with their own hyper-parameters.

        In a job with a world size it blocks until all workers have called it. The parameters become a job of their own
        on the servers, NAME.added1 for the first group. Raises Unsupported for parameters of no prepared model,
        InvalidRequest for parameters that an optimizer has already.
        """
        self._servers.add_group(self._index, param_group)


def _bare() -> ServerOptimizer:
    return ServerOptimizer.__new__(ServerOptimizer)


@cache
def _named_after(kind: type[torch.optim.Optimizer]) -> type[ServerOptimizer]:
    """Returns a class with the name of the script's own: loggers name learning rates by it, profilers steps."""
    return type(kind.__name__, (ServerOptimizer,), {"__module__": kind.__module__, "__doc__": ServerOptimizer.__doc__})


def optimizer_like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class without state. groups: its groups, which are not copied"""
    made = type(optimizer).__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's patch of the other's
    made.__dict__.update(state=defaultdict(dict), param_groups=groups)
    return made


# -- steps of other optimizers -----------------------------------------------------------------------------------------

NAMES_SHOWN = 3

# The functions called before each step. Replaced as a whole, since another thread may be iterating over it.
_watching: tuple[Callable[[Optimizer], None], ...] = ()
_changing = threading.Lock()


def watch_steps(look: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Calls `look` before each step of each optimizer in this process. Returns a function that ends this."""

    def end() -> None:
        global _watching
        with _changing:
            _watching = tuple(each for each in _watching if each is not look)

    global _watching
    with _changing:
        _watching = (*_watching, look)
    return end


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for look in _watching:
        look(optimizer)


# Of all optimizers, because a script may make others later. Never removed: torch goes through its hooks without a lock,
# and a thread that adds or removes one would break the steps of all others.
register_optimizer_step_pre_hook(_before_step)


class SteppedAlone:
    """Watches all steps of all optimizers in this process, until `close`.

    met:       called with a message when another optimizer steps the session's parameters
    steps:     how many steps the session's own optimizers have begun
    others:    how many steps other optimizers have begun, of tensors that have gradients
    is_closed: `close` was called
    """

    def __init__(self, models: Sequence[nn.Module], met: Callable[[str], None]) -> None:
        """met: called with a message before such a step of parameters of these models; it may prevent the step"""
        self.steps = self.others = 0
        self.is_closed = False
        self._models = models
        self._names = _parameter_names(models)
        self._handles = {id(table.weight) for table in named_tables(models).values()}
        self._met = met
        self._own: list[Optimizer] = []
        self._handed_over: list[Optimizer] = []
        self._replaced: list[Optimizer] = []
        self._end = watch_steps(self._before_step)

    def know(self, prepared: Sequence[Optimizer], handed_over: Sequence[Optimizer]) -> None:
        """Adds optimizers of the session, and those that the script passed to `prepare` for them."""
        self._own += prepared
        self._handed_over += [each for each in handed_over if not _is_in(each, prepared)]

    def take_over(self, prepared: Sequence[Optimizer], handed_over: Sequence[Optimizer]) -> None:
        """Adds optimizers as `know` does.

        Earlier optimizers of the session that share a parameter with them count as replaced: a step of one is reported.
        """
        taken = {id(tensor) for each in prepared for tensor in _tensors(each)}
        replaced = [each for each in self._own if any(id(tensor) in taken for tensor in _tensors(each))]
        self._own = [each for each in self._own if not _is_in(each, replaced)]
        self._replaced += replaced
        self.know(prepared, handed_over)

    def close(self) -> None:
        """Removes the hook, and forgets all optimizers."""
        self.is_closed = True
        self._end()
        self._models = ()
        self._own, self._handed_over, self._replaced = [], [], []

    def _before_step(self, optimizer: Optimizer) -> None:
        if _is_in(optimizer, self._own):
            self.steps += 1
            return
        with_gradient = [tensor for tensor in _tensors(optimizer) if tensor.grad is not None]
        self.others += bool(with_gradient)
        tensors = [tensor for tensor in _tensors(optimizer) if tensor in self._names]
        # A step changes nothing that has no gradient. So a script may keep an optimizer of old. A table's handle never
        # has one: its rows do.
        names = [self._names[each] for each in tensors if each.grad is not None or id(each) in self._handles]
        if names or _is_in(optimizer, self._replaced):
            self._met(self._message(optimizer, names))
        self._look_for_new(optimizer, with_gradient)

    def check_new(self, optimizers: Sequence[Optimizer]) -> None:
        """Reports parameters of these optimizers that the script has put into a model since `prepare`."""
        for each in optimizers:
            self._look_for_new(each, _tensors(each))

    def _look_for_new(self, optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> None:
        others = {id(tensor) for tensor in tensors if tensor not in self._names}
        if others and any(id(each) in others for model in self._models for each in model.parameters()):
            names = _parameter_names(self._models)
            new = _shown([name for tensor, name in names.items() if id(tensor) in others])
            self._met(
                f"{type(optimizer).__name__} has {new}, which came into the model after prepare: each worker would "
                "train that alone. Put new layers, heads and adapters into the model before prepare, or begin another "
                "job: session.close(), then connect(job=...) with another name, and prepare"
            )

    def _message(self, optimizer: Optimizer, names: list[str]) -> str:
        name = type(optimizer).__name__  # a prepared one has that of the script's own
        if _is_in(optimizer, self._replaced):
            return (
                f"this {name} was replaced by a later call of prepare: step the optimizer that this call has returned"
            )
        what = f"{name} steps {_shown(names)} on this worker alone: "
        if _is_in(optimizer, self._handed_over):
            return (
                f"{what}it was handed to prepare, which has returned another optimizer. Step that one: "
                "model, optimizer, loader = session.prepare(model, optimizer, loader)"
            )
        return (
            f"{what}the session trains them, and does not know this optimizer. Hand it over before its first step: "
            "optimizer = session.prepare(optimizer)"
        )


def refuse(message: str) -> None:
    """Raises InvalidRequest with a message about such a step: nothing has changed yet."""
    raise InvalidRequest(message)


def _parameter_names(models: Sequence[nn.Module]) -> dict[torch.Tensor, str]:
    """Returns the names of the models' parameters; of several models, with the model's number in front."""
    return {
        parameter: f"{number}.{name}" if len(models) > 1 else name
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {len(names) - NAMES_SHOWN} more" * (len(names) > NAMES_SHOWN))


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _is_in(optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> bool:
    return any(map(partial(is_, optimizer), optimizers))
