"""Groups of processes that train a model which tensor parallelism has cut, alone or with `fully_shard`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export, model_state_dict
from tests.scripts.train_parallel import Model, Options, one_process
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import (
    LEASE,
    WAIT_SECONDS,
    Groups,
    begun_and_ended,
    last,
    let_go_once_begun,
    relative_distance,
    same,
)

SHARDED = Options(groups=1, members=4, shards=True, even=True, micro=2, clip=0.02, asks=True, loads=True)


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(groups=1, optimizer="SGD", micro=2, whole=True),
        Options(micro=2, clip=0.02, asks=True, loads=True),
        SHARDED,
        pytest.param(Options(micro=2, clip=0.02, optimizer="SGD"), marks=pytest.mark.repeat),
        pytest.param(replace(SHARDED, groups=2, optimizer="SGD"), marks=pytest.mark.repeat),
        pytest.param(
            Options(members=4, shards=True, even=True, whole=True, optimizer="SGD", micro=2), marks=pytest.mark.long
        ),
    ],
    ids=["AdamW", "SGD", "clip", "sharded", "clip SGD", "sharded clip SGD", "sharded SGD"],
)
def test_groups_of_tensor_parallel_members_end_as_one_process(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, options: Options
) -> None:
    """Parameters are cut along either dimension or both, in strides, or held alike by some members or all."""
    begin, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    assert relative_distance(end, one_process(options)) <= 1e-6
    assert same({name: begin[name] for name in Model(options.even).state_dict()}, Model(options.even).state_dict())


@pytest.mark.parametrize("context", cases([False], [True]), ids=["tensor parallel", "context parallel"])
def test_members_that_compute_for_the_same_rows_have_the_same_batches(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, context: bool
) -> None:
    begun_and_ended(nursery, shared.address, job, tmp_path / "cut", Options(steps=1, context=context))
    seen = [json.loads((tmp_path / "cut" / f"seen-{g}-{m}").read_text()) for g in (0, 1) for m in (0, 1)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(4))


@pytest.mark.parametrize("frozen", ["", "head"])
def test_unlike_gradients_of_what_members_hold_alike_are_refused(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, frozen: str
) -> None:
    """In the first step that has them."""
    options = Options(groups=1, whole=True, unlike=True, frozen=frozen, thaws=2)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        assert all(process.wait(WAIT_SECONDS) == 0 for process in groups.processes.values())
    for member in (0, 1):
        said = (tmp_path / f"refused-0-{member}").read_text()
        assert said.startswith("members 0 and 1 of a group hold the same of head.weight, and have unlike gradients of")


def test_a_push_that_fails_leaves_members_with_the_same_weights(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path, Options(groups=1, unpushed=2, optimizer="SGD"))
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert relative_distance(end, one_process(Options(groups=1, optimizer="SGD"))) > 1e-6


def all_left(directory: Path, when: str) -> bool:
    """Whether both members of group 0 had the same weights at a moment."""
    return same(*(load_file(directory / f"{when}-0-{member}.safetensors") for member in (0, 1)))


def test_a_push_that_fails_in_the_place_after_a_lost_one_leaves_members_with_the_same_weights(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    begun_and_ended(nursery, shared.address, job, tmp_path, Options(groups=1, lost=2, optimizer="SGD"))
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert all_left(tmp_path, "lost")


@pytest.mark.parametrize("mode", cases(["sync"], ["local:2"]))
def test_members_that_lose_their_place_in_a_barrier_go_on_with_the_same_weights(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    """Each pulls what it owns, which another group has trained meanwhile."""
    options = Options(mode=mode, steps=8, holds=[2], meets=2, prepared={"outer": {"warm_up": 0}})
    ahead = replace(options, holds=[2, 6], meets=6)
    with (
        Groups(nursery, shared.address, job, tmp_path / "lost", options, only=0) as lost,
        Groups(nursery, shared.address, job, tmp_path / "ahead", ahead, only=1) as other,
    ):
        until(lambda: lost.are_held(2, (0,)) and other.are_held(2, (1,)), "all to stand at clock 2")
        shared.end_lease(0, job)
        other.let_go(2)
        until(lambda: other.are_held(6, (1,)), "group 1 to go on alone")
        lost.let_go(2)
        other.let_go(6)
        ends = [*lost.ended(), *other.ended()]
    assert lost.logs().count("lost its place") == 2
    assert not same(load_file(tmp_path / "lost" / "2-0-0.safetensors"), ends[0])
    assert all_left(tmp_path / "lost", "met")


def test_what_is_frozen_at_first_is_trained_as_in_one_process_once_it_is_not(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """Its gradient is summed by all that hold it alike, also by those that do not push it."""
    options = Options(groups=1, frozen="norm", thaws=2)
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    assert relative_distance(end, one_process(options)) <= 1e-6


@pytest.mark.parametrize(
    ("mode", "groups", "outer"),
    cases(
        [("local:2", 2, {}), ("ssp:1", 1, {}), ("local:2/1", 1, {"warm_up": 1})],
        [("local:2/1", 2, {"warm_up": 1, "mixing": 0.0})],
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensor_parallel_members_train_as_a_worker_of_one_process_in_other_modes(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str, groups: int, outer: dict[str, float]
) -> None:
    """In local:2/1 a round ends with the last step: what was pulled is mixed in there."""
    options = Options(groups=groups, mode=mode, steps=8, prepared={"outer": outer})
    _, end = begun_and_ended(nursery, shared.address, job, tmp_path / "cut", options)
    plain = replace(options, members=0)
    _, expected = begun_and_ended(nursery, shared.address, f"{job}-plain", tmp_path / "plain", plain)
    assert relative_distance(end, expected) <= 1e-6


def test_a_member_that_is_interrupted_while_a_fragment_lands_hands_on_what_it_holds_alike_first(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(groups=1, mode="local:2/1", steps=8, prepared={"outer": {"warm_up": 1}})
    _, expected = begun_and_ended(nursery, shared.address, job, tmp_path / "undisturbed", options)
    cut = replace(options, cut_short=4)
    _, found = begun_and_ended(nursery, shared.address, f"{job}-cut", tmp_path / "cut", cut)
    assert (tmp_path / "cut" / "cut-short-0-1").exists()
    assert same(found, expected)


def test_tensor_parallel_members_that_lost_a_shard_end_as_undisturbed(
    nursery: Nursery, shared: Cluster, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """What they hold alike is put back as the fragments had mixed it, also in those that do not own it."""
    options = Options(groups=1, mode="local:4/1", loops=8, prepared={"outer": {"warm_up": 0}})  # mixed in at 5, 9, 13
    _, expected = begun_and_ended(nursery, shared.address, job, tmp_path / "undisturbed", options)
    kept = tmp_path / "checkpoints"
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every="2steps", lease=LEASE)
    store = CheckpointStore(kept)
    held = replace(options, holds=[0, 6, 10])
    with Groups(nursery, cluster.address, job, tmp_path / "job", held, told=True) as groups:
        for clock, due in ((0, 1), (6, 2)):
            let_go_once_begun(groups, cluster, job, clock, due, (0,))
        until(lambda: groups.are_held(10, (0,)), "both to stand within the third round")
        until(lambda: last(store, job) == 2, "the checkpoint")
        cluster.start_again(1)
        groups.let_go(10)
        _, found = groups.begun_and_ended()
    assert groups.logs().count("the job was rolled back") == 2
    assert same(found, expected)


def test_a_checkpoint_of_tensor_parallel_members_goes_on_in_one_process_to_the_bit(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """And is exported whole. Each process has the weights and the optimizer's state that those had."""
    kept = tmp_path / "checkpoints"
    first = make_cluster(checkpoint_dir=kept, lease=LEASE)
    _, last = begun_and_ended(nursery, first.address, job, tmp_path / "first", SHARDED)
    first.stop()
    export(kept, job, None, tmp_path / "exported")
    assert same(model_state_dict(tmp_path / "exported"), {n: last[n] for n in Model(True).state_dict()})
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    plain = replace(SHARDED, members=0, shards=False, loads=False, steps=SHARDED.steps + 2)
    begin, end = begun_and_ended(nursery, second.address, job, tmp_path / "second", plain)
    assert same(begin, last)
    assert relative_distance(end, one_process(plain)) <= 1e-6
