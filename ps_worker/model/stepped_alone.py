"""Detects steps of other optimizers on a session's parameters: each worker would then train them alone.

There are three such habits. A script makes a new optimizer over the prepared model for its next stage. It puts a layer
into the prepared model, such as a new head or an adapter, and makes an optimizer for that. Or it steps the optimizer
that it has passed to `prepare` instead of the one that was returned. In one process all are right. In DDP the first is
right, because there the model averages the gradients, and not the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ps_protocol.errors import InvalidRequest
from ps_worker.tables.modules import named_tables

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
