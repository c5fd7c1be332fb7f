"""What trains a bucket may change while its job runs: with one update, whichever worker brings it, never by mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_protocol.convert import next_optimizer, next_optimizer_message
from ps_protocol.errors import InvalidRequest, LimitExceeded, PSError
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import PushCall, PushKind
from ps_protocol.optimizers import hyper_parameters
from ps_protocol.stage_spec import MAX_STAGES, StageSpec
from ps_server.core.commands import AddWorker
from ps_server.core.partition import JobPartition
from ps_server.shard.optimizer_room import OptimizerRoom
from ps_server.storage.bucket_file import read_snapshots, snapshot_tensors
from ps_server.storage.table_files import save_tensors
from ps_server.storage.tensor_file import TensorReader
from tests.tools.partitions import image, job_spec, payload, push, running, stage
from tests.tools.partitions import work as work_on

ADAM = hyper_parameters("Adam", torch.optim.Adam([torch.zeros(1)], lr=0.5).param_groups[0])
NEXT = StageSpec(1, "Adam", (7,), {7: ADAM})


def partition(mode: str) -> JobPartition:
    """A job with two workers."""
    return running(mode, 2)


def work(job: JobPartition) -> None:
    work_on(job, 0)


def following(told: Any = NEXT, clock: int = 1, rank: int = 0, **more: Any) -> PushCall:
    """What has something else train a bucket from a worker's step on."""
    more = {"payload": b"", "stage": 0, **more}
    return push(0, clock, rank, rank + 1, kind=PushKind.NEXT_OPTIMIZER, next_optimizer=told, **more)


def weights(job: JobPartition) -> float:
    [value] = set(job.buckets[0].weights.flat.tolist())
    return value  # type: ignore[no-any-return]


def test_it_takes_effect_with_the_step_of_its_clock() -> None:
    job = partition("async")
    stage(job, push(0, 1))
    work(job)
    assert weights(job) == -1.0, "by SGD with lr 1"
    stage(job, following(clock=2))
    work(job)
    assert weights(job) == -1.0
    stage(job, push(0, 2, stage=1, groups={7: {"lr": 0.25}}))
    work(job)
    assert weights(job) == pytest.approx(-1.25), "by Adam, with the hyper-parameters of the push"
    assert job.buckets[0].weights.state_names() == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize("brings", [0, 1])
def test_in_a_mean_it_counts_whichever_worker_brings_it(brings: int) -> None:
    job = partition("sync")
    stage(job, following(rank=brings))
    stage(job, push(0, 1, brings, brings + 1, stage=1, groups={7: {"lr": 0.25}}))
    stage(job, push(0, 1, 1 - brings, 2 - brings, groups={0: {"lr": 8.0}}))  # of the stage before
    work(job)
    assert weights(job) == pytest.approx(-0.25)


def test_a_bucket_stays_in_a_stage_that_it_has_come_to() -> None:
    job = partition("async")
    stage(job, following(StageSpec(2, "Adam", (7,), {7: ADAM})))
    stage(job, push(0, 1, stage=2))
    work(job)
    stage(job, following(StageSpec(2, "Adam", (7,), {7: {**ADAM, "lr": 0.125}}), clock=2))  # said once more
    stage(job, push(0, 2, stage=2))
    stage(job, following(StageSpec(1, "SGD", (3,), {3: {"lr": 9.0}}), rank=1))  # by a worker that comes late
    stage(job, push(0, 1, 1, 2, stage=1, groups={3: {"lr": 9.0}}))
    work(job)
    assert weights(job) == pytest.approx(-1.5), "three steps of Adam with lr 0.5"


