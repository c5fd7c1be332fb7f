"""How much memory is free, and that a job which needs more is refused instead of killing the shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import LimitExceeded
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.messages.data import PullCall
from ps_protocol.modes import Consistency
from ps_protocol.tables import JobTable, TableSpec
from ps_protocol.v1 import jobs_pb2
from ps_runtime.memory import free_bytes
from ps_server.core.budget import room_for
from ps_server.core.dense import Gradient
from ps_server.core.limits import DEFAULTS
from ps_server.core.partition import JobPartition
from ps_server.core.table_rows import RowsContribution
from ps_server.core.validation import check_job_spec
from ps_server.shard.hosted_job import HostedUnit
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_tables.contributions import RowGradients
from ps_tables.sizes import index_bytes, record_bytes
from tests.tools.cluster import Cluster
from tests.tools.raw_worker import RawWorker, vector_job

MEMINFO = "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHugePages_Total:  0\n"


def system(root: Path, groups: dict[str, tuple[str, str, str]], group: str = "/") -> Path:
    """A machine's files: meminfo, and memory.max, memory.current and memory.stat of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(f"1:name=other:/elsewhere\n0::{group}\n")
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(("memory.max", "memory.current", "memory.stat"), files, strict=True):
            (folder / file).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "group", "free"),
    [
        ({}, "/", 1_024_000),
        ({"": ("max\n", "5000\n", "file 100\n")}, "/", 1_024_000),
        ({"": ("500000\n", "300000\n", "anon 1\nfile 50000\n")}, "/", 250_000),
        ({"": ("500000\n", "300000\n", "file 50000\nshmem 20000\n")}, "/", 230_000),
        ({"": ("9000000\n", "0\n", ""), "a/b": ("max\n", "7\n", ""), "a": ("4000\n", "1000\n", "")}, "/a/b", 3000),
        ({"": ("1000\n", "3000\n", "")}, "/", 0),
    ],
    ids=[
        "no groups",
        "no limit",
        "a limit, and files that can go",
        "files of which some are memory",
        "the limit of a group above",
        "over the limit",
    ],
)
def test_the_least_that_machine_and_control_groups_leave_is_free(
    tmp_path: Path, groups: dict[str, tuple[str, str, str]], group: str, free: int
) -> None:
    assert free_bytes(system(tmp_path, groups, group)) == free


def test_where_nothing_tells_nothing_is_known(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None


def test_a_job_larger_than_memory_is_refused_and_the_shards_live(shared: Cluster) -> None:
    if free_bytes() is None:
        pytest.skip("this system does not say how much memory is free")
    huge = replace(vector_job("huge", "sync", 2**37, 1), bucket_bytes=16 * 2**20)  # 512 GiB
    with pytest.raises(LimitExceeded, match=r"'huge' does not fit into this shard's memory: its weights here are \d+"):
        RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(huge)))
    assert shared.state("huge") == {"known": False}
    with RawWorker(shared.address, vector_job("after", "sync", 64, 1), 0) as worker:
        worker.initialise()
        assert worker.pull().tolist() == [0.0] * 64


# -- what a job comes to take ----------------------------------------------------------------------------------------


def job_of(optimizer: str, values: HyperParameters, world_size: int = 1, cells: int = 1000) -> JobSpec:
    """A job of one vector of float32."""
    parameters = (ParameterSpec("w", (cells,), "float32", 0),)
    return JobSpec("job", parameters, optimizer, (values,), Consistency(0, aggregate=True), 4096, world_size)


STATES: list[tuple[str, HyperParameters]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "amsgrad": True}),
    ("RMSprop", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.9}),
    ("Adagrad", {"lr": 0.1}),
    ("Adadelta", {"lr": 0.1}),
    ("Adamax", {"lr": 0.1}),
    ("NAdam", {"lr": 0.1}),
    ("RAdam", {"lr": 0.1}),
]


@pytest.mark.parametrize(("optimizer", "values"), STATES, ids=lambda value: str(value))
def test_what_an_optimizer_comes_to_keep_is_known_before_it_steps(optimizer: str, values: HyperParameters) -> None:
    spec = job_of(optimizer, values)
    partition = JobPartition(spec, [0])
    weights = partition.buckets[0].weights
    weights.add(Gradient(torch.ones(1000)))
    weights.step()
    scalars = 8  # of a step's number and the like
    assert 0 <= weights.optimizer_bytes - room_for(spec, [0]).optimizer <= scalars


