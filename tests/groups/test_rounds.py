"""Groups of processes in rounds of local steps: each member's pieces have a base, and the script's optimizer steps on
DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from ps_server.storage.checkpoints import CheckpointStore
from ps_worker.state.documents import plain
from ps_worker.state.inner import InnerStates
from tests.scripts.train_in_group import Options, batch, loss, make_model, make_optimizer, whole
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import (
    LEASE,
    Groups,
    Tensors,
    last,
    let_go_once_begun,
    log_of,
    one_process,
    relative_distance,
    same,
)
from tests.tools.islands import Island

STEPS = 2  # of a round
AVERAGING = {"warm_up": 0, "lr": 1.0, "momentum": 0.0, "nesterov": False}
NESTEROV = {"warm_up": 0, "lr": 0.8, "momentum": 0.7, "nesterov": True}


def local_options(outer: dict[str, float | bool], **more: object) -> Options:
    prepared = {"outer": outer, **more.pop("prepared", {})}  # type: ignore[dict-item]
    return Options(mode=f"local:{STEPS}", prepared=prepared, **more)  # type: ignore[arg-type]


def rounds_by_hand(options: Options, clocks: list[int], early: int = 0, anew: int = 0) -> list[Tensors]:
    """The weights of the first worker at these clocks, by plain torch: an outer step with the mean of differences.

    early: the clock at which a round ends that has not all its steps
    anew:  the clock at which a round begins again, with its base
    """
    outer = {name: value for name, value in options.prepared["outer"].items() if name != "warm_up"}
    base, islands = make_model(), [Island(options, group) for group in range(options.groups)]
    outer_optimizer = torch.optim.SGD(base.parameters(), **outer)
    found = []
    for step in range(options.steps):
        for island in islands:
            island.step(step)
        if step + 1 == anew:
            for island in islands:
                island.model.load_state_dict(base.state_dict())
                island.made = 0
        elif step == options.poison:
            islands[0].go_back(base)
            islands[0].made -= 1 if options.non_finite == "refuse" else STEPS
        elif islands[0].made == STEPS or step + 1 == early:
            for parameter, *own in zip(base.parameters(), *(each.model.parameters() for each in islands), strict=True):
                parameter.grad = parameter.detach() - torch.stack([each.detach() for each in own]).mean(0)
            outer_optimizer.step()
            for island in islands:
                island.model.load_state_dict(base.state_dict())
                island.made = 0
        if step + 1 in clocks:
            found.append(copy.deepcopy(islands[0].model.state_dict()))
    return found


@pytest.mark.parametrize(
    "optimizer",
    cases(
        ["AdamW"],
        [
            "Adadelta",
            "Adagrad",
            "Adam",
            "Adamax",
            "ASGD",
            "fused Adam",
            "fused AdamW",
            "NAdam",
            "RAdam",
            "RMSprop",
        ],
    ),
)
def test_one_group_that_averages_ends_as_one_process(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, optimizer: str
) -> None:
    """Whichever of torch's optimizers steps its DTensors: docs/groups.md has those that torch refuses on them."""
    options = local_options(AVERAGING, groups=1, optimizer=optimizer)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert relative_distance(found[0], one_process(options)) <= 1e-6
    assert [int(each["clock"]) for each in found] == [options.steps] * 2


@pytest.mark.parametrize("groups", cases([2], [1]))
def test_groups_agree_to_the_bit_after_each_round(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, groups: int
) -> None:
    ends = [2, 4, 6, 8]
    options = local_options(NESTEROV, groups=groups, leaves=ends, optimizer="SGD")
    with Groups(nursery, shared.address, job, tmp_path, options) as each:
        each.ended()
        members = each.each
    for clock, expected in zip(ends, rounds_by_hand(options, ends), strict=True):
        found = [load_file(tmp_path / f"{clock}-{group}-{member}.safetensors") for group, member in members]
        assert all(same(weights, found[0]) for weights in found)
        assert relative_distance(found[0], expected, least=0.1) <= 1e-6


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_round_in_which_one_member_loses_the_place_counts_once_as_a_whole(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, when: str
) -> None:
    options = local_options(NESTEROV, groups=1, loses=when)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    assert relative_distance(found[0], rounds_by_hand(options, [options.steps])[0]) <= 1e-6


def ended_after_a_lost_place(groups: Groups, cluster: Cluster, job: str) -> list[Tensors]:
    """Takes the only group's place at clock 3, within its second round. Returns what its members, alike, end with."""
    until(lambda: groups.are_held(3, (0,)), "all to stand within the second round")
    cluster.end_lease(0, job)
    groups.let_go(3)
    found = groups.ended()
    assert all(same(each, found[0]) for each in found)
    return found


