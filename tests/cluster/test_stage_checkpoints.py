"""A script that has gone on with another optimizer survives what it survives before: rollbacks, and a start anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export, model_state_dict, optimizer_state_dict
from tests.scripts.train_two_stages import STEPS, SWITCH
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import ROOT, Nursery

MakeCluster = Callable[..., Cluster]
Found = list[dict[str, torch.Tensor]]
SCRIPT = ROOT / "tests" / "scripts" / "train_two_stages.py"
WORKERS, EVERY = 2, 5
LEASE = 30.0  # a worker loses its place because a shard was restored, and for no other reason
WAIT_SECONDS = 90


def start(nursery: Nursery, address: str, directory: Path, held: int = 0, mode: str = "sync") -> list[Any]:
    """Starts the workers of the script. held: the clock at which they are to be held"""
    directory.mkdir(exist_ok=True)
    variables = {"PS_SERVER": address, "PS_MODE": mode, "PS_WORLD_SIZE": str(WORKERS)}
    holds = [*(clock - 1 for clock in checkpoints(held)), held] if held else []
    return [
        nursery.run(SCRIPT, [directory, *holds], directory / f"log-{rank}", PS_RANK=str(rank), **variables)
        for rank in range(WORKERS)
    ]


def checkpoints(clock: int) -> list[int]:
    """The clocks below this one at which there is a checkpoint: the first is as soon as it can be."""
    return [1, *range(EVERY, clock, EVERY)]


def ended(processes: list[Any], directory: Path) -> Found:
    codes = [process.wait(WAIT_SECONDS) for process in processes]
    assert codes == [0] * WORKERS, "\n".join((directory / f"log-{rank}").read_text() for rank in range(WORKERS))
    return [load_file(directory / f"rank-{rank}.safetensors") for rank in range(WORKERS)]


def reach(processes: list[Any], directory: Path, kept: Path, cluster: Cluster, clock: int) -> None:
    """Until all workers stand at a clock, with the checkpoint before it complete. Each was begun in time, because they
    were held a step before it."""

    def held(at: int) -> bool:
        assert all(process.poll() is None for process in processes), "a worker has ended"
        return all((directory / f"held-{at}-{rank}").exists() for rank in range(WORKERS))

    def begun(at: int) -> bool:
        tasks = [shard.jobs()["default"].snapshot_task for shard in cluster.shards]
        return all(task is not None and task.clock == at for task in tasks)

    def complete(at: int) -> bool:
        store = CheckpointStore(kept)
        names = store.names("default")
        return bool(names) and store.manifest("default", names[-1]).clock == at

    for each in checkpoints(clock):
        until(lambda: held(each - 1), "the step before a checkpoint")  # noqa: B023
        until(lambda: begun(each), "the beginning of the checkpoint")  # noqa: B023
        (directory / f"go-{each - 1}").touch()
    until(lambda: held(clock), "the clock to be held at")
    until(lambda: complete(checkpoints(clock)[-1]), "the last checkpoint")


def differing(found: Found, expected: Found) -> set[str]:
    return {name for a, b in zip(found, expected, strict=True) for name in a | b if not torch.equal(a[name], b[name])}


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, shared: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Found:
    directory = tmp_path_factory.mktemp("undisturbed")
    return ended(start(nursery, shared.address, directory), directory)


@pytest.mark.parametrize("which", cases([1], [0]))  # with the coordinator, or without
def test_a_rollback_within_the_second_stage_ends_with_the_weights_of_the_undisturbed_run(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path, undisturbed: Found, which: int
) -> None:
    kept, held = tmp_path / "checkpoints", SWITCH + EVERY + 2
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every=f"{EVERY}steps", lease=LEASE)
    processes = start(nursery, cluster.address, tmp_path, held)
    reach(processes, tmp_path, kept, cluster, held)
    cluster.start_again(which)
    (tmp_path / f"go-{held}").touch()
    assert differing(ended(processes, tmp_path), undisturbed) == set()


def test_a_rollback_into_the_first_stage_goes_on_with_the_second_optimizer_and_says_so(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path
) -> None:
    kept, held = tmp_path / "checkpoints", SWITCH + 2
    assert SWITCH % EVERY, "the checkpoint before is of the first stage"
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every=f"{EVERY}steps", lease=LEASE)
    processes = start(nursery, cluster.address, tmp_path, held)
    reach(processes, tmp_path, kept, cluster, held)
    cluster.start_again(1)
    (tmp_path / f"go-{held}").touch()
    first, second = ended(processes, tmp_path)
    weights = [name for name in first if name.endswith(("weight", "bias"))]
    assert all(torch.equal(first[name], second[name]) for name in weights)
    assert int(first["rest"][1]) == STEPS
    steps = {float(value) for name, value in first.items() if name.endswith(".step")}
    assert steps == {float(STEPS - held // EVERY * EVERY)}, "those that it has made since"
    assert (
        "this script changed weights, rows, optimizer state or groups between two passes"
        in (tmp_path / "log-0").read_text()
    )


@pytest.mark.long
def test_a_rollback_of_local_steps_within_the_second_stage_ends_with_the_weights_of_the_undisturbed_run(
    make_cluster: MakeCluster, nursery: Nursery, shared: Cluster, tmp_path: Path
) -> None:
    """The second optimizer's state is on the workers, and in their parts of the checkpoint."""
    kept, held = tmp_path / "checkpoints", SWITCH + EVERY + 2
    undisturbed = tmp_path / "undisturbed"
    expected = ended(start(nursery, shared.address, undisturbed, mode="local:2"), undisturbed)
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every=f"{EVERY}steps", lease=LEASE)
    processes = start(nursery, cluster.address, tmp_path, held, mode="local:2")
    reach(processes, tmp_path, kept, cluster, held)
    cluster.start_again(1)
    (tmp_path / f"go-{held}").touch()
    assert differing(ended(processes, tmp_path), expected) == set()


