"""When the gradients of DTensors are copied into a member's buffers, and that the copy is what the script leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ps_worker import NonFiniteGradient, Session
from tests.scripts.train_in_group import count_drafts
from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.small_models import filled

STEPS = 8
CHANGE = 4  # by then buckets leave early, where they may
Script = Callable[[Any, Any, torch.Tensor, int], None]


def cut_model(mesh: DeviceMesh) -> Any:
    return fully_shard(filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))), mesh=mesh)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def prepared(session: Session, mesh: DeviceMesh, **more: Any) -> tuple[Any, Any]:
    model = cut_model(mesh)
    model, optimizer = session.prepare(model, adam(model), group=mesh, bucket_bytes=64, **more)
    return model, optimizer


def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(rows).square().mean()
    return found


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def are_copied(session: Session) -> list[bool]:
    """Of each gradient, whether the buffers have it."""
    gradients = session._strategy._training.model.gradients  # type: ignore[attr-defined]
    return [gradients._is_here(index) for index in gradients._buffers.sharded]


def overlap_of(session: Session) -> Any:
    [overlap] = session._strategy._training._steps._overlaps.values()  # type: ignore[attr-defined]
    return overlap


def step(model: Any, optimizer: Any, number: int) -> None:
    loss(model, rows_of(number)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("transport", "overlap", "in_backward"), [("shm", None, False), ("tcp", None, True), ("tcp", False, False)]
)
def test_backward_copies_gradients_only_for_buckets_that_may_leave_before_the_step(
    shared: Cluster, job: str, mesh: DeviceMesh, transport: str, overlap: bool | None, in_backward: bool
) -> None:
    with shared.connect("sync", job=job, transport=transport) as session:
        model, optimizer = prepared(session, mesh, overlap=overlap)
        for number in range(3):
            loss(model, rows_of(number)).backward()
            assert are_copied(session) == [in_backward] * 4
            optimizer.step()
            assert are_copied(session) == [True] * 4
            optimizer.zero_grad()


def test_gradients_that_leave_during_backward_end_to_the_bit_as_those_that_leave_with_the_step(
    shared: Cluster, job: str, mesh: DeviceMesh
) -> None:
    """Two groups of two do: test_features_of_torch.py."""
    ends = []
    for overlap in (False, True):
        with shared.connect("sync", job=f"{overlap}-{job[-100:]}", transport="tcp") as session:
            model, optimizer = prepared(session, mesh, overlap=overlap)
            counts: Counter[str] = Counter()
            count_drafts(session, counts)
            for number in range(STEPS):
                step(model, optimizer, number)
            assert (counts["drafts"] > STEPS) == overlap
            ends.append([parameter.to_local().clone() for parameter in model.parameters()])
    assert all(torch.equal(*each) for each in zip(*ends, strict=True))


# -- whatever a script does --------------------------------------------------------------------------------------------


def accumulates(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    """The last backward in no_sync, too, in some steps."""
    for part in rows.split(2):
        with model.no_sync():
            loss(model, part).backward()
    if number % 2:
        loss(model, rows).backward()
    optimizer.step()
    optimizer.zero_grad()


def twice(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    found = loss(model, rows)
    found.backward(retain_graph=True)
    found.backward()
    optimizer.step()
    optimizer.zero_grad()


def drops(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    loss(model, rows).backward()
    if number >= CHANGE:
        model[0].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()


def gives(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    """One gradient is the script's own, before or behind backward, and in one step there is none beside it."""
    weight = model[0].weight
    if number >= CHANGE:
        weight.grad = torch.full_like(weight, 0.1 * number)
    if number != CHANGE + 1:
        loss(model, rows).backward()
    if number % 2:
        weight.grad = torch.full_like(weight, 0.2 * number)
    optimizer.step()
    optimizer.zero_grad()


