"""What a timeline notes, of which steps, on which clock; and the names that torch's profiler shows."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import BucketSpec, Layout, Slice
from ps_protocol.messages.data import BucketTimes, PulledBucket
from ps_worker.metrics import PULL, PUSH, WAIT, named
from ps_worker.timeline import recording
from ps_worker.timeline.chrome import SIX, BucketMoments, StepMoments, events
from ps_worker.timeline.clocks import ClockReading, ShardClocks
from ps_worker.timeline.recording import RecordingRequest, Timeline
from tests.tools.cluster import Cluster

SECONDS = st.floats(0.0, 10.0)
LAYOUT = Layout((BucketSpec(0, "trained", "float32", False, 0, 4, (Slice(0, 0, 0, 2), Slice(1, 0, 2, 2))),), (0,), {})


# -- clocks ------------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=8), SECONDS)
def test_a_shards_moment_is_off_by_half_the_smallest_round_trip_at_most(
    offset: float, trips: list[tuple[float, float, float]], moment: float
) -> None:
    """However a round trip is shared by its two ways, and wherever the shard's clock begins."""
    readings = [ClockReading(at, at + there + back, at + there - offset) for at, there, back in trips]
    clocks = ShardClocks()
    clocks.read((3, reading) for reading in readings)
    best = clocks.of(3)
    assert best is not None
    assert best.error == min(reading.error for reading in readings)
    assert abs(best.own(moment) - (moment + offset)) <= best.error + 1e-9 * (1 + abs(offset))
    assert clocks.of(0) is None


def test_clocks_are_read_anew_after_a_while_and_for_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clocks = ShardClocks()
    assert clocks.are_due
    clocks.read([(0, ClockReading(1.0, 1.1, 0.0))])
    assert not clocks.are_due
    now += 11.0
    assert clocks.are_due
    clocks.read([(0, ClockReading(2.0, 3.0, 0.0))])
    assert clocks.of(0) == ClockReading(2.0, 3.0, 0.0), "an old reading is none, however good it was"
    clocks.forget()
    assert clocks.are_due
    assert clocks.of(0) is None


# -- which steps, and what of them -------------------------------------------------------------------------------------


def pulled(times: BucketTimes | None = None) -> PulledBucket:
    return PulledBucket(0, 0.0, memoryview(b"payload"), None, times=times)


def run(timeline: Timeline, steps: int, clock: int = 0) -> None:
    for number in range(steps):
        timeline.begin_step(clock + number + 1, rank=0)
        if timeline.step is not None:
            timeline.step.gradient(0)
            timeline.step.pushing()
            timeline.step.sent([0])
            timeline.step.landed(0, pulled())
        timeline.end_step()


def clocks_in(path: Path) -> list[int]:
    found = json.loads(path.read_text())["traceEvents"]
    return [event["args"]["clock"] for event in found if event["ph"] == "X" and event["tid"] == 1 and event["args"]]


@pytest.mark.parametrize(
    ("first", "steps", "made", "recorded"),
    [(1, 50, 3, [1, 2, 3]), (3, 2, 9, [3, 4]), (1, 1, 2, [1]), (4, 5, 5, [4, 5])],
)
def test_a_recording_has_the_steps_that_are_wanted(
    tmp_path: Path, first: int, steps: int, made: int, recorded: list[int]
) -> None:
    timeline = Timeline()
    timeline.describe(LAYOUT)
    timeline.record(RecordingRequest(tmp_path / "t.json", first, steps))
    run(timeline, made)
    assert (tmp_path / "t-rank0.json").exists() == (made >= first + steps - 1), "written once it is complete"
    timeline.close()
    assert clocks_in(tmp_path / "t-rank0.json") == recorded


