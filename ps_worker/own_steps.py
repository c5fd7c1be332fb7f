"""Steps that a session does not see: a prepared model that an optimizer steps which `prepare` has not returned.

A worker would train alone then, and nothing would look wrong: the loss goes down, and each worker has weights of its
own. So every step of every optimizer of the process passes a hook. It raises before the step of one that has prepared
parameters and is not the session's, such as the optimizer that the script had before `prepare`, or a fresh one for the
next stage of its training.

Three kinds of optimizers pass: those over other parameters (a server's in this process, of a copy of the model), one
that is stepped inside a step of the session's own (SAM's), and one that wraps the session's own (Lookahead).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ps_protocol.errors import InvalidRequest
from ps_worker.tables.modules import named_tables

log = logging.getLogger("ps_worker")

# What the open sessions of this process have returned. One session may train what an earlier one has left open.
_known = weakref.WeakSet[torch.optim.Optimizer]()


class OwnSteps:
    """Sees to it that the models of one session are stepped by that session's optimizers.

    stepped: one of them has begun a step
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.stepped = False
        self._raised = False
        self._own = list(optimizers)
        _known.update(self._own)
        # A table's handle may have an optimizer of its own, made at any time: its rows ride with the next push.
        handles = {id(table.weight) for table in named_tables(models).values()}
        self._parameters = {
            id(parameter): (key, weakref.ref(parameter))
            for model in models
            for key, parameter in model.named_parameters()
            if id(parameter) not in handles
        }
        # The hook would keep this object, and with it the models, for a session that is never closed.
        this = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = this()
            if steps is not None:
                steps._stepping(optimizer)

        self._hook = register_optimizer_step_pre_hook(hook)

    def warn_of_none(self) -> None:
        """Warns where the models have gradients, and no optimizer of the session was ever stepped."""
        if self.stepped or self._raised or not self._have_gradients():
            return
        log.warning(
            "no step was made through this session, and its models have gradients: train with the model and the "
            "optimizer that session.prepare returns (model, optimizer = session.prepare(model, optimizer))"
        )

    def close(self) -> None:
        """Lets every optimizer step the models again."""
        self._hook.remove()
        for optimizer in self._own:
            _known.discard(optimizer)

    def _have_gradients(self) -> bool:
        tensors = (reference() for _, reference in self._parameters.values())
        return any(tensor is not None and tensor.grad is not None for tensor in tensors)

    def _stepping(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in _known:  # all that a step of the session's own costs
            self.stepped = self.stepped or any(optimizer is own for own in self._own)
            return
        name = self._name_of_one(optimizer)
        if name is None or _wraps_known(optimizer) or _is_in_step_of_known():
            return
        self._raised = True
        raise InvalidRequest(self._message(optimizer, name))

    def _name_of_one(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Returns the name of a parameter of these models that an optimizer has."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name, reference = self._parameters.get(id(parameter), ("", None))
                if reference is not None and reference() is parameter:
                    return name
        return None

    def _message(self, optimizer: torch.optim.Optimizer, name: str) -> str:
        return (
            f"{type(optimizer).__name__} steps {name} of a prepared model, and session.prepare has not returned this "
            "optimizer: this worker would train alone. Write model, optimizer = session.prepare(model, optimizer) and "
            "step what that returns. For a next stage with a new optimizer, close the session, connect with another "
            'job name (job="NAME-stage2") and prepare the model with it: it starts from the weights that it has'
        )


def _wraps_known(optimizer: torch.optim.Optimizer) -> bool:
    values = vars(optimizer).values()
    return any(isinstance(value, torch.optim.Optimizer) and value in _known for value in values)


def _is_in_step_of_known() -> bool:
    """Whether a caller is the `step` of an optimizer that a session has returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.optim.Optimizer) and caller in _known:
                return True
        frame = frame.f_back
    return False
