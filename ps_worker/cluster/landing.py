"""A pull under way: which buckets or rows are still missing, and where each is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ps_frames.frames import nothing
from ps_protocol.convert import Awaited
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Parts, split_head, split_message
from ps_protocol.layout import BucketSpec
from ps_protocol.messages import rows
from ps_protocol.messages.data import PulledBucket
from ps_protocol.messages.rows import PulledRows
from ps_protocol.tensors import PLAIN, Cast, bytes_of
from ps_runtime.troubles import Troubles
from ps_worker.values import PullResult

log = logging.getLogger("ps_worker")

# Parses a message of the answer to a pull: its fields, and its payload; None: the payload comes later, or there is
# none.
Read = Callable[[bytes, memoryview | None], Sequence[PulledBucket]]


@dataclass(frozen=True)
class PullPlan:
    """How a pull of buckets is requested, and how its answer is used.

    request: makes the request for buckets of these indices
    read:    parses a message of the answer
    land:    writes a bucket to the model; returns its bytes
    memory_for: returns memory into which to receive a bucket's payload of this many bytes; None: there is none. Raises
                InvalidRequest if the size is wrong
    """

    request: Callable[[list[int]], bytes]
    read: Read
    land: Callable[[BucketSpec, PulledBucket], int]
    memory_for: Callable[[BucketSpec, PulledBucket, int], memoryview | None] | None = None


class Landing:
    """A pull of buckets at a clock. For one thread at a time. waits: logs which workers the pull waits for"""

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
        """Returns the request for the missing buckets."""
        return self._plan.request(list(self._missing))

    def result(self) -> PullResult:
        """Returns the result of a pull that is done."""
        if self._waits.open and not self._has_waited:  # it is over with the first pull that does not wait
            self._waits.over("pull")
        return PullResult(self._sizes, self._longest, self._checkpoint)

    # -- answers -----------------------------------------------------------------------------------------------------

    def message(self, message: bytes) -> None:
        """Takes the buckets of a message that has come as a whole, as by gRPC. `place` and `take` are for one whose
        payload is received into the memory of its bucket.

        Raises InvalidRequest if it is no answer to the pull.
        """
        self._take(self._plan.read(*split_message(message)))

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        """Returns memory for the payload of the next message; None: the caller may use any."""
        self._fields, self._coming = split_head(head, payload_bytes), None
        if not payload_bytes:
            return None
        pulled = self._plan.read(self._fields, None)
        if len(pulled) != 1 or pulled[0].bucket not in self._missing:
            return None
        self._coming = pulled[0]
        if self._plan.memory_for is None:
            return None
        return self._plan.memory_for(self._missing[pulled[0].bucket], pulled[0], payload_bytes)

    def take(self, payload: memoryview | None) -> bool:
        """Processes the message whose head `place` was called with. Returns whether all buckets have landed."""
        if self._coming is not None and payload is not None:
            self._take([self._coming._replace(payload=payload)])
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
            self._checkpoint = self._checkpoint or pulled.save_state


# -- rows --------------------------------------------------------------------------------------------------------------


class RowLanding:
    """A pull of rows from one shard. For one thread at a time.

    request:    the request of the call
    count, dim: the number of rows, and the elements of each
    codec:      the codec of the rows in messages
    land:       writes rows, [n, dim] float32; its first argument is the number of the first one
    shared:     the memory in the segment that gets the rows: [rows, dim]; None: they come in messages
    waits:      logs which workers the pull waits for
    out:        the memory to which `land` writes the rows: [count, dim], contiguous. Rows that come as float32 are
                received there; None: they are received elsewhere
    """

    def __init__(
        self,
        peer: str,
        request: Parts,
        count: int,
        dim: int,
        codec: Cast,
        land: Callable[[int, torch.Tensor], None],
        shared: torch.Tensor | None,
        waits: Troubles,
        out: torch.Tensor | None = None,
    ) -> None:
        self._peer, self._request, self._rows, self._dim, self._codec = peer, request, count, dim, codec
        self._land, self._shared, self._waits, self._out = land, shared, waits, out
        self.progressed: Callable[[], None] = nothing  # is called with each message
        self.begin()

    def begin(self) -> None:
        """Forgets all that has come, before the pull is repeated."""
        self._landed = np.zeros(self._rows, np.bool_)
        self._answered, self._waited, self._save_state = False, 0.0, False
        self._coming: PulledRows | None = None  # what a message says of rows, without their payload; None: nothing

    @property
    def is_done(self) -> bool:
        """Whether all rows have come."""
        return self._answered and bool(self._landed.all())

    def request(self) -> Parts:
        """Returns the request."""
        return self._request

    def result(self) -> PullResult:
        """Returns the result. Raises InvalidRequest if rows are missing."""
        if not self.is_done:
            raise InvalidRequest(f"{self._peer}: expected {self._rows} rows, got {int(self._landed.sum())}")
        self._waits.over("rows")
        codec = self._codec if self._shared is None else PLAIN["float32"]
        return PullResult({codec.name: codec.size(self._rows * self._dim)}, self._waited, self._save_state)

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        """Returns the memory to which the rows of the message that comes belong; None: it may be received anywhere.

        If only a part of it comes, its rows count as missing, and the pull is repeated.
        """
        self._coming = pulled = self._parsed(split_head(head, payload_bytes))
        if pulled is None or self._out is None or self._codec.dtype != "float32" or not payload_bytes:
            return None
        first, count = pulled.first, pulled.rows
        if not self._is_expected(pulled, payload_bytes):
            return None
        return bytes_of(self._out[first : first + count].view(-1))

    def take(self, payload: memoryview | None) -> bool:
        """Processes the message whose head `place` was called with. Returns whether all rows have come."""
        self._take(payload)
        return self.is_done

    def message(self, fields: bytes, payload: memoryview | None) -> None:
        """Processes a message that has come as a whole. Raises InvalidRequest if it is no answer to the call."""
        self._coming = self._parsed(fields)
        self._take(payload)

    def _parsed(self, fields: bytes) -> PulledRows | None:
        """Parses a message; returns None if it says nothing of rows."""
        return rows.read_pulled(fields, None)

    def _take(self, payload: memoryview | None) -> None:
        self.progressed()
        if self._coming is None:
            return
        pulled = self._coming._replace(payload=payload)
        self._waited = max(self._waited, pulled.waited)
        self._save_state = self._save_state or pulled.save_state
        if pulled.waiting is not None:
            note_wait(self._waits, pulled.waiting)
            return
        self._answered = True
        elements = self._read(pulled)
        if pulled.rows:
            self._land(pulled.first, elements)
            self._landed[pulled.first : pulled.first + pulled.rows] = True

    def _read(self, pulled: PulledRows) -> torch.Tensor:
        first, count, payload = pulled.first, pulled.rows, pulled.payload
        if pulled.in_segment and self._shared is not None and payload is None and (first, count) == (0, self._rows):
            return self._shared
        sent = len(payload or b"")
        if not self._is_expected(pulled, sent):
            way = "in the segment" if pulled.in_segment else f"in {sent} bytes of {pulled.wire_format or 'float32'}"
            raise InvalidRequest(
                f"{self._peer}: expected {self._rows} rows of {self._dim} x {self._codec.dtype}, got rows {first} to "
                f"{first + count} {way}"
            )
        return self._codec.decode(payload or b"", count * self._dim).view(count, self._dim).to(torch.float32)

    def _is_expected(self, pulled: PulledRows, sent: int) -> bool:
        """Whether rows may come so, in a payload of so many bytes."""
        return (
            not pulled.in_segment
            and pulled.first + pulled.rows <= self._rows
            and sent == self._codec.size(pulled.rows * self._dim)
            and (pulled.wire_format or "float32") == self._codec.dtype
        )


class ExchangeLanding(RowLanding):
    """A pull of rows in one call with a push.

    keep:   called when the push is staged and rows are yet to come: what the call pushes may be changed from then on,
            and may be needed to repeat the call
    staged: called with the time at which the push was staged, on the clock of time.perf_counter; perhaps several times
    """

    def __init__(self, *pull: Any, keep: Callable[[], None], staged: Callable[[float], None]) -> None:
        self._keep, self._staged, self._when = keep, staged, 0.0
        super().__init__(*pull)

    def is_staged(self, seconds: float = 0.0) -> None:
        """Notes that the push has been staged for so many seconds."""
        self._staged(time.perf_counter() - seconds)

    def _parsed(self, fields: bytes) -> PulledRows | None:
        staged_seconds, pulled = rows.read_exchanged(fields)
        self._when = time.perf_counter() - staged_seconds  # every answer comes after the push is staged
        if pulled is None or pulled.first or pulled.rows < self._rows:
            self._keep()
            self._staged(self._when)
        return pulled

    def _take(self, payload: memoryview | None) -> None:
        super()._take(payload)
        self._staged(self._when)


def note_wait(waits: Troubles, waiting: Awaited) -> None:
    """Logs which workers a pull of rows waits for."""
    waits.met("rows", "waiting for rows: %s", waiting.reason, detail=waiting.ranks)