def test_slices_without_a_group_stay_as_they_are() -> None:
    job = JobPartition(job_spec("async", bucket_bytes=256), [0])
    job.execute(AddWorker(0, 1, 0))
    stage(job, push(0, 0, kind=PushKind.INITIAL_VALUE, payload=payload(0.0, 64)))
    stage(job, following(StageSpec(1, "SGD", (None, 0), {0: {"lr": 0.5}})))
    stage(job, push(0, 1, payload=payload(1.0, 64), stage=1))
    work(job)
    assert job.buckets[0].weights.flat.tolist() == [0.0] * 32 + [-0.5] * 32
    stage(job, following(StageSpec(2, "SGD", (None, None)), clock=2))
    stage(job, push(0, 2, payload=payload(1.0, 64), stage=2))
    work(job)
    assert job.buckets[0].weights.flat.tolist() == [0.0] * 32 + [-0.5] * 32


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (following(None), InvalidRequest, "expected what trains it from a step on, without a payload"),
        (following(payload=payload(1.0)), InvalidRequest, "got a clock of 1 and 128 bytes"),
        (following(clock=0), InvalidRequest, "got a clock of 0"),
        (following(replace(NEXT, number=0)), InvalidRequest, "a stage that follows has a number from 1, got 0"),
        (following(replace(NEXT, group_of_slice=(7, 7))), InvalidRequest, "expected the groups of 1 slices, got 2"),
        (
            following(replace(NEXT, group_of_slice=(None,))),
            InvalidRequest,
            "expected hyper-parameters of the groups",
        ),
        (following(replace(NEXT, optimizer="LBFGS")), InvalidRequest, "expected an optimizer out of SGD"),
        (following(replace(NEXT, groups={7: {**ADAM, "lr": -1.0}})), InvalidRequest, "Adam refuses"),
        (following(replace(NEXT, kept=frozenset({1}))), InvalidRequest, "slices without a group keep no state"),
        (push(0, 1, stage=1), InvalidRequest, "bucket 0 of job 'sums': stage 1 is not known here"),
        (
            following(replace(NEXT, number=3, optimizer="SGD", groups={7: {"lr": 1.0}})),
            InvalidRequest,
            "the optimizer is Adam, and",
        ),
        (
            following(replace(NEXT, number=3, group_of_slice=(8,), groups={8: ADAM})),
            InvalidRequest,
            "the groups of its",
        ),
    ],
)
def test_what_cannot_train_a_bucket_is_refused_and_changes_nothing(
    bad: PushCall, error: type[PSError], said: str
) -> None:
    job = partition("async")
    stage(job, following(replace(NEXT, number=3), rank=1))
    before = image(job)
    with pytest.raises(error, match=said):
        stage(job, bad)
    assert image(job) == before


def test_a_job_comes_to_so_many_stages_at_most() -> None:
    job = partition("async")
    for number in range(1, MAX_STAGES):
        stage(job, following(replace(NEXT, number=number)))
    with pytest.raises(LimitExceeded, match=f"a job may come to {MAX_STAGES} stages"):
        stage(job, following(replace(NEXT, number=MAX_STAGES)))


def test_it_comes_through_the_wire_as_it_was() -> None:
    told = StageSpec(3, "SGD", (None, 0, 5, 0), {0: {"lr": 0.5, "nesterov": True}, 5: {"lr": 1.0}}, frozenset({1, 3}))
    assert next_optimizer(next_optimizer_message(told)) == told


def test_it_is_part_of_a_snapshot_and_of_its_file(tmp_path: Path) -> None:
    job = partition("async")
    stage(job, following())
    stage(job, push(0, 1, stage=1))
    work(job)
    snapshots = [job.buckets[index].snapshot() for index in (0, 1)]
    tensors, metadata = snapshot_tensors(snapshots)
    assert {name for name in tensors if "weights" in name} == {"0/weights-in-stage", "1/weights"}, (
        "an earlier version does not take it for a bucket that SGD steps"
    )
    path = tmp_path / "file"
    save_tensors(tensors, path, metadata)
    buckets = bucket_layout(job.spec.parameters, job.spec.bucket_bytes).buckets[:2]
    with path.open("rb") as file:
        found, _ = read_snapshots(TensorReader(file, path.stat().st_size), buckets, {}, ())
    assert [found[0].stage, found[1].stage] == [NEXT, None]
    again = partition("async")
    for index in (0, 1):
        again.buckets[index].restore(found[index])
        assert again.buckets[index].weights.stage == job.buckets[index].weights.stage
        assert torch.equal(again.buckets[index].weights.flat, job.buckets[index].weights.flat)
    assert again.buckets[0].weights.read_state("exp_avg")[0].tolist() == pytest.approx([0.1] * 32)
    job.buckets[0].restore(again.buckets[1].snapshot())
    assert job.buckets[0].weights.stage.number == 0, "a rollback may go back to a stage before"


def test_a_stage_is_refused_that_keeps_more_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 0}
    monkeypatch.setattr("ps_server.shard.optimizer_room.free_bytes", lambda: free["bytes"])
    job = partition("async")
    bucket = job.buckets[0].weights.bucket
    room = OptimizerRoom("sums", job.checker, lambda: 100)  # which other pushes may take
    room.make(bucket, StageSpec(1, "SGD", (3,), {3: {"lr": 0.5}}))
    assert room.more == 0, "as much as before"
    free["bytes"] = 100 + 2 * bucket.nbytes - 1
    with pytest.raises(LimitExceeded, match="bucket 0 comes to 256 bytes, for 0 before, and 255 are free for more"):
        room.make(bucket, replace(NEXT, number=2))
    free["bytes"] += 1
    for _ in range(2):  # of two workers
        room.make(bucket, replace(NEXT, number=2))
        assert room.more == 2 * bucket.nbytes
