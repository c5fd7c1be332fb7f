"""Rows that make room on servers: the few that are too many, and what follows a table hears of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ps_worker
from ps_server.core.limits import Limits
from ps_server.ops import requests, status_text
from ps_worker.row_feed import RowFeed
from tests.tools.cases import cases
from tests.tools.cluster import Cluster

FIRST, NEW = torch.arange(400), torch.arange(10_000, 10_005)


class Trainer:
    """Trains a table, each step with the ids that it is told."""

    def __init__(self, session: ps_worker.Session, **of_table: object) -> None:
        self.own = ps_worker.Embedding(2, seed=1, initial="constant", **of_table)  # type: ignore[arg-type]
        self.table, self._optimizer = session.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=1.0))

    def step(self, ids: torch.Tensor) -> None:
        self.table(ids).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def trained(self, ids: torch.Tensor) -> list[int]:
        return ids[(self.table.rows(ids) != 1.0).all(1)].tolist()


def figures(cluster: Cluster, job: str) -> tuple[int, int]:
    """Rows, and how many have made room."""
    found = status_text.tables(requests.fetch(cluster.address), job)["table"]
    return int(found["row_count"]), int(found["evicted_row_count"])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_few_new_ids_leave_a_table_that_one_step_has_filled_nearly_full(shared: Cluster, job: str, mode: str) -> None:
    with (
        shared.connect(mode, job=job) as session,
        RowFeed("table", shared.address, job, period=0.1) as feed,
    ):
        trainer = Trainer(session, max_rows=320)
        trainer.step(FIRST)
        assert len(trainer.own) == 320  # which waits for what was pushed
        assert figures(shared, job) == (320, 0)
        trainer.step(NEW)
        assert trainer.trained(NEW) == NEW.tolist()
        rows, gone = figures(shared, job)
        assert (rows, gone) == (320 + 5 - gone, 20), "10 of 160 on each shard"
        feed.wait_for(2)
        assert len(feed) == rows
        assert torch.equal(feed.rows(FIRST), trainer.table.rows(FIRST)), "it was told which ones went"


@pytest.mark.parametrize("shards", cases([1], [2]))
def test_checkpoints_of_changes_have_what_made_room(
    make_cluster: Callable[..., Cluster], tmp_path: Path, shards: int
) -> None:
    """A run that goes on from one has the rows of the run that was not disturbed."""

    def step(trainer: Trainer, number: int) -> None:
        trainer.step(torch.arange(7 * number, 7 * number + 60) if number else FIRST)

    cluster = make_cluster(shards=shards, checkpoint_dir=tmp_path, checkpoint_every="1steps")
    with cluster.connect("sync") as session:
        trainer = Trainer(session, max_rows=320)
        for number in range(8):
            step(trainer, number)
        rows = trainer.own.state_dict()
    cluster.stop()
    cluster = make_cluster(shards=shards, checkpoint_dir=tmp_path, restore=True)
    with cluster.connect("sync") as session:
        again = Trainer(session, max_rows=320)
        for number in range(session.clock, 8):
            step(again, number)
        assert all(torch.equal(rows[name], tensor) for name, tensor in again.own.state_dict().items())


def test_with_less_memory_than_before_a_job_goes_on_with_the_rows_trained_last(
    make_cluster: Callable[..., Cluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(shards=1, checkpoint_dir=tmp_path)
    with cluster.connect("sync") as session:
        trainer = Trainer(session)
        for part in FIRST.split(100):
            trainer.step(part)
    cluster.stop()
    with caplog.at_level(logging.WARNING, "ps_server"):
        cluster = make_cluster(shards=1, checkpoint_dir=tmp_path, restore=True, limits=Limits(table_bytes=14_000))
    with cluster.connect("sync") as session:
        trainer = Trainer(session)
        assert session.clock == 4
        rows, gone = figures(cluster, "default")
        assert rows + gone == 400
        assert 200 < rows < 300
        assert set(trainer.trained(FIRST)) > set(FIRST[200:].tolist())
        said = f"job default: table table has room for {rows} rows here, and 400 were saved"
        assert len([text for text in caplog.messages if text.startswith(said)]) == 1
        trainer.step(NEW)
        assert trainer.trained(NEW) == NEW.tolist()
