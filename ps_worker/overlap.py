"""Which buckets may leave while backward still runs.

A bucket is full when backward has finished every gradient in it. It may leave at once only if nothing changes
gradients or hyper-parameters between backward and step: clipping, unscaling, a second backward, a new learning rate.
What a script does is watched for a few steps before any bucket leaves early; if it is seen to change something, none
ever does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

from ps_protocol.errors import Unsupported
from ps_protocol.layout import Bucket

log = logging.getLogger("ps_worker")

WATCHED_STEPS = 2


class Overlap:
    """The state of one worker's step.

    wanted: True lets buckets leave early from the first step, False never, None after WATCHED_STEPS quiet steps
    """

    def __init__(self, buckets: Sequence[Bucket], wanted: bool | None) -> None:
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self._members = {b.index: {segment.parameter for segment in b.segments} for b in buckets}
        self._of: dict[int, list[int]] = {}  # by parameter, the buckets it lies in
        for index, members in self._members.items():
            for parameter in members:
                self._of.setdefault(parameter, []).append(index)
        self._wanted = wanted
        self._quiet_steps = 0
        self.paused = False  # inside no_sync
        self._begin()

    def _begin(self) -> None:
        self._missing = {index: len(members) for index, members in self._members.items()}
        self._seen: set[int] = set()
        self._repeated = False
        self._versions: list[int] | None = None
        self.left: set[int] = set()  # buckets that have left in this step

    def abandon(self) -> None:
        """This step counts no more: the next backward begins a new one."""
        self._begin()

    @property
    def active(self) -> bool:
        """Whether full buckets leave during backward."""
        return self._wanted is True or (self._wanted is None and self._quiet_steps >= WATCHED_STEPS)

    def ready(self, parameter: int, versions: list[int]) -> list[Bucket]:
        """Backward has finished a parameter's gradient: the buckets that may leave now."""
        self._versions = versions
        if self.paused:
            return []
        if parameter in self._seen:
            self._repeated = True
            if any(index in self.left for index in self._of[parameter]):
                raise Unsupported(
                    "a second backward before optimizer.step(), when buckets of the first have left already: wrap all "
                    "but the last in model.no_sync(), or use prepare(..., overlap=False)"
                )
            return []
        self._seen.add(parameter)
        full = []
        for index in self._of.get(parameter, ()):
            self._missing[index] -= 1
            if self._missing[index] == 0 and self.active and not self._repeated:
                full.append(self._buckets[index])
                self.left.add(index)
        return full

    def finish(self, versions: list[int], absent: Set[int] = frozenset(), moved: bool = False) -> tuple[bool, set[int]]:
        """`optimizer.step()` begins: whether gradients were changed since backward, and the buckets that have left.

        absent: the parameters without a gradient; one that backward had made is taken away again
        moved:  whether hyper-parameters are others than when backward began

        Raises Unsupported if they were changed when some of them had left.
        """
        changed = (self._versions is not None and versions != self._versions) or not self._seen.isdisjoint(absent)
        left, unusual = self.left, changed or moved or self._repeated
        self._begin()
        if (changed or moved) and left:
            raise Unsupported(
                "gradients or hyper-parameters were changed between backward and optimizer.step() (clipping, "
                "unscaling, a learning rate), when buckets had left already: use prepare(..., overlap=False)"
            )
        if unusual and self._wanted is None:
            log.info("gradients are changed after backward: buckets leave at optimizer.step()")
            self._wanted = False
        self._quiet_steps += 1
        return changed, left
