"""Pulls of rows, and of whole tables: admitted as those of buckets are (pulls.py), and sent in messages of a few MiB.

Rows are copied while the table is not stepped, and sent from the copy: in another order and number than they lie in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch

from ps_protocol.codecs import WIRE_FORMATS
from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import Ids
from ps_protocol.tensors import bytes_of
from ps_server.core.requests import RowsPull, TablePull
from ps_server.shard.job import HostedJob, HostedTable
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.waiting import Lent, Outbox, Pull, PulledRows, PulledTable
from ps_server.storage.tensor_file import file_chunks

MESSAGE_BYTES = 4 * 2**20
READER = 0  # the incarnation of a caller that is no worker


def check(job: HostedJob, call: RowsPull | TablePull, outbox: Outbox, now: float, principal: str) -> tuple[Pull, int]:
    """Returns a pull, and the index of its table. Raises what is wrong with it. principal: whose it is"""
    checker = job.state.tables.checker
    checker.table(call.table)
    wanted = call if isinstance(call, TablePull) else checker.wanted(call)
    if call.incarnation != READER or isinstance(call, TablePull):
        with job.lock:
            job.state.check_worker(call.rank, call.incarnation, call.key)
    elif call.clock:
        raise InvalidRequest(f"a caller that has not joined may only pull rows at clock 0, got clock {call.clock}")
    pull = Pull(call.rank, call.incarnation, call.clock, outbox, 1, now, principal=principal, wanted=wanted)
    return pull, checker.first + call.table


def send(job: HostedJob, table: HostedTable, pull: Pull, waited: float, metrics: ShardMetrics) -> None:
    """Sends what a pull wants of a table on its outbox, then ends the stream."""
    if isinstance(pull.wanted, TablePull):
        _send_table(job, table, pull, pull.wanted.count_only)
    elif pull.wanted is not None:
        rows = max(1, MESSAGE_BYTES // WIRE_FORMATS[job.state.spec.weight_wire].size(table.weights.dim))
        for first in range(0, max(1, len(pull.wanted)), rows):
            some = pull.wanted[first : first + rows]
            pull.outbox.lend(partial(_lend_rows, job, table, pull, first, some, waited, metrics))
    pull.outbox.finish()


def saves_state(job: HostedJob, pull: Pull, version: int) -> bool:
    """Whether what this pull gets is in a checkpoint for which its worker is to save its own state."""
    task = job.snapshot_task
    return task is not None and pull.incarnation != READER and task.tells(pull.rank, pull.clock, version)


@contextlib.contextmanager
def _lend_rows(
    job: HostedJob, table: HostedTable, pull: Pull, first: int, ids: Ids, waited: float, metrics: ShardMetrics
) -> Iterator[Lent]:
    rows = torch.empty(len(ids), table.weights.dim, dtype=torch.float32, device="cpu")
    with table.tensors:
        trained, version = table.weights.pull(ids, rows), table.rule.version
        save_state = saves_state(job, pull, version)
    codec = WIRE_FORMATS[job.state.spec.weight_wire]
    payload = bytes_of(codec.encode(rows.view(-1)))
    wire_format = "" if codec.dtype == "float32" else codec.dtype
    answer = PulledRows(table.index, version, first, len(ids), trained, waited, None, save_state, payload, wire_format)
    yield Lent(answer, None)
    metrics.pulled(job.name, len(payload))


def _send_table(job: HostedJob, table: HostedTable, pull: Pull, count_only: bool) -> None:
    with table.tensors:
        version, rows = table.rule.version, len(table.weights)
        tensors = {} if count_only else table.weights.snapshot()
    seed = job.state.tables[table.index].spec.rows.initializer.seed
    answer = PulledTable(table.index, version, rows, seed)
    if count_only:
        pull.outbox.tell(answer)
        return
    for chunk in file_chunks(tensors, {}):
        view = memoryview(chunk)
        for first in range(0, len(view), MESSAGE_BYTES):
            pull.outbox.lend(partial(_lend_piece, answer, view[first : first + MESSAGE_BYTES]))


def _lend_piece(answer: PulledTable, piece: memoryview) -> AbstractContextManager[Lent]:
    return contextlib.nullcontext(Lent(answer._replace(payload=piece), None))
