"""Groups of processes in the modes in which workers do not share a clock, and where a step fails half way."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ps_server.core.limits import Limits
from tests.scripts.train_in_group import Options, batch, given_gradient, loss, make_model, make_optimizer
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import LEASE, WAIT_SECONDS, Groups, Tensors, mean_loss, one_process, relative_distance, same


@pytest.mark.parametrize("mode", cases(["ssp:1"], ["async"]))
def test_one_group_ends_as_one_process_in_each_mode(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    options = Options(groups=1, mode=mode)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert relative_distance(found[0], one_process(options)) <= 1e-6
    assert [int(each["clock"]) for each in found] == [options.steps] * 2


@pytest.mark.parametrize("mode", cases(["async"], ["ssp:1"]))
def test_two_groups_learn_as_in_sync(nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str) -> None:
    options = Options(mode=mode, steps=40, learns=True)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    before, in_sync = mean_loss(one_process(replace(options, steps=0))), mean_loss(one_process(options))
    assert in_sync < before / 10
    assert mean_loss(found[0]) < 1.5 * in_sync  # by hand, with workers in any order: 0.7 to 0.8 of it
    met = [(tmp_path / f"met-{group}-{member}").read_text() for group, member in groups.each]
    assert all("[[0, 0], [0, 1], [1, 0], [1, 1]], 0.5, [0, 1]" in each for each in met)


def test_a_group_is_ahead_of_another_by_no_more_than_the_bound(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    with Groups(nursery, shared.address, job, tmp_path, Options(mode="ssp:2", slow=3)) as groups:
        until(lambda: groups.are_held(3, (1,)), "group 1 to stand at clock 3")
        until(lambda: shared.waits(job).get(0) == (6, [1]), "group 0 to wait for it")
        groups.let_go(3)
        found = groups.ended()
    assert [int(each["clock"]) for each in found] == [8] * 4


def test_an_update_waits_for_the_quorum_and_late_steps_count_on_all_pieces(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(connected={"quorum": 1}, slow=3, holds=[6], loses="before")
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(3, (1,)), "group 1 to stand at clock 3")
        until(lambda: groups.are_held(6, (0,)), "group 0 to go on without it")
        groups.let_go(3)
        until(lambda: groups.are_held(6), "group 1 to come to clock 6")
        rules = [bucket.rule for shard in shared.shards for bucket in shard.jobs()[job].buckets.values()]
        trained = [rule for rule in rules if rule.version]
        assert len({tuple(sorted(rule.pushed.items())) for rule in trained}) == 1
        assert all(set(rule.pushed) == {0, 1} for rule in trained)
        groups.let_go(6)
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    assert [int(each["clock"]) for each in found[:2]] == [8] * 2
    assert found[2]["clock"] == found[3]["clock"]


@pytest.mark.parametrize(("mode", "when"), crossed(["async", "ssp:1"], ["before", "after"]))
def test_a_step_in_which_the_place_is_lost_counts_once(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str, when: str
) -> None:
    options = Options(groups=1, mode=mode, loses=when)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    assert relative_distance(found[0], one_process(options)) <= 1e-6


def in_mode(mode: str) -> Options:
    """A job of two groups in a mode, or in sync with a quorum of one, in which group 0 stands at two clocks."""
    later = 9 if mode == "local:4/2" else 10  # at 9 a round of local:4/2 is over
    options = Options(mode=mode, steps=12, holds=[4, later], prepared={"outer": {"warm_up": 0}})
    return replace(options, mode="sync", connected={"quorum": 1}) if mode == "quorum" else options


@pytest.mark.parametrize("mode", cases(["async", "local:4/2"], ["local:2", "ssp:2", "quorum"]))
def test_a_group_that_lost_a_member_leaves_and_comes_back(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    options = in_mode(mode)
    later = options.holds[1]
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(4), "all to stand at step 4")
        groups.processes[1, 1].kill()
        groups.let_go(4)
        assert groups.processes[1, 0].wait(WAIT_SECONDS) != 0  # its collectives end
        until(lambda: groups.are_held(later, (0,)), "group 0 to go on alone")
        members = shared.coordinator.job(job).workers
        assert {member.rank for member in members.all()} == {0}
        short = replace(options, steps=4, holds=[])
        with Groups(nursery, shared.address, job, tmp_path / "again", short, only=1) as again:
            until(lambda: {member.rank for member in members.all()} == {0, 1}, "group 1 to come back")
            until(lambda: len(list((tmp_path / "again").glob("begun-*"))) == 2, "group 1 to have the weights")
            groups.let_go(later)
            found = [*groups.ended(0), *again.ended()]
    assert int(found[0]["clock"]) == int(found[1]["clock"]) >= 12  # of rounds it may make an empty one for the other
    assert found[2]["clock"] == found[3]["clock"]
    assert job not in shared.coordinator.jobs()


@pytest.mark.parametrize("mode", cases(["local:4/2"], ["async", "ssp:2", "local:2", "quorum"]))
def test_a_group_with_a_member_that_is_stopped_is_out_until_it_runs_again(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, mode: str
) -> None:
    """In sync: test_fsdp2.py."""
    cluster, options = make_cluster(lease=LEASE), in_mode(mode)
    later, never = options.holds[1], {"PS_GROUP_TIMEOUT": "0"}
    with Groups(nursery, cluster.address, job, tmp_path, options, variables=never) as groups:
        until(lambda: groups.are_held(4), "all to stand at step 4")
        groups.processes[1, 1].send_signal(signal.SIGSTOP)
        cluster.end_lease(1, job)
        groups.let_go(4)
        until(lambda: groups.are_held(later, (0,)), "group 0 to go on alone")
        members = cluster.coordinator.job(job).workers
        assert {member.rank for member in members.all()} == {0}
        groups.processes[1, 1].send_signal(signal.SIGCONT)
        until(lambda: {member.rank for member in members.all()} == {0, 1}, "group 1 to come back")
        groups.let_go(later)
        found = groups.ended()
    assert int(found[0]["clock"]) == int(found[1]["clock"]) >= 12
    assert int(found[2]["clock"]) == int(found[3]["clock"]) >= 12


def test_all_members_save_their_state_where_one_hears_by_a_refresh_that_a_checkpoint_wants_it(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """Member 1 holds nothing and pulls nothing. Shards tell of a checkpoint at one clock alone."""
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", checkpoint_every="1000steps", lease=LEASE)
    options = Options(groups=1, mode="async", empty=True, holds=[4, 6], refreshes=4)
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups, ThreadPoolExecutor(1) as pool:
        until(lambda: groups.are_held(4, (0,)), "both to stand at clock 4")
        coordinated, hosted = cluster.coordinator.job(job), [shard.jobs()[job] for shard in cluster.shards]
        until(lambda: all(each.snapshot_task for each in hosted), "the beginning of the job's first checkpoint")
        before = [each.snapshot_task for each in hosted]
        made = pool.submit(coordinated.checkpoint, WAIT_SECONDS)
        until(lambda: all(h.snapshot_task is not b for h, b in zip(hosted, before, strict=True)), "its beginning")
        groups.let_go(4)
        until(lambda: groups.are_held(6, (0,)), "both to stand at clock 6")
        assert {rank: each.clock for rank, each in made.result(WAIT_SECONDS).workers.items()} == {0: 4}
        groups.let_go(6)
        groups.ended()


@pytest.mark.parametrize(("up", "down"), cases([("int4", "int8"), ("bfloat16", "bfloat16")], [("int8", "int8")]))
def test_narrow_wires_learn_as_wide_ones(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, up: str, down: str
) -> None:
    """All processes have the same bits, as workers of one process have: weights in blocks come as what is added."""
    prepared, over = {"gradient_wire": up, "weight_wire": down}, {"transport": "tcp"}
    options = Options(optimizer="SGD", steps=24, learns=True, prepared=prepared, connected=over)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert mean_loss(found[0]) < mean_loss(one_process(replace(options, steps=0))) / 5
    assert all(same(each, found[0]) for each in found)
    assert not same(found[0], one_process(options) | {"clock": found[0]["clock"]})


def test_a_step_counts_once_on_a_narrow_wire(nursery: Nursery, shared: Cluster, job: str, tmp_path: Path) -> None:
    prepared = {"gradient_wire": "int8", "weight_wire": "int8"}
    options = Options(groups=1, prepared=prepared, loses="before", optimizer="SGD", steps=24, learns=True)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    assert all(same(each, found[0]) for each in found)
    assert mean_loss(found[0]) < mean_loss(one_process(replace(options, steps=0))) / 5


@pytest.mark.parametrize("transport", cases(["shm", "grpc"], ["tcp"]))
def test_the_way_to_shards_changes_nothing(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, transport: str
) -> None:
    """In shared memory each member has a segment of its own, which goes with the place. While that is being taken anew,
    group 0 stands still: an update would not wait for group 1."""
    options = Options(connected={"transport": transport}, loses="after", holds=[4], slow=5)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(4), "both groups to stand at clock 4")
        groups.let_go(4)
        until(lambda: groups.are_held(5, (1,)), "group 1 to stand at clock 5")
        held = [set(shard.jobs()[job].of_workers.segments) for shard in shared.shards]
        assert held == [set(groups.each) if transport == "shm" else set()] * len(held)
        groups.let_go(5)
        found = groups.ended()
    assert groups.logs().count("lost its place") == 2
    assert relative_distance(found[0], one_process(options)) <= 1e-6
    assert all(same(each, found[0]) for each in found)


@pytest.mark.parametrize(("mode", "sent"), [("sync", {"0-0", "0-1"}), ("async", {"0-0", "0-1", "1-0", "1-1"})])
def test_whose_assignments_count_all_members_decide_alike(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str, sent: set[str]
) -> None:
    """In sync those of the lowest group: one member of the other has heard of its end, and the first one has not."""
    options = Options(mode=mode, scaled=3)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert {path.name.removeprefix("assigned-") for path in tmp_path.glob("assigned-*")} == sent
    if mode == "sync":
        assert all(same(each, found[0]) for each in found)
        assert relative_distance(found[0], one_process(options)) <= 1e-6


def test_members_that_make_unlike_calls_are_told_of_both_and_may_go_on(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(groups=1, mode="async", part_ways=True)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        groups.ended()
    said = "member 0 of this worker's group is in session.global_weights, and member 1 in session.barrier"
    assert all(said in (tmp_path / f"refused-0-{member}").read_text() for member in (0, 1))
    assert all((tmp_path / f"met-0-{member}").exists() for member in (0, 1))


def test_a_step_after_one_in_which_a_member_was_interrupted_is_not_taken_for_a_part_of_that(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """The other member is in the step before still, and compares for the second time. It has pushed what is its own;
    with the step after that both are at one clock again."""
    options = Options(groups=1, mode="async", interrupted=3)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert [int(each["clock"]) for each in found] == [5, 5]
    assert "step 4 was interrupted before this member had pushed its part of it, which is lost" in groups.logs()
    said = "member 0 of this worker's group is in part 1 of optimizer.step, and member 1 in part 2 of optimizer.step"
    assert all(said in (tmp_path / f"refused-0-{member}").read_text() for member in (0, 1))


@pytest.mark.parametrize("when", ["waiting", "between"])
def test_a_call_in_which_a_member_was_interrupted_keeps_no_other_waiting(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, when: str
) -> None:
    """The other one is in the second collective of the call, and the next call of the one that was interrupted begins
    with a first one."""
    options = Options(groups=1, mode="async", steps=1, cut_short=when)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        groups.ended()
    said = "member 0 of this worker's group is in part 1 of session.gather, and member 1 in part 2 of session.gather"
    assert all(said in (tmp_path / f"refused-0-{member}").read_text() for member in (0, 1))
    assert all((tmp_path / f"met-0-{member}").exists() for member in (0, 1))


def test_a_member_says_that_it_waits_for_the_others(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(groups=1, mode="async", late=True)
    said = "member 0 of this worker's group waits in session.global_weights for the other members"
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until((tmp_path / f"held-{options.steps}-1").exists, "member 1 to be late")
        until(lambda: said in groups.logs(), "the words of member 0")
        assert "member 1" not in groups.logs()
        groups.let_go(options.steps)
        groups.ended()
    assert groups.logs().count(said) == 1


def test_a_member_that_waits_for_the_others_is_ended_by_a_signal(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """Ctrl-C is an exception in Python, whatever waits below."""
    options = Options(groups=1, mode="async", late=True)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        until((tmp_path / f"held-{options.steps}-1").exists, "member 1 to be late")
        until(lambda: "waits in session.global_weights" in groups.logs(), "member 0 to wait")
        groups.processes[0, 0].send_signal(signal.SIGINT)
        assert groups.processes[0, 0].wait(WAIT_SECONDS) != 0
        assert "KeyboardInterrupt" in groups.logs()
        assert groups.processes[0, 1].poll() is None


def where_member_1_leaves_a_step_out(options: Options) -> Tensors:
    """What one process ends with that steps only the rows of member 0 in the step of which member 1 pushes nothing."""
    model = make_model()
    optimizer = make_optimizer(options.optimizer, model)
    for step in range(options.steps):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == options.unpushed:
            for parameter, rows in zip(model.parameters(), before, strict=True):
                first = -(-len(rows) // 2)
                parameter.data[first:] = rows[first:]
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_members_go_on_from_one_clock_where_the_push_of_one_fails(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    """It has sent nothing of its piece, and the other one all of its own. Both have the servers' weights after that,
    and take none of them for changes of the script."""
    options = Options(groups=1, mode=mode, unpushed=3, optimizer="plain SGD")
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert relative_distance(found[0], where_member_1_leaves_a_step_out(options)) <= 1e-6
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert "no thread can be started" in (tmp_path / "refused-0-0").read_text()
    assert [int(each["clock"]) for each in found] == [options.steps] * 2


def after_a_refused_push(
    nursery: Nursery, shared: Cluster, job: str, directory: Path, options: Options
) -> dict[str, torch.Tensor]:
    """What both members of a group end with, after a step that raised in both."""
    with Groups(nursery, shared.address, job, directory, options) as groups:
        found = groups.ended()
    assert {path.name for path in directory.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert all(same(each, found[0]) for each in found)
    return found[0]


@pytest.mark.parametrize("mode", cases(["async"], ["sync"]))
def test_what_the_wire_rounds_off_counts_once_where_the_push_of_one_member_fails(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    """Of the member whose calls were through, the step counts: what was rounded off of it goes with the next one. The
    other member goes on with what it had rounded off before."""
    more: dict[str, Any] = {"connected": {"transport": "tcp"}, "prepared": {"gradient_wire": "int8"}}
    options = Options(groups=1, mode=mode, unpushed=3, optimizer="plain SGD", given=3, **more)
    found = after_a_refused_push(nursery, shared, job, tmp_path, options)
    model = make_model()
    [group] = make_optimizer(options.optimizer, model).param_groups
    for index, whole in enumerate(model.parameters()):
        for member, piece in enumerate(whole.data.tensor_split([-(-len(whole) // 2)])):
            for step in range(options.steps):
                if (member, step) != (1, options.unpushed):
                    piece -= group["lr"] * given_gradient(options, step, member, index, piece.shape)
    assert relative_distance(found, dict(model.state_dict())) <= 1e-6


def test_what_the_wire_rounds_off_of_a_round_counts_once_where_the_push_of_one_member_fails(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    """The round after it has one step, and is pushed by none: its base is gone."""
    outer = {"warm_up": 0, "lr": 0.5, "momentum": 0.0, "nesterov": False}
    more: dict[str, Any] = {"prepared": {"outer": outer, "gradient_wire": "int8"}, "connected": {"transport": "tcp"}}
    options = Options(groups=1, mode="local:2", steps=13, unpushed=3, optimizer="plain SGD", given=5, **more)
    found = after_a_refused_push(nursery, shared, job, tmp_path, options)
    model = make_model()
    [group] = make_optimizer(options.optimizer, model).param_groups
    for index, whole in enumerate(model.parameters()):
        for member, piece in enumerate(whole.data.tensor_split([-(-len(whole) // 2)])):
            for step in range(options.steps):
                if step != 4 and (member, step) not in ((1, 2), (1, 3)):
                    change = group["lr"] * given_gradient(options, step, member, index, piece.shape)
                    piece -= outer["lr"] * change
    assert relative_distance(found, dict(model.state_dict())) <= 1e-6


def test_members_go_on_from_one_clock_where_servers_refuse_the_push_of_one(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(lease=LEASE, limits=Limits(push_norm=100.0))
    options = Options(groups=1, poison=3, poison_value=1e6)
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert "max-push-norm" in (tmp_path / "refused-0-0").read_text()
    assert [int(each["clock"]) for each in found] == [options.steps] * 2
    assert all(same(each, found[0]) for each in found)
