"""A round whose model is pushed fragment by fragment (mode `local:H/F`): which one is due, and what is pushed of it.

leaves  After a step at which a fragment is due, its weights are taken from its base: the difference, which is pushed.
lands   What was pulled of it is its next base. After the delay it is mixed into the weights, which the script has
        stepped meanwhile.
over    The round is over when its last fragment is mixed in. The warm-up has rounds of the whole model, as local:H.

ps_protocol/fragments.py says when.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_worker.model.local_round import LocalRound
from ps_worker.model.separate_base import SeparateBase
from ps_worker.model.step import EndedStep, StepMaker
from ps_worker.values import BucketPush

log = logging.getLogger("ps_worker")


def step_maker(spec: JobSpec) -> type[StepMaker]:
    """Returns what makes the pushes of a job."""
    if spec.local is None:
        return StepMaker
    return LocalRound if spec.local.fragments is None else StreamedRound


class StreamedRound(LocalRound):
    """Makes the pushes of fragments, one after the other, and those of the rounds of the warm-up.

    fragments: when each is due
    pushed:    how many fragments of the round at hand have been pushed
    """

    def __init__(self, spec: JobSpec, *arguments: Any, **more: Any) -> None:
        super().__init__(spec, *arguments, **more)
        assert self._local.fragments is not None
        assert isinstance(self.model.base, SeparateBase)
        self.fragments = self._local.fragments
        self.pushed = 0
        self._base: SeparateBase = self.model.base
        if len(self._trained) < self.fragments.count:
            log.warning(
                "%d of %d fragments are empty: the model has %d buckets that train. Smaller buckets "
                "(prepare(..., bucket_bytes=)) fill them",
                *(self.fragments.count - len(self._trained), self.fragments.count, len(self._trained)),
            )

    def begin(self, clock: int) -> None:
        """Begins the round after so many others; nothing is under way."""
        super().begin(clock)
        self.pushed = 0

    @property
    def is_streamed(self) -> bool:
        """Whether the round at hand pushes the model fragment by fragment."""
        return self._local.is_streamed(self.number)

    @property
    def step(self) -> int:
        """The last step that was made, as `Fragments` counts them."""
        return self.made + (0 if self.number == self._local.warm_up + 1 else self.fragments.delay)

    @property
    def leaving(self) -> int | None:
        """The fragment that is to be pushed now, or was to be before, and an interrupt came; None: none is."""
        is_due = self.pushed < self.fragments.count and self.step >= self.fragments.leaves(self.pushed)
        return self.pushed if is_due else None

    def buckets(self, first: int, last: int) -> list[BucketSpec]:
        """Returns the buckets of these fragments: from `first` to `last`, with both."""
        numbers = range(first, last + 1)
        return [bucket for number, bucket in enumerate(self._trained) if self.fragments.of(number) in numbers]

    def leave(self, fragment: int, clock: int) -> list[BucketPush]:
        """Returns the pushes of a fragment, which `left` follows. Where the weights are not finite and the job leaves
        such out, they are empty, and all weights are their base again. Raises InvalidRequest or NonFiniteGradient, as
        `end`, and nothing of the fragment is to be pushed then.
        """
        buckets, step = self.buckets(fragment, fragment), self.end_empty()
        if self._is_pushed():
            step = self.whole()
            self._base.leave(buckets)
        elif self.left_out:
            self._base.go_back()
        return self._pushes(buckets, step, clock)

    def leave_rest(self) -> bool:
        """Makes the differences of the fragments that the round has not pushed; returns whether they may be pushed.
        Raises as `leave`."""
        if not self._is_pushed():
            return False
        self._base.leave(self.buckets(self.pushed, self.fragments.count - 1))
        return True

    def whole(self) -> EndedStep:
        """Returns the round as one step of all fragments, whose differences are made."""
        return EndedStep(0, set(), self._now(), False, self.tables.left_out())

    def left(self) -> None:
        """Notes that the next fragment is on its way."""
        self.pushed += 1

    def leave_out(self, clock: int) -> list[BucketPush]:
        """Returns empty pushes of the fragments that the round at hand has not pushed, for a worker that leaves in it:
        so all fragments come to the same round."""
        rest = self.buckets(self.pushed, self.fragments.count - 1)
        self.pushed = self.fragments.count
        return self._pushes(rest, self.end_empty(), clock)

    def land(self, fragment: int) -> None:
        """Mixes what was pulled of a fragment into the weights."""
        self.model.end_pull(is_part=True)
        self._base.mix(self.buckets(fragment, fragment), self.fragments.mixing)

    def _pushes(self, buckets: Sequence[BucketSpec], step: EndedStep, clock: int) -> list[BucketPush]:
        return [self._push(bucket, step, clock, ()) for bucket in buckets]
