"""Servers whose tables outgrow memory: rows in files change nothing but where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_protocol.row_ids import shards_of
from ps_protocol.tables import JobTable
from ps_server.core.limits import Limits
from ps_server.core.placement import TableShare
from ps_server.ops import requests, status_text
from ps_server.storage.row_files import RowFiles
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.row_gradients import summed
from tests.tools.table_shards import DIM, SPEC, SYNC, WORKERS, TableShard

IDS, STEPS = 1_500, 40
MEMORY = 50_000  # bytes, of which two thirds know where rows are: a sixth of all rows fits beside that


class Items(nn.Module):
    """One table."""

    def __init__(self) -> None:
        super().__init__()
        self.item = ps_worker.Embedding(8, scale=0.1, seed=5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.item(ids).square().sum()  # type: ignore[no-any-return]


def trained(session: ps_worker.Session, last: int, begin: int = 0) -> dict[str, torch.Tensor]:
    """Trains from a clock to another; returns all that there is then."""
    own = Items()
    model, optimizer = session.prepare(own, torch.optim.Adagrad(own.parameters(), lr=0.1))
    assert session.clock == begin
    while session.clock < last:
        random = torch.Generator().manual_seed(session.clock)
        ids = (IDS * torch.rand(150, generator=random) ** 2).long() * 2**40
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
    return own.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def rows_in_files(cluster: Cluster) -> int:
    return int(status_text.tables(requests.fetch(cluster.address), "default")["item"]["file_row_count"])


def test_servers_with_files_train_and_restore_to_the_same_bits(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Half of the run on two shards, the rest, from its checkpoint, on three."""
    with make_cluster().connect("sync") as session:
        expected = trained(session, STEPS)
    with_files = {
        "cold_rows_dir": tmp_path / "rows",
        "checkpoint_dir": tmp_path / "checkpoints",
        "checkpoint_every": f"{STEPS // 2}steps",
        "limits": Limits(table_bytes=MEMORY),
    }
    cluster = make_cluster(**with_files)
    with cluster.connect("sync") as session:
        trained(session, STEPS // 2)
        assert rows_in_files(cluster) > 100
        found = scrape(cluster.servers[0].metrics_address)
        assert found['ps_table_cold_lookups_total{job="default",table="item"}'] > 0
        assert found['ps_table_file_bytes{job="default",table="item"}'] > 0
        assert "in files of" in status_text.table(requests.fetch(cluster.address))
    cluster.stop()  # the end of the job has made a checkpoint
    cluster = make_cluster(shards=3, **with_files, restore=True)
    with cluster.connect("sync") as session:
        assert same(trained(session, STEPS, STEPS // 2), expected)
        assert rows_in_files(cluster) > 100
    assert list((tmp_path / "rows").iterdir()) == []


def begun_since(before: set[threading.Thread]) -> set[str]:
    """The names of pools that have threads now which were not there before."""
    return {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}


def test_servers_that_stop_end_the_threads_that_read_files_and_ask_for_statuses(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    before = set(threading.enumerate())  # of clusters of other tests, too
    cluster = make_cluster(cold_rows_dir=tmp_path, limits=Limits(table_bytes=MEMORY))
    with cluster.connect("sync") as session:
        trained(session, STEPS // 2)
        assert rows_in_files(cluster) > 100
    assert {"status", "cold-rows"} <= begun_since(before)
    cluster.stop()
    until(lambda: not {"status", "cold-rows"} & begun_since(before), "the end of these threads")


def test_a_directory_that_takes_no_files_is_refused_before_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=r"no files of rows can be made in .*file: "):
        Cluster(1, cold_rows_dir=tmp_path / "file")


def pushed(shards: list[TableShard], clock: int) -> None:
    for rank in range(WORKERS):
        random = np.random.default_rng((clock, rank))
        ids = random.zipf(1.2, 60) % 500 * 7919 - 300
        gradients = torch.from_numpy(random.standard_normal((60, DIM)).astype(np.float32))
        step = summed(ids.astype(np.int64), gradients)
        of = shards_of(step.ids, len(shards))
        for shard, each in enumerate(shards):
            each.push(rank, clock, step.part(of == shard))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 2)])
def test_rows_are_the_same_on_any_number_of_shards(tmp_path: Path, before: int, after: int) -> None:
    table, files = JobTable(SPEC, "Adagrad", {"lr": 0.1}), RowFiles(tmp_path)

    def share(shard: int, shards: int) -> TableShare:
        return TableShare(shard, shards, 36_000 // shards, 0, files.free_bytes(), files.open)

    [alone] = [TableShard(table, SYNC)]
    several = [TableShard(table, SYNC, shard, before, share(shard, before)) for shard in range(before)]
    for clock in range(1, 21):
        pushed([alone], clock)
        pushed(several, clock)
    assert all(shard.table.in_file.rows for shard in several)
    parts = [shard.partition.tables[0].snapshot() for shard in several]
    again = [TableShard(table, SYNC, shard, after, share(shard, after)) for shard in range(after)]
    for shard in again:
        shard.restore(parts)
    for clock in range(21, 41):
        pushed([alone], clock)
        pushed(again, clock)
    assert all(shard.table.in_file.rows for shard in again)
    whole = alone.table.snapshot()
    found = [shard.table.snapshot() for shard in again]
    order = np.argsort(torch.cat([each["ids"] for each in found]).numpy())
    wanted = np.argsort(whole["ids"].numpy())
    for name in whole.keys() - {"version"}:
        assert torch.equal(torch.cat([each[name] for each in found])[order], whole[name][wanted]), name
