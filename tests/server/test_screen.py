"""What `ps-server status --watch` shows of jobs of 4, 64 and 512 workers in a window of 80 columns and 24 lines."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from ps_protocol.v1 import cluster_pb2, figures_pb2, job_pb2, shard_pb2
from ps_server.ops import screen, status
from ps_server.ops.columns import lines_of, wrapped
from ps_server.rpc.plain import plain

COLUMNS, LINES = 80, 24
SILENT = 17  # the rank of a worker that is silent, in jobs that have so many


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def clock_of(rank: int) -> int:
    """Worker 3 is far behind the others, who are a few steps apart."""
    return 120 if rank == 3 else 180 + rank % 7


def worker(rank: int) -> cluster_pb2.WorkerStatus:
    values = [figures_pb2.LoggedValue(name=name, last=0.1483, mean=0.15) for name in ("accuracy", "loss", "lr")]
    figures = figures_pb2.WorkerFigures(step_count=150, values=values, total_step_count=400)
    figures.done_step_count = clock_of(rank)
    host = f"worker-{rank}.trainers.example.org"
    return cluster_pb2.WorkerStatus(rank=rank, clock=clock_of(rank), pid=4000 + rank, host=host, figures=figures)


def activity(rank: int) -> str:
    if rank == SILENT:
        return "silent, lease ends in 3 s"
    return "training" if rank == 3 else "waits 0.4 s for worker 3"


def shard(index: int, workers: int) -> cluster_pb2.ShardStatus:
    waits = [
        shard_pb2.WaitStatus(rank=rank, clock=clock_of(rank), awaited_ranks=[3], reason="ssp:4")
        for rank in range(workers)
        if rank != 3
    ]
    versions = shard_pb2.VersionRange(min_version=9_000, max_version=9_004)
    versions.clocks.update({rank: clock_of(rank) for rank in range(workers)})
    held = shard_pb2.ShardJobStatus(
        job="demo", bucket_count=6, parameter_bytes=50_000_000, optimizer_bytes=10**8, versions=versions, waits=waits
    )
    place = {"address": f"shard-{index}.servers.example.org:50051", "metrics_address": f"shard-{index}:9100"}
    return cluster_pb2.ShardStatus(index=index, pid=77, reachable=True, jobs=[held], **place)


def seen(workers: int, shards: int = 2) -> dict[str, Any]:
    """The view of a job of so many workers."""
    job = cluster_pb2.JobStatus(
        name="demo", world_size=workers, started=True, parameter_bytes=10**8, bucket_count=12, imbalance=1.0, run="1"
    )
    job.consistency.CopyFrom(job_pb2.Consistency(max_staleness=4))
    job.workers.extend(worker(rank) for rank in range(workers))
    view = cluster_pb2.JobView(
        job="demo",
        state="training",
        diagnosis="54 % of the workers' time is waiting, most of it for worker 3",
        steps_per_second=2.5 * workers,
        done_fraction=0.45,
        workers=[
            cluster_pb2.WorkerView(rank=rank, activity=activity(rank), steps_per_second=2.5) for rank in range(workers)
        ],
    )
    view.age_duration.seconds, view.left_duration.seconds, view.checkpoint_age_duration.seconds = 200, 130, 8
    response = cluster_pb2.WatchStatusResponse(jobs=[view])
    response.status.coordinator.address, response.status.coordinator.shard_count = "coordinator:50051", shards
    response.status.jobs.append(job)
    response.status.shards.extend(shard(index, workers) for index in range(shards))
    response.shards.extend(cluster_pb2.ShardView(index=index) for index in range(shards))
    return plain(response)


def drawn(view: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a terminal of COLUMNS and LINES."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))
    out = Terminal()
    screen._redraw(out, view)
    text = out.getvalue().removeprefix("\x1b[H").removesuffix("\x1b[J")
    return [line.removesuffix("\x1b[K") for line in text.splitlines()]


def ranks(lines: list[str]) -> list[int]:
    """The ranks of the race, from its first line to its last."""
    return [int(found[1]) for line in lines if (found := re.match(r" +(\d+)  +\d+  [─●]+", line))]


@pytest.mark.parametrize("workers", [4, 64, 512])
def test_the_sentence_and_the_race_come_first_and_all_fits(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(seen(workers), monkeypatch)
    assert max(map(len, lines)) <= COLUMNS
    assert len(lines) < LINES
    assert lines[0] == f"demo · ssp:4 · training · {2.5 * workers:.1f} steps/s · running for 3 min"
    assert lines[1] == "54 % of the workers' time is waiting, most of it for worker 3"
    assert re.fullmatch(r"step 120-18\d of 400 · 45 % · 2 min left · checkpoint 8 s ago", lines[2])
    assert re.match(r" rank +clock +\S+ → \S+ +steps/s +loss  now", lines[3])
    assert [line for line in lines if line.startswith("ROLE ")], "and then the processes"
    assert len([line for line in lines if line.startswith("shard ")]) == 2
    assert not [line for line in lines if "make the window higher" in line]


def test_of_few_workers_all_are_shown_with_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(seen(4), monkeypatch)
    assert ranks(lines) == [0, 1, 2, 3]
    assert lines[4].endswith("waits 0.4 s for worker 3"), "whole: this is what the window is looked at for"
    assert not [line for line in lines if "more between" in line]


@pytest.mark.parametrize("workers", [64, 512])
def test_of_many_workers_those_in_trouble_are_shown_and_the_fastest(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = drawn(seen(workers), monkeypatch)
    shown = ranks(lines)
    assert len(shown) == 10
    assert shown[:2] == [SILENT, 3], "one that is silent, then the one that is furthest behind"
    clocks = [clock_of(rank) for rank in shown[1:]]
    assert clocks == sorted(clocks)
    assert {clock_of(rank) for rank in shown[8:]} == {186}
    [between] = [line for line in lines if "more between" in line]
    assert between == f" {workers - 10} more between, at clocks 180 to 186"
    assert lines.index(between) == 4 + 8


@pytest.mark.parametrize("workers", [4, 64, 512])
def test_the_table_is_no_wider_than_the_window(workers: int) -> None:
    """Each shard's row had the clock of each worker: 1,538 columns with 256 of them."""
    view = seen(workers)
    assert max(map(len, status.table(view["status"], COLUMNS).splitlines()[: workers + 4])) <= COLUMNS
    whole = status.table(view["status"]).splitlines()
    assert max(map(len, whole[: workers + 4])) < 250
    [row] = [line.split() for line in whole if line.split()[:2] == ["shard", "0"]]
    head = whole[0].split()
    assert row[head.index("CLOCK")] == ("120-182" if workers == 4 else "120-186")


def test_a_window_that_is_very_low_shows_who_is_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = screen.screen(seen(64), 80, 8)
    assert ranks(lines[:8])[0] == SILENT
    assert "more between" in "\n".join(lines[:8])


def test_columns_are_left_out_in_their_order_and_lines_are_cut() -> None:
    rows = [("A", "LONG", "B"), ("1", "x" * 10, "2")]
    assert lines_of(rows, 20, ["LONG"]) == ["A  LONG        B", "1  xxxxxxxxxx  2"]
    assert lines_of(rows, 12, ["LONG"]) == ["A  B", "1  2"]
    assert lines_of(rows, 8) == ["A  LONG…", "1  xxxx…"]
    assert wrapped(["one", "two", "three"], 9) == ["one · two", "three"]
