"""Sends the rows that tables have before `prepare` from rank 0 to the shards: to each in messages of a few MiB, one by
one.

Rows that were trained longest ago are sent first: if memory cannot hold all rows, a shard moves these to its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ps_protocol.identity import Identity
from ps_protocol.messages import rows
from ps_protocol.messages.rows import TablePush
from ps_protocol.row_ids import by_shard, mix, shards_of
from ps_protocol.tables import Beginning, JobTable
from ps_tables.beginning import encoded, row_columns, row_size
from ps_worker.cluster.calls import ShardCalls
from ps_worker.tables.given_rows import GivenRows
from ps_worker.tables.server_rows import FirstRows, ServerTables

MESSAGE_BYTES = 4 * 2**20


class RowsBefore:
    """The initial content of a job's tables, which rank 0 sends, and whether the servers have used this worker's."""

    def __init__(self, tables: ServerTables) -> None:
        self._tables = tables
        self._taken = self._had_begun = False

    def send(
        self, begin: Callable[[Sequence[FirstRows], bool], list[Future[int | None]]], settle: Callable[[], None]
    ) -> None:
        """Sends the initial content of all tables, once all shards have confirmed that they have room for it.

        If a table has begun on some shards with the content of another rank 0, the other shards get that one's seed.

        begin:  sends the content to all shards, or only asks for room; see RowTransport.begin
        settle: waits for these calls, and raises their first error
        """
        tables = self._tables.first_rows()
        if not tables:
            return
        asked = begin(tables, True)
        settle()
        seeds = [answer.result() for answer in asked]  # table by table, of each shard
        shards = len(seeds) // len(tables)
        had_begun = None not in seeds
        if any(tables):
            self._had_begun = had_begun
            self._taken |= not had_begun
        if had_begun:
            return
        for number, table in enumerate(tables):
            begun = [seed for seed in seeds[shards * number : shards * (number + 1)] if seed is not None]
            tables[number] = replace(table, seed=begun[0] if begun else table.seed)
        begin(tables, False)
        settle()

    def began(self, clock: int) -> None:
        """Warns if the script's tables had rows before `prepare` that are ignored, because the job's tables had begun
        without them.

        clock: the job's clock when this worker joined
        """
        if (self._had_begun or clock > 0) and not self._taken:
            self._tables.warn_of_ignored(clock)


@dataclass(frozen=True)
class InitialRows:
    """The initial content of a table on one shard.

    tensors: the content for all shards, in the form of Table.snapshot
    columns: the columns of a row, in the order in which they are sent
    rows, waiting: the indices of this shard's rows and waiting ids, in the order in which they are sent
    """

    beginning: Beginning
    tensors: Mapping[str, torch.Tensor]
    columns: Mapping[str, int]
    rows: torch.Tensor
    waiting: torch.Tensor


def parts_of(table: FirstRows, job: JobTable, shards: int) -> list[InitialRows]:
    """Returns each shard's part of a table's initial content. If the rows' optimizer is not the job's, they have no
    state.
    """
    tensors, spec = table.rows, job.rows
    if table.given is not None:  # vectors that the script has set: begin_given sends them piece by piece
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        beginnings = _given_beginnings(table.given, table.seed, shards)
        return [InitialRows(beginning, {}, {}, nothing, nothing) for beginning in beginnings]
    columns = row_columns(job.optimizer, job.values, spec.dim, True)
    with_state = columns.keys() <= tensors.keys()
    columns = columns if with_state else row_columns(job.optimizer, job.values, spec.dim, False)
    version = int(tensors["version"]) if "version" in tensors else 0
    rows = _places(tensors, "", shards)
    waiting = _places(tensors if spec.admit_after > 1 else {}, "waiting.", shards)  # otherwise no id waits
    return [
        InitialRows(
            Beginning(version, table.seed, len(rows[at]), len(waiting[at]), with_state),
            tensors,
            columns,
            rows[at],
            waiting[at],
        )
        for at in range(shards)
    ]


def _places(tensors: Mapping[str, torch.Tensor], prefix: str, shards: int) -> list[torch.Tensor]:
    """Returns the indices of each shard's rows, those trained longest ago first; or of its waiting ids, those trained
    last first. A table without room for all waiting ids keeps the first ones.
    """
    if f"{prefix}ids" not in tensors:
        return [torch.empty(0, dtype=torch.int64, device="cpu")] * shards
    ids, last = tensors[f"{prefix}ids"].numpy(), tensors[f"{prefix}last"].numpy()
    order = np.lexsort((mix(ids), -last if prefix else last))
    return [torch.from_numpy(np.ascontiguousarray(order[which])) for which in by_shard(ids[order], shards)]


def begin_table(calls: ShardCalls, worker: Identity, table: int, part: InitialRows, ask: bool) -> int | None:
    """Sends a table's part to its shard. Returns None; or the table's seed, if it had begun there before. Raises
    PSError.

    table: the index of the table in the job's list of tables
    ask:   send nothing, and only ask whether there is room
    """
    for message in _messages(worker, table, part, ask):
        begun, seed = _send(calls, message)
        if begun:
            return seed
    return None


def _send(calls: ShardCalls, message: TablePush) -> tuple[bool, int]:
    """Sends a message; returns whether the table had begun before, and its seed then."""
    answer = rows.read_table_pushed(calls.unary("PushTable", rows.write_table_push(message)))
    return answer.begun, answer.seed


def _messages(worker: Identity, table: int, part: InitialRows, ask: bool) -> Iterator[TablePush]:
    begins, first = part.beginning, 0
    if ask or not begins.total:
        yield TablePush(worker, table, begins, 0, 0, 0, not ask, b"")
        return
    columns: Mapping[str, int]
    for places, columns in ((part.rows, part.columns), (part.waiting, {})):
        most = max(1, MESSAGE_BYTES // row_size(columns))
        for some in places.split(most) if len(places) else ():
            named = ("ids", "last", *columns) if columns else ("waiting.ids", "waiting.counts", "waiting.last")
            payload = encoded({name: part.tensors[name][some] for name in named}, columns)
            counts = (len(some), 0) if columns else (0, len(some))
            yield TablePush(worker, table, begins, first, *counts, first + len(some) == begins.total, payload)
            first += len(some)


# -- vectors that a script has given -----------------------------------------------------------------------------------


def begin_given(
    calls: Sequence[ShardCalls],
    worker: Identity,
    table: int,
    first: FirstRows,
    submit: Callable[[Callable[[], None]], Future[None]],
) -> None:
    """Sends vectors that a script has set to all shards, piece by piece, so that only one piece is in memory.

    A shard on which the table had begun before gets none. Raises PSError.

    submit: runs a function in another thread
    """
    given, shards = first.given, len(calls)
    assert given is not None
    beginnings = _given_beginnings(given, first.seed, shards)
    came = [0] * shards
    waiting = {shard for shard in range(shards) if beginnings[shard].rows}

    def send(shard: int, payload: bytes, count: int) -> None:
        begins, end = beginnings[shard], came[shard] + count
        push = TablePush(worker, table, begins, came[shard], count, 0, end == begins.rows, payload)
        begun, _ = _send(calls[shard], push)
        came[shard] = end
        if begun:
            waiting.discard(shard)

    for shard in set(range(shards)) - waiting:
        send(shard, b"", 0)
    for piece in given.pieces():
        sent = []
        for shard, which in enumerate(by_shard(piece.ids, shards)):
            ids = piece.ids[which]
            if shard in waiting and len(ids):
                values = piece.values[which if isinstance(which, slice) else torch.from_numpy(which)]
                last = torch.ones(len(ids), dtype=torch.int64, device="cpu")
                tensors = {"ids": torch.from_numpy(ids), "last": last, "weights": values}
                payload = encoded(tensors, {"weights": values.shape[1]})
                sent.append(submit(partial(send, shard, payload, len(ids))))
        for each in sent:
            each.result()
        if not waiting:
            return


def _given_beginnings(given: GivenRows, seed: int, shards: int) -> list[Beginning]:
    """Returns the beginning of the table on each shard, from given vectors. They count as the first update, without
    state.
    """
    counts = np.bincount(shards_of(given.ids(), shards), minlength=shards)
    return [Beginning(1, seed, count) for count in counts.tolist()]
