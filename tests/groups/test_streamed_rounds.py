"""Groups of processes in rounds whose model is pushed fragment by fragment (mode local:H/F): a fragment counts on all
members or on none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ps_server.storage.checkpoints import CheckpointStore
from ps_worker.model.local_settings import local_settings
from tests.scripts.train_in_group import LOST_STEP, Options, make_model
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
    mean_loss,
    relative_distance,
    same,
)
from tests.tools.islands import StreamedRounds

MODE = "local:4/2"  # fragments leave after steps 2, 4, 6 and so on, and land one step later: rounds end at 5, 9 and 13
OUTER = {"warm_up": 0, "lr": 0.8, "momentum": 0.7, "nesterov": True}
INT4 = {"gradient_wire": "int4", "weight_wire": "int4"}


def options_of(mode: str = MODE, **more: object) -> Options:
    prepared = {"outer": OUTER, **more.pop("prepared", {})}  # type: ignore[dict-item]
    return Options(mode=mode, prepared=prepared, servers=True, **more)  # type: ignore[arg-type]


def by_hand(options: Options) -> StreamedRounds:
    local = local_settings(options.mode, options.prepared["outer"])
    assert local is not None
    assert local.fragments is not None
    return StreamedRounds(options, local.fragments)


def servers_of(found: Tensors) -> Tensors:
    return {name.removeprefix("servers."): tensor for name, tensor in found.items() if name.startswith("servers.")}


def assert_as(found: Tensors, expected: StreamedRounds, group: int) -> None:
    """A group has the weights of its worker by hand, and those of the servers."""
    own = {name: each.detach() for name, each in expected.islands[group].model.named_parameters()}
    assert relative_distance({name: found[name] for name in own}, own, least=0.1) <= 1e-6
    servers = servers_of(found)
    assert relative_distance({name: servers[name] for name in own}, expected.servers(), least=0.1) <= 1e-6


def assert_alike(groups: Groups, found: list[Tensors]) -> None:
    """Members have the same bits, and groups the same of the servers' weights."""
    for each, own in zip(groups.each, found, strict=True):
        assert same(own, found[groups.each.index((each[0], 0))])
        assert same(servers_of(own), servers_of(found[0]))


@pytest.mark.parametrize(
    "options",
    cases(
        [
            options_of("local:6/2"),
            options_of(groups=1, frozen=True, optimizer="SGD", prepared={"outer": {**OUTER, "delay": 0}}),
        ],
        [options_of("local:6/3", optimizer="SGD"), options_of("local:3/3"), options_of(groups=1)],
    ),
    ids=lambda options: f"{options.mode} {options.optimizer}".replace("/", "-"),
)
def test_groups_are_as_workers_of_one_process_after_each_step(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, options: Options
) -> None:
    """Of uneven shards and an empty one. Whatever has landed all processes have to the bit."""
    options = replace(options, steps=14, leaves=[*range(1, 15)])
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        ends = groups.ended()
    expected = by_hand(options)
    for step in range(options.steps):
        expected.step(step)
        expected.exchange()
        found = [load_file(tmp_path / f"{step + 1}-{group}-{member}.safetensors") for group, member in groups.each]
        assert_alike(groups, found)
        for (group, _), own in zip(groups.each, found, strict=True):
            assert_as(own, expected, group)
    assert [int(each["clock"]) for each in ends] == [options.steps] * len(ends)
    if options.frozen:
        frozen = {name: tensor for name, tensor in make_model().state_dict().items() if name.startswith("2.")}
        assert all(same({name: each[name] for name in frozen}, frozen) for each in ends)
        assert [float(each["steps"]) for each in ends] == [options.steps] * len(ends)


@pytest.mark.parametrize(("up", "down"), cases([("int4", "int8")], [("int8", "int4"), ("bfloat16", "float32")]))
def test_narrow_wires_learn_and_all_processes_have_the_same_bits_of_the_servers_weights(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, up: str, down: str
) -> None:
    more = {"prepared": {"gradient_wire": up, "weight_wire": down}, "connected": {"transport": "tcp"}}
    options = options_of(optimizer="SGD", steps=29, learns=True, **more)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert_alike(groups, found)
    assert mean_loss(servers_of(found[0])) < mean_loss(dict(make_model().state_dict())) / 5


# -- all members or none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fragment_in_which_one_member_loses_the_place_counts_once_as_a_whole(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, when: str
) -> None:
    """Before it has pushed, or once the fragment has come to the servers, and before it is mixed in."""
    options = options_of(groups=1, loses=when, steps=10)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    expected = by_hand(options)
    for step in range(options.steps):
        expected.step(step)
        expected.lose() if step == LOST_STEP + 1 else expected.exchange()
    assert_alike(groups, found)
    assert_as(found[0], expected, 0)


def test_a_group_that_loses_its_place_between_two_fragments_pushes_the_rest_of_the_round_at_once(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(lease=LEASE)
    options = options_of(groups=1, steps=10, holds=[3], meets=3)
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(3, (0,)), "all to stand where the first fragment is mixed in")
        cluster.end_lease(0, job)
        groups.let_go(3)
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    expected = by_hand(options)
    for step in range(options.steps):
        if step == 3:
            expected.lose()
        expected.step(step)
        expected.exchange()
    assert_alike(groups, found)
    assert_as(found[0], expected, 0)


