"""What a shard keeps for a worker's next step, and what makes it count: drafts, commits, assignments, in any order."""

from __future__ import annotations

import random

import pytest
import torch

from ps_protocol.errors import Backlogged, Fenced, InvalidRequest, OutOfOrder, UnknownWorker
from ps_server.core.commands import AddWorker, RemoveWorker
from ps_server.core.partition import JobPartition
from ps_server.core.requests import PushKind
from tests.simulation.simulator import FROZEN, image, job_spec, payload, push, stage
from tests.tools.partitions import running, work


def commit(
    job: JobPartition,
    clock: int,
    bucket: int = 0,
    rank: int = 0,
    incarnation: int = 1,
    skip: bool = False,
    **groups: float,
) -> bool:
    """Commits one bucket; True if it counts now."""
    kind = PushKind.SKIP if skip else PushKind.COMMIT
    changed = {0: dict(groups)} if groups else {}
    one = push(bucket, clock, rank, incarnation, kind=kind, payload=b"", groups=changed)
    return job.execute(job.checker.check(one)).fresh


def weight(job: JobPartition, bucket: int = 0) -> float:
    work(job, bucket)
    [value] = set(job.buckets[bucket].weights.flat.tolist())
    return value


def draft(job: JobPartition, clock: int, value: float = 1.0, rank: int = 0, incarnation: int = 1) -> None:
    stage(job, push(clock=clock, rank=rank, incarnation=incarnation, payload=payload(value), kind=PushKind.DRAFT))


def assign(job: JobPartition, clock: int, value: float, rank: int = 0, incarnation: int = 1) -> None:
    kind = PushKind.ASSIGN
    stage(job, push(clock=clock, rank=rank, incarnation=incarnation, payload=payload(value), kind=kind))


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_a_draft_counts_once_it_is_committed_and_only_once(mode: str) -> None:
    job = running(mode)
    draft(job, 1)
    assert weight(job) == 0.0
    assert commit(job, 1)
    assert weight(job) == -1.0
    draft(job, 1, 5.0)  # a late repeat
    assert not commit(job, 1)
    assert weight(job) == -1.0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_commit_may_come_before_its_draft(mode: str) -> None:
    job = running(mode)
    assert not commit(job, 1, lr=2.0)
    assert weight(job) == 0.0
    draft(job, 1)
    assert weight(job) == -2.0  # with the hyper-parameters of the commit


def test_a_push_takes_the_place_of_a_draft_and_of_its_commit() -> None:
    job = running("sync")
    draft(job, 1, 7.0)
    stage(job, push(clock=1))
    assert weight(job) == -1.0
    commit(job, 2)
    stage(job, push(clock=2))
    draft(job, 2, 7.0)
    assert weight(job) == -2.0


def test_a_skip_takes_the_place_of_a_draft() -> None:
    job = running("async")
    draft(job, 1, 7.0)
    assert commit(job, 1, skip=True)
    assert weight(job) == 0.0
    assert job.buckets[0].pending == {}


def test_a_worker_that_is_gone_leaves_no_draft_and_no_assignment() -> None:
    job = running("sync", workers=2)
    draft(job, 1, rank=1, incarnation=2)
    assign(job, 1, 9.0, rank=1, incarnation=2)
    job.execute(RemoveWorker(1, 2))
    assert job.buckets[0].pending == {}
    draft(job, 1)
    job.execute(AddWorker(0, 5, 0))  # it came back
    with pytest.raises(Fenced):
        commit(job, 1)
    commit(job, 1, incarnation=5)
    assert weight(job) == 0.0


def test_an_assignment_takes_effect_with_the_push_of_its_clock() -> None:
    job = running("async")
    assign(job, 1, 10.0)
    assign(job, 1, 20.0)  # a later one of the same clock
    assert weight(job) == 0.0
    stage(job, push(clock=1))
    assert weight(job) == 19.0
    assign(job, 1, 30.0)  # a late repeat
    stage(job, push(clock=2))
    assert weight(job) == 18.0


def test_in_sync_the_lowest_ranks_assignment_counts_whatever_the_order() -> None:
    for order in ((0, 1), (1, 0)):
        job = running("sync", workers=2)
        for rank in order:
            assign(job, 1, 10.0 * (rank + 1), rank, rank + 1)
            draft(job, 1, rank=rank, incarnation=rank + 1)
            commit(job, 1, rank=rank, incarnation=rank + 1)
        assert weight(job) == 9.0
        assign(job, 2, 50.0, 1, 2)  # rank 0 has changed nothing: that counts
        for rank in order:
            stage(job, push(clock=2, rank=rank, incarnation=rank + 1))
        assert weight(job) == 8.0


def test_an_assignment_without_a_gradient_counts_too() -> None:
    job = running("sync")
    assign(job, 1, 10.0)
    commit(job, 1, skip=True)
    assert weight(job) == 10.0