def test_a_job_is_refused_whose_optimizer_will_not_fit_beside_what_other_jobs_still_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads())
    spec = job_of("Adam", {"lr": 0.1}, world_size=2, cells=2**20)
    room = room_for(spec, range(1025))
    assert (room.weights, room.optimizer, room.staged) == (2**22, 2**23, 2**22)
    assert room.objects > 1024 * 5 * 1024
    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: room.total - 1)
    with pytest.raises(LimitExceeded, match=f"its optimizer's state comes to {2**23}.*{room.total - 1} are free"):
        shard.create_job(spec, range(1024), "1")
    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: room.total)
    shard.create_job(spec, range(1024), "1")
    # Its weights are taken now; a small one finds the rest promised.
    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: room.optimizer + room.staged)
    with pytest.raises(LimitExceeded, match=f"of which other jobs here still take {room.optimizer + room.staged}"):
        shard.create_job(replace(job_of("SGD", {"lr": 0.1}), name="small"), [0], "1")
    assert list(shard.jobs()) == ["job"]
    shard.stop()


def test_rows_that_a_job_has_announced_are_kept_from_later_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads())

    def with_table(name: str, max_rows: int) -> JobSpec:
        rows = TableSpec("items", 14, max_rows=max_rows)
        tables = (JobTable(rows, "Adagrad", {"lr": 0.1}),)
        return JobSpec(name, (), "SGD", ({"lr": 0.1},), Consistency(0, aggregate=True), 4096, 2, tables=tables)

    def promised(name: str) -> int:
        return shard.jobs()[name].partition.promised_bytes

    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: 2**34)
    shard.create_job(with_table("announced", 100_000), [], "1", shards=2)
    shard.create_job(with_table("open", 0), [], "1", shards=2)
    most = 50_000 * record_bytes(TableSpec("items", 14), "Adagrad", {"lr": 0.1}) + index_bytes(50_000)
    kept = promised("announced")
    assert 0.99 * most < kept <= most
    assert promised("open") == 0, "it takes what there is"
    announced, other = (shard.jobs()[name].promised() for name in ("announced", "open"))
    assert announced - other == kept, "they differ in that alone"
    dense = job_of("SGD", {"lr": 0.1}, world_size=1)
    room, others = room_for(dense, [0]).total, announced + other
    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: room + others - 1)
    with pytest.raises(LimitExceeded, match=f"of which other jobs here still take {others}$"):
        shard.create_job(dense, [0], "1")
    table = shard.jobs()["announced"].partition.tables[0].weights
    ids = np.arange(10_000)
    table.add(RowsContribution((RowGradients(ids, np.ones(10_000, np.int64), torch.ones(10_000, 14)),)))
    table.step()
    assert promised("announced") <= kept - 10_000 * 4 * (14 + 14), "what is filled is taken, and promised no more"
    shard.create_job(dense, [0], "1")
    assert list(shard.jobs()) == ["announced", "open", "job"]
    shard.stop()


def test_groups_are_limited_before_they_are_looked_at() -> None:
    groups = tuple({"lr": 0.1 + index} for index in range(DEFAULTS.groups + 1))
    spec = replace(job_of("SGD", {"lr": 0.1}), param_groups=groups)
    with pytest.raises(LimitExceeded, match=r"max-groups is 4096, got a job of 4097 parameter groups"):
        check_job_spec(spec, DEFAULTS)


def test_a_small_job_may_not_have_very_many_buckets() -> None:
    spec = replace(job_of("SGD", {"lr": 0.1}, cells=2**20), bucket_bytes=128)
    with pytest.raises(LimitExceeded, match=r"may have 1280 buckets, .* got about 32\d{3}: use larger bucket_bytes"):
        check_job_spec(spec, DEFAULTS)
    check_job_spec(replace(spec, bucket_bytes=4096), DEFAULTS)


class Recording:
    """An outbox whose stream is closed by the test."""

    def __init__(self) -> None:
        self.close: Callable[[], None] = lambda: None

    def on_close(self, callback: Callable[[], None]) -> None:
        self.close = callback

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Watched(dict[int, HostedUnit[Any]]):
    """Counts what is looked at."""

    looks = 0

    def __getitem__(self, index: int) -> HostedUnit[Any]:
        self.looks += 1
        return super().__getitem__(index)

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def test_a_pull_that_is_over_looks_at_its_own_buckets_only() -> None:
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads())
    spec = vector_job("job", "sync", 16 * 100, 1)
    shard.create_job(spec, range(100), "1")
    shard.add_worker("job", 0, 1, None, run="1")
    job = shard.jobs()["job"]
    outboxes = [Recording() for _ in range(3)]
    for outbox in outboxes:
        shard.pull(PullCall(Identity("job", 0, 1, run="1"), 5, (7, 8)), outbox)
    assert [len(job.buckets[index].waiters) for index in (6, 7, 8)] == [0, 3, 3]
    job.units = watched = Watched(job.units)
    outboxes[1].close()
    assert watched.looks == 2
    assert [len(bucket.waiters) for index, bucket in watched.items() if index in (7, 8)] == [2, 2]
    outboxes[0].close()
    outboxes[2].close()
    assert not any(bucket.waiters for bucket in watched.values())
    shard.stop()
