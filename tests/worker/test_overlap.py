"""Buckets that leave while backward still runs: when they do, and that a script may do whatever it likes afterwards.

Over gRPC a bucket leaves as a draft; where memory is shared nothing leaves that a shard looks at before the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ps_server.core.limits import DEFAULTS
from ps_worker import NonFiniteGradient, Session
from ps_worker.cluster.calls import ShardCalls
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.small_models import drawn, filled, same, weights_of

# One step of a script: model, optimizer, its number, data.
Step = Callable[[Any, torch.optim.Optimizer, int, torch.Tensor], None]
Gradient = Callable[[Any], object]
STEPS = 6
SURPRISE = 4  # by then buckets leave early
ONES = torch.ones(4, 8)


def prepared(session: Session, overlap: bool | None = True) -> Any:
    model = filled(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return session.prepare(model, optimizer, bucket_bytes=512, overlap=overlap)


def backward(model: nn.Module, data: torch.Tensor) -> None:
    model(data).square().mean().backward()


# -- what scripts do -------------------------------------------------------------------------------------------------


def changing(change: Gradient, first: int = 0, last: int = STEPS) -> Step:
    """A script that changes its gradients before some steps."""

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
        backward(model, data)
        if first <= number <= last:
            change(model)
        optimizer.step()

    return step


def each_gradient(change: Callable[[torch.Tensor], object]) -> Gradient:
    return lambda model: [change(parameter.grad) for parameter in model.parameters()]


def clip(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replace_gradients(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def drop_a_gradient(model: Any) -> None:
    next(model.parameters()).grad = None


def skipping(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    backward(model, data)
    if number != SURPRISE:  # a spike of the loss, say
        optimizer.step()


def zeroing(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    backward(model, 100 * data)
    if number >= SURPRISE:
        optimizer.zero_grad(set_to_none=False)
        backward(model, data)
    optimizer.step()


def accumulating(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    with model.no_sync():
        backward(model, data[:8])
    backward(model, data[8:])
    optimizer.step()


def twice(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    backward(model, data[:8])
    if number >= SURPRISE:
        backward(model, data[8:])
    optimizer.step()


def with_a_schedule(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
    plain(model, optimizer, number, data)


def throwing_a_part_away(model: Any, optimizer: torch.optim.Optimizer, number: int, data: torch.Tensor) -> None:
    """Backward through a part of the model."""
    if number >= SURPRISE:
        model[:2](data).sum().backward()
        optimizer.zero_grad()
    plain(model, optimizer, number, data)


plain = changing(lambda model: None)
clipping_late = changing(clip, SURPRISE)
SCRIPTS: dict[str, Step] = {
    "plain": plain,
    "clipping": changing(clip),
    "clipping late": clipping_late,
    # which torch's version counters do not see
    "clipping by data": changing(each_gradient(lambda gradient: gradient.data.clamp_(-0.001, 0.001)), SURPRISE),
    "scaling": changing(each_gradient(lambda gradient: gradient.mul_(0.5)), SURPRISE, SURPRISE),
    "dropping": changing(drop_a_gradient, SURPRISE, SURPRISE),
    "replacing": changing(replace_gradients, SURPRISE, SURPRISE),
    "skipping": skipping,
    "zeroing": zeroing,
    "accumulating": accumulating,
    "twice": twice,
    "with a schedule": with_a_schedule,
    "throwing a part away": throwing_a_part_away,
}


def weights_after(cluster: Cluster, job: str, overlap: bool | None, script: str, transport: str) -> list[torch.Tensor]:
    """What two workers have trained."""

    def work(rank: int) -> list[torch.Tensor]:
        with cluster.connect(
            "sync", rank, 2, job=f"{job}-{overlap}-{transport}"[-128:], transport=transport
        ) as session:
            model, optimizer = prepared(session, overlap)
            for number in range(STEPS):
                SCRIPTS[script](model, optimizer, number, drawn(100 * rank + number, 16, 8))
                optimizer.zero_grad()
            return weights_of(model)

    return in_parallel(2, work)[0]


EVERY_RUN = ("replacing", "skipping", "accumulating")


@pytest.mark.parametrize("script", cases(EVERY_RUN, [name for name in SCRIPTS if name not in EVERY_RUN]))
def test_overlap_changes_no_bit_of_the_result(shared: Cluster, job: str, script: str) -> None:
    """Nothing leaves early in the first run. In the others it does, once backward has been looked at, and at once."""
    without = weights_after(shared, job, False, script, "shm")
    assert same(without, weights_after(shared, job, None, script, "grpc"))
    if script in ("plain", "clipping by data", "twice"):
        assert same(without, weights_after(shared, job, True, script, "grpc"))
        assert same(without, weights_after(shared, job, True, script, "shm"))


# -- drafts ----------------------------------------------------------------------------------------------------------


def drafts(cluster: Cluster, job: str) -> int:
    """Buckets that shards keep for a step that has not come yet."""
    partitions = [shard.jobs()[job].partition for shard in cluster.shards]
    return sum(bool(bucket.pending) for partition in partitions for bucket in partition.buckets.values())


def versions(cluster: Cluster, job: str) -> list[tuple[int, int]]:
    """By shard, the lowest and the highest version of a bucket."""
    return [shard.jobs()[job].partition.reached.versions() for shard in cluster.shards]


def test_buckets_leave_before_backward_ends(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, transport="grpc") as session:
        model, optimizer = prepared(session)
        at_the_end: list[int] = []
        last = next(model.parameters())  # to get its gradient
        last.register_hook(lambda gradient: at_the_end.append(until(lambda: drafts(shared, job))))
        backward(model, ONES)
        assert at_the_end[0] > 0
        optimizer.step()
        assert session.clock == 1
        assert drafts(shared, job) == 0


def test_a_draft_changes_no_weight_before_its_step(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job, transport="grpc") as session:
        model, optimizer = prepared(session)
        backward(model, ONES)
        until(lambda: drafts(shared, job) > 0)
        assert versions(shared, job) == [(0, 0), (0, 0)]
        optimizer.zero_grad()
        plain(model, optimizer, 0, ONES)
        assert all(lowest <= 1 for lowest, _ in versions(shared, job))


def test_a_gradient_that_is_not_finite_pushes_nothing(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job, transport="grpc") as session:
        model, optimizer = prepared(session)
        plain(model, optimizer, 0, ONES)
        before = weights_of(model)
        optimizer.zero_grad()
        with pytest.raises(NonFiniteGradient):
            plain(model, optimizer, 1, ONES * float("nan"))
        assert all(highest <= 1 for _, highest in versions(shared, job))
        assert session.clock == 1
        assert same(before, model.parameters())
        optimizer.zero_grad()
        plain(model, optimizer, 1, ONES)
        assert session.clock == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_drafts_of_all_workers_get_by_with_a_small_budget(make_cluster: Callable[..., Cluster], mode: str) -> None:
    cluster = make_cluster(limits=replace(DEFAULTS, staged_bytes=1024))

    def work(rank: int) -> int:
        with cluster.connect(mode, rank, 3, transport="grpc") as session:
            model, optimizer = prepared(session)
            for number in range(STEPS):
                clipping_late(model, optimizer, number, ONES)
            return session.clock

    assert in_parallel(3, work) == [STEPS] * 3


def test_a_draft_of_a_refused_step_does_not_count_however_late_it_comes(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of the clock of the step that is made instead: its shard could take it for that one's."""
    sending, arrived = threading.Event(), threading.Event()
    try_once = ShardCalls.try_once

    def late(calls: ShardCalls, method: str, message: Any) -> Any:
        if sending.is_set():
            return try_once(calls, method, message)
        sending.set()
        assert let_go.wait(60)
        answer = try_once(calls, method, message)
        arrived.set()
        return answer

    let_go = threading.Event()
    monkeypatch.setattr(ShardCalls, "try_once", late)
    with shared.connect("sync", job=job, transport="tcp") as session:
        model = filled(nn.Linear(8, 1, bias=False))
        stepper = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = session.prepare(model, stepper, overlap=True, gradient_wire="bfloat16")
        before = model.weight.detach().clone()
        model(ONES).sum().backward()
        assert sending.wait(60)
        model.weight.grad[0, 0] = float("nan")
        with pytest.raises(NonFiniteGradient):
            optimizer.step()
        optimizer.zero_grad()
        model(2 * ONES).sum().backward()
        training: Any = session._strategy._training  # type: ignore[attr-defined]
        wait(training.participation.connection._drafted.values())
        let_go.set()
        assert arrived.wait(60)
        optimizer.step()
    assert torch.equal(model.weight, before - 8)