def test_only_the_segments_that_are_named_are_assigned() -> None:
    job = JobPartition(job_spec("sync", bucket_bytes=256), [0, 1])
    job.execute(AddWorker(0, 1, 0))
    first = push(0, 0, kind=PushKind.INITIAL_VALUE, payload=payload(0.0, 64))
    stage(job, first)
    stage(job, push(clock=1, kind=PushKind.ASSIGN, payload=payload(10.0, 64), absent=frozenset({0})))
    stage(job, push(clock=1, payload=payload(1.0, 64)))
    work(job, 0)
    assert job.buckets[0].weights.flat.tolist() == [-1.0] * 32 + [9.0] * 32


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (push(kind=PushKind.ASSIGN, payload=payload(1.0)[:-4]), "expected 128 bytes"),
        (push(kind=PushKind.ASSIGN_STATE, state="momentum_buffer", payload=b""), "expected 128 bytes"),
        (push(kind=PushKind.ASSIGN_STATE, state="", payload=payload(1.0)), "expected 0 bytes"),
        (push(kind=PushKind.ASSIGN_STATE, state="exp_avg"), "the state of SGD is momentum_buffer, got 'exp_avg'"),
        (push(FROZEN, kind=PushKind.ASSIGN, payload=payload(0.0, 16)), "holds what no optimizer steps"),
        (push(clock=2, kind=PushKind.DRAFT), "pushed clock 2 where 1 comes next"),
        (push(clock=2, kind=PushKind.ASSIGN), "pushed clock 2 where 1 comes next"),
        (push(incarnation=9, kind=PushKind.DRAFT), "was replaced"),
        (push(rank=3, kind=PushKind.DRAFT), "not a live member"),
    ],
)
def test_bad_drafts_and_assignments_are_refused_and_change_nothing(bad: object, said: str) -> None:
    job = running("sync")
    before = image(job)
    with pytest.raises((InvalidRequest, OutOfOrder, UnknownWorker), match=said):
        stage(job, bad)  # type: ignore[arg-type]
    assert image(job) == before
    assert all(not bucket.pending for bucket in job.buckets.values())


def test_a_commit_of_what_no_optimizer_steps_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds what no optimizer steps"):
        commit(running("sync"), 1, bucket=FROZEN)


def test_drafts_that_no_update_waits_for_fit_into_what_the_budget_leaves() -> None:
    job = running("sync", workers=3)
    job._staged_limit = 128  # one bucket
    draft(job, 1, rank=1, incarnation=2)
    with pytest.raises(Backlogged, match="no room for more"):
        draft(job, 1, rank=2, incarnation=3)
    draft(job, 1)  # the update waits for this one
    commit(job, 1, rank=2, incarnation=3)  # from here on it is a push like any other, and that budget is free
    draft(job, 1, rank=2, incarnation=3)
    for rank in (0, 1):
        commit(job, 1, rank=rank, incarnation=rank + 1)
    assert weight(job) == -1.0


def test_drafts_of_one_worker_keep_no_other_from_pushing_where_none_waits() -> None:
    job = running("async", workers=2)
    job._staged_limit = 128
    draft(job, 1)
    for clock in range(1, 5):
        stage(job, push(clock=clock, rank=1, incarnation=2))
        work(job, 0)
    assert weight(job) == -4.0


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_in_any_order_and_however_often_each_step_counts_once_with_its_last_gradient(mode: str) -> None:
    """Messages of each step are repeated, reordered and overtaken by those of the step before."""
    for seed in range(200):
        draw = random.Random(seed)
        job, expected = running(mode), 0.0
        late: list[tuple[str, int, float]] = []
        for clock in range(1, 6):
            value, surprised = float(draw.randint(1, 9)), draw.random() < 0.4
            if draw.random() < 0.3:
                assign(job, clock, 1000.0 * clock)
                expected = 1000.0 * clock
            messages = [("draft", clock, value + 100 * surprised)] * draw.randint(1, 2)
            if surprised:  # the worker knows better by now, and pushes in full what counts
                messages += [("push", clock, value)] * draw.randint(1, 2)
            else:
                messages += [("commit", clock, 0.0)] * draw.randint(1, 2)
                draw.shuffle(messages)
            for message in [*late, *messages]:
                deliver(job, *message)
            expected -= value
            assert weight(job) == expected, seed
            late = [message for message in messages if draw.random() < 0.3]


def deliver(job: JobPartition, kind: str, clock: int, value: float) -> None:
    if kind == "commit":
        commit(job, clock)
    elif kind == "push":
        stage(job, push(clock=clock, payload=payload(value)))
    else:
        draft(job, clock, value)


def test_state_that_is_not_whole_is_refused_when_it_is_to_count() -> None:
    spec = job_spec("sync")
    adam = type(spec)(**{**spec.__dict__, "optimizer": "Adam", "groups": ({"lr": 1.0},)})
    job = JobPartition(adam, [0])
    job.execute(AddWorker(0, 1, 0))
    stage(job, push(0, 0, kind=PushKind.INITIAL_VALUE, payload=payload(0.0)))
    stage(job, push(kind=PushKind.ASSIGN_STATE, state="exp_avg"))
    with pytest.raises(InvalidRequest, match="lacks exp_avg_sq, step, which Adam needs"):
        stage(job, push())
    with pytest.raises(InvalidRequest, match="is not finite"):
        stage(job, push(kind=PushKind.ASSIGN_STATE, state="step", payload=payload(float("inf"), 1)))
    stage(job, push(kind=PushKind.ASSIGN_STATE, state="step", payload=payload(3.0, 1)))
    stage(job, push(kind=PushKind.ASSIGN_STATE, state="exp_avg_sq"))
    stage(job, push())
    work(job, 0)
    found, absent = job.buckets[0].weights.read_state("step")
    assert (found.tolist(), absent) == ([4.0], frozenset())
    assert torch.isfinite(job.buckets[0].weights.flat).all()
