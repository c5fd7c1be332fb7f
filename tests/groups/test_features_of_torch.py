"""Features of torch in groups whose model `fully_shard` has cut: a mixed precision policy, clipping by the norm of
DTensors, activation checkpointing, `torch.compile`, and the switch that leaves reductions out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ps_server.storage.export import export, model_state_dict
from tests.scripts.train_in_group import ROWS, Options, batch, cut, loss, make_model, make_optimizer, whole
from tests.tools.cases import cases
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery
from tests.tools.groups import LEASE, Groups, Tensors, one_process, relative_distance, same

LAYERS = 3
CLIPPED = 0.1  # a norm that is below that of every step


def alone(options: Options, mesh: DeviceMesh) -> Tensors:
    """What one process ends with, under the same policy, without servers.

    It computes the parts of the batch one after the other, as the members have them: in bfloat16 the sum of their
    gradients is not the gradient of the whole batch. Each group clips its own gradient, and the servers take the mean.
    """
    model = make_model()
    cut(model, mesh, replace(options, recomputes=False, compiled=False))
    optimizer = make_optimizer(options.optimizer, model)
    size = ROWS // (options.groups * options.members)
    for step in range(options.steps):
        parts = zip(*(each.split(size) for each in batch(step)), strict=True)
        sums = [torch.zeros(parameter.shape) for parameter in model.parameters()]
        for _ in range(options.groups):
            for _ in range(options.members):
                loss(model, *next(parts)).backward()
            gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
            for gradient in gradients:
                gradient.copy_(gradient.to(getattr(torch, options.reduced or "float32"))).div_(options.members)
            if options.norm:
                norm: Any = nn.utils.clip_grad_norm_(model.parameters(), options.norm)
                assert whole(norm) > options.norm
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient
                gradient.zero_()
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad.to_local().copy_(total / options.groups)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    cases(
        [Options(reduced="bfloat16", norm=CLIPPED, recomputes=True)],
        [
            Options(groups=1, reduced="bfloat16"),
            Options(reduced="float32", optimizer="SGD"),
            Options(norm=CLIPPED, optimizer="SGD", micro=2),
            Options(norm=CLIPPED, micro=2),
            Options(groups=1, recomputes=True),
            Options(groups=1, compiled=True),
            Options(compiled=True, reduced="bfloat16", norm=CLIPPED),
        ],
    ),
    ids=lambda each: "-".join(
        word
        for word in (
            f"{each.groups}",
            each.reduced,
            "norm" * bool(each.norm),
            "recomputes" * each.recomputes,
            "compiled" * each.compiled,
            each.optimizer * (each.micro > 1),
        )
        if word
    ),
)
def test_groups_end_as_one_process_with_float32_weights(
    nursery: Nursery,
    make_cluster: Callable[..., Cluster],
    job: str,
    tmp_path: Path,
    mesh: DeviceMesh,
    options: Options,
) -> None:
    """The features show in what the members have counted, and the policy and the clipping in the weights."""
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", lease=LEASE)
    with Groups(nursery, cluster.address, job, tmp_path / "groups", options) as groups:
        found = groups.ended()
    cluster.stop()
    counts = [json.loads((tmp_path / "groups" / f"counted-{g}-{m}").read_text()) for g, m in groups.each]
    calls = LAYERS * options.steps
    expected = {"forwards": 2 * calls} if options.recomputes else {"graphs": calls} if options.compiled else {}
    assert counts == [expected] * len(counts)
    assert all(same(each, found[0]) for each in found)
    weights = alone(options, mesh)
    assert relative_distance(found[0], weights) <= 1e-6
    if options.reduced or options.norm:
        assert relative_distance(found[0], one_process(options)) > 1e-5
    export(tmp_path / "checkpoints", job, None, tmp_path / "exported")
    exported = model_state_dict(tmp_path / "exported")
    assert same(exported, {name: found[0][name] for name in weights})
    assert {tensor.dtype for tensor in (*weights.values(), *exported.values())} == {torch.float32}


@pytest.mark.parametrize(
    "options",
    cases(
        [Options(micro=2, switched="switch and no_sync", steps=4)],
        [
            Options(micro=2, switched="switch", prepared={"overlap": True}, connected={"transport": "tcp"}),
            Options(micro=2, switched="switch and no_sync", prepared={"overlap": True}, connected={"transport": "tcp"}),
            Options(micro=2, switched="switch", optimizer="SGD", groups=1),
        ],
    ),
    ids=lambda each: f"{each.groups}-{each.switched}-{each.optimizer}-{each.connected.get('transport', 'auto')}",
)
def test_accumulation_that_a_group_reduces_once_a_step_ends_as_one_process(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, options: Options
) -> None:
    """The script finds no gradient after the backwards in which nothing is reduced."""
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert all(same(each, found[0]) for each in found)
    assert relative_distance(found[0], one_process(options)) <= 1e-6


@pytest.mark.repeat
def test_gradients_that_leave_during_backward_end_to_the_bit_as_those_that_leave_with_the_step(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """The case of every run is a group of one process: test_copied_gradients.py."""
    ends = []
    for overlap in (False, True):
        name = f"{overlap}-{job[-100:]}"
        options = Options(drafts=True, prepared={"overlap": overlap}, connected={"transport": "tcp"})
        with Groups(nursery, shared.address, name, tmp_path / name, options) as groups:
            ends += groups.ended()
        counts = [json.loads((tmp_path / name / f"counted-{g}-{m}").read_text()) for g, m in groups.each]
        assert [each.get("drafts", 0) > options.steps for each in counts] == [overlap] * len(counts), counts
    assert all(same(each, ends[0]) for each in ends)
