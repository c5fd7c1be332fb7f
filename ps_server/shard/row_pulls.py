"""Pulls of rows, and of whole tables: admitted as those of buckets are (pulls.py), and sent in messages of a few MiB.

Rows are copied while the table is not stepped, and sent from the copy: in another order and number than they lie in.
Where the worker shares memory, they are copied there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from ps_protocol.codecs import Cast, row_codec
from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import Ids
from ps_protocol.tensors import bytes_of
from ps_server.core.requests import RowsPull, TablePull
from ps_server.shard.job import HostedJob, HostedTable
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.row_memory import with_ids
from ps_server.shard.waiting import READER, Lent, Outbox, Pull, PulledRows, PulledTable
from ps_server.storage.tensor_file import file_chunks

MESSAGE_BYTES = 4 * 2**20  # of rows, a feed's too


def check(job: HostedJob, call: RowsPull | TablePull, outbox: Outbox, now: float, principal: str) -> tuple[Pull, int]:
    """Returns a pull, and the index of its table. Raises what is wrong with it. principal: whose it is"""
    checker = job.state.tables.checker
    checker.table(call.table)
    rows = None
    if isinstance(call, RowsPull):
        call, rows = with_ids(job, call)
    wanted = call if isinstance(call, TablePull) else checker.wanted(call)
    if call.incarnation != READER or isinstance(call, TablePull):
        with job.lock:
            job.state.check_worker(call.rank, call.incarnation, call.key)
    elif call.clock:
        raise InvalidRequest(f"a caller that has not joined may only pull rows at clock 0, got clock {call.clock}")
    pull = Pull(call.rank, call.incarnation, call.clock, outbox, 1, now, principal=principal, wanted=wanted, rows=rows)
    index = checker.first + call.table
    # What is saved of a table has every update that is staged; a lookup has those of its mode.
    pull.all_staged = isinstance(wanted, TablePull) and not wanted.count_only
    if not isinstance(wanted, TablePull):
        pull.id_bytes = wanted.nbytes
    elif not wanted.count_only:
        weights = job.state.tables[index].rows
        pull.copy_bytes = weights.nbytes + weights.in_file.nbytes
    return pull, index


def send(job: HostedJob, table: HostedTable, pull: Pull, waited: float, metrics: ShardMetrics) -> None:
    """Sends what a pull wants of a table on its outbox, then ends the stream."""
    if isinstance(pull.wanted, TablePull):
        _send_table(job, table, pull, pull.wanted.count_only, metrics)
        pull.outbox.finish()
    elif pull.rows is not None:
        pull.outbox.tell_last(_put(job, table, pull, pull.rows, waited, metrics))
    elif pull.wanted is not None and not len(pull.wanted):
        save_state = job.saves_state(pull, table.rule.version)
        wire_format = wire_format_of(row_codec(job.state.spec.weight_wire))
        pull.outbox.tell_last(
            PulledRows(table.index, table.rule.version, 0, 0, 0, waited, None, save_state, None, wire_format)
        )
    elif pull.wanted is not None:
        rows = max(1, MESSAGE_BYTES // row_codec(job.state.spec.weight_wire).size(table.weights.dim))
        for first in range(0, len(pull.wanted), rows):
            some = pull.wanted[first : first + rows]
            pull.outbox.lend(partial(_lend_rows, job, table, pull, first, some, waited, metrics))
        pull.outbox.finish()


def _put(
    job: HostedJob, table: HostedTable, pull: Pull, rows: torch.Tensor, waited: float, metrics: ShardMetrics
) -> PulledRows:
    """Writes all rows into the worker's segment: here and now, by the thread that stepped them."""
    assert isinstance(pull.wanted, np.ndarray)
    with table.tensors:
        trained, version = table.weights.pull(pull.wanted, rows), table.rule.version
    metrics.pulled(job.name, rows.nbytes)
    save_state = job.saves_state(pull, version)
    count = len(pull.wanted)
    return PulledRows(table.index, version, 0, count, trained, waited, None, save_state, in_segment=True)


@contextlib.contextmanager
def _lend_rows(
    job: HostedJob, table: HostedTable, pull: Pull, first: int, ids: Ids, waited: float, metrics: ShardMetrics
) -> Iterator[Lent]:
    rows = torch.empty(len(ids), table.weights.dim, dtype=torch.float32, device="cpu")
    with table.tensors:
        trained, version = table.weights.pull(ids, rows), table.rule.version
        save_state = job.saves_state(pull, version)
    codec = row_codec(job.state.spec.weight_wire)
    payload = bytes_of(codec.encode(rows.view(-1)))
    wire_format = wire_format_of(codec)
    answer = PulledRows(table.index, version, first, len(ids), trained, waited, None, save_state, payload, wire_format)
    yield Lent(answer, None)
    metrics.pulled(job.name, len(payload))


def wire_format_of(codec: Cast) -> str:
    """Returns how messages name a codec of rows: float32 has no name there."""
    return "" if codec.dtype == "float32" else codec.dtype


def _send_table(job: HostedJob, table: HostedTable, pull: Pull, count_only: bool, metrics: ShardMetrics) -> None:
    with table.tensors:
        version, rows = table.rule.version, len(table.weights)
        tensors = {} if count_only else table.weights.snapshot()
    seed = table.weights.spec.initializer.seed
    answer = PulledTable(table.index, version, rows, seed)
    if count_only:
        pull.outbox.tell(answer)
        return
    for chunk in file_chunks(tensors, {}):
        view = memoryview(chunk)
        for first in range(0, len(view), MESSAGE_BYTES):
            pull.outbox.lend(partial(_lend_piece, job, answer, view[first : first + MESSAGE_BYTES], metrics))


@contextlib.contextmanager
def _lend_piece(job: HostedJob, answer: PulledTable, piece: memoryview, metrics: ShardMetrics) -> Iterator[Lent]:
    yield Lent(answer._replace(payload=piece), None)
    metrics.pulled(job.name, len(piece))
