"""Workers' segments for rows: attached, and looked up for the messages that name places in them.

What a worker has written there is copied before it is checked: it may write again at any time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest, NotShared
from ps_protocol.row_ids import ID_BYTES
from ps_protocol.row_memory import MAX_ROW_BYTES, RowMemory, pushed_bytes
from ps_protocol.segment_layout import PAGE_BYTES
from ps_server.core.requests import RowsPull, RowsPush
from ps_server.shard.job import HostedJob


def segment_bytes(job: HostedJob, row_bytes: int) -> int:
    """Returns the size of a segment for so many bytes of rows. Raises InvalidRequest for too many, or no table."""
    if not job.state.spec.tables or row_bytes > MAX_ROW_BYTES:
        tables = len(job.state.spec.tables)
        raise InvalidRequest(
            f"expected a segment for rows of at most {MAX_ROW_BYTES} bytes, in a job with tables; got one of "
            f"{row_bytes}, and the job has {tables} tables"
        )
    return PAGE_BYTES + row_bytes


def with_payload(job: HostedJob, push: RowsPush) -> RowsPush:
    """Returns a push with a copy of what it has in the segment."""
    if push.place is None:
        return push
    dim = job.state.tables.checker.table(push.table).rows.dim
    memory = _memory_of(job, push)
    return replace(push, payload=memory.array(push.place, pushed_bytes(push.count, dim), np.uint8).copy().data)


def with_ids(job: HostedJob, pull: RowsPull) -> tuple[RowsPull, torch.Tensor | None]:
    """Returns a pull with a copy of the ids that it has in the segment, and where its rows go: [n, dim]."""
    if pull.places is None:
        return pull, None
    memory, (ids, count, rows) = _memory_of(job, pull), pull.places
    dim = job.state.tables.checker.table(pull.table).rows.dim
    return replace(pull, payload=memory.array(ids, ID_BYTES * count, np.uint8).copy().data), memory.rows(
        rows, count, dim
    )


def _memory_of(job: HostedJob, call: RowsPush | RowsPull) -> RowMemory:
    """Returns a worker's segment for rows. Raises NotShared if it has none here, UnknownWorker if it is not live."""
    with job.lock:
        job.state.check_worker(call.rank, call.incarnation, call.key)
        attached = job.of_workers.row_memory.get(call.rank)
    if attached is None or attached.incarnation != call.incarnation:
        raise NotShared(f"worker {call.rank} has attached no segment for rows here")
    return attached.memory
