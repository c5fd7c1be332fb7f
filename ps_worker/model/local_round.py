"""A round of local steps, as it is pushed: what the script's own steps took from the weights that it began with.

base       The weights of the servers that a round begins with (base.py).
ends       The weights are taken from the base: the difference. It is pushed like a gradient, and the weights that are
           pulled are the next base.
time       A round of local:Ts ends with its first step after so long. Its difference weighs the steps that were made.
averaging  Where one worker trains and the servers average, the result of a round is its own weights. They are sent as
           they are: base - (base - w) is w but for rounding.
"""

from __future__ import annotations

import time
from typing import Any

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.job import JobSpec, NonFinite
from ps_worker.model.step import EndedStep, StepMaker


class LocalRound(StepMaker):
    """Makes the pushes of rounds, one after the other.

    number:   of the round at hand, from 1
    made:     steps that were made in it
    before:   steps that were made before it, where the job's settings do not say: rounds end by time
    left_out: the last round was left out of the mean: its weights were not finite
    """

    def __init__(self, spec: JobSpec, *arguments: Any, **more: Any) -> None:
        super().__init__(spec, *arguments, **more)
        assert spec.local is not None
        self._local = spec.local
        self.number, self.made = 1, 0
        self.before: MadeSteps | None = None if spec.local.seconds is None else MadeSteps(self)
        self._began = 0.0
        self.left_out = False

    def begin(self, clock: int) -> None:
        """Begins the round after so many others, with the weights that have been pulled as its base."""
        if self.before is not None:
            self.before.begin(clock)
        self.number, self.made = clock + 1, 0
        self.model.base.keep()
        self._began = time.monotonic()

    @property
    def steps(self) -> int:
        """Steps made since the job began: the job's, or where rounds end by time this worker's own."""
        before = self._local.clock(self.number - 1) if self.before is None else self.before.count
        return before + self.made

    @property
    def is_full(self) -> bool:
        """Whether the round has all its steps."""
        if self.made < self._local.steps_of(self.number):
            return False
        is_timed = self._local.ends_by_time(self.number)
        return not is_timed or time.monotonic() - self._began >= (self._local.seconds or 0.0)

    def stepped(self) -> None:
        """Ends a step."""
        self.made += 1

    def begin_anew(self) -> None:
        """Takes back what was made of the weights in this round."""
        self.made = 0
        self.model.base.go_back()

    def end(self, optimizer: int) -> EndedStep:
        """Ends the round with the difference. Raises NonFiniteGradient, or as `Weights.gather`, if it may not leave."""
        if not self._is_pushed():
            return self.end_empty()
        self.model.base.subtract()
        weight = 0 if self._local.seconds is None else self.made
        return EndedStep(optimizer, set(), self._now(), False, self.tables.left_out(), float(weight))

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


class MadeSteps:
    """How many steps this worker has made before the round at hand, where rounds end by time: part of its own state.

    A worker without a state begins with the least that the job's rounds are: one step each.
    """

    def __init__(self, round_at_hand: LocalRound) -> None:
        self._round = round_at_hand
        self._is_new = True
        self.count = 0

    def begin(self, clock: int) -> None:
        """Begins the round after so many. What was made of a round that another one replaces does not count."""
        if self._is_new:
            self.count, self._is_new = clock, False
        elif clock >= self._round.number:
            self.count += self._round.made

    def state_dict(self) -> dict[str, int]:
        """Returns how many steps there were, those of the round at hand included."""
        return {"steps": self.count + self._round.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes back to so many steps; what was made of the round at hand does not count."""
        self.count, self._is_new = state["steps"], False
        self._round.made = 0
