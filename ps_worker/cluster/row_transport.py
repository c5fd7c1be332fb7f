"""Moves rows between a worker and all shards: a gradient is pushed to its row's shard, and a row is pulled from there.

If a shard shares memory with this worker, rows are written to that memory and read from it. Otherwise they travel in
messages of a few MiB, over a data connection if one is open, or else by gRPC.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.batches import DataRange
from ps_protocol.framing import Buffer, Parts
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages import rows as messages
from ps_protocol.messages.rows import PulledTable, PullOffsets, RowPushKind, RowsPull, RowsPush, TablePull
from ps_protocol.row_ids import COUNT_BYTES, ID_BYTES, Ids, Which, by_shard
from ps_protocol.segment_layout import aligned, pulled_bytes, pushed_bytes
from ps_protocol.tables import assigned_bytes
from ps_protocol.tensors import bytes_of, row_codec
from ps_runtime.pools import DaemonPool
from ps_runtime.troubles import Troubles
from ps_tables.contributions import RowGradients, RowValues
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.first_rows import MESSAGE_BYTES, begin_given, begin_table, parts_of
from ps_worker.cluster.landing import ExchangeLanding, RowLanding, note_wait
from ps_worker.cluster.shared_memory import SegmentRange, SharedRows
from ps_worker.tables.ahead import RowsAhead
from ps_worker.tables.server_rows import FirstRows, RowsOfShard, TableStep
from ps_worker.values import PullResult, PushResult

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class RowStep:
    """The calls of one step for all tables.

    pushed: the pushes; each is done when its rows are staged
    ended:  the pulls that end the step, if requested
    ahead:  the pulls of rows for a later batch
    """

    pushed: list[Future[PushResult]]
    ended: list[Future[PullResult]]
    ahead: list[Future[PullResult]]


@dataclass(frozen=True)
class _Asked:
    """Rows of a table to pull from one shard. land, out: see RowLanding"""

    table: int
    shard: int
    ids: Ids
    dim: int
    land: Callable[[int, torch.Tensor], None] = lambda first, rows: None
    out: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes of ids and rows in shared memory."""
        return pulled_bytes(len(self.ids), self.dim)


@dataclass(frozen=True)
class _PushMessage:
    """A message that pushes rows of one table to one shard.

    push: the push, with the first part of the payload, if rows are in the message
    more: the parts of the payload that follow
    size: bytes of the rows, in the message or in shared memory
    wire: the wire format of their elements
    """

    push: RowsPush
    more: tuple[Buffer, ...] = ()
    size: int = 0
    wire: str = "float32"

    def written(self) -> Parts:
        """Returns the request of a push alone."""
        return messages.write_push(self.push, self.more)

    def copied(self) -> _PushMessage:
        """Returns the same message in memory of its own."""
        payload = bytes(self.push.payload)
        return replace(self, push=replace(self.push, payload=payload), more=tuple(bytes(part) for part in self.more))


