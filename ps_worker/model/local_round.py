"""A round of local steps (modes `local:H`, `local:H/F` and `local:Ts`): when fragments are pushed, and their
differences.

base       The weights of the servers that a round begins with (base.py).
leaves     The difference base - weights is pushed like a gradient, and the pulled weights are the next base. In local:H
           the whole model is pushed with the round's last step.
fragments  In local:H/F each fragment of the model is pushed at a step of its own. Its pulled weights are mixed into the
           model's some steps later; the script has stepped these meanwhile (schedule: ps_protocol/fragments.py). The
           round is over when its last fragment is mixed in. Mode local:H has one fragment without a delay, and so has
           each round of the warm-up.
time       A round of local:Ts ends with its first step after T seconds. Its difference is weighted by its steps.
group      Where the worker is a group of processes, all of them push a round, or a fragment, or leave it out: they
           agree before any of them makes its difference. Fragments are of the buckets of all members together.
averaging  If one worker trains and the servers average, the result of a round is its own weights. They are sent as an
           assignment: base - (base - w) would equal w except for rounding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.fragments import Fragments
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import BucketSpec
from ps_protocol.local import Local
from ps_protocol.messages.data import BucketPush
from ps_runtime.troubles import Troubles
from ps_worker.metrics import WorkerMetrics
from ps_worker.model.step import EndedStep, StepMaker

log = logging.getLogger("ps_worker")


class LocalRound:
    """Makes the pushes of rounds, one after the other. For the training thread.

    number:    the current round's, from 1
    made:      the steps made in it
    before:    counts the steps made before it, if rounds end by time; otherwise None: the job's settings give their
               number
    left_out:  the last round was left out of the mean, because its weights were not finite
    fragments: the schedule of the fragments; one fragment without a delay if the model is pushed as a whole
    pushed:    how many fragments of the current round have been pushed
    """

    def __init__(self, spec: JobSpec, local: Local, steps: StepMaker, metrics: WorkerMetrics) -> None:
        self._spec, self._local, self._steps, self._metrics = spec, local, steps, metrics
        self._base, self._weights = steps.model.base, steps.model.weights
        self._trained = steps.model.layout.trained
        self.number, self.made, self.pushed = 1, 0, 0
        self.before: MadeSteps | None = None if local.seconds is None else MadeSteps(self)
        self.left_out = False
        self.fragments = local.fragments or Fragments(local.steps, 1)
        self._began = 0.0
        self._skipped = Troubles(log, None)  # ps_worker_non_finite_total counts them
        of_all = [bucket.index for bucket in steps.model.layout.buckets if not bucket.frozen]
        self._fragment_of = {index: self.fragments.of(position) for position, index in enumerate(of_all)}
        if len(of_all) < self.fragments.count:
            log.warning(
                "%d of %d fragments are empty: the model has %d buckets that train. Smaller buckets "
                "(prepare(..., bucket_bytes=)) fill them",
                *(self.fragments.count - len(of_all), self.fragments.count, len(of_all)),
            )

    def begin(self, clock: int) -> None:
        """Begins the round after `clock` rounds, with the pulled weights as its base."""
        if self.before is not None:
            self.before.begin(clock)
        self.number, self.made, self.pushed = clock + 1, 0, 0
        self._base.keep()
        self._began = time.monotonic()

    @property
    def steps(self) -> int:
        """The steps since the job began: the job's; if rounds end by time, this worker's."""
        before = self._local.clock(self.number - 1) if self.before is None else self.before.count
        return before + self.made

    @property
    def is_full(self) -> bool:
        """Whether the round is due to end: it has all its steps and, if it ends by time, T seconds are over."""
        if self.made < self._local.steps_of(self.number):
            return False
        is_timed = self._local.ends_by_time(self.number)
        return not is_timed or time.monotonic() - self._began >= (self._local.seconds or 0.0)

    def stepped(self) -> None:
        """Counts a step."""
        self.made += 1

    def begin_anew(self) -> None:
        """Begins the current round again: sets the weights back to its base."""
        self.made = 0
        self._base.go_back()

    def agree(self, compare: Callable[[Callable[[], tuple[None, bool]]], tuple[None, bool]]) -> bool:
        """Returns whether the round, or the next fragment, is pushed: by all members of the group, or by none.

        compare: as Group.any_through. Raises as `may_count`, on all of them; then nothing of it must be pushed.
        """
        made = self.made
        try:
            _, self.left_out = compare(lambda: (None, not self.may_count()))
        except NonFiniteGradient:
            self.made = max(0, made - 1)
            raise
        return not self.left_out

    def may_count(self) -> bool:
        """Whether the weights at hand may count. Raises NonFiniteGradient, or as `Weights.gather`, if they must not be
        pushed.
        """
        self.left_out = False
        if not self._base.is_there:  # a push failed: the differences that no shard has are lost
            return False
        self._weights.gather()
        name = self._base.not_finite()
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

    # -- the whole model -----------------------------------------------------------------------------------------------

    def end(self, optimizer: int) -> EndedStep:
        """Ends the round with its difference, if it may count."""
        self._base.subtract()
        weight = 0 if self._local.seconds is None else self.made
        return EndedStep(optimizer, set(), self._now(), False, self._steps.tables.left_out(), float(weight))

    def end_empty(self) -> EndedStep:
        """Ends the round as one without a difference, which the mean leaves out."""
        return EndedStep(None, set(), self._now(), drafts_hold=False, rows=self._steps.tables.left_out())

    def _now(self) -> list[dict[str, Any]]:
        return [dict(self._local.outer(self.number))]

    # -- fragment by fragment ------------------------------------------------------------------------------------------

    @property
    def is_streamed(self) -> bool:
        """Whether the round at hand pushes the model fragment by fragment."""
        return self._local.is_streamed(self.number)

    @property
    def step(self) -> int:
        """The number of the last step made, as `Fragments` counts steps."""
        return self.made + (0 if self.number == self._local.warm_up + 1 else self.fragments.delay)

    @property
    def leaving(self) -> int | None:
        """The number of the fragment that is due to be pushed; None if none is."""
        is_due = self.pushed < self.fragments.count and self.step >= self.fragments.leaves(self.pushed)
        return self.pushed if is_due else None

    def buckets(self, first: int, last: int) -> list[BucketSpec]:
        """Returns the buckets of the fragments `first` to `last`, both inclusive, that this process pushes."""
        numbers = range(first, last + 1)
        return [bucket for bucket in self._trained if self._fragment_of[bucket.index] in numbers]

    def leave(self, fragment: int, clock: int, is_pushed: bool) -> list[BucketPush]:
        """Returns the pushes of a fragment. Call `left` once they are sent.

        is_pushed: the answer of `agree`. If False, the pushes are empty, and all weights go back to the base
        """
        buckets, step = self.buckets(fragment, fragment), self.end_empty()
        if is_pushed:
            step = self.whole()
            self._base.leave(buckets)
        elif self.left_out:
            self._base.go_back()
        return self._steps.pushes(step, clock, (), buckets)

    def leave_rest(self) -> None:
        """Computes the differences of all fragments that the round has not pushed, if they may count."""
        self._base.leave(self.buckets(self.pushed, self.fragments.count - 1))

    def whole(self) -> EndedStep:
        """Returns the round as one step, whose differences are computed already."""
        return EndedStep(0, set(), self._now(), False, self._steps.tables.left_out())

    def left(self) -> None:
        """Records that the next fragment has been pushed."""
        self.pushed += 1

    def leave_out(self, clock: int, first: int) -> list[BucketPush]:
        """Returns empty pushes of the fragments from `first` on, which have not been pushed in the current round, for a
        worker that leaves. All fragments then reach the same round.
        """
        rest = self.buckets(first, self.fragments.count - 1)
        self.pushed = self.fragments.count
        return self._steps.pushes(self.end_empty(), clock, (), rest)

    def land(self, fragment: int) -> None:
        """Mixes the pulled weights of a fragment into the model's."""
        self._steps.model.end_pull(is_part=True)
        self._base.mix(self.buckets(fragment, fragment), self.fragments.mixing)


class MadeSteps:
    """Counts the steps that this worker has made before the current round, if rounds end by time. Part of its own
    state.

    A worker without a state begins with one step for each earlier round.
    """

    def __init__(self, round_at_hand: LocalRound) -> None:
        self._round = round_at_hand
        self._is_new = True
        self.count = 0

    def begin(self, clock: int) -> None:
        """Records that the round after `clock` rounds begins. Steps of a round that is begun again do not count."""
        if self._is_new:
            self.count, self._is_new = clock, False
        elif clock >= self._round.number:
            self.count += self._round.made

    def state_dict(self) -> dict[str, int]:
        """Returns the number of steps, including those of the current round."""
        return {"steps": self.count + self._round.made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes back to a number of steps. Those of the current round do not count."""
        self.count, self._is_new = state["steps"], False
        self._round.made = 0