@pytest.mark.long
@pytest.mark.parametrize("hold_at", [SWITCH - 1, SWITCH + EVERY + 2])
def test_a_launch_that_starts_anew_in_either_stage_ends_with_the_same_weights(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path, undisturbed: Found, hold_at: int
) -> None:
    kept, before = tmp_path / "checkpoints", tmp_path / "before"
    first = make_cluster(checkpoint_dir=kept, checkpoint_every=f"{EVERY}steps", lease=LEASE)
    processes = start(nursery, first.address, before, hold_at)
    reach(processes, before, kept, first, hold_at)
    for process in processes:
        process.kill()
        process.wait(WAIT_SECONDS)
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, shards=3, lease=LEASE)
    assert (
        differing(ended(start(nursery, second.address, tmp_path / "after"), tmp_path / "after"), undisturbed) == set()
    )


def test_an_export_has_the_optimizer_of_the_stage(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints")
    net: Any = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 2))
    with cluster.connect("sync", job="job") as session:
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), bucket_bytes=256)
        for number in range(5):
            if number == 2:
                optimizer = session.prepare(torch.optim.Adam([{"params": net[1].parameters(), "lr": 0.25}]))
            net(torch.ones(1, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: value.clone() for name, value in net.state_dict().items()}
        state = optimizer.state_dict()
    until(lambda: CheckpointStore(tmp_path / "checkpoints").names("job"), "the last checkpoint")
    export(tmp_path / "checkpoints", "job", None, tmp_path / "out")
    found = model_state_dict(tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    own = torch.optim.Adam(net[1].parameters())
    own.load_state_dict(optimizer_state_dict(tmp_path / "out"))
    assert own.param_groups[0]["lr"] == 0.25
    for index, each in enumerate(net[1].parameters()):
        for name, value in state["state"][index].items():
            assert torch.equal(own.state[each][name], value)
