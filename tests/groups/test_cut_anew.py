"""Checkpoints of groups that are restored with another cut: by larger groups, by workers of one process, and by groups
where the workers had one process each; and with the same cut by another number of shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_server.storage.checkpoints import CheckpointStore
from tests.scripts import train_in_group
from tests.scripts.train_cut_anew import Options, loss, make_model, make_optimizer, state
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import (
    LEASE,
    Groups,
    Tensors,
    begun_and_ended,
    last,
    let_go_once_begun,
    log_of,
    relative_distance,
    same,
)

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
        (replace(MOMENTUM, columns=True, mode="async"), 4, False),
        pytest.param(ADAMW, 4, False, marks=pytest.mark.repeat),
        pytest.param(replace(MOMENTUM, columns=True, mode="async"), 3, False, marks=pytest.mark.repeat),
        (replace(ADAMW, groups=2), 0, False),
        pytest.param(replace(ADAMW, members=0, mode="async"), 2, False, marks=pytest.mark.repeat),
    ],
    ids=["2 by columns to 4 by rows", "2 to 4", "2 by columns to 3 by rows", "2 to one process", "one process to 2"],
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
    assert relative_distance(state_of(end), expected) <= 1e-6
    assert (float(end["rate"]), int(end["clock"])) == (pytest.approx(rate), after.stops)


def test_local_steps_go_on_with_another_cut_of_the_weights_and_of_the_outer_momentum(
    nursery: Nursery, shared: Cluster, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """The script's own optimizer begins anew: it is plain SGD here, and has no state."""
    kept = tmp_path / "checkpoints"
    before = replace(ADAMW, optimizer="SGD", values={"lr": 0.05}, mode="local:2", stops=6)
    longer = replace(before, stops=12)
    _, expected = begun_and_ended(nursery, shared.address, job, tmp_path / "whole", longer)
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    _, last = begun_and_ended(nursery, first.address, job, tmp_path / "first", before)
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    after = replace(longer, members=3)
    begin, end = begun_and_ended(nursery, second.address, job, tmp_path / "second", after)
    assert same(begin, state_of(last))
    assert relative_distance(state_of(end), state_of(expected)) <= 1e-6


OUTER = {"warm_up": 0, "lr": 0.8, "momentum": 0.7, "nesterov": True}
INT8 = {"gradient_wire": "int8", "weight_wire": "int8"}


@pytest.mark.parametrize(
    ("every", "dues", "more"),
    cases(
        [("2steps", {0: 1, 3: 2}, {"mode": "local:2", "prepared": {"outer": OUTER, **INT8}})],
        [("3steps", {0: 1, 2: 3}, {})],
    ),
    ids=["local", "sync"],
)
def test_the_same_cut_on_another_number_of_shards_goes_on_with_all_that_members_had(
    nursery: Nursery,
    make_cluster: Callable[..., Cluster],
    job: str,
    tmp_path: Path,
    every: str,
    dues: dict[int, int],
    more: dict[str, Any],
) -> None:
    """Positions in the data, random states and schedules of each member; in local modes the state of its optimizer, and
    what the wire has rounded off. The checkpoint is one of a job that goes on, and the end is the same.

    dues: the steps after which the groups wait, and the clock of the checkpoint that is begun meanwhile
    """
    kept, copied = tmp_path / "checkpoints", tmp_path / "copied"
    options = train_in_group.Options(groups=1, noisy=True, **more)
    first = make_cluster(checkpoint_dir=kept, checkpoint_every=every, lease=LEASE)
    with Groups(nursery, first.address, job, tmp_path / "first", replace(options, holds=[*dues, 6])) as groups:
        for clock, due in dues.items():
            let_go_once_begun(groups, first, job, clock, due, (0,))
        until(lambda: groups.are_held(6, (0,)), "both to stand at clock 6")
        until(lambda: last(CheckpointStore(kept), job) == [*dues.values()][-1], "the checkpoint")
        shutil.copytree(kept, copied)
        groups.let_go(6)
        expected = groups.ended()
    first.stop()
    second = make_cluster(shards=3, checkpoint_dir=copied, restore=True, lease=LEASE)
    with Groups(nursery, second.address, job, tmp_path / "second", options) as groups:
        found = groups.ended()
    assert all(same(*each) for each in zip(found, expected, strict=True))
    drawn = [[log_of(tmp_path / when, each) for each in groups.each] for when in ("first", "second")]
    assert drawn[0] == drawn[1]
