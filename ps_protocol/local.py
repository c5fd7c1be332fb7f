"""Local steps: the modes `local:H`, `local:H/F` and `local:Ts`, their rounds, and the outer optimizer.

A round begins with the same weights on all workers: the base. Each worker makes H steps with the script's own
optimizer, the inner one. Then it pushes the difference, base minus weights, and the servers step with the mean of the
differences as if it were a gradient. Their optimizer, SGD with momentum, is the outer one. For a shard this is `sync`
with a clock that counts rounds. It is DiLoCo (Douillard et al., 2023, https://arxiv.org/abs/2311.08105). An outer step
with lr 1 and no momentum is plain averaging.

In `local:Ts`, such as `local:30s`, a round has no fixed number of steps. Each worker ends it with its first step after
T seconds on its own clock, so a fast worker waits for one step of a slow worker at most. The mean is weighted by the
number of each worker's steps.

In `local:H/F`, such as `local:8/4`, a round pushes one of F fragments of the model at a time, and mixes the pulled
weights in some steps later (fragments.py).

Training ends worse if workers diverge from the first step on. A job therefore begins with a warm-up: rounds of one step
that average, and that push and pull the whole model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest
from ps_protocol.fragments import Fragments
from ps_protocol.hyper_parameters import HyperParameters

MAX_STEPS = 1_000_000
MAX_SECONDS = 86_400.0
MAX_WARM_UP = 1_000_000_000
OUTER_OPTIMIZER = "SGD"


@dataclass(frozen=True)
class Local:
    """The settings of a job of mode `local:H`, `local:H/F` or `local:Ts`. Rounds are numbered from 1.

    steps: H, the steps of a worker in a round after the warm-up; in `local:Ts` 1, the fewest
    warm_up: the number of rounds of one step that the job begins with
    lr, momentum, nesterov: of the outer optimizer after the warm-up; in the warm-up it has lr 1 and no momentum
    seconds: T, the duration of a round after the warm-up in `local:Ts`; None: a round has H steps
    fragments: of the model in `local:H/F`; None if the whole model is pushed, and pulled before the next round
    """

    steps: int
    warm_up: int = 64
    lr: float = 0.8
    momentum: float = 0.7
    nesterov: bool = True
    seconds: float | None = None
    fragments: Fragments | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds <= MAX_SECONDS:  # also refuses NaN
            raise InvalidRequest(f"local:Ts takes a T above 0, up to {MAX_SECONDS:g} seconds, got {self.seconds:g}")
        if self.seconds is not None and self.steps != 1:
            raise InvalidRequest(
                f"a round ends after so many steps, or after so long, got {self.steps} steps and a time"
            )
        if not 1 <= self.steps <= MAX_STEPS:
            raise InvalidRequest(f"local:H takes an H from 1 to {MAX_STEPS}, got {self.steps}")
        if self.fragments is not None and (self.seconds is not None or self.fragments.steps != self.steps):
            raise InvalidRequest(f"a round with fragments has a number of steps, and no time, got {self}")
        if not 0 <= self.warm_up <= MAX_WARM_UP:
            raise InvalidRequest(f"the warm-up of local:H has 0 to {MAX_WARM_UP} steps, got {self.warm_up}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InvalidRequest(f"the outer optimizer's lr must be a number above 0, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise InvalidRequest(f"the outer optimizer's momentum must be from 0 to below 1, got {self.momentum}")

    @property
    def mode(self) -> str:
        """The name of the mode."""
        if self.fragments is not None:
            return f"local:{self.steps}/{self.fragments.count}"
        return f"local:{self.steps}" if self.seconds is None else f"local:{self.seconds:g}s"

    def ends_by_time(self, round_number: int) -> bool:
        """Whether a round ends after T seconds instead of a number of steps."""
        return self.seconds is not None and round_number > self.warm_up

    def is_streamed(self, round_number: int) -> bool:
        """Whether a round pushes the model fragment by fragment."""
        return self.fragments is not None and round_number > self.warm_up

    @property
    def delay(self) -> int:
        """The number of steps by which rounds with fragments end later than they would without a delay."""
        return 0 if self.fragments is None else self.fragments.delay

    def steps_of(self, round_number: int) -> int:
        """Returns the number of steps of a round; if it ends by time, the fewest."""
        if round_number <= self.warm_up:
            return 1
        return self.steps + (self.delay if round_number == self.warm_up + 1 else 0)

    def clock(self, rounds: int) -> int:
        """Returns the number of steps in the first `rounds` rounds of a job; of rounds that end by time, the fewest."""
        warm = min(rounds, self.warm_up)
        return warm + (rounds - warm) * self.steps + (self.delay if rounds > warm else 0)

    def averages(self, round_number: int) -> bool:
        """Whether the weights after a round are the mean of the workers' own."""
        return round_number <= self.warm_up or (self.lr == 1 and not self.momentum)

    def outer(self, round_number: int) -> HyperParameters:
        """Returns the outer optimizer's hyper-parameters in a round."""
        warm = round_number <= self.warm_up
        momentum = 0.0 if warm else self.momentum
        return {
            "lr": 1.0 if warm else self.lr,
            "momentum": momentum,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": self.nesterov and momentum > 0,  # torch.optim.SGD refuses nesterov without momentum
            "maximize": False,
        }
