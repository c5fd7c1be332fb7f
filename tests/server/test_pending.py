"""What a shard keeps for a worker's next step, and what makes it count: drafts, commits, assignments, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from ps_protocol.errors import Backlogged, Fenced, InvalidRequest, OutOfOrder, UnknownWorker
from ps_protocol.messages.data import PushKind
from ps_server.core.commands import AddWorker, RemoveWorker
from ps_server.core.partition import JobPartition
from tests.tools.partitions import FROZEN, check, image, job_spec, payload, push, running, stage, work


def send(job: JobPartition, kind: PushKind, clock: int, rank: int = 0, incarnation: int = 0, **more: object) -> bool:
    """Sends a message about bucket 0, by default of the worker that is live; True if it counts now."""
    message = push(clock=clock, rank=rank, incarnation=incarnation or rank + 1, kind=kind, **more)
    staged = job.execute(check(job, message))
    return not (staged.duplicate or staged.kept)


def commit(job: JobPartition, clock: int, rank: int = 0, incarnation: int = 0, **groups: float) -> bool:
    changed = {0: dict(groups)} if groups else {}
    return send(job, PushKind.COMMIT, clock, rank, incarnation, payload=b"", groups=changed)


def draft(job: JobPartition, clock: int, value: float = 1.0, rank: int = 0) -> None:
    send(job, PushKind.DRAFT, clock, rank, payload=payload(value))


def assign(job: JobPartition, clock: int, value: float, rank: int = 0) -> None:
    send(job, PushKind.ASSIGN, clock, rank, payload=payload(value))


def weight(job: JobPartition) -> float:
    work(job, 0)
    [value] = set(job.buckets[0].weights.flat.tolist())
    return value


def test_a_commit_that_comes_before_its_draft_brings_the_hyper_parameters() -> None:
    job = running("sync")
    assert not commit(job, 1, lr=2.0)
    assert weight(job) == 0.0
    draft(job, 1)
    assert weight(job) == -2.0


def test_a_skip_takes_the_place_of_a_draft_and_lets_an_assignment_count() -> None:
    job = running("async")
    assign(job, 1, 10.0)
    draft(job, 1, 7.0)
    assert send(job, PushKind.SKIP, 1, payload=b"")
    assert weight(job) == 10.0
    assert job.buckets[0].pending == {}


def test_a_worker_that_is_gone_leaves_no_draft_and_no_assignment() -> None:
    job = running("sync", workers=2)
    draft(job, 1, rank=1)
    assign(job, 1, 9.0, rank=1)
    job.execute(RemoveWorker(1, 2))
    assert job.buckets[0].pending == {}
    draft(job, 1)
    job.execute(AddWorker(0, 5, 0))  # it came back
    with pytest.raises(Fenced):
        commit(job, 1)
    commit(job, 1, incarnation=5)
    assert weight(job) == 0.0


def test_in_sync_the_lowest_ranks_assignment_counts_whatever_the_order() -> None:
    for order in ((0, 1), (1, 0)):
        job = running("sync", workers=2)
        for rank in order:
            assign(job, 1, 10.0 * (rank + 1), rank)
            draft(job, 1, rank=rank)
            commit(job, 1, rank=rank)
        assert weight(job) == 9.0
        assign(job, 2, 50.0, 1)  # rank 0 has changed nothing: that counts
        for rank in order:
            send(job, PushKind.GRADIENT, 2, rank)
        assert weight(job) == 8.0


def test_only_the_segments_that_are_named_are_assigned() -> None:
    job = JobPartition(job_spec("sync", bucket_bytes=256), [0, 1])
    job.execute(AddWorker(0, 1, 0))
    stage(job, push(0, 0, kind=PushKind.INITIAL_VALUE, payload=payload(0.0, 64)))
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
        (push(FROZEN, kind=PushKind.COMMIT, payload=b""), "holds what no optimizer steps"),
        (push(clock=2, kind=PushKind.DRAFT), "pushed clock 2 where 1 comes next"),
        (push(clock=2, kind=PushKind.ASSIGN), "pushed clock 2 where 1 comes next"),
        (push(incarnation=9, kind=PushKind.DRAFT), "never joined"),
        (push(rank=3, kind=PushKind.DRAFT), "not a live worker"),
    ],
)
def test_bad_drafts_and_assignments_are_refused_and_change_nothing(bad: object, said: str) -> None:
    job = running("sync")
    before = image(job)
    with pytest.raises((InvalidRequest, OutOfOrder, UnknownWorker), match=said):
        stage(job, bad)  # type: ignore[arg-type]
    assert image(job) == before
    assert all(not bucket.pending for bucket in job.buckets.values())


def test_drafts_that_no_update_waits_for_fit_into_what_the_budget_leaves() -> None:
    job = running("sync", workers=3, staged_limit=128)  # one bucket
    draft(job, 1, rank=1)
    with pytest.raises(Backlogged, match="no room for more"):
        draft(job, 1, rank=2)
    draft(job, 1)  # the update waits for this one
    commit(job, 1, rank=2)  # from here on it is a push like any other, and that budget is free
    draft(job, 1, rank=2)
    for rank in (0, 1):
        commit(job, 1, rank=rank)
    assert weight(job) == -1.0


def test_drafts_of_one_worker_keep_no_other_from_pushing_where_none_waits() -> None:
    job = running("async", workers=2, staged_limit=128)
    draft(job, 1)
    for clock in range(1, 5):
        send(job, PushKind.GRADIENT, clock, rank=1)
        work(job, 0)
    assert weight(job) == -4.0


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_in_any_order_and_however_often_each_step_counts_once_with_its_last_gradient(mode: str) -> None:
    """Messages of each step are repeated, reordered and overtaken by those of the step before."""
    for seed in range(200):
        draw = random.Random(seed)
        job, expected = running(mode), 0.0
        late: list[Callable[[], object]] = []
        for clock in range(1, 6):
            value, surprised = float(draw.randint(1, 9)), draw.random() < 0.4
            if draw.random() < 0.3:
                assign(job, clock, 1000.0 * clock)
                expected = 1000.0 * clock
            whole = push(clock=clock, payload=payload(value))
            messages = [partial(draft, job, clock, value + 100 * surprised)] * draw.randint(1, 2)
            if surprised:  # the worker knows better by now, and pushes in full what counts
                messages += [partial(stage, job, whole)] * draw.randint(1, 2)
            else:
                messages += [partial(commit, job, clock)] * draw.randint(1, 2)
                draw.shuffle(messages)
            for message in [*late, *messages]:
                message()
            expected -= value
            assert weight(job) == expected, seed
            late = [message for message in messages if draw.random() < 0.3]


def test_state_that_is_not_whole_is_refused_when_it_is_to_count() -> None:
    job = running(spec=replace(job_spec("sync"), optimizer="Adam"))
    stage(job, push(kind=PushKind.ASSIGN_STATE, state="exp_avg"))
    with pytest.raises(InvalidRequest, match="lacks exp_avg_sq, step, which Adam needs"):
        stage(job, push())
    with pytest.raises(InvalidRequest, match="is not finite"):
        stage(job, push(kind=PushKind.ASSIGN_STATE, state="step", payload=payload(float("inf"), 1)))
    stage(job, push(kind=PushKind.ASSIGN_STATE, state="step", payload=payload(3.0, 1)))
    stage(job, push(kind=PushKind.ASSIGN_STATE, state="exp_avg_sq"))
    stage(job, push())
    work(job, 0)
    step, absent = job.buckets[0].weights.read_state("step")
    assert (step.tolist(), absent) == ([4.0], frozenset())
    assert torch.isfinite(job.buckets[0].weights.flat).all()
