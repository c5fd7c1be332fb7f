"""Decides which buckets are sent while backward still runs.

A bucket is full when backward has finished every gradient in it. It is then sent as a draft, which counts only if
`optimizer.step()` confirms it: a script may still clip, scale or drop gradients, run backward again, or skip the step.
If it does, the drafts are dropped and the whole step is sent in `step()`. That costs bytes. So a script is watched for
a few steps before the first draft, and for longer after each such surprise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

from ps_protocol.layout import BucketSpec

log = logging.getLogger("ps_worker")

WATCHED_STEPS = 2
LONGEST_WATCH_STEPS = 4096


class Overlap:
    """Which gradients of one optimizer's step are finished, and which buckets are sent early.

    buckets:    the buckets of its parameters. One that also has other parameters is never sent early
    wanted:     True: send early in every step; False: never; None: after some steps without a surprise
    parameters: the parameters that the optimizer steps; None: all in these buckets
    """

    def __init__(self, buckets: Sequence[BucketSpec], wanted: bool | None, parameters: Set[int] | None = None) -> None:
        self.spaces = {bucket.space for bucket in buckets}
        self._buckets = {bucket.index: bucket for bucket in buckets}
        everything = {b.index: {part.parameter for part in b.slices} for b in buckets}
        self._members = {
            index: members if parameters is None else members.intersection(parameters)
            for index, members in everything.items()
        }
        self._shared = {index for index, members in everything.items() if members != self._members[index]}
        self._of: dict[int, list[int]] = {}  # by parameter, the buckets it lies in
        for index, members in self._members.items():
            for parameter in members:
                self._of.setdefault(parameter, []).append(index)
        self._wanted = wanted
        self._quiet_steps = 0
        self._watched_steps = WATCHED_STEPS
        self.paused = False  # inside no_sync
        self._begin()

    @property
    def parameters(self) -> Set[int]:
        """The parameters of the buckets."""
        return self._of.keys()

    def _begin(self) -> None:
        self._missing = {index: len(members) for index, members in self._members.items()}
        self._seen: set[int] = set()
        self._repeated = False
        self._marks: list[int] | None = None

    def abandon(self) -> None:
        """Forgets the current step: the next backward begins a new one."""
        self._begin()

    @property
    def active(self) -> bool:
        """Whether full buckets are sent during backward."""
        return self._wanted is True or (self._wanted is None and self._quiet_steps >= self._watched_steps)

    def ready(self, parameter: int, marks: list[int]) -> list[BucketSpec]:
        """Notes that backward has finished a parameter's gradient. Returns the buckets to send now.

        marks: Gradients.marks at this moment
        """
        self._marks = marks
        if self.paused:
            return []
        if parameter in self._seen:  # a second backward: no bucket is what it was
            self._repeated = True
            return []
        self._seen.add(parameter)
        full = []
        for index in self._of.get(parameter, ()):
            self._missing[index] -= 1
            is_full = self._missing[index] == 0 and index not in self._shared
            if is_full and self.active and not self._repeated:
                full.append(self._buckets[index])
        return full

    def finish(self, marks: list[int], absent: Set[int] = frozenset()) -> tuple[bool, bool]:
        """Ends the step. Returns whether gradients were changed since backward, and whether drafts are still valid.

        marks:  Gradients.marks at this moment
        absent: the parameters without a gradient. If backward had made one, the script has removed it
        """
        changed = (self._marks is not None and marks != self._marks) or not self._seen.isdisjoint(absent)
        surprised = changed or self._repeated
        if surprised and self.active and self._wanted is None:
            self._watched_steps = min(2 * self._watched_steps, LONGEST_WATCH_STEPS)
            log.info(
                "gradients changed after backward: for the next %d steps all of them leave at optimizer.step()",
                self._watched_steps,
            )
        self._quiet_steps = 0 if surprised else self._quiet_steps + 1
        self._begin()
        return changed, not surprised
