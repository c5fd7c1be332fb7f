"""Checkpoints of groups that are restored with another cut: by larger groups, by workers of one process, and by groups
where the workers had one process each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts.train_cut_anew import Options, loss, make_model, make_optimizer, state
from tests.tools.cluster import Cluster
from tests.tools.forkserver import ROOT, Forked, Nursery

SCRIPT = ROOT / "tests" / "scripts" / "train_cut_anew.py"
WAIT_SECONDS = 90
LEASE = 30.0
ADAMW = Options(2, 5, "AdamW", {"lr": 0.02}, columns=False, mode="sync", prepared={})
MOMENTUM = replace(ADAMW, optimizer="SGD", values={"lr": 0.05, "momentum": 0.9})

Tensors = dict[str, torch.Tensor]


def start(nursery: Nursery, address: str, job: str, directory: Path, options: Options) -> list[Forked]:
    """Starts the processes of a job, each group as a torchrun of its own starts it."""
    directory.mkdir()
    count = max(1, options.members)
    return [
        nursery.run(
            SCRIPT,
            [directory, group, member, json.dumps(asdict(options))],
            directory / f"log-{group}-{member}",
            PS_SERVER=address,
            JOB=job,
            **({"RANK": str(member), "WORLD_SIZE": str(count)} if options.members else {}),
            **({"PS_GROUP_SIZE": str(count)} if options.members else {}),
        )
        for group in range(options.workers)
        for member in range(count)
    ]


def ended(processes: list[Forked], directory: Path) -> tuple[Tensors, Tensors]:
    """What the processes of a job began with, and what they ended with: the same in all."""
    codes = [process.wait(WAIT_SECONDS) for process in processes]
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(directory.glob("log-*")))
    assert codes == [0] * len(codes), logs
    found = []
    for when in ("begin", "end"):
        first, *others = [load_file(path) for path in sorted(directory.glob(f"{when}-*.safetensors"))]
        assert len(others) == len(codes) - 1
        assert all(same(each, first) for each in others)
        found.append(first)
    return found[0], found[1]


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


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
        (ADAMW, 4, False),
        (replace(MOMENTUM, columns=True), 3, False),
        (replace(ADAMW, workers=2), 0, False),
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
    _, last = ended(start(nursery, first.address, job, tmp_path / "first", before), tmp_path / "first")
    first.stop()
    second = make_cluster(shards=3, checkpoint_dir=kept, restore=True, lease=LEASE)
    after = replace(before, members=members, columns=columns, stops=before.stops + 4)
    begin, end = ended(start(nursery, second.address, job, tmp_path / "second", after), tmp_path / "second")
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
    before = replace(ADAMW, optimizer="SGD", values={"lr": 0.05}, mode="local:2", stops=6, workers=2)
    undisturbed = make_cluster(checkpoint_dir=tmp_path / "others", lease=LEASE)
    longer = replace(before, stops=12)
    _, expected = ended(start(nursery, undisturbed.address, job, tmp_path / "whole", longer), tmp_path / "whole")
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    _, last = ended(start(nursery, first.address, job, tmp_path / "first", before), tmp_path / "first")
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    after = replace(longer, members=4)
    begin, end = ended(start(nursery, second.address, job, tmp_path / "second", after), tmp_path / "second")
    assert same(begin, state_of(last))
    assert max(float((end[name] - expected[name]).abs().max()) for name in state_of(expected)) <= 1e-6
