"""The optimizer that `prepare` returns: the user's own to look at, stepped on the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ps_protocol.errors import Unsupported


class ServerOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer it wraps; `step` pushes gradients and pulls weights instead of computing.

    It shares the wrapped optimizer's param_groups, so LR schedulers work, made before or after: hyper-parameters ride
    with each push. Its state (momentum, moments) lives on the shards.
    """

    def __init__(self, wrapped: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        # Deliberately not Optimizer.__init__, which would make new groups: the wrapped one's live objects are shared.
        self.__dict__.update(wrapped.__dict__)
        # What hides in there and would step here instead: a scheduler made before `prepare` patched the wrapped
        # optimizer's `step`, and a fused one asks GradScaler to leave unscaling to it.
        for name in ("step", "_step_supports_amp_scaling"):
            self.__dict__.pop(name, None)
        self._wrapped = wrapped
        self._step_on_servers = step

    # torch's own wrapper calls step hooks, the wrapped optimizer's and the global ones. Optimizer.__init__ puts it on.
    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends this worker's step: when it returns, gradients are staged and weights are as the mode promises."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # what schedulers made before `prepare` look at
        self._step_on_servers()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps it no second time

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a job's parameters are fixed when it is registered."""
        raise Unsupported("a job's parameters are fixed; give the optimizer all its groups before prepare")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over hyper-parameters. Refused if there is optimizer state: that lives on the shards."""
        if state_dict.get("state"):
            raise Unsupported("this state_dict holds optimizer state, which lives on the shards")
        for live, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            live.update({key: value for key, value in loaded.items() if key != "params"})