def test_each_member_of_a_group_has_a_file_and_a_process_of_its_own(tmp_path: Path) -> None:
    names = {}
    for member in (0, 1):
        timeline = Timeline()
        timeline.describe(LAYOUT, member)
        timeline.record(RecordingRequest(tmp_path / "t.json", 1, 1))
        run(timeline, 1)
        found = json.loads((tmp_path / f"t-rank0.{member}.json").read_text())["traceEvents"]
        names |= {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert {"member 0 of group 0", "member 1 of group 0", "shard 0"} == set(names.values())


def test_a_recording_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(recording, "MOST_BUCKETS", 4)
    timeline = Timeline()
    timeline.describe(LAYOUT)
    timeline.record(RecordingRequest(tmp_path / "t.json", 1, 50))
    run(timeline, 10)
    assert clocks_in(tmp_path / "t-rank0.json") == [1, 2, 3, 4]
    assert "the timeline ends after 4 steps: it has 4 buckets" in caplog.text


def test_a_step_that_does_not_end_is_left_out_with_all_it_noted(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.describe(LAYOUT)
    timeline.record(RecordingRequest(tmp_path / "t.json", 1, 50))
    timeline.begin_step(1, 0)
    lost = timeline.step
    assert lost is not None
    timeline.connect()
    assert timeline.step is None
    lost.landed(0, pulled())  # by a thread of the old connection
    run(timeline, 1, clock=7)
    timeline.close()
    assert clocks_in(tmp_path / "t-rank0.json") == [8]


def test_a_shard_that_tells_no_times_has_none(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.describe(LAYOUT)
    timeline.record(RecordingRequest(tmp_path / "t.json", 1, 1))
    run(timeline, 1)
    found = json.loads((tmp_path / "t-rank0.json").read_text())["traceEvents"]
    names = {event["name"] for event in found if event["ph"] == "X" and event["tid"] == 1}
    assert names == {"step 1", "ready → sent", "sent → landed"}


def test_what_cannot_be_written_is_said_and_ends_no_training(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    timeline = Timeline()
    timeline.describe(LAYOUT)
    timeline.record(RecordingRequest(folder / "t.json", 1, 1))
    folder.rmdir()
    run(timeline, 2)
    assert f"the timeline cannot be written to {folder / 't-rank0.json'}: No such file or directory" in caplog.text


def test_slices_are_drawn_in_order_where_a_shards_moment_is_off() -> None:
    off = BucketMoments(0, 1, 1.0, 1.002, 1.01, (1.0015, 1.005, 1.0102), 0.001)
    found = [event for event in events(2, [StepMoments(5, 1.0, 1.001, 1.02, (off,))], 0.0) if event["ph"] == "X"]
    [whole] = [event for event in found if "bucket" in event["args"]]
    assert [whole["args"][name] for name in SIX] == [1_000_000, 1_002_000, 1_001_500, 1_005_000, 1_010_200, 1_010_000]
    assert whole["args"]["error_us"] == 1000
    parts = [event for event in found if event["tid"] == 1 and event is not whole]
    ends = [(event["ts"], event["ts"] + event["dur"]) for event in parts]
    assert [event["dur"] for event in parts] == [2000, 0, 3000, 5000, 0]
    assert all(before[1] == after[0] for before, after in pairwise(ends))


# -- modes and names ---------------------------------------------------------------------------------------------------


def test_alone_a_warning_says_that_there_is_none(tmp_path: Path, caplog: Any) -> None:
    with (
        caplog.at_level(logging.WARNING),
        ps_worker.connect(mode="single", timeline=str(tmp_path / "t.json")) as session,
    ):
        session.timeline(tmp_path / "t.json")
    assert caplog.text.count("mode single has no timeline: no bucket travels to a shard") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("path", "steps"), [("no/such/folder/t.json", 5), ("/", 5), ("t.json", 0)])
def test_what_cannot_be_recorded_is_refused(path: str, steps: int) -> None:
    with ps_worker.connect(mode="single") as session, pytest.raises(InvalidRequest, match="timeline"):
        session.timeline(path, steps=steps)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_the_profiler_shows_push_wait_and_pull(shared: Cluster, job: str, transport: str) -> None:
    with shared.connect("sync", job=job, transport=transport) as session:
        net = nn.Linear(4, 1)
        model, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(2):
                model(torch.ones(4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    counts = {event.key: event.count for event in profiler.key_averages() if event.key.startswith("ps_worker.")}
    assert counts == {PUSH: 2, WAIT: 2, PULL: 2}


def test_while_no_profiler_runs_a_name_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_worker.metrics.record_function", lambda name: pytest.fail(name))
    with named(PUSH):
        pass
