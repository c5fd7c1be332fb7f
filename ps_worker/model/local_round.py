"""A round of local steps, as it is pushed: what the script's own steps took from the weights that it began with.

base       The weights of the servers that a round begins with (base.py).
ends       The weights are taken from the base: the difference. It is pushed like a gradient, and the weights that are
           pulled are the next base.
averaging  Where one worker trains and the servers average, the result of a round is its own weights. They are sent as
           they are: base - (base - w) is w but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.local import Local
from ps_protocol.modes import local_steps
from ps_worker.model.step import EndedStep, StepMaker


def outer_optimizer(local: Local, parameters: list[torch.Tensor]) -> torch.optim.SGD:
    """Returns the optimizer that is the servers', with its hyper-parameters of after the warm-up."""
    return torch.optim.SGD(parameters, **local.outer(local.warm_up + 1))  # type: ignore[arg-type]


def local_settings(mode: str, outer: Mapping[str, Any]) -> Local | None:
    """Returns the settings of a job of mode local:H; None in another mode. Raises InvalidRequest for wrong ones, in
    every mode: the same script runs in all of them.

    outer: as for `prepare`
    """
    steps = local_steps(mode)
    known = {"lr": (int, float), "momentum": (int, float), "nesterov": (bool,), "warm_up": (int,)}
    for name, value in outer.items():
        if name not in known:
            raise InvalidRequest(f"outer takes {', '.join(known)}, got {name!r}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and name != "nesterov"):
            what = {"nesterov": "True or False", "warm_up": "a whole number"}.get(name, "a number")
            raise InvalidRequest(f"outer[{name!r}] is {what}, got {value!r}")
    given: dict[str, Any] = {
        name: float(value) if name in ("lr", "momentum") else value for name, value in outer.items()
    }
    settings = Local(steps or 1, **given)
    return settings if steps is not None else None


class LocalRound(StepMaker):
    """Makes the pushes of rounds, one after the other.

    number:   of the round at hand, from 1
    made:     steps that were made in it
    left_out: the last round was left out of the mean: its weights were not finite
    """

    def __init__(self, spec: JobSpec, *arguments: Any, **more: Any) -> None:
        super().__init__(spec, *arguments, **more)
        assert spec.local is not None
        self._local = spec.local
        self.number, self.made = 1, 0
        self.left_out = False

    def begin(self, clock: int) -> None:
        """Begins the round after so many others, with the weights that have been pulled as its base."""
        self.number, self.made = clock + 1, 0
        self.model.base.keep()

    @property
    def steps(self) -> int:
        """Steps made since the job began."""
        return self._local.clock(self.number - 1) + self.made

    @property
    def is_full(self) -> bool:
        """Whether the round has all its steps."""
        return self.made >= self._local.steps_of(self.number)

    def begin_anew(self) -> None:
        """Takes back what was made of the weights in this round."""
        self.made = 0
        self.model.base.go_back()

    def end(self, optimizer: int) -> EndedStep:
        """Ends the round with the difference. Raises InvalidRequest or NonFiniteGradient if it must not be pushed."""
        if not self._is_pushed():
            return self.end_empty()
        self.model.base.subtract()
        return EndedStep(optimizer, set(), self._now(), drafts_hold=False, rows=self.tables.left_out())

    def end_alone(self) -> bool:
        """Ends the round of the only worker of a job; returns whether its weights are the round's result.

        Raises as `end`.
        """
        return self._is_pushed()

    def end_empty(self) -> EndedStep:
        """Ends a round that counts as none."""
        return EndedStep(None, set(), self._now(), drafts_hold=False, rows=self.tables.left_out())

    def _now(self) -> list[dict[str, Any]]:
        return [dict(self._local.outer(self.number))]

    def _is_pushed(self) -> bool:
        """Whether the weights at hand may count. Raises NonFiniteGradient if they are to be refused."""
        self.left_out = False
        if not self.model.base.is_there:  # calls have failed that were to push them: what no shard has got is lost
            return False
        self.model.weights.gather()
        name = self.model.base.not_finite()
        if name is None:
            self._skipped.over("weights")
            return True
        self._metrics.not_finite()
        if self._spec.non_finite is NonFinite.REFUSE:
            self.made = max(0, self.made - 1)  # this step does not count
            raise NonFiniteGradient(
                f"{name} is not finite after the steps of this round; nothing of the round was pushed. "
                "session.global_weights() has the weights that it began with "
                "(prepare(..., non_finite='skip') leaves out such rounds instead)"
            )
        self._skipped.met("weights", "%s is not finite after the steps of round %d; it is skipped", name, self.number)
        self.left_out = True
        return False
