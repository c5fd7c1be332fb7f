"""Checkpoints of groups that are restored with another cut: by larger groups, by workers of one process, and by groups
where the workers had one process each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripts.train_cut_anew import Options, loss, make_model, make_optimizer, state
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery
from tests.tools.groups import LEASE, Tensors, begun_and_ended, same

ADAMW = Options(2, 5, "AdamW", {"lr": 0.02}, columns=False, mode="sync", prepared={})
MOMENTUM = replace(ADAMW, optimizer="SGD", values={"lr": 0.05, "momentum": 0.9})


def state_of(found: Tensors) -> Tensors:
    return {name: tensor for name, tensor in found.items() if name not in ("rate", "clock")}


def one_process(options: Options, steps: int) -> tuple[Tensors, float]:
    """What one process ends with, without servers, and its learning rate."""
    model = make_model()
    optimizer, schedule = make_optimizer(model, options.optimizer, options.values)
    for step in range(steps):
        loss(model, step).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return state(model, optimizer), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("before", "members", "columns"),
    [
        pytest.param(ADAMW, 4, False, marks=pytest.mark.repeat),
        (replace(MOMENTUM, columns=True), 3, False),
        (replace(ADAMW, groups=2), 0, False),
        (replace(ADAMW, members=0, mode="async"), 2, False),
    ],
    ids=["2 to 4", "2 by columns to 3 by rows", "2 to one process", "one process to 2"],
)
def test_a_checkpoint_goes_on_with_another_cut_to_the_bit(
    nursery: Nursery,
    make_cluster: Callable[..., Cluster],
    job: str,
    tmp_path: Path,
    before: Options,
    members: int,
    columns: bool,
) -> None:
    """Weights, buffers, optimizer state, and the schedule; and the rest of the training is that of one process."""
    kept = tmp_path / "checkpoints"
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    _, last = begun_and_ended(nursery, first.address, job, tmp_path / "first", before)
    first.stop()
    second = make_cluster(shards=3, checkpoint_dir=kept, restore=True, lease=LEASE)
    after = replace(before, members=members, columns=columns, stops=before.stops + 4)
    begin, end = begun_and_ended(nursery, second.address, job, tmp_path / "second", after)
    assert same(begin, state_of(last))
    expected, rate = one_process(after, after.stops)
    assert state_of(end).keys() == expected.keys()
    assert max(float((end[name] - expected[name]).abs().max()) for name in expected) <= 1e-6
    assert (float(end["rate"]), int(end["clock"])) == (pytest.approx(rate), after.stops)


def test_local_steps_go_on_with_another_cut_of_the_weights_and_of_the_outer_momentum(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """The script's own optimizer begins anew: it is plain SGD here, and has no state."""
    kept = tmp_path / "checkpoints"
    before = replace(ADAMW, optimizer="SGD", values={"lr": 0.05}, mode="local:2", stops=6)
    undisturbed = make_cluster(checkpoint_dir=tmp_path / "others", lease=LEASE)
    longer = replace(before, stops=12)
    _, expected = begun_and_ended(nursery, undisturbed.address, job, tmp_path / "whole", longer)
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    _, last = begun_and_ended(nursery, first.address, job, tmp_path / "first", before)
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    after = replace(longer, members=4)
    begin, end = begun_and_ended(nursery, second.address, job, tmp_path / "second", after)
    assert same(begin, state_of(last))
    assert max(float((end[name] - expected[name]).abs().max()) for name in state_of(expected)) <= 1e-6
