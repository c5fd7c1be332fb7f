"""A pull of rows under way: which of them have come, and where they go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ps_frames.sockets import nothing
from ps_protocol.codecs import PLAIN, Cast
from ps_protocol.convert import seconds, wire_format
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import split_head
from ps_protocol.v1 import rows_pb2
from ps_runtime.troubles import Troubles
from ps_worker.values import PullResult

log = logging.getLogger("ps_worker")


class RowLanding:
    """A pull of rows from one shard. For one thread at a time.

    request: of PullRows
    rows:    how many it asks for, and `dim` elements of each; codec: as they come in messages
    land:    takes rows over, from a number on: [n, dim] float32
    shared:  where rows come that are in the segment: [rows, dim]; None: they come in messages
    waits:   told of what it waits for
    """

    def __init__(
        self,
        peer: str,
        request: bytes,
        rows: int,
        dim: int,
        codec: Cast,
        land: Callable[[int, torch.Tensor], None],
        shared: torch.Tensor | None,
        waits: Troubles,
    ) -> None:
        self._peer, self._request, self._rows, self._dim, self._codec = peer, request, rows, dim, codec
        self._land, self._shared, self._waits = land, shared, waits
        self.progressed: Callable[[], None] = nothing  # is called with each message
        self.begin()

    def begin(self) -> None:
        """Begins anew: nothing has come."""
        self._landed = np.zeros(self._rows, np.bool_)
        self._answered, self._waited, self._state_wanted = False, 0.0, False
        self._fields = b""

    @property
    def is_done(self) -> bool:
        """Whether all rows have come."""
        return self._answered and bool(self._landed.all())

    def request(self) -> bytes:
        """Returns the request."""
        return self._request

    def result(self) -> PullResult:
        """Returns what came of it. Raises InvalidRequest where rows are missing."""
        if not self.is_done:
            raise InvalidRequest(f"{self._peer}: expected {self._rows} rows, got {int(self._landed.sum())}")
        self._waits.over("rows")
        codec = self._codec if self._shared is None else PLAIN["float32"]
        return PullResult({codec.name: codec.size(self._rows * self._dim)}, self._waited, self._state_wanted)

    def place(self, head: bytes, payload_bytes: int) -> memoryview | None:
        """Returns memory for the payload of the message that comes."""
        self._fields = split_head(head, payload_bytes)
        return memoryview(bytearray(payload_bytes)) if payload_bytes else None

    def take(self, payload: memoryview | None) -> bool:
        """Takes the message that `place` was told of; returns whether all rows have come."""
        self.message(self._fields, payload)
        return self.is_done

    def message(self, fields: bytes, payload: memoryview | None) -> None:
        """Takes a message. Raises InvalidRequest for one that cannot be an answer."""
        self.progressed()
        self._take(rows_pb2.PullRowsResponse.FromString(fields), payload)

    def _take(self, response: rows_pb2.PullRowsResponse, payload: memoryview | None) -> None:
        self._waited = max(self._waited, seconds(response.wait_duration))
        self._state_wanted = self._state_wanted or response.state_wanted
        if response.HasField("waiting"):
            note_wait(self._waits, response.waiting)
            return
        self._answered = True
        first, count = response.first_row, response.row_count
        rows = self._read(response, payload)
        if count:
            self._land(first, rows)
            self._landed[first : first + count] = True

    def _read(self, response: rows_pb2.PullRowsResponse, payload: memoryview | None) -> torch.Tensor:
        first, count = response.first_row, response.row_count
        if response.in_segment and self._shared is not None and payload is None and (first, count) == (0, self._rows):
            return self._shared
        expected, sent = self._codec.size(count * self._dim), len(payload or b"")
        came_as = wire_format(response.wire_format) or "float32"
        if response.in_segment or first + count > self._rows or sent != expected or came_as != self._codec.dtype:
            way = "in the segment" if response.in_segment else f"in {sent} bytes of {came_as}"
            raise InvalidRequest(
                f"{self._peer}: expected {self._rows} rows of {self._dim} x {self._codec.dtype}, got rows {first} to "
                f"{first + count} {way}"
            )
        return self._codec.decode(payload or b"", count * self._dim).view(count, self._dim).to(torch.float32)


class ExchangeLanding(RowLanding):
    """A pull of rows that comes with a push.

    staged: is called with the time at which the push was staged, on the clock of time.perf_counter; maybe again
    """

    def __init__(self, *pull: Any, staged: Callable[[float], None]) -> None:
        self._staged = staged
        super().__init__(*pull)

    def message(self, fields: bytes, payload: memoryview | None) -> None:
        """Takes a message. Raises InvalidRequest for one that cannot be an answer."""
        self.progressed()
        response = rows_pb2.ExchangeRowsResponse.FromString(fields)
        self._staged(time.perf_counter() - seconds(response.staged_duration))  # no answer comes before it is
        if response.HasField("pulled"):
            self._take(response.pulled, payload)


def note_wait(waits: Troubles, notice: rows_pb2.RowWaitNotice) -> None:
    """Tells of what rows wait for."""
    waits.met("rows", "waiting for rows: %s", notice.reason, detail=tuple(notice.awaited_ranks))