def test_a_group_that_loses_its_place_within_a_round_ends_it_there(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """With the steps that it has."""
    cluster = make_cluster(lease=LEASE)
    options = local_options(NESTEROV, groups=1, steps=9, holds=[3], meets=3)
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups:
        found = ended_after_a_lost_place(groups, cluster, job)
    assert groups.logs().count("lost its place") == 2
    assert relative_distance(found[0], rounds_by_hand(options, [9], early=3)[0]) <= 1e-6


def test_a_round_that_one_member_cannot_end_early_begins_anew_on_all(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """Without the base there is no difference to push. No member waits for one that has none."""
    cluster = make_cluster(lease=LEASE)
    options = local_options(NESTEROV, groups=1, steps=9, holds=[3], meets=3, baseless=3)
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups:
        found = ended_after_a_lost_place(groups, cluster, job)
    assert groups.logs().count("; it was in no step") == 2
    assert relative_distance(found[0], rounds_by_hand(options, [9], anew=3)[0]) <= 1e-6


@pytest.mark.parametrize("non_finite", ["refuse", "skip"])
def test_a_round_that_one_member_refuses_is_pushed_by_none(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, non_finite: str
) -> None:
    """Refused: both have the base of the round still, and the script goes back to it. Left out: both begin with the
    servers' weights, and with optimizers of no state."""
    options = local_options(NESTEROV, groups=1, poison=3, non_finite=non_finite)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    refused = {path.name: path.read_text() for path in tmp_path.glob("refused-*")}
    if non_finite == "refuse":
        assert refused.keys() == {"refused-0-0", "refused-0-1"}
        assert all("is not finite after the steps of this round" in text for text in refused.values())
        assert "member 1 of this worker's group" in refused["refused-0-0"]
    else:
        assert not refused
    assert relative_distance(found[0], rounds_by_hand(options, [options.steps])[0]) <= 1e-6


def test_what_one_member_has_no_state_of_all_begin_without() -> None:
    """Pieces are of unlike sizes: the state of one may be too large for a checkpoint, and that of another not."""
    model = make_model()
    optimizer = make_optimizer("AdamW", model)
    loss(model, *batch(0)).backward()
    optimizer.step()
    fresh: list[bool] = []
    for on_all, is_kept in ((True, True), (False, False)):
        inner = InnerStates([optimizer], lambda: fresh.append(True), lambda is_so, on_all=on_all: is_so and on_all)
        inner.restore(1, inner.captured(1))
        assert bool(optimizer.state) == is_kept
    assert fresh == [True]


class Factored(torch.optim.Optimizer):
    """A script's own, which divides by means of rows and of columns. The latter are whole in each member. Those of one
    row have the shape of a piece."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            squares, state = parameter.grad.square() + 1e-3, self.state[parameter]
            for name, dimension in (("rows", -1), ("columns", 0)):
                mean = squares.mean(dimension, keepdim=True)
                mean = mean.redistribute(placements=[Replicate() if mean.placements[0].is_partial() else Shard(0)])
                state[name] = mean + state.get(name, 0)
            parameter.sub_(0.01 * parameter.grad / (state["rows"] * state["columns"]))


def test_state_that_is_cut_otherwise_than_its_parameter_comes_back_as_it_was(mesh: DeviceMesh) -> None:
    model: Any = fully_shard(make_model(), mesh=mesh)
    optimizer = Factored(model.parameters())
    inner = InnerStates([optimizer], lambda: None)

    def step(number: int) -> None:
        loss(model, *batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> list[tuple[Any, torch.Tensor]]:
        found = [value for each in optimizer.state.values() for value in each.values()]
        return [(getattr(value, "placements", None), whole(value)) for value in found]

    step(0)
    expected = state()
    plain(inner.captured(1), {})  # as a checkpoint has it
    step(1)
    inner.restore(1, None)
    found = state()
    assert [placed for placed, _ in found] == [placed for placed, _ in expected]
    assert all(torch.equal(each, value) for (_, each), (_, value) in zip(found, expected, strict=True))
    step(2)


@pytest.mark.parametrize("wire", cases(["int4"], ["int8", "float32"]))
def test_groups_that_lost_a_shard_end_as_undisturbed(
    nursery: Nursery, shared: Cluster, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, wire: str
) -> None:
    """Each member's state has what its optimizer keeps of its pieces, and what the wire has cost."""
    wires = {"gradient_wire": wire, "weight_wire": wire} if wire != "float32" else {}
    options = local_options(NESTEROV, groups=1, noisy=True, passes=1, prepared=wires)
    with Groups(nursery, shared.address, job, tmp_path / "undisturbed", options) as groups:
        expected = groups.ended()
    kept = tmp_path / "checkpoints"
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every="2steps", lease=LEASE)
    store = CheckpointStore(kept)
    held = replace(options, holds=[0, 3, 4, 6])
    with Groups(nursery, cluster.address, job, tmp_path / "job", held) as groups:
        for clock, due in ((0, 1), (3, 2)):  # at 3 all have sent their state of the first checkpoint
            let_go_once_begun(groups, cluster, job, clock, due, (0,))
        until(lambda: groups.are_held(4, (0,)), "the clock of the checkpoint")
        groups.let_go(4)
        until(lambda: groups.are_held(6, (0,)), "all to stand at clock 6")
        until(lambda: last(store, job) == 2, "the checkpoint")
        cluster.start_again(1)
        groups.let_go(6)
        found = groups.ended()
    assert all(same(*each) for each in zip(found, expected, strict=True))
    assert [log_of(tmp_path / "job", each) for each in groups.each] == [
        log_of(tmp_path / "undisturbed", each) for each in groups.each
    ]
