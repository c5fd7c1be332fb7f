"""What shards and workers tell of tables: the numbers of a training run whose every id is known."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import PSError
from ps_runtime.quantities import size_text
from ps_server.core.server_figures import OTHER_TABLES, TABLES_REPORTED, RowCounts, TableFigures, reported
from ps_server.ops import requests, screen, status_text
from ps_server.rpc.plain import plain
from ps_server.rpc.shard_messages import table_figures, table_message
from ps_tables.choosing import library_in_use
from tests.tools.cable import BEATS, LEASE
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.heartbeats import beat_often
from tests.tools.table_model import LookUps

DIM = 3
PUSHED, PULLED = 8 + 4 + 4 * DIM, 4 * DIM  # bytes of a row: id, count and gradient; weights
FEW, LATE = torch.arange(10), torch.arange(5, 15)
SEVEN = torch.tensor([7])


class Tables(nn.Module):
    """Three tables that are looked up with the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = ps_worker.Embedding(DIM)
        self.choosy = ps_worker.Embedding(DIM, admit_after=2, expire_after=4)
        self.small = ps_worker.Embedding(DIM, max_rows=6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(table(ids).sum() for table in (self.plain, self.choosy, self.small))  # type: ignore[return-value]


class Training(LookUps):
    """Steps of a worker that trains Tables with SGD."""

    def __init__(self, session: ps_worker.Session) -> None:
        self.own = Tables()
        self.model, self.optimizer = session.prepare(self.own, torch.optim.SGD(self.own.parameters(), lr=0.1))

    def known(self, are_announced: bool = False) -> None:
        """Twenty ids in two steps, ten of them distinct in each; then one id until the others have expired."""
        batches = [torch.cat([FEW, FEW[:5]]), LATE, *[SEVEN] * 6]
        for ids, following in zip(batches, [*batches[1:], None], strict=True):
            for table in (self.own.plain, self.own.choosy, self.own.small):
                table.announce(following if are_announced else None)
            self.step(ids)


STEPS = 8
ASKED = len(FEW) + len(LATE) + 6  # distinct ids of the lookups, in each table
# By table and figure: what is told of the run above, over all shards.
EXPECTED = {
    "plain": {
        "row_count": 15,
        "found_id_count": 5 + 6,
        "missing_id_count": 10 + 5,
        "pushed_row_count": ASKED,
        "admitted_row_count": 15,
        "expired_row_count": 0,
        "evicted_row_count": 0,
        "waiting_gradient_count": 0,
        "no_room_gradient_count": 0,
        "file_row_count": 0,
        "file_size_bytes": 0,
        "cold_id_count": 0,
    },
    "choosy": {
        "row_count": 1,
        "found_id_count": 6,  # 7 became a row in the second step
        "missing_id_count": 20,
        "pushed_row_count": ASKED,
        "admitted_row_count": 10,
        "expired_row_count": 9,
        "evicted_row_count": 0,
        "waiting_gradient_count": 5 + 5,
        "no_room_gradient_count": 0,
        "file_row_count": 0,
        "file_size_bytes": 0,
        "cold_id_count": 0,
    },
}
SAMPLES = {
    'ps_table_rows{job="JOB",table="TABLE"}': "row_count",
    'ps_table_bytes{job="JOB",table="TABLE"}': "size_bytes",
    'ps_table_lookups_total{job="JOB",result="found",table="TABLE"}': "found_id_count",
    'ps_table_lookups_total{job="JOB",result="missing",table="TABLE"}': "missing_id_count",
    'ps_table_file_rows{job="JOB",table="TABLE"}': "file_row_count",
    'ps_table_file_bytes{job="JOB",table="TABLE"}': "file_size_bytes",
    'ps_table_cold_lookups_total{job="JOB",table="TABLE"}': "cold_id_count",
    'ps_table_pushed_rows_total{job="JOB",table="TABLE"}': "pushed_row_count",
    'ps_table_admitted_rows_total{job="JOB",table="TABLE"}': "admitted_row_count",
    'ps_table_forgotten_rows_total{job="JOB",reason="expired",table="TABLE"}': "expired_row_count",
    'ps_table_forgotten_rows_total{job="JOB",reason="evicted",table="TABLE"}': "evicted_row_count",
    'ps_table_dropped_gradients_total{job="JOB",reason="waiting",table="TABLE"}': "waiting_gradient_count",
    'ps_table_dropped_gradients_total{job="JOB",reason="no_room",table="TABLE"}': "no_room_gradient_count",
}


def total(cluster: Cluster, name: str) -> float:
    """A series, summed over all shards."""
    return sum(scrape(server.metrics_address).get(name, 0.0) for server in cluster.servers)


def of_tables(cluster: Cluster, job: str) -> dict[str, dict[str, Any]]:
    return status_text.tables(requests.fetch(cluster.address), job)


def settled(cluster: Cluster, job: str, pushed: int = ASKED) -> dict[str, dict[str, Any]]:
    """What is told of the tables once all that was pushed is in the rows."""

    def look() -> bool:
        found = of_tables(cluster, job)
        rules = [rule for shard in cluster.shards for rule in shard.jobs()[job].partition.rules.values()]
        done = not any(rule.waiting or rule.added for rule in rules)
        return done and all(table["pushed_row_count"] == pushed for table in found.values())

    until(look, "all pushes in the rows")
    return of_tables(cluster, job)  # figures that were read during the last update may lack some of it


def test_what_became_of_every_id_is_told_by_status_and_prometheus(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job) as session:
        Training(session).known()
        found = settled(shared, job)
        told_of = {name: {what: found[name][what] for what in expected} for name, expected in EXPECTED.items()}
        assert told_of == EXPECTED
        small = found["small"]
        assert 0 < small["row_count"] <= 6, "each shard holds up to three"
        assert small["evicted_row_count"] > 0
        assert small["no_room_gradient_count"] > 0, "of ten ids some shard gets more than three"
        assert small["row_count"] == small["admitted_row_count"] - small["evicted_row_count"]
        assert small["found_id_count"] + small["missing_id_count"] == ASKED
        pages = [scrape(server.metrics_address) for server in shared.servers]
        for name, table in found.items():
            series = {what: sample.replace("JOB", job).replace("TABLE", name) for sample, what in SAMPLES.items()}
            scraped = {what: sum(page.get(sample, 0.0) for page in pages) for what, sample in series.items()}
            assert scraped == {what: table[what] for what in SAMPLES.values()}, name


def test_the_memory_of_tables_is_part_of_what_is_told_of_a_job(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job) as session:
        training = Training(session)
        training.step(FEW)
        empty = settled(shared, job, len(FEW))["plain"]["size_bytes"]
        training.step(torch.arange(5_000))
        found = settled(shared, job, len(FEW) + 5_000)
        assert found["plain"]["size_bytes"] >= empty + 4_990 * 4 * DIM
        held = [sum(each.nbytes for each in shard.jobs()[job].partition.table_figures()) for shard in shared.shards]
        assert sum(held) == sum(table["size_bytes"] for table in found.values())
        for server, nbytes in zip(shared.servers, held, strict=True):
            assert scrape(server.metrics_address)[f'ps_job_bytes{{job="{job}",kind="tables"}}'] == nbytes
        text = status_text.table(requests.fetch(shared.address))
    head, *rows = text.splitlines()
    place = head.index("TABLES")
    in_column = [row[place:].split("  ")[0] for row in rows if row.startswith("shard") and f" {job} " in row]
    assert in_column == [size_text(nbytes) for nbytes in held]


@pytest.mark.parametrize("are_announced", [False, True])
def test_the_bytes_of_rows_are_in_those_of_pushes_and_pulls(shared: Cluster, job: str, are_announced: bool) -> None:
    with shared.connect("sync", job=job) as session:
        training = Training(session)
        training.known(are_announced)
        pushed, pulled = 3 * ASKED * PUSHED, 3 * ASKED * PULLED
        pushes, pulls = (f'ps_{kind}_bytes_total{{job="{job}"}}' for kind in ("push", "pull"))
        # What is sent is counted a moment after it has arrived.
        until(lambda: total(shared, pulls) >= pulled, "all that was sent")
        assert (total(shared, pushes), total(shared, pulls)) == (pushed, pulled)
        samples = scrape(session.metrics_address)
        assert samples["ps_worker_push_bytes_total"] == pushed
        assert samples["ps_worker_pull_bytes_total"] == pulled
        training.own.plain.local.state()
        received = scrape(session.metrics_address)["ps_worker_pull_bytes_total"]
        assert received - pulled >= 15 * PULLED, "whole tables count, too"
        until(lambda: total(shared, pulls) >= received, "all that was sent")
        assert total(shared, pulls) == received


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_a_worker_tells_how_often_an_id_comes_in_a_lookup(shared: Cluster, job: str, mode: str) -> None:
    with ps_worker.connect(shared.address, mode, job) as session:
        training = Training(session)
        training.known()
        with torch.no_grad():
            training.own.plain(torch.tensor([[1, 1], [1, 2]]))
        samples = scrape(session.metrics_address)
        assert samples["ps_worker_lookups_total"] == 3 * (15 + 10 + 6) + 4
        assert samples["ps_worker_distinct_lookups_total"] == 3 * ASKED + 2


def test_status_has_a_line_for_each_table_and_one_for_lookups(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_often(monkeypatch, BEATS)
    cluster: Cluster = make_cluster(lease=LEASE)
    with cluster.connect("async", job="j") as session:
        Training(session).known()
        settled(cluster, "j")
        looked_up = 3 * (15 + 10 + 6)

        def look() -> dict[str, Any] | None:
            found = requests.fetch(cluster.address)
            [worker] = found["jobs"][0]["workers"]
            return found if worker["figures"] and worker["figures"]["looked_up_id_count"] == looked_up else None

        found = until(look, "a heartbeat after the last step")
        assert found is not None
        lines = status_text.table(found).splitlines()
        size = size_text(status_text.tables(found, "j")["choosy"]["size_bytes"])
        assert f"  table choosy: 1 row, {size}; 10 admitted, 9 expired, 0 evicted; 23.1 % of 26 ids found" in lines
        assert [line.split()[1] for line in lines if line.startswith("  table ")] == ["plain:", "choosy:", "small:"]
        assert f"  an id comes {looked_up / (3 * ASKED):.1f} times in a lookup, on average" in lines
        used = library_in_use()
        assert f"  tables on the shards: {used if used == 'numpy' else f'the library for {used}'}" in lines

        class Once(io.StringIO):
            """Ends the watching when it has a line for a table."""

            def write(self, text: str) -> int:
                if "\n  table choosy: 1 row" in text:
                    raise KeyboardInterrupt
                return len(text)

        with pytest.raises(KeyboardInterrupt):
            screen.watch(cluster.address, period=0.5, out=Once())


def test_workers_of_an_update_push_rows_that_come_in_once(shared: Cluster, job: str) -> None:
    def work(rank: int) -> None:
        with shared.connect("sync", rank, 2, job=job) as session:
            training = Training(session)
            training.step(FEW)
            session.barrier()
            if rank == 0:
                found = settled(shared, job, 2 * len(FEW))
                assert found["plain"]["admitted_row_count"] == len(FEW)
                assert found["choosy"]["admitted_row_count"] == len(FEW), "an id has occurred with each worker"
            session.barrier()

    in_parallel(2, work)


def test_counts_begin_anew_with_a_job_and_its_series_vanish_with_it(shared: Cluster, job: str) -> None:
    for _ in range(2):
        with shared.connect("async", job=job) as session:
            Training(session).step(FEW)
            assert settled(shared, job, len(FEW))["plain"]["admitted_row_count"] == len(FEW)
        assert not any(job in name for server in shared.servers for name in scrape(server.metrics_address))


def test_what_cannot_be_looked_up_is_not_counted() -> None:
    with ps_worker.connect(mode="single") as session:
        training = Training(session)
        with pytest.raises(PSError, match="ids are a tensor of int64 or int32"):
            training.model(torch.ones(3))
        assert scrape(session.metrics_address)["ps_worker_lookups_total"] == 0


def test_tables_behind_the_first_hundred_are_told_as_one() -> None:
    counts = RowCounts(*range(1, 10))
    tables = [
        TableFigures(str(number), number, 10 * number, counts, 2 * number, 3 * number)
        for number in range(TABLES_REPORTED + 3)
    ]
    assert reported(tables[:TABLES_REPORTED]) == tuple(tables[:TABLES_REPORTED])
    *first, last = reported(tables)
    assert first == tables[:TABLES_REPORTED]
    rows = sum(range(TABLES_REPORTED, TABLES_REPORTED + 3))
    counts = RowCounts(*range(3, 28, 3))
    assert last == TableFigures(OTHER_TABLES, rows, 10 * rows, counts, 2 * rows, 3 * rows)


def test_what_is_told_of_a_table_comes_back_from_its_message() -> None:
    figures = TableFigures("items", 9, 10, RowCounts(*range(1, 10)), 11, 12)
    assert table_figures(table_message(figures)) == figures
    assert plain(table_message(figures))["evicted_row_count"] == figures.counts.evicted
