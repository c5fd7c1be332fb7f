"""The ways of rows between a worker and all shards: each gradient goes to its row's shard, and rows come from there.

Rows are written to memory that a shard shares with this worker, and read from there. Otherwise they travel in messages
of a few MiB, over data connections where there are some, otherwise by gRPC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from ps_protocol.codecs import WIRE_FORMATS
from ps_protocol.convert import data_range_messages, hyper_messages, wire_format_number
from ps_protocol.data import DataRange
from ps_protocol.framing import Buffer, Parts, message_parts
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES, Ids, Which, by_shard
from ps_protocol.row_memory import aligned, pulled_bytes, pushed_bytes
from ps_protocol.tensors import bytes_of
from ps_protocol.v1 import rows_pb2
from ps_runtime.troubles import Troubles
from ps_tables.contributions import RowGradients
from ps_worker.cluster import convert
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.row_landing import RowLanding
from ps_worker.cluster.row_memory import Room, SharedRows
from ps_worker.cluster.threads import DaemonPool
from ps_worker.tables.server_rows import RowsPush, TablePart
from ps_worker.values import PullResult, PushResult

log = logging.getLogger("ps_worker")

MESSAGE_BYTES = 4 * 2**20


class RowTransport:
    """The ways of rows to all shards. Pushes and pulls return at once; futures raise PSError. For the training thread.

    calls:  by shard, of which all have a part of each table
    shared: memory for rows that some of the shards see
    """

    def __init__(
        self, calls: Mapping[int, ShardCalls], worker: Identity, spec: JobSpec, shared: SharedRows | None
    ) -> None:
        self._calls, self._worker, self._spec, self._shared = calls, worker, spec, shared
        self._gradients, self._weights = WIRE_FORMATS[spec.gradient_wire], WIRE_FORMATS[spec.weight_wire]
        self._waits = Troubles(log, None)
        self._pool = DaemonPool(len(calls) if spec.tables else 0, "rows")

    # -- pushes ------------------------------------------------------------------------------------------------------

    def push(self, clock: int, pushes: Sequence[RowsPush], ranges: Sequence[DataRange]) -> list[Future[PushResult]]:
        """Pushes a step of all tables. ranges: the leased data that the step used"""
        parts = [part for push in pushes for part in self._parts(push)]
        room = self._room(
            (shard, pushed_bytes(len(rows), rows.gradients.shape[1])) for _, shard, rows in parts if rows is not None
        )
        futures = []
        for push, shard, rows in parts:
            request = self._push_request(push, rows, clock, ranges)
            if rows is None or not len(rows):
                futures.append(self._push(shard, message_parts(request), 0))
            elif room is not None and self._is_shared(shard):
                size = self._put(request, rows, room)
                futures.append(self._push(shard, message_parts(request), size))
                room.calls.append(futures[-1])
            else:
                futures += [self._push(shard, *message) for message in self._messages(request, rows)]
        return futures

    def _parts(self, push: RowsPush) -> Iterator[tuple[RowsPush, int, RowGradients | None]]:
        """Yields what a table's push has for each shard; None: the step has no gradient for the table."""
        rows = push.rows
        places = by_shard(rows.ids, len(self._calls)) if rows is not None else None
        for shard in self._calls:
            yield push, shard, None if rows is None or places is None else rows.part(places[shard])

    def _room(self, sizes: Iterable[tuple[int, int]]) -> Room | None:
        """Returns room in shared memory for parts of some sizes, each of a shard; None: there is none."""
        if self._shared is None:
            return None
        return self._shared.room(sum(aligned(size) for shard, size in sizes if self._is_shared(shard)))

    def _push_request(
        self, push: RowsPush, rows: RowGradients | None, clock: int, ranges: Sequence[DataRange]
    ) -> rows_pb2.PushRowsRequest:
        taken = rows_pb2.ROW_PUSH_KIND_NO_GRADIENT if push.took_part else rows_pb2.ROW_PUSH_KIND_SKIP
        return rows_pb2.PushRowsRequest(
            worker=convert.identity(self._worker),
            table=push.table,
            clock=clock,
            kind=taken if rows is None else rows_pb2.ROW_PUSH_KIND_GRADIENT,
            total_row_count=0 if rows is None else len(rows),
            hyper_parameters=hyper_messages(push.values),
            ranges=data_range_messages(ranges),
        )

    def _push(self, shard: int, message: Parts, size: int) -> Future[PushResult]:
        """Sends one message. size: the bytes of rows in it, or that it names"""
        return self._calls[shard].push_rows(message, lambda: PushResult(size, time.perf_counter()), self._pool)

    @staticmethod
    def _put(request: rows_pb2.PushRowsRequest, rows: RowGradients, room: Room) -> int:
        """Has a request name rows that it writes to shared memory; returns their bytes."""
        count, dim = rows.gradients.shape
        size = pushed_bytes(count, dim)
        place = room.take(size)
        request.row_count, request.in_segment.offset = count, place
        room.memory.array(place, count, np.int64)[:] = rows.ids
        room.memory.array(place + ID_BYTES * count, count, np.uint32)[:] = rows.counts
        room.memory.rows(place + (ID_BYTES + COUNT_BYTES) * count, count, dim).copy_(rows.gradients)
        return size

    def _messages(self, request: rows_pb2.PushRowsRequest, rows: RowGradients) -> Iterator[tuple[Parts, int]]:
        """Yields the messages that bring a table's rows of one shard, each with the bytes of its payload."""
        codec = self._gradients
        row_bytes = ID_BYTES + COUNT_BYTES + codec.size(rows.gradients.shape[1])
        most = max(1, MESSAGE_BYTES // row_bytes)
        request.wire_format = wire_format_number("" if codec.dtype == "float32" else codec.dtype)
        for first in range(0, len(rows), most):
            ids, counts = rows.ids[first : first + most], rows.counts[first : first + most].astype("<u4")
            gradients = codec.encode(rows.gradients[first : first + most].reshape(-1))
            request.first_row, request.row_count = first, len(ids)
            payload = b"".join((ids.data, counts.data, bytes_of(gradients)))
            yield message_parts(request, payload), len(payload)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, clock: int, table: int, ids: Ids, out: torch.Tensor) -> list[Future[PullResult]]:
        """Fetches rows: [n] ids into [n, dim] float32, contiguous."""
        dim = out.shape[1]
        parts = [(shard, which, ids[which]) for shard, which in enumerate(by_shard(ids, len(self._calls)))]
        parts = [part for part in parts if len(part[2])]
        room = self._room((shard, pulled_bytes(len(wanted), dim)) for shard, _, wanted in parts)
        return [
            self._pull(shard, clock, table, wanted, dim, partial(_land, out, which), room)
            for shard, which, wanted in parts
        ]

    def end_step(self, clock: int) -> list[Future[PullResult]]:
        """Waits for the end of a step as pulls of buckets do, in a job that has none: on each shard, until the job's
        consistency admits rows of the first table."""
        none, dim = np.empty(0, np.int64), self._spec.tables[0].rows.dim
        return [self._pull(shard, clock, 0, none, dim, lambda first, rows: None, None) for shard in self._calls]

    def _pull(
        self,
        shard: int,
        clock: int,
        table: int,
        ids: Ids,
        dim: int,
        land: Callable[[int, torch.Tensor], None],
        room: Room | None,
    ) -> Future[PullResult]:
        request = rows_pb2.PullRowsRequest(worker=convert.identity(self._worker), table=table, clock=clock)
        shared: torch.Tensor | None = None
        payload: Buffer | None = ids.data
        if room is not None and self._is_shared(shard):
            count, payload = len(ids), None
            place = room.take(pulled_bytes(count, dim))
            request.ids_in_segment.offset, request.row_count = place, count
            request.rows_in_segment.offset = place + ID_BYTES * count
            room.memory.array(place, count, np.int64)[:] = ids
            shared = room.memory.rows(place + ID_BYTES * count, count, dim)
        message, calls = message_parts(request, payload).whole(), self._calls[shard]
        landing = RowLanding(str(calls.peer), message, len(ids), dim, self._weights, land, shared, self._waits)
        pulled = calls.pull_rows(landing, self._pool)
        if room is not None and shared is not None:
            room.calls.append(pulled)
        return pulled

    def _is_shared(self, shard: int) -> bool:
        return self._shared is not None and shard in self._shared.shards

    # -- whole tables ------------------------------------------------------------------------------------------------

    def pull_table(self, clock: int, table: int, count_only: bool) -> list[Future[TablePart]]:
        """Fetches all rows of a table, from each shard those that it has; or only their number."""
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
        self._pool.close()


def _land(out: torch.Tensor, which: Which, first: int, rows: torch.Tensor) -> None:
    """Puts rows of one shard where they belong among all. which: the places of that shard's rows"""
    if isinstance(which, slice):
        out[which][first : first + len(rows)].copy_(rows)
    else:
        records = out.numpy().view(f"V{out.itemsize * out.shape[1]}")[:, 0]
        records[which[first : first + len(rows)]] = rows.numpy().view(records.dtype)[:, 0]
