"""A pull under way: which buckets are still to come, and where the elements of each belong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ps_frames.sockets import nothing
from ps_protocol.framing import split_head, split_message
from ps_protocol.layout import BucketSpec
from ps_runtime.troubles import Troubles
from ps_worker.values import PulledBucket, PullResult

log = logging.getLogger("ps_worker")

# Reads a message of the answer to a pull: its fields, and its payload; None: the elements are not here yet, or nowhere.
Read = Callable[[bytes, memoryview | None], Sequence[PulledBucket]]


@dataclass(frozen=True)
class PullPlan:
    """What is done with a pull.

    request: makes the request for buckets of these indices
    read:    takes a message of the answer apart
    land:    takes a bucket over; returns its bytes
    place:   returns where the elements of a bucket, so many bytes, may be put before it lands, if anywhere. Raises
             InvalidRequest if they cannot be the bucket's
    """

    request: Callable[[list[int]], bytes]
    read: Read
    land: Callable[[BucketSpec, PulledBucket], int]
    place: Callable[[BucketSpec, PulledBucket, int], memoryview | None] | None = None


class Landing:
    """A pull of buckets at a clock. For one thread at a time. waits: told of what it waits for"""

    def __init__(self, plan: PullPlan, clock: int, buckets: Sequence[BucketSpec], waits: Troubles) -> None:
        self._plan, self._clock, self._waits = plan, clock, waits
        self._missing = {bucket.index: bucket for bucket in buckets}
        self._sizes: dict[str, int] = {}
        self._longest, self._checkpoint, self._has_waited = 0.0, False, False
        self._fields = b""
        self._coming: PulledBucket | None = None  # its elements are on their way
        self.progressed: Callable[[], None] = nothing  # is called with each message

    @property
    def is_done(self) -> bool:
        """Whether all buckets have landed."""
        return not self._missing

    def request(self) -> bytes:
        """Returns the request for what is missing."""
        return self._plan.request(list(self._missing))

    def result(self) -> PullResult:
        """Returns what came of it, when it is done."""
        if not self._has_waited:  # it is over with the first pull that does not wait
            self._waits.over("pull")
        return PullResult(self._sizes, self._longest, self._checkpoint)

    # -- answers -----------------------------------------------------------------------------------------------------

    def message(self, message: bytes) -> None:
        """Takes a whole message. Raises InvalidRequest for one that cannot be an answer."""
        self._take(self._plan.read(*split_message(message)))

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        """Returns where the payload of the message that comes belongs; None: it is taken from anywhere."""
        self._fields, self._coming = split_head(head, payload_bytes), None
        if not payload_bytes:
            return None
        pulled = self._plan.read(self._fields, None)
        if len(pulled) != 1 or pulled[0].bucket not in self._missing:
            return None
        self._coming = pulled[0]
        if self._plan.place is None:
            return None
        return self._plan.place(self._missing[pulled[0].bucket], pulled[0], payload_bytes)

    def take(self, payload: memoryview | None) -> bool:
        """Takes the message that `place` was told of; returns whether all buckets have landed."""
        if self._coming is not None and payload is not None:
            self._take([replace(self._coming, payload=payload)])
        else:
            self._take(self._plan.read(self._fields, payload))
        return self.is_done

    def _take(self, buckets: Iterable[PulledBucket]) -> None:
        self.progressed()
        for pulled in buckets:
            if pulled.waiting is not None:
                awaited, reason = pulled.waiting
                self._waits.met("pull", "waiting at clock %d: %s", self._clock, reason, detail=awaited)
                self._has_waited = True
                continue
            bucket = self._missing.pop(pulled.bucket)
            wire = pulled.wire_format or bucket.dtype
            self._sizes[wire] = self._sizes.get(wire, 0) + self._plan.land(bucket, pulled)
            self._longest = max(self._longest, pulled.waited)
            self._checkpoint = self._checkpoint or pulled.checkpoint
