"""A table takes no more memory than it was given, all of it counted: also ids that wait to become rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_protocol.job import JobSpec
from ps_protocol.modes import Consistency
from ps_protocol.tables import JobTable, TableSpec
from ps_server.core.partition import JobPartition
from ps_server.core.placement import TableShare
from ps_server.core.table_rows import table_size
from ps_tables.contributions import RowGradients
from ps_tables.sizes import index_bytes, record_bytes, rows_within
from ps_tables.table import Table
from tests.tools.cases import cases

ITEMS = TableSpec("items", 1)


def trained(table: Table, ids: np.ndarray, times: int = 1) -> None:
    for part in np.array_split(ids, max(1, len(ids) // 20_000)):
        for _ in range(times):
            gradients = torch.ones(len(part), table.spec.dim)
            table.apply(RowGradients(part, np.ones(len(part), np.int64), gradients), 1, table.version + 1)


@pytest.mark.parametrize("admit_after", [1, 2])
@pytest.mark.parametrize(
    ("memory", "dim"), cases([(2_000_000, 1), (3_100_000, 2)], [(2_900_000, 1), (4_600_000, 1), (9_000_000, 32)])
)
def test_a_full_table_takes_no_more_memory_than_it_was_given(memory: int, dim: int, admit_after: int) -> None:
    """Narrow rows are the worst case: an index takes more than they do, and ids that wait as much again."""
    spec = replace(ITEMS, dim=dim, admit_after=admit_after)
    room = rows_within(memory, record_bytes(spec, "SGD", {}), admit_after > 1)
    table = Table(spec, "SGD", {"lr": 0.1}, room)
    ids = np.arange(room + room // 2)
    trained(table, ids, times=admit_after)
    for first in range(1, 6):  # they come once: they wait, where that is asked for, and make room for one another
        trained(table, ids + first * 10**12)
    if admit_after > 1:
        assert len(table.snapshot()["waiting.ids"]) > 0.9 * room
    assert len(table) > 0.9 * room
    assert table.nbytes <= memory
    assert table.nbytes > 0.6 * memory, "what is given is used"


@pytest.mark.parametrize("max_rows", [0, 200_000])
def test_a_job_promises_memory_for_as_many_ids_that_wait_as_rows(max_rows: int) -> None:
    """So that what is registered later does not count on it."""
    spec = replace(ITEMS, max_rows=max_rows)
    plain, waits = (JobTable(replace(spec, admit_after=n), "SGD", {"lr": 1.0}) for n in (0, 2))
    share = TableShare(0, 2, 10_000_000 if max_rows else 1_000_000)
    without, with_them = table_size(plain, share), table_size(waits, share)
    assert with_them.nbytes == 4 * with_them.rows + index_bytes(with_them.rows, waits=True) <= share.table_bytes
    if max_rows:
        assert with_them.rows == without.rows == 100_000
        job = JobSpec("job", (), "SGD", ({"lr": 1.0},), Consistency(None), 64, 1, tables=(waits,))
        promised = JobPartition(job, [], share=share).promised_bytes
        assert with_them.nbytes - 20_000 <= promised <= with_them.nbytes
    else:
        assert 0.4 * without.rows < with_them.rows < 0.7 * without.rows


@pytest.mark.parametrize("memory", [100_000, 1_000_000])
def test_with_a_file_memory_has_room_for_ids_that_wait(memory: int) -> None:
    waits = JobTable(replace(ITEMS, dim=64, admit_after=2), "SGD", {"lr": 1.0})
    size = table_size(waits, TableShare(0, 1, memory, file_bytes=2**30))
    assert size.in_file
    assert size.in_memory * 256 + 4 * size.rows + index_bytes(size.rows, waits=True) <= memory
