"""Timelines of real clusters: each bucket of each step, six moments in order, on one clock."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.v1 import data_pb2
from ps_worker import Session
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.landing import PullPlan
from ps_worker.timeline.chrome import FIRST_WORKER, SIX
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.small_models import drawn, filled

WORKERS, STEPS, BUCKETS = 2, 6, 9
Event = dict[str, Any]
Trained = tuple[nn.Module, torch.optim.Optimizer]


def prepared(session: Session, overlap: bool | None = None) -> Trained:
    """Nine buckets, on both shards."""
    model = filled(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)))
    made = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=1024, overlap=overlap)
    return made[0], made[1]


def step(trained: Trained, number: int = 0) -> None:
    model, optimizer = trained
    optimizer.zero_grad()
    model(drawn(number, 4, 16)).square().mean().backward()
    optimizer.step()


def events(path: Path) -> list[Event]:
    """What a file holds; fails if it is no Chrome trace."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] in "MX"
        assert {type(event[key]) for key in ("pid", "tid")} == {int}
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert event["dur"] >= 0
    return list(trace["traceEvents"])


def buckets(path: Path) -> dict[tuple[int, int], Event]:
    """By step and bucket, what is measured of it; fails if one comes twice."""
    whole = [event["args"] for event in events(path) if event["ph"] == "X" and "bucket" in event["args"]]
    found = {(args["clock"], args["bucket"]): args for args in whole}
    assert len(found) == len(whole)
    return found


def are_in_order(measured: Event) -> bool:
    """Whether the six moments are: a shard's may be off by the error that is named, and all by a rounding."""
    ready, sent, staged, applied, admitted, landed = (measured[name] for name in SIX)
    slack = measured["error_us"] + 2
    return ready <= sent <= staged + slack and staged <= applied <= admitted <= landed + slack


