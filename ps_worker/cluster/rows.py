"""The ways of rows between a worker and all shards: each gradient goes to its row's shard, and rows come from there.

Rows travel in messages of a few MiB, over data connections where there are some, otherwise by gRPC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from ps_protocol.codecs import WIRE_FORMATS
from ps_protocol.convert import data_range_messages, hyper_messages, seconds, wire_format, wire_format_number
from ps_protocol.data import DataRange
from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Parts, message_parts
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES, Ids, shards_of
from ps_protocol.tensors import bytes_of
from ps_protocol.v1 import rows_pb2
from ps_runtime.troubles import Troubles
from ps_tables.contributions import RowGradients
from ps_worker.cluster import convert
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.threads import DaemonPool
from ps_worker.tables.server_rows import RowsPush, TablePart
from ps_worker.values import PullResult, PushResult

log = logging.getLogger("ps_worker")

MESSAGE_BYTES = 4 * 2**20


class RowTransport:
    """The ways of rows to all shards. Pushes and pulls return at once; futures raise PSError.

    calls: by shard, of which all have a part of each table
    """

    def __init__(self, calls: Mapping[int, ShardCalls], worker: Identity, spec: JobSpec) -> None:
        self._calls, self._worker, self._spec = calls, worker, spec
        self._gradients, self._weights = WIRE_FORMATS[spec.gradient_wire], WIRE_FORMATS[spec.weight_wire]
        self._waits = Troubles(log, None)
        self._pool = DaemonPool(len(calls), "rows") if spec.tables else None

    def push(self, clock: int, pushes: Sequence[RowsPush], ranges: Sequence[DataRange]) -> list[Future[PushResult]]:
        """Pushes a step of all tables. ranges: the leased data that the step used"""
        futures = []
        for push in pushes:
            rows = push.rows
            of = shards_of(rows.ids, len(self._calls)) if rows is not None else None
            for shard, calls in self._calls.items():
                part = rows.part(of == shard) if rows is not None and of is not None else None
                for message, size in self._messages(push, part, clock, ranges):
                    futures.append(self._submit(calls, message, size))
        return futures

    def _submit(self, calls: ShardCalls, message: Parts, size: int) -> Future[PushResult]:
        def send() -> PushResult:
            calls.unary("PushRows", message)
            return PushResult(size, time.perf_counter())

        assert self._pool is not None
        return self._pool.submit(send)

    def _messages(
        self, push: RowsPush, part: RowGradients | None, clock: int, ranges: Sequence[DataRange]
    ) -> Iterator[tuple[Parts, int]]:
        """Yields the messages that push a table's rows of one shard, each with the bytes of its payload."""
        taken = rows_pb2.ROW_PUSH_KIND_NO_GRADIENT if push.took_part else rows_pb2.ROW_PUSH_KIND_SKIP
        request = rows_pb2.PushRowsRequest(
            worker=convert.identity(self._worker),
            table=push.table,
            clock=clock,
            kind=taken if part is None else rows_pb2.ROW_PUSH_KIND_GRADIENT,
            hyper_parameters=hyper_messages(push.values),
            ranges=data_range_messages(ranges),
        )
        if part is None or not len(part):
            yield message_parts(request), 0
            return
        codec = self._gradients
        row_bytes = ID_BYTES + COUNT_BYTES + codec.size(part.gradients.shape[1])
        rows = max(1, MESSAGE_BYTES // row_bytes)
        request.total_row_count = len(part)
        request.wire_format = wire_format_number("" if codec.dtype == "float32" else codec.dtype)
        for first in range(0, len(part), rows):
            ids, counts = part.ids[first : first + rows], part.counts[first : first + rows].astype("<u4")
            gradients = codec.encode(part.gradients[first : first + rows].reshape(-1))
            request.first_row, request.row_count = first, len(ids)
            payload = b"".join((ids.data, counts.data, bytes_of(gradients)))
            yield message_parts(request, payload), len(payload)

    def pull(self, clock: int, table: int, ids: Ids, out: torch.Tensor) -> list[Future[PullResult]]:
        """Fetches rows: [n] ids into [n, dim] float32, contiguous."""
        of = shards_of(ids, len(self._calls))
        futures = []
        for shard, calls in self._calls.items():
            places = np.flatnonzero(of == shard)
            if len(places):
                assert self._pool is not None
                futures.append(self._pool.submit(partial(self._fetch, calls, clock, table, ids[places], places, out)))
        return futures

    def end_step(self, clock: int) -> list[Future[PullResult]]:
        """Waits for the end of a step as pulls of buckets do, in a job that has none: on each shard, until the job's
        consistency admits rows of the first table."""
        assert self._pool is not None
        none, out = np.empty(0, np.int64), torch.empty(0, self._spec.tables[0].rows.dim)
        return [
            self._pool.submit(partial(self._fetch, calls, clock, 0, none, none, out)) for calls in self._calls.values()
        ]

    def _fetch(
        self, calls: ShardCalls, clock: int, table: int, ids: Ids, places: np.ndarray, out: torch.Tensor
    ) -> PullResult:
        waited, state_wanted = 0.0, False
        dim, landed = out.shape[1], np.zeros(len(ids), np.bool_)
        request = rows_pb2.PullRowsRequest(worker=convert.identity(self._worker), table=table, clock=clock)

        def land(fields: bytes, payload: memoryview | None) -> None:
            nonlocal waited, state_wanted
            response = rows_pb2.PullRowsResponse.FromString(fields)
            waited = max(waited, seconds(response.wait_duration))
            state_wanted = state_wanted or response.state_wanted
            if response.HasField("waiting"):
                self._note_wait(response.waiting)
                return
            first, count = response.first_row, response.row_count
            expected, sent = self._weights.size(count * dim), len(payload or b"")
            came_as = wire_format(response.wire_format) or "float32"
            if first + count > len(ids) or sent != expected or came_as != self._weights.dtype:
                raise InvalidRequest(
                    f"{calls.peer}: expected {len(ids)} rows of {dim} x {self._weights.dtype}, got rows {first} to "
                    f"{first + count} in {sent} bytes of {came_as}"
                )
            if count:
                rows = self._weights.decode(payload or b"").view(count, dim)
                out[torch.from_numpy(places[first : first + count])] = rows.to(torch.float32)
                landed[first : first + count] = True

        calls.stream("PullRows", message_parts(request, ids.data).whole(), land)
        self._waits.over("rows")
        if not landed.all():
            raise InvalidRequest(f"{calls.peer}: expected {len(ids)} rows, got {int(landed.sum())}")
        return PullResult(self._weights.size(len(ids) * dim), waited, state_wanted)

    def pull_table(self, clock: int, table: int, count_only: bool) -> list[Future[TablePart]]:
        """Fetches all rows of a table, from each shard those that it has; or only their number."""
        assert self._pool is not None
        request = rows_pb2.PullTableRequest(
            worker=convert.identity(self._worker), table=table, clock=clock, count_only=count_only
        ).SerializeToString()
        return [self._pool.submit(partial(self._fetch_table, calls, request)) for calls in self._calls.values()]

    def _fetch_table(self, calls: ShardCalls, request: bytes) -> TablePart:
        pieces: list[bytes] = []
        last = rows_pb2.PullTableResponse()

        def land(fields: bytes, payload: memoryview | None) -> None:
            response = rows_pb2.PullTableResponse.FromString(fields)
            if response.HasField("waiting"):
                self._note_wait(response.waiting)
                return
            if payload is not None:
                pieces.append(bytes(payload))
            last.CopyFrom(response)

        def begin() -> None:
            pieces.clear()

        calls.stream("PullTable", request, land, begin)
        self._waits.over("rows")
        return TablePart(b"".join(pieces), last.row_count, last.seed)

    def _note_wait(self, notice: rows_pb2.RowWaitNotice) -> None:
        awaited = tuple(notice.awaited_ranks)
        self._waits.met("rows", "waiting for rows: %s", notice.reason, detail=awaited)

    def close(self) -> None:
        """Ends the threads; the connections belong to others."""
        if self._pool is not None:
            self._pool.close()
