"""Groups of processes that train a model which `fully_shard` has cut: what they end with, and what they do where one of
them fails."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ps_server.ops import requests, status_text
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export, model_state_dict, optimizer_state_dict
from tests.scripts.train_in_group import LOST_STEP, Options, make_model, make_optimizer
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Nursery
from tests.tools.groups import (
    LEASE,
    WAIT_SECONDS,
    Groups,
    Tensors,
    begun,
    last,
    let_go_once_begun,
    log_of,
    one_process,
    relative_distance,
    same,
)


@pytest.mark.parametrize(
    ("options", "told"),
    [(Options(), False), (Options(optimizer="SGD", micro=2, clip=0.5), True)],
    ids=["AdamW", "SGD"],
)
def test_two_groups_of_two_end_as_one_process_and_alike_to_the_bit(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, options: Options, told: bool
) -> None:
    with Groups(nursery, shared.address, job, tmp_path, options, told=told) as groups:
        found = groups.ended()
    assert relative_distance(found[0], one_process(options)) <= 1e-6
    assert all(same(each, found[0]) for each in found)
    assert int(found[0]["clock"]) == options.steps
    met = [json.loads((tmp_path / f"met-{group}-{member}").read_text()) for group, member in groups.each]
    everyone = [[group, member] for group, member in groups.each]
    assert met == [[everyone, 0.5, [0, 1], each == (0, 0)] for each in groups.each]


@pytest.mark.parametrize(
    ("when", "said", "clock"),
    [("before", "its last gradient is pushed from there", 9), ("after", "its last gradient counts", 8)],
)
def test_a_step_in_which_one_member_loses_the_place_counts_once_as_a_whole(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, when: str, said: str, clock: int
) -> None:
    """Before: the other member has pushed its piece. It pushes a skip, where the one that lost the place pushes: both
    go on from the job's next clock. After: all of the step counts, and neither pushes it again. The other group stands
    still until then: while a place is being taken anew, an update does not wait for its worker."""
    options = Options(loses=when, holds=[4] if when == "after" else [])
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        if when == "after":
            until(lambda: groups.are_held(4), "both groups to stand at clock 4")
            groups.let_go(4)
        found = groups.ended()
    assert all(same(each, found[0]) for each in found)
    assert [int(each["clock"]) for each in found] == [clock] * 4
    logs = [(tmp_path / f"log-1-{member}").read_text() for member in (0, 1)]
    assert all(f"and goes on at clock 4 as incarnation 3; {said}" in log for log in logs), logs
    if when == "after":
        assert relative_distance(found[0], one_process(options)) <= 1e-6


def test_one_group_ends_as_fully_shard_alone(nursery: Nursery, shared: Cluster, job: str, tmp_path: Path) -> None:
    options = Options(groups=1)
    with Groups(nursery, shared.address, job, tmp_path / "group", options) as groups:
        found = groups.ended()[0]
    with Groups(nursery, "", "", tmp_path / "alone", Options(groups=1, alone=True)) as alone:
        expected = alone.ended()[0]
    assert relative_distance(found, expected) <= 1e-6


@pytest.mark.parametrize("non_finite", ["refuse", "skip"])
def test_a_step_that_one_member_refuses_counts_on_none(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, non_finite: str
) -> None:
    options = Options(groups=1, poison=3, non_finite=non_finite, steps=6)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()[0]
    assert relative_distance(found, one_process(options)) <= 1e-6
    refused = {path.name: path.read_text() for path in tmp_path.glob("refused-*")}
    if non_finite == "skip":
        assert refused == {}
        return
    assert refused.keys() == {"refused-0-0", "refused-0-1"}
    assert all("the gradient of 0.weight is not finite" in text for text in refused.values())
    assert "member 1 of this worker's group" in refused["refused-0-0"]


def test_a_step_that_one_member_leaves_out_is_left_out_where_another_loses_the_place(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(groups=1, poison=LOST_STEP, non_finite="skip", steps=6, loses="end")
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert "lost its place" in groups.logs()
    assert all(same(each, found[0]) for each in found)
    assert relative_distance(found[0], one_process(options)) <= 1e-6


def test_what_servers_refuse_of_one_members_assignments_stops_all_before_they_push(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    options = Options(groups=1, unassigned=3, steps=6)
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert "there is no room" in (tmp_path / "refused-0-0").read_text()
    assert [int(each["clock"]) for each in found] == [options.steps - 1] * 2
    assert all(same(each, found[0]) for each in found)
    assert relative_distance(found[0], one_process(options)) <= 1e-6


@pytest.mark.parametrize("refused", ["poison", "unassigned"])
def test_what_the_script_sets_before_a_step_that_one_member_refuses_goes_with_the_next(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path, refused: str
) -> None:
    """The other member has ended the step; where servers refuse what one has set, they have what the other one has."""
    options = Options(groups=1, scaled=3, optimizer="plain SGD", **{refused: 3})  # type: ignore[arg-type]
    with Groups(nursery, shared.address, job, tmp_path, options) as groups:
        found = groups.ended()
    assert {path.name for path in tmp_path.glob("refused-*")} == {"refused-0-0", "refused-0-1"}
    assert all(same(each, found[0]) for each in found)
    assert relative_distance(found[0], one_process(options)) <= 1e-6


def test_a_member_that_holds_nothing_has_its_state_in_checkpoints(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """It pulls nothing, and hears by the others that a checkpoint is wanted."""
    kept = tmp_path / "checkpoints"
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every="3steps", lease=LEASE)
    store = CheckpointStore(kept)
    options = Options(groups=1, empty=True, holds=[0, 2, 5])
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(0, (0,)), "the step before the first checkpoint")
        until(lambda: begun(cluster, job) == {1}, "the beginning of the first checkpoint")
        groups.let_go(0)
        until(lambda: groups.are_held(2, (0,)), "the step before the checkpoint")
        until(lambda: begun(cluster, job) == {3}, "the beginning of the checkpoint on both shards")
        groups.let_go(2)
        until(lambda: groups.are_held(5, (0,)), "all to stand at clock 5")
        until(lambda: last(store, job) == 3, "the checkpoint")
        assert set(store.manifest(job, store.names(job)[-1]).workers) == {0}
        groups.let_go(5)
        groups.ended()


def test_members_that_take_their_own_ranks_are_told(
    nursery: Nursery, shared: Cluster, job: str, tmp_path: Path
) -> None:
    with Groups(nursery, shared.address, job, tmp_path, Options(astray=True), only=0) as groups:
        assert all(process.wait(WAIT_SECONDS) != 0 for process in groups.processes.values())
        said = "the members of a group are one worker: member 0 is rank 0 of 2 in job"
        assert all(said in (tmp_path / f"log-0-{member}").read_text() for member in (0, 1))
    assert shared.coordinator.jobs().get(job) is None


def test_a_group_that_lost_a_member_leaves_and_the_others_go_on_until_it_starts_again(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(lease=LEASE, absence_seconds=0.0)
    with Groups(nursery, cluster.address, job, tmp_path, Options(steps=12, holds=[4, 8])) as groups:
        until(lambda: groups.are_held(4), "all to stand at clock 4")
        seen = status_text.table(requests.fetch(cluster.address))
        assert re.findall(r"^group of 2 +(\d) ", seen, re.MULTILINE) == ["0", "1"]
        members = cluster.coordinator.job(job).workers
        places = [{1: (socket.gethostname(), groups.processes[group, 1].pid)} for group in (0, 1)]
        until(lambda: [worker.processes for worker in members.all()] == places, "the second members to tell theirs")
        groups.processes[1, 1].kill()
        groups.let_go(4)
        assert groups.processes[1, 0].wait(WAIT_SECONDS) != 0  # its collectives end
        until(lambda: groups.are_held(8, (0,)), "group 0 to go on alone")
        assert {member.rank for member in members.all()} == {0}
        with Groups(nursery, cluster.address, job, tmp_path / "again", Options(steps=4), only=1) as again:
            until(lambda: {member.rank for member in members.all()} == {0, 1}, "group 1 to come back")
            until(lambda: len(list((tmp_path / "again").glob("begun-*"))) == 2, "group 1 to have the weights")
            groups.let_go(8)
            found = [*groups.ended(0), *again.ended()]
    assert [int(each["clock"]) for each in found] == [12] * 4
    assert all(same(each, found[0]) for each in found)
    assert cluster.coordinator.jobs() == {}


def test_a_group_whose_member_hangs_loses_its_lease_and_comes_back_as_one(
    nursery: Nursery, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    cluster = make_cluster(lease=LEASE)
    options = Options(steps=12, holds=[4, 8])
    with Groups(nursery, cluster.address, job, tmp_path, options) as groups:
        until(lambda: groups.are_held(4), "all to stand at clock 4")
        groups.processes[1, 1].send_signal(signal.SIGSTOP)
        cluster.end_lease(1, job)
        groups.let_go(4)
        until(lambda: groups.are_held(8, (0,)), "group 0 to go on alone")
        assert {member.rank for member in cluster.coordinator.job(job).workers.all()} == {0}  # not again and again
        groups.processes[1, 1].send_signal(signal.SIGCONT)
        groups.let_go(8)
        found = groups.ended()
    assert same(found[0], found[1])
    assert same(found[2], found[3])
    assert int(found[2]["clock"]) >= 12


def test_groups_that_lost_a_shard_end_as_undisturbed_and_checkpoints_have_whole_tensors(
    nursery: Nursery, shared: Cluster, make_cluster: Callable[..., Cluster], job: str, tmp_path: Path
) -> None:
    """With dropout, noise in the data, a shuffled loader for each process, and a schedule."""
    with Groups(nursery, shared.address, job, tmp_path / "undisturbed", Options(noisy=True)) as groups:
        expected = groups.ended()
    kept = tmp_path / "checkpoints"
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every="3steps", lease=LEASE)
    store = CheckpointStore(kept)
    with Groups(nursery, cluster.address, job, tmp_path / "job", Options(noisy=True, holds=[0, 2, 3, 5])) as groups:
        for clock, due in ((0, 1), (2, 3)):
            let_go_once_begun(groups, cluster, job, clock, due)
        until(lambda: groups.are_held(3), "the clock of the checkpoint")
        groups.let_go(3)
        until(lambda: groups.are_held(5), "all to stand at clock 5")
        until(lambda: last(store, job) == 3, "the checkpoint")
        export(kept, job, None, tmp_path / "exported")
        cluster.start_again(1)
        groups.let_go(5)
        found = groups.ended()
    assert all(same(*each) for each in zip(found, expected, strict=True))
    assert [log_of(tmp_path / "job", each) for each in groups.each] == [
        log_of(tmp_path / "undisturbed", each) for each in groups.each
    ]
    assert_exported(tmp_path / "exported", load_file(tmp_path / "job" / "3-0-0.safetensors"))


def assert_exported(directory: Path, expected: Tensors) -> None:
    model = make_model()
    model.load_state_dict(model_state_dict(directory))
    assert same(dict(model.state_dict()), expected)
    optimizer = make_optimizer("AdamW", model)
    optimizer.load_state_dict(optimizer_state_dict(directory))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].shape == parameter.shape
        assert int(state["step"]) == 3
