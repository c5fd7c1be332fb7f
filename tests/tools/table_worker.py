"""A job with one table in a coordinator and shards of one process, and a worker that pushes rows to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from ps_protocol.job import JobSpec
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import with_defaults
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import JobTable, TableSpec
from ps_server.storage.manifest import Manifest
from ps_tables.increments import in_order
from tests.tools.one_process import DirectWorker, OneProcess
from tests.tools.partitions import changed
from tests.tools.row_gradients import summed
from tests.tools.table_shards import DIM, SPEC, messages

Rows = dict[int, list[float]]  # by id, a row with its optimizer's state and its last version


def table_job(rules: Mapping[str, int] | None = None) -> JobSpec:
    """A job with a table and nothing else, in which each step is an update of its own."""
    spec: TableSpec = replace(SPEC, **dict(rules or {}))
    table = JobTable(spec, "RowWiseAdagrad", {"lr": 0.1})
    return with_defaults(JobSpec("job", (), "SGD", ({"lr": 0.1},), Consistency(None), 64, 1, tables=(table,)))


class TableWorker(DirectWorker):
    """A worker whose steps train a few rows each."""

    def __init__(self, cluster: OneProcess, rules: Mapping[str, int] | None = None) -> None:
        super().__init__(cluster, table_job(rules), 0)

    def step(self, ids: np.ndarray) -> None:
        """Trains these rows, with gradients that the clock decides."""
        self.clock += 1
        values = np.random.default_rng(self.clock).standard_normal((len(ids), DIM)).astype(np.float32)
        rows = summed(ids.astype(np.int64), torch.from_numpy(values))
        of, member = shards_of(rows.ids, len(self.cluster.shards)), self.place.worker
        for index, shard in self.cluster.shards.items():
            for message in messages(0, member.incarnation, self.clock, rows.part(of == index), 1):
                shard.push_rows(changed(message, job="job", key=member.key, run=self.run))

    def steps(self, count: int, universe: int = 400) -> None:
        """Makes some steps of ten popular rows."""
        for _ in range(count):
            self.step(np.random.default_rng((self.clock, 1)).zipf(1.3, 10) % universe * 7919 - 300)

    def checkpoint(self) -> Manifest:
        """Has a checkpoint made, while nothing is trained."""
        self.cluster.while_waiting()
        return self.cluster.coordinator.job("job").checkpoint()

    def rows(self) -> Rows:
        """All that decides what becomes of the rows, on all shards."""
        found: Rows = {}
        for shard in self.cluster.shards.values():
            found |= rows_of(shard.jobs()["job"].partition.tables[0].weights.snapshot())
        return found


def rows_of(tensors: Mapping[str, torch.Tensor]) -> Rows:
    """Returns the rows of a snapshot, and what waits as rows of one number."""
    ordered = in_order(dict(tensors))
    found: Rows = {}
    for prefix, negative in (("", 1), ("waiting.", 2**62)):
        names = sorted(name for name in ordered if name.startswith("waiting.") == bool(prefix))
        columns = [name for name in names if name not in ("version", f"{prefix}ids")]
        for place, number in enumerate(ordered.get(f"{prefix}ids", torch.empty(0)).tolist()):
            key = number if not prefix else negative + number
            found[int(key)] = [value for name in columns for value in ordered[name][place].reshape(-1).tolist()]
    return found