def clips(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    loss(model, rows).backward()
    if number >= CHANGE:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def steps_again(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    """With the gradients of the step before, a part of which it has changed."""
    loss(model, rows).backward()
    optimizer.step()
    model[0].weight.grad.to_local().mul_(0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def freezes(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    model[0].weight.requires_grad_(number < CHANGE)
    loss(model, rows).backward()
    optimizer.step()
    optimizer.zero_grad()


def throws_away(model: Any, optimizer: Any, rows: torch.Tensor, number: int) -> None:
    loss(model, 100 * rows).backward()
    optimizer.zero_grad(set_to_none=bool(number % 2))
    loss(model, rows).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("script", [accumulates, twice, drops, gives, clips, steps_again, freezes, throws_away])
@pytest.mark.parametrize("transport", cases(["shm"], ["tcp"]))
def test_a_step_has_the_gradients_that_the_script_leaves(
    shared: Cluster, job: str, mesh: DeviceMesh, transport: str, script: Script
) -> None:
    alone = cut_model(mesh)
    alone.no_sync = lambda: torch.enable_grad()
    optimizer: Any = adam(alone)
    for number in range(STEPS):
        script(alone, optimizer, rows_of(number), number)
    with shared.connect("sync", job=job, transport=transport) as session:
        model, optimizer = prepared(session, mesh)
        for number in range(STEPS):
            script(model, optimizer, rows_of(number), number)
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (found.to_local() - expected.to_local()).abs().max() <= 1e-6


def test_a_gradient_that_is_not_finite_is_refused_whoever_has_made_it(
    shared: Cluster, job: str, mesh: DeviceMesh
) -> None:
    with shared.connect("sync", job=job, transport="shm") as session:
        model, optimizer = prepared(session, mesh)
        step(model, optimizer, 0)
        loss(model, torch.full((8, 4), torch.inf)).backward()
        with pytest.raises(NonFiniteGradient, match=r"0\.weight"):
            optimizer.step()
        optimizer.zero_grad()
        loss(model, rows_of(1)).backward()
        model[2].bias.grad.to_local()[1] = torch.nan
        with pytest.raises(NonFiniteGradient, match=r"2\.bias"):
            optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, 2)
        assert session.clock == 2


# -- another way to the shards -----------------------------------------------------------------------------------------


def test_a_script_is_watched_anew_once_buckets_may_leave_before_the_step_again(
    shared: Cluster, job: str, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies that the step makes are no changes of the script. Those that it makes are not known of meanwhile."""
    caplog.set_level("INFO", "ps_worker")
    with shared.connect("sync", job=job, transport="tcp") as session:
        model, optimizer = prepared(session, mesh)
        steps = session._strategy._training._steps  # type: ignore[attr-defined]
        for number in range(3):
            step(model, optimizer, number)
        assert overlap_of(session).active
        steps.allow_drafts(0, None)
        step(model, optimizer, 3)  # which allows them again
        assert not overlap_of(session).active
        for number in (4, 5):
            step(model, optimizer, number)
        assert overlap_of(session).active
        assert "gradients changed after backward" not in caplog.text


def test_a_gradient_counts_where_the_way_to_shards_changes_before_its_step(
    shared: Cluster, job: str, mesh: DeviceMesh
) -> None:
    alone = cut_model(mesh)
    optimizer: Any = adam(alone)
    for number in range(2):
        step(alone, optimizer, number)
    with shared.connect("sync", job=job, transport="tcp") as session:
        model, optimizer = prepared(session, mesh)
        steps = session._strategy._training._steps  # type: ignore[attr-defined]
        for number, (before, behind) in enumerate([(None, [0]), ([0], None)]):
            steps.allow_drafts(0, before)
            loss(model, rows_of(number)).backward()
            steps.allow_drafts(0, behind)
            optimizer.step()
            optimizer.zero_grad()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (found.to_local() - expected.to_local()).abs().max() <= 1e-6


def test_a_step_left_out_before_the_way_changes_hides_no_change_of_the_next(
    shared: Cluster, job: str, mesh: DeviceMesh
) -> None:
    """Its gradient was to be copied in the step. That of the next one has left before the script changes it."""
    alone = cut_model(mesh)
    optimizer: Any = adam(alone)
    loss(alone, rows_of(1)).backward()
    alone[0].weight.grad.zero_()
    optimizer.step()
    with shared.connect("sync", job=job, transport="tcp") as session:
        model, optimizer = prepared(session, mesh, overlap=True)
        steps = session._strategy._training._steps  # type: ignore[attr-defined]
        steps.allow_drafts(0, None)
        loss(model, rows_of(0)).backward()
        steps.abandon()
        optimizer.zero_grad()
        steps.allow_drafts(0, [0])
        loss(model, rows_of(1)).backward()
        model[0].weight.grad.to_local().zero_()
        optimizer.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (found.to_local() - expected.to_local()).abs().max() <= 1e-6


def test_a_step_left_out_before_the_way_changes_vouches_for_no_gradient_of_the_next(
    shared: Cluster, job: str, mesh: DeviceMesh
) -> None:
    with shared.connect("sync", job=job, transport="tcp") as session:
        model, optimizer = prepared(session, mesh)
        steps = session._strategy._training._steps  # type: ignore[attr-defined]
        loss(model, rows_of(0)).backward()
        steps.abandon()
        steps.allow_drafts(0, None)
        loss(model, torch.full((8, 4), torch.inf)).backward()
        with pytest.raises(NonFiniteGradient, match=r"0\.weight"):
            optimizer.step()