# -- what is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "transport", "wire"),
    cases(
        [("sync", "shm", "float32"), ("ssp:2", "shm", "bfloat16"), ("async", "grpc", "float32")],
        [
            *[(mode, "shm", "float32") for mode in ("ssp:2", "async")],
            *[(mode, "shm", "bfloat16") for mode in ("sync", "async")],
            *[(mode, "grpc", "float32") for mode in ("sync", "ssp:2")],
        ],
    ),
)
def test_each_bucket_of_each_step_has_its_six_moments_once_and_in_order(
    shared: Cluster, job: str, tmp_path: Path, mode: str, transport: str, wire: str
) -> None:
    def train(rank: int) -> None:
        where: dict[str, Any] = {"timeline": tmp_path / "trace.json", "timeline_steps": STEPS}
        with shared.connect(mode, rank, WORKERS, job=job, transport=transport, **where) as session:
            model = filled(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trained = session.prepare(model, optimizer, bucket_bytes=1024, gradient_wire=wire)
            for number in range(STEPS + 2):
                step(trained, number)

    in_parallel(WORKERS, train)
    for rank in range(WORKERS):
        found = buckets(tmp_path / f"trace-rank{rank}.json")
        assert set(found) == {(clock, bucket) for clock in range(1, STEPS + 1) for bucket in range(BUCKETS)}
        assert {args["shard"] for args in found.values()} == {0, 1}
        assert {args["rank"] for args in found.values()} == {rank}
        assert [args for args in found.values() if not are_in_order(args)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-rank0.json", "trace-rank1.json"]


def test_shards_and_workers_are_drawn_on_one_clock(shared: Cluster, job: str, tmp_path: Path) -> None:
    before = time.time()
    with shared.connect("sync", job=job, timeline=tmp_path / "trace.json", timeline_steps=2) as session:
        trained = prepared(session)
        for number in range(2):
            step(trained, number)
    after = time.time()
    found = events(tmp_path / "trace-rank0.json")
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {FIRST_WORKER: "worker 0", 1: "shard 0", 2: "shard 1"}
    slices = [event for event in found if event["ph"] == "X"]
    slack = 1e3 + max(event["args"].get("error_us", 0) for event in slices)
    first, last = before * 1e6 - slack, after * 1e6 + slack
    assert all(first <= event["ts"] <= event["ts"] + event["dur"] <= last for event in slices)
    on_shards = [event["name"] for event in slices if event["pid"] <= 2]
    assert sorted(set(on_shards)) == ["applied → admitted", "staged → applied"]
    assert len(on_shards) == 2 * 2 * BUCKETS


def test_the_clock_of_a_shard_is_read_within_the_error_that_is_said(shared: Cluster, job: str, tmp_path: Path) -> None:
    """The servers are in this process: their clock is the worker's, but for where it begins."""
    began = {index: shard._pulls._began for index, shard in enumerate(shared.shards)}
    with shared.connect("sync", job=job, timeline=tmp_path / "trace.json") as session:
        step(prepared(session))
        clocks = session._timeline.clocks
        for index, zero in began.items():
            reading = clocks.of(index)
            assert reading is not None
            before, now, after = time.perf_counter(), time.monotonic(), time.perf_counter()
            first, last = zero + (before - now), zero + (after - now)  # a thread may stand still between two readings
            assert 0 < reading.error < 1.0
            assert first - reading.error - 2e-6 <= reading.own(0.0) <= last + reading.error + 2e-6


# -- what it shows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "late", "transport"),
    cases(
        [("sync", "applied", "tcp"), ("ssp:0", "admitted", "grpc")],
        [
            ("sync", "applied", "shm"),
            ("sync", "applied", "grpc"),
            ("ssp:0", "admitted", "shm"),
            ("ssp:0", "admitted", "tcp"),
        ],
    ),
)
def test_who_waits_for_a_straggler_sees_where(
    shared: Cluster, job: str, tmp_path: Path, mode: str, late: str, transport: str
) -> None:
    """In sync an update waits for all gradients; in ssp it does not, but the pull does."""
    held = 0.2

    def train(rank: int) -> None:
        with shared.connect(mode, rank, WORKERS, job=job, transport=transport, timeline=tmp_path / "t.json") as session:
            trained = prepared(session)
            step(trained)
            if rank == 1:
                until(lambda: all_wait(shared, job, is_applied=late == "admitted"), "worker 0 waits for each bucket")
                threading.Event().wait(held)  # the straggler; nothing depends on how long it is exactly
            step(trained)

    in_parallel(WORKERS, train)
    quick, slow = (buckets(tmp_path / f"t-rank{rank}.json") for rank in range(WORKERS))
    for bucket in range(BUCKETS):
        mine, other = quick[2, bucket], slow[2, bucket]
        before = SIX[SIX.index(late) - 1]
        assert mine[late] - mine[before] > held * 1e6, "the wait lies here"
        slack = mine["error_us"] + other["error_us"] + 2
        assert mine["admitted"] >= other["staged"] - slack, "not before the straggler's push was there"
        assert other["admitted"] - other["staged"] < mine["admitted"] - mine["staged"]


def all_wait(cluster: Cluster, job: str, is_applied: bool) -> bool:
    """Whether worker 0 waits for each bucket at clock 2. is_applied: its own step is in"""
    held = [bucket for shard in cluster.shards for bucket in shard.jobs()[job].buckets.values()]
    return all(bucket.waiters and bucket.rule.staged.get(0) == 2 for bucket in held) and not (
        is_applied and any(bucket.rule.applied.get(0) != 2 for bucket in held)
    )


# -- which steps -------------------------------------------------------------------------------------------------------


def test_it_begins_where_it_is_told_and_ends_with_what_there_is(shared: Cluster, job: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"timeline": tmp_path / "trace.json", "timeline_first": 3, "timeline_steps": 50}
    with shared.connect("sync", job=job, **where) as session:
        trained = prepared(session)
        for number in range(5):
            step(trained, number)
        assert not list(tmp_path.iterdir()), "it is written at the end"
    assert {clock for clock, _ in buckets(tmp_path / "trace-rank0.json")} == {3, 4, 5}


def test_a_script_records_steps_of_its_choice(shared: Cluster, job: str, tmp_path: Path) -> None:
    with shared.connect("sync", job=job) as session:
        trained = prepared(session)
        for number in range(8):
            if number == 3:
                session.timeline(tmp_path / "some.json", steps=2)
            step(trained, number)
        assert {clock for clock, _ in buckets(tmp_path / "some-rank0.json")} == {5, 6}
        session.timeline(tmp_path / "again.json", steps=1)
        for number in range(2):
            step(trained, number)
        assert {clock for clock, _ in buckets(tmp_path / "again-rank0.json")} == {10}


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_with_accumulation_a_bucket_is_ready_with_the_last_backward(
    shared: Cluster, job: str, tmp_path: Path, transport: str
) -> None:
    with shared.connect("sync", job=job, transport=transport, timeline=tmp_path / "trace.json") as session:
        model, optimizer = prepared(session, overlap=True)
        with session.no_sync():
            model(drawn(1, 4, 16)).square().mean().backward()
        between = time.time() * 1e6
        model(drawn(2, 4, 16)).square().mean().backward()
        optimizer.step()
    found = buckets(tmp_path / "trace-rank0.json")
    assert len(found) == BUCKETS
    assert all(args["ready"] > between - 1e3 and are_in_order(args) for args in found.values())


def test_a_draft_leaves_before_the_step_and_is_staged_with_it(shared: Cluster, job: str, tmp_path: Path) -> None:
    with shared.connect("sync", job=job, transport="grpc", timeline=tmp_path / "trace.json") as session:
        model, optimizer = prepared(session, overlap=True)
        model(drawn(1, 4, 16)).square().mean().backward()
        until(lambda: all(future.done() for future in _drafts(session)))
        ended = time.time() * 1e6
        optimizer.step()
    found = buckets(tmp_path / "trace-rank0.json")
    assert all(args["sent"] < ended + 1e3 <= args["staged"] + args["error_us"] + 2e3 for args in found.values())
    assert all(are_in_order(args) for args in found.values())


def _drafts(session: Session) -> list[Any]:
    training: Any = session._strategy
    return list(training._training.participation.connection._drafted.values())


def test_a_step_in_which_the_worker_lost_its_place_is_left_out(shared: Cluster, job: str, tmp_path: Path) -> None:
    with shared.connect("async", job=job, timeline=tmp_path / "trace.json") as session:
        trained = prepared(session)
        step(trained)
        shared.lose_place(0, job)
        step(trained)  # the worker finds that it has lost its place, and takes another
        for number in range(3):
            step(trained, number)
        last = session.clock
    found = buckets(tmp_path / "trace-rank0.json")
    clocks = sorted({clock for clock, _ in found})
    assert clocks[0] == 1
    assert clocks[-1] == last
    assert len(found) == len(clocks) * BUCKETS
    assert all(are_in_order(args) for args in found.values())


# -- when it is off ----------------------------------------------------------------------------------------------------


def test_without_a_timeline_no_request_asks_for_times_and_no_shard_notes_any(
    shared: Cluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with one they do, until it ends."""
    asked: dict[bool, list[bool]] = {False: [], True: []}
    recording = False
    pull = ShardCalls.pull

    def spy(calls: ShardCalls, method: str, plan: PullPlan, *rest: Any) -> Any:
        kind = {"Pull": data_pb2.PullRequest, "Exchange": data_pb2.ExchangeRequest}[method]
        asked[recording].append(kind.FromString(plan.request([])).times_wanted)
        return pull(calls, method, plan, *rest)

    monkeypatch.setattr(ShardCalls, "pull", spy)
    with shared.connect("sync", job=job) as session:
        trained = prepared(session)
        for number in range(3):
            step(trained, number)
        assert asked[False]
        assert not any(asked[False])
        assert not any(shard.jobs()[job].times._pushes for shard in shared.shards)
        session.timeline(tmp_path / "trace.json", steps=1)
        step(trained)
        recording = True
        step(trained)
        assert asked[True]
        assert all(asked[True])
        assert all(shard.jobs()[job].times._pushes for shard in shared.shards)
        recording = False
        step(trained)
        assert not any(asked[False])
        assert not any(shard.jobs()[job].times._pushes for shard in shared.shards), "forgotten with the first pull"