@pytest.mark.parametrize("non_finite", cases(["skip"], ["refuse"]))
def test_a_fragment_that_one_member_refuses_is_pushed_by_none(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, non_finite: str
) -> None:
    """Refused: the script sets both back to the servers' weights. Left out: both go back to them, with optimizers of no
    state, and are at one step of the round."""
    options = options_of(groups=1, steps=10, poison=3, non_finite=non_finite)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    refused = {path.name: path.read_text() for path in tmp_path.glob("refused-*")}
    expected = by_hand(options)
    for step in range(options.steps):
        expected.step(step)
        if step != options.poison:
            expected.exchange()
            continue
        expected.set_back()
        expected.islands[0].optimizer.state.clear()
        if non_finite == "skip":
            expected.exchange(is_left_out=True)
    assert_alike(groups, found)
    assert_as(found[0], expected, 0)
    assert refused.keys() == ({"refused-0-0", "refused-0-1"} if non_finite == "refuse" else set())
    assert all("is not finite after the steps of this round" in text for text in refused.values())


def test_a_fragment_that_one_member_cannot_push_is_told_of_by_all_where_it_is_due(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """At each step from there on: the other one has pushed it, and mixes nothing in."""
    options = replace(options_of(groups=1, steps=7, unpushed=3), servers=False)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert (tmp_path / "refused-0-0").read_text().count("no thread can be started") == 1
    assert "member 1 of this worker's group" in (tmp_path / "refused-0-0").read_text()
    assert "no thread can be started" in (tmp_path / "refused-0-1").read_text()
    expected = by_hand(options)
    for step in range(options.steps):
        expected.step(step)
        if step <= 3:
            expected.exchange()
    assert all(same(each, found[0]) for each in found)
    own = {name: each.detach() for name, each in expected.islands[0].model.named_parameters()}
    assert relative_distance({name: found[0][name] for name in own}, own) <= 1e-6


def test_a_member_that_was_interrupted_before_a_fragment_leaves_is_not_taken_for_one_in_which_it_lands(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = replace(options_of(groups=1, interrupted=1), servers=False)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        groups.ended()
    said = (
        "member 0 of this worker's group is in optimizer.step (fragment 0 of round 1 leaves), "
        "and member 1 in optimizer.step (fragment 0 of round 1 lands)"
    )
    assert all(said in (tmp_path / f"refused-0-{member}").read_text() for member in (0, 1))


def test_a_member_that_asks_alone_for_the_servers_weights_is_told_so_with_a_fragment_under_way(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = replace(options_of(groups=1, steps=2, part_ways=True), servers=False)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        groups.ended()
    said = "member 0 of this worker's group is in session.global_weights, and member 1 in session.barrier"
    assert all(said in (tmp_path / f"refused-0-{member}").read_text() for member in (0, 1))


# -- groups come and go ------------------------------------------------------------------------------------------------


def test_a_group_that_has_no_more_data_brings_the_fragments_that_another_waits_for(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """It is in a value of all, in the middle of a round, and then of a later one."""
    options = options_of(steps=13, short=3)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert [int(each["round"]) for each in found] == [3] * 4
    for own in found:
        assert same(servers_of(own), servers_of(found[0]))
    assert same(found[0], found[1])
    assert same(found[2], found[3])
    assert not same(servers_of(found[0]), {name: found[0][name] for name in servers_of(found[0])})


@pytest.mark.parametrize("wires", cases([INT4], [{}]), ids=lambda wires: "int4" if wires else "float32")
def test_groups_that_lost_a_shard_end_as_undisturbed(
    nursery: Nursery,
    shared: Cluster,
    make_cluster: Callable[..., Cluster],
    job: str,
    tmp_path: Path,
    wires: dict[str, str],
) -> None:
    """With a fragment under way. Each member's state has its own weights beside the servers', what its optimizer keeps
    of its pieces, and what the wire has cost."""
    # Fragments leave after 3, 6, 9, 12 and 15. A pass has 8 steps: the last one begins after what is lost.
    options = options_of("local:6/2", groups=1, noisy=True, passes=3, prepared=wires)
    with Groups(nursery, shared.address, job, tmp_path / "undisturbed", options) as groups:
        expected = groups.ended()
    kept = tmp_path / "checkpoints"
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every="2steps", lease=LEASE)
    store = CheckpointStore(kept)
    held = replace(options, holds=[0, 8, 15])
    with Groups(nursery, cluster.address, job, tmp_path / "job", held) as groups:
        for clock, due in ((0, 1), (8, 2)):  # at 8 all have sent their state of the first checkpoint
            let_go_once_begun(groups, cluster, job, clock, due, (0,))
        until(lambda: groups.are_held(15, (0,)), "all to stand where a fragment of the third round has left")
        until(lambda: last(store, job) == 2, "the checkpoint")
        cluster.start_again(1)
        groups.let_go(15)
        found = groups.ended()
    assert groups.logs().count("the job was rolled back") == 2
    assert all(same(*each) for each in zip(found, expected, strict=True))
    assert [log_of(tmp_path / "job", each) for each in groups.each] == [
        log_of(tmp_path / "undisturbed", each) for each in groups.each
    ]