class RowTransport:
    """Pushes and pulls rows of all shards. Methods return at once; futures raise PSError. For the training thread.

    calls:  the calls to every shard; each shard has some rows of each table
    shared: the memory for rows that some shards have mapped; None: there is none
    """

    def __init__(
        self, calls: Mapping[int, ShardCalls], worker: Identity, spec: JobSpec, shared: SharedRows | None
    ) -> None:
        self._calls, self._worker, self._spec, self._shared = calls, worker, spec, shared
        self._gradients, self._weights = row_codec(spec.gradient_wire), row_codec(spec.weight_wire)
        self._waits = Troubles(log, None)
        self._assignments = 0  # made so far
        # By clock, table and shard, the number of the last assignment sent
        self._assigned: dict[tuple[int, int, int], int] = {}
        # Over gRPC a call holds a thread until it is answered, and so does a call that is repeated. Pulls have threads
        # of their own: they wait for other workers, which may wait for this worker's pushes.
        threads = len(calls) if spec.tables else 0
        self._pushers, self._pullers = DaemonPool(threads, "push rows"), DaemonPool(threads, "pull rows")
        self._reader: DaemonPool | None = None  # of vectors that a script has given

    # -- before the first step ---------------------------------------------------------------------------------------

    def begin(self, tables: Sequence[FirstRows], ask: bool) -> list[Future[int | None]]:
        """Sends the initial content of the tables: to all shards in parallel, to each one message after the other.

        Returns a future for each table and shard: of None, or of the seed if the table had begun on that shard before.

        ask: send nothing, and only ask whether there is room
        """
        futures: list[Future[int | None]] = []
        for number, table in enumerate(tables):
            if table.given is not None and not ask:
                futures.append(self._begin_given(number, table))
                continue
            parts = parts_of(table, self._spec.tables[number], len(self._calls))
            futures += [
                self._pushers.submit(partial(begin_table, calls, self._worker, number, part, ask))
                for calls, part in zip(self._calls.values(), parts, strict=True)
            ]
        return futures

    def _begin_given(self, number: int, table: FirstRows) -> Future[int | None]:
        """Sends vectors that a script has given, from a thread of its own, which reads them: see begin_given."""
        if self._reader is None:
            self._reader = DaemonPool(1, "given rows")
        calls = list(self._calls.values())
        return self._reader.submit(partial(begin_given, calls, self._worker, number, table, self._pushers.submit))

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(
        self,
        clock: int,
        pushes: Sequence[TableStep],
        ranges: Sequence[DataRange],
        ahead: Sequence[RowsAhead],
        ends: bool,
        had: Callable[[int, int], bool] | None = None,
    ) -> RowStep:
        """Pushes a step of all tables, and pulls rows at its clock.

        A push and a pull of one table and shard are one call if their rows and ids are in shared memory, or fit into
        one message. Other pulls leave without waiting for the answers to pushes.

        ranges: the leased data that the step used
        ahead:  the rows to pull for a later batch
        ends:   the job has no buckets: a pull of the first table, perhaps of no rows, ends the step
        had:    returns whether a shard already has a table's step: it gets a skip; None: no shard has
        """
        parts = [part for push in pushes for part in self._parts(push, had)]
        wanted = self._wanted(ahead)
        of_ahead = set(wanted)
        for shard in self._calls if ends else ():
            wanted.setdefault((0, shard), _Asked(0, shard, np.empty(0, np.int64), self._spec.tables[0].rows.dim))
        room = self._room([*_pushed_sizes(parts), *((asked.shard, asked.size) for asked in wanted.values())])
        pushed: list[Future[PushResult]] = []
        pulled: dict[tuple[int, int], Future[PullResult]] = {}
        assigned, self._assigned = self._assigned, {}
        for step, shard, rows in parts:
            assignment, place = assigned.get((clock, step.table, shard), 0), self._place_on(shard, room)
            sent = self._messages(self._push_of(step, rows, clock, ranges, assignment), rows, place)
            asked = wanted.get((step.table, shard))
            if asked is not None and self._is_one_call(sent, asked, place):
                staged, pulled[step.table, shard] = self._exchange(sent[0], asked, place)
                pushed.append(staged)
                continue
            for message in sent:
                pushed.append(self._push(shard, message))
                self._use(place, pushed[-1])
        for key, asked in wanted.items():
            if key not in pulled:
                pulled[key] = self._pull(clock, asked, self._place_on(asked.shard, room))
        for each in ahead:
            each.pulls = [pull for (table, _), pull in pulled.items() if table == each.table]
            each.ends = ends and each.table == 0
        ended = [pull for (table, _), pull in pulled.items() if table == 0] if ends else []
        return RowStep(pushed, ended, [pulled[key] for key in of_ahead])

    def _wanted(self, ahead: Sequence[RowsAhead]) -> dict[tuple[int, int], _Asked]:
        """Returns the requested rows of a step, by table and shard."""
        every = [
            asked for each in ahead for asked in self._asked(each.table, each.batch.ids, each.out, each.batch.ends)
        ]
        return {(asked.table, asked.shard): asked for asked in every}

    def assign(
        self, clock: int, table: int, rows: RowValues, had: Callable[[int, int], bool] | None
    ) -> list[Future[PushResult]]:
        """Sends rows that the script has set, which take effect with the step of `clock`. had: as in `step`"""
        self._assignments += 1
        most = max(1, MESSAGE_BYTES // assigned_bytes(rows.values.shape[1], 1))
        sent: list[Future[PushResult]] = []
        for shard, which in zip(self._calls, by_shard(rows.ids, len(self._calls)), strict=True):
            ids = rows.ids[which]
            if not len(ids) or (had is not None and had(shard, table)):
                continue
            values = rows.values[which if isinstance(which, slice) else torch.from_numpy(which)]
            self._assigned[clock, table, shard] = self._assignments
            for first in range(0, len(ids), most):
                part = slice(first, first + most)
                payload = b"".join((ids[part].astype("<i8").data, bytes_of(values[part].contiguous().view(-1))))
                counts = first, len(ids[part]), len(ids)
                push = RowsPush(self._worker, table, clock, RowPushKind.ASSIGN, payload, *counts, {})
                push = replace(push, assignment=self._assignments)
                sent.append(self._push(shard, _PushMessage(push, size=len(payload))))
        return sent

    def forget_assigned(self) -> None:
        """Excludes the rows that `assign` has sent from the next step: the shards then drop them."""
        self._assigned = {}

    def leave_out(self, clock: int) -> list[Future[PushResult]]:
        """Pushes a step without gradients for all tables, which the mean leaves out."""
        return self.step(
            clock, [TableStep(table) for table in range(len(self._spec.tables))], (), (), ends=False
        ).pushed

    def _is_one_call(self, pushes: Sequence[_PushMessage], asked: _Asked, room: SegmentRange | None) -> bool:
        """Whether a push, in these messages, and a pull of the same table from the same shard are one call."""
        if room is not None or len(pushes) > 1:
            return room is not None
        size = pushes[0].size + asked.ids.nbytes
        return not size or (size <= MESSAGE_BYTES and self._calls[asked.shard].takes_row_payloads)

    def _exchange(
        self, sent: _PushMessage, asked: _Asked, room: SegmentRange | None
    ) -> tuple[Future[PushResult], Future[PullResult]]:
        """Sends a push and a pull in one call."""
        places, shared = self._put_ids(asked, room)
        staged: Future[PushResult] = Future()
        kept = sent  # what is pushed again, if the call fails

        def keep() -> None:
            nonlocal kept
            if kept is sent:
                kept = sent.copied()

        def is_staged(when: float) -> None:
            if not staged.done():
                staged.set_result(PushResult({sent.wire: sent.size}, when))

        def apart() -> tuple[Parts, RowLanding]:
            return kept.written(), self._pull_of(sent.push.clock, asked, None, None)

        request = messages.write_exchange(sent.push, places, _bytes_in(asked.ids) if room is None else b"", sent.more)
        landing = ExchangeLanding(*self._landing(asked, request, shared), keep=keep, staged=is_staged)
        calls = self._calls[asked.shard]
        if request.payload is None:
            pull = calls.pull_rows(landing, self._pullers, "ExchangeRows")
        else:
            pull = calls.exchange_rows(landing, apart, self._pushers, self._pullers)
        self._use(room, pull)

        def ended(done: Future[PullResult]) -> None:
            error = done.exception()
            if error is not None and not staged.done():
                staged.set_exception(error)

        pull.add_done_callback(ended)
        return staged, pull

    @staticmethod
    def _use(room: SegmentRange | None, call: Future[Any]) -> None:
        if room is not None:
            room.calls.append(call)

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _parts(
        self, push: TableStep, had: Callable[[int, int], bool] | None
    ) -> Iterator[tuple[TableStep, int, RowGradients | None]]:
        """Yields a table's push and its rows for each shard; None: the step has no gradient for the table."""
        rows = push.rows
        places = by_shard(rows.ids, len(self._calls), rows.ends) if rows is not None else None
        for shard in self._calls:
            if had is not None and had(shard, push.table):
                yield TableStep(push.table, values=push.values), shard, None
                continue
            yield push, shard, None if rows is None or places is None else rows.part(places[shard])

    def _room(self, sizes: Iterable[tuple[int, int]]) -> SegmentRange | None:
        """Returns shared memory for (shard, size) pairs; None: there is none."""
        if self._shared is None:
            return None
        return self._shared.room(sum(aligned(size) for shard, size in sizes if self._is_shared(shard)))

    def _push_of(
        self,
        step: TableStep,
        rows: RowGradients | None,
        clock: int,
        ranges: Sequence[DataRange],
        assignment: int,
    ) -> RowsPush:
        """Returns a step's push to a table on one shard, without its rows."""
        kind = RowPushKind.NO_GRADIENT if step.took_part else RowPushKind.SKIP
        return RowsPush(
            self._worker,
            step.table,
            clock,
            kind if rows is None else RowPushKind.GRADIENT,
            payload=b"",
            first=0,
            count=0,
            total=0 if rows is None else len(rows),
            values=step.values,
            ranges=tuple(ranges),
            assignment=assignment,
        )

    def _push(self, shard: int, sent: _PushMessage) -> Future[PushResult]:
        def result() -> PushResult:
            return PushResult({sent.wire: sent.size}, time.perf_counter())

        return self._calls[shard].push_rows(sent.written(), result, self._pushers)

    def _messages(self, push: RowsPush, rows: RowGradients | None, room: SegmentRange | None) -> list[_PushMessage]:
        """Returns the messages of a push to one shard: one, if its rows are in shared memory or there are none."""
        if rows is None or not len(rows):
            return [_PushMessage(push)]
        if room is None:
            return list(self._with_rows(push, rows))
        named, size = self._put(push, rows, room)
        return [_PushMessage(named, size=size)]

    @staticmethod
    def _put(push: RowsPush, rows: RowGradients, room: SegmentRange) -> tuple[RowsPush, int]:
        """Writes rows to shared memory; returns the push that names them, and their bytes."""
        count, dim = rows.gradients.shape
        size = pushed_bytes(count, dim)
        place = room.take(size)
        room.memory.array(place, count, np.int64)[:] = rows.ids
        room.memory.array(place + ID_BYTES * count, count, np.uint32)[:] = rows.counts
        room.memory.rows(place + (ID_BYTES + COUNT_BYTES) * count, count, dim).copy_(rows.gradients)
        return replace(push, count=count, place=place), size

    def _with_rows(self, push: RowsPush, rows: RowGradients) -> Iterator[_PushMessage]:
        """Yields the messages that bring a table's rows of one shard. Ids, and gradients that travel as they are, are
        sent from where they lie.
        """
        codec = self._gradients
        row_bytes = ID_BYTES + COUNT_BYTES + codec.size(rows.gradients.shape[1])
        most = max(1, MESSAGE_BYTES // row_bytes)
        wire_format = "" if codec.dtype == "float32" else codec.dtype
        for first in range(0, len(rows), most):
            ids, counts = rows.ids[first : first + most], rows.counts[first : first + most].astype("<u4")
            gradients = codec.encode(rows.gradients[first : first + most].reshape(-1))
            part = replace(push, payload=_bytes_in(ids), first=first, count=len(ids), wire_format=wire_format)
            more = _bytes_in(counts), bytes_of(gradients)
            yield _PushMessage(part, more, row_bytes * len(ids), codec.name)

    # -- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, clock: int, table: int, ids: Ids, out: torch.Tensor, ends: Ids) -> list[Future[PullResult]]:
        """Pulls rows into `out`. ids: [n] by shard; out: [n, dim] float32, contiguous; ends: the end of each shard's
        ids
        """
        each = self._asked(table, ids, out, ends)
        room = self._room((asked.shard, asked.size) for asked in each)
        return [self._pull(clock, asked, self._place_on(asked.shard, room)) for asked in each]

    def _asked(self, table: int, ids: Ids, out: torch.Tensor, ends: Ids) -> list[_Asked]:
        places = by_shard(ids, len(self._calls), ends)
        each = [
            _Asked(
                table,
                shard,
                ids[which],
                out.shape[1],
                partial(_land, out, which),
                out[which] if isinstance(which, slice) else None,
            )
            for shard, which in enumerate(places)
        ]
        return [asked for asked in each if len(asked.ids)]

    def _pull(self, clock: int, asked: _Asked, room: SegmentRange | None) -> Future[PullResult]:
        places, shared = self._put_ids(asked, room)
        pulled = self._calls[asked.shard].pull_rows(self._pull_of(clock, asked, places, shared), self._pullers)
        self._use(room, pulled)
        return pulled

    def _pull_of(
        self, clock: int, asked: _Asked, places: PullOffsets | None, shared: torch.Tensor | None
    ) -> RowLanding:
        message = messages.write_pull(RowsPull(self._worker, asked.table, clock, _bytes_in(asked.ids), places))
        return RowLanding(*self._landing(asked, message, shared))

    def _landing(self, asked: _Asked, message: Parts, shared: torch.Tensor | None) -> tuple[Any, ...]:
        peer, rows = str(self._calls[asked.shard].peer), len(asked.ids)
        return peer, message, rows, asked.dim, self._weights, asked.land, shared, self._waits, asked.out

    @staticmethod
    def _put_ids(asked: _Asked, room: SegmentRange | None) -> tuple[PullOffsets | None, torch.Tensor | None]:
        """Writes ids to shared memory. Returns the offsets of ids and rows, and the memory for the rows; None: use
        messages.
        """
        if room is None or not len(asked.ids):
            return None, None
        count = len(asked.ids)
        place = room.take(asked.size)
        rows = place + ID_BYTES * count
        room.memory.array(place, count, np.int64)[:] = asked.ids
        return PullOffsets(place, count, rows), room.memory.rows(rows, count, asked.dim)

    def _place_on(self, shard: int, room: SegmentRange | None) -> SegmentRange | None:
        """Returns `room` if the shard has mapped the segment, otherwise None."""
        return room if self._is_shared(shard) else None

    def _is_shared(self, shard: int) -> bool:
        return self._shared is not None and shard in self._shared.shards

    # -- whole tables ------------------------------------------------------------------------------------------------

    def pull_table(self, clock: int, table: int, count_only: bool) -> list[Future[RowsOfShard]]:
        """Pulls a table, from each shard its part. count_only: only the number of rows"""
        request = messages.write_table_pull(TablePull(self._worker, table, clock, count_only))
        return [self._pullers.submit(partial(self._fetch_table, calls, request)) for calls in self._calls.values()]

    def _fetch_table(self, calls: ShardCalls, request: bytes) -> RowsOfShard:
        pieces: list[bytes] = []
        last = PulledTable()

        def land(fields: bytes, payload: memoryview | None) -> None:
            nonlocal last
            pulled = messages.read_pulled_table(fields, payload)
            if pulled.waiting is not None:
                note_wait(self._waits, pulled.waiting)
                return
            if payload is not None:
                pieces.append(bytes(payload))
            last = pulled._replace(payload=None)

        def begin() -> None:
            pieces.clear()

        calls.stream("PullTable", request, land, begin)
        self._waits.over("rows")
        return RowsOfShard(b"".join(pieces), last.rows, last.seed)

    @property
    def threads(self) -> list[threading.Thread]:
        """Its threads, which end soon after `close`."""
        return [thread for pool in self._pools() for thread in pool.threads]

    def close(self) -> None:
        """Ends the threads. The connections stay open: their owner closes them."""
        for pool in self._pools():
            pool.close()

    def _pools(self) -> list[DaemonPool]:
        return [self._pushers, self._pullers, *([] if self._reader is None else [self._reader])]


def _pushed_sizes(parts: Iterable[tuple[TableStep, int, RowGradients | None]]) -> Iterator[tuple[int, int]]:
    """Yields the shard of each part that has rows, and their bytes in shared memory."""
    for _, shard, rows in parts:
        if rows is not None:
            yield shard, pushed_bytes(len(rows), rows.gradients.shape[1])


def _bytes_in(numbers: npt.NDArray[Any]) -> memoryview:
    """Returns the memory of a contiguous array, as bytes."""
    return numbers.view(np.uint8).data


def _land(out: torch.Tensor, which: Which, first: int, rows: torch.Tensor) -> None:
    """Copies rows of one shard to their positions in `out`, which has the rows of all shards, if they do not lie there.

    first: the number of the first of these rows, counted in the shard's own
    which: the positions of the shard's rows in `out`
    """
    if isinstance(which, slice):
        there = out[which][first : first + len(rows)]
        if there.data_ptr() != rows.data_ptr():
            there.copy_(rows)
    else:
        records = out.numpy().view(f"V{out.itemsize * out.shape[1]}")[:, 0]
        records[which[first : first + len(rows)]] = rows.numpy().view(records.dtype)[:, 0]
