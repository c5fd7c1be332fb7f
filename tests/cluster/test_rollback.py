"""A job that loses a shard, or all its processes, ends with the weights of the undisturbed run, to the bit.

The workers are processes that run a plain script (train_with_state.py), which knows nothing of all this.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from ps_protocol.local import Local
from ps_protocol.modes import local_rounds
from ps_server.storage.checkpoints import CheckpointStore
from tests.scripts.train_with_state import BATCH, OUTER, PASSES, SAMPLES
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.forkserver import ROOT, Nursery
from tests.tools.rollbacks import QUICK

MakeCluster = Callable[..., Cluster]
SCRIPT = ROOT / "tests" / "scripts" / "train_with_state.py"
WORKERS = 2
STEPS = PASSES * SAMPLES // (BATCH * WORKERS)
WAIT_SECONDS = 90
LEASE = 30.0  # a worker loses its place because a shard was restored, and for no other reason

Found = list[dict[str, torch.Tensor]]
StepsOf = Callable[[int], int]


class Workers:
    """The processes of one job; ended with the `with`."""

    def __init__(
        self,
        nursery: Nursery,
        address: str,
        directory: Path,
        holds: Sequence[int] = (),
        transport: str = "auto",
        wire: str = "float32",
        mode: str = "sync",
    ) -> None:
        self.directory = directory
        variables = {"PS_SERVER": address, "PS_MODE": mode, "PS_WORLD_SIZE": str(WORKERS), "PS_TRANSPORT": transport}
        variables["PS_WIRE"] = wire
        self.processes = [
            nursery.run(SCRIPT, [directory, *holds], directory / f"log-{rank}", PS_RANK=str(rank), **variables)
            for rank in range(WORKERS)
        ]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def are_held(self, clock: int) -> bool:
        assert all(process.poll() is None for process in self.processes), "a worker has ended"
        return all((self.directory / f"held-{clock}-{rank}").exists() for rank in range(WORKERS))

    def let_go(self, clock: int) -> None:
        (self.directory / f"go-{clock}").touch()

    def reach(self, clock: int, every: int, cluster: Cluster, steps_of: StepsOf = int) -> None:
        """Until they stand at a clock, with a checkpoint behind them at 1 and at each multiple of `every`.

        Each was begun in time, because they were held a step before it, or a round. steps_of: as of `holds`
        """
        for multiple in checkpoints(clock, every, steps_of):
            before = steps_of(multiple - 1)
            until(lambda: self.are_held(before), "the step before a checkpoint")  # noqa: B023
            until(lambda: begun(cluster) == {multiple}, "the beginning of the checkpoint")  # noqa: B023
            self.let_go(before)
        until(lambda: self.are_held(clock), "the clock to be held at")

    def ended(self, clock: int = STEPS) -> Found:
        """What each ended with, at this clock."""
        assert [process.wait(WAIT_SECONDS) for process in self.processes] == [0] * WORKERS
        found = [load_file(self.directory / f"rank-{rank}.safetensors") for rank in range(WORKERS)]
        assert [int(tensors["rest"][-1]) for tensors in found] == [clock] * WORKERS
        return found


def begun(cluster: Cluster) -> set[int | None]:
    """The clocks of the checkpoints that the shards have begun last."""
    captures = [shard.jobs()["default"].snapshot_task for shard in cluster.shards]
    return {capture.clock if capture is not None else None for capture in captures}


def holds(clock: int, every: int, steps_of: StepsOf = int) -> list[int]:
    """Where `reach` wants workers to be held. steps_of: the steps that a clock of the servers is"""
    return [*(steps_of(multiple - 1) for multiple in checkpoints(clock, every, steps_of)), clock]


def checkpoints(clock: int, every: int, steps_of: StepsOf = int) -> list[int]:
    """The servers' clocks below this one at which there is a checkpoint: the first is as soon as it can be."""
    return [1, *(multiple for multiple in range(every, clock, every) if steps_of(multiple) < clock)]


def last(store: CheckpointStore) -> int:
    """The clock of the last checkpoint."""
    names = store.names("default")
    return store.manifest("default", names[-1]).clock if names else 0


def same(found: Found, expected: Found) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, shared: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a run without checkpoints and without disturbance ends with."""
    with Workers(nursery, shared.address, tmp_path_factory.mktemp("undisturbed")) as workers:
        return workers.ended()


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "every", "held", "transport"),
    cases(
        [(0, "10steps", 12, "grpc")],  # with the coordinator; within the 2nd pass
        [(1, "13steps", 47, "shm")],  # over two ends of passes
    ),
)
def test_a_job_that_lost_a_shard_ends_with_the_weights_of_the_undisturbed_run(
    make_cluster: MakeCluster,
    nursery: Nursery,
    tmp_path: Path,
    undisturbed: Found,
    which: int,
    every: str,
    held: int,
    transport: str,
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", checkpoint_every=every, lease=LEASE)
    store = CheckpointStore(tmp_path / "checkpoints")
    steps = int(every.removesuffix("steps"))
    with Workers(nursery, cluster.address, tmp_path, holds(held, steps), transport) as workers:
        workers.reach(held, steps, cluster)
        until(lambda: last(store) == held // steps * steps, "the last checkpoint is complete")
        cluster.start_again(which)
        workers.let_go(held)
        assert same(workers.ended(), undisturbed)
    assert cluster.coordinator.jobs() == {}


@pytest.mark.long
def test_what_was_rounded_off_on_the_wire_is_rolled_back_too(
    make_cluster: MakeCluster, nursery: Nursery, shared: Cluster, tmp_path: Path, undisturbed: Found
) -> None:
    """In int4, the bits of a step depend on what workers and shards have rounded off in all steps before."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "job").mkdir()
    with Workers(nursery, shared.address, tmp_path / "alone", wire="int4") as workers:
        expected = workers.ended()
    assert not same(expected, undisturbed)
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", checkpoint_every="10steps", lease=LEASE)
    store = CheckpointStore(tmp_path / "checkpoints")
    with Workers(nursery, cluster.address, tmp_path / "job", holds(12, 10), wire="int4") as workers:
        workers.reach(12, 10, cluster)
        until(lambda: last(store) == 10, "the last checkpoint is complete")
        cluster.start_again(1)
        workers.let_go(12)
        assert same(workers.ended(), expected)


@pytest.mark.long
def test_a_job_whose_processes_all_ended_goes_on_to_the_same_weights(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path, undisturbed: Found
) -> None:
    kept = tmp_path / "checkpoints"
    first = make_cluster(checkpoint_dir=kept, checkpoint_every="10steps", lease=LEASE)
    store = CheckpointStore(kept)
    with Workers(nursery, first.address, tmp_path, holds(27, 10)) as workers:
        workers.reach(27, 10, first)
        until(lambda: last(store) == 20, "the last checkpoint is complete")
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, shards=3, lease=LEASE)
    with Workers(nursery, second.address, tmp_path) as workers:
        assert same(workers.ended(), undisturbed)


LOCAL = Local(4, warm_up=OUTER["warm_up"])  # rounds end at the clocks 1, 2, 3, 4, 8, 12 and so on


@pytest.fixture(scope="module")
def undisturbed_rounds(
    nursery: Nursery, shared: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Found]:
    """Returns what an undisturbed run of local:4 ends with, in a wire format."""

    @functools.cache
    def run(wire: str) -> Found:
        directory = tmp_path_factory.mktemp("undisturbed-rounds")
        with Workers(nursery, shared.address, directory, mode="local:4", wire=wire) as workers:
            return workers.ended()

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "held", "transport", "wire"),
    [
        (1, 26, "tcp", "float32"),  # within round 10
        pytest.param(1, 26, "tcp", "int4", marks=pytest.mark.repeat),  # what was rounded off is rolled back, too
        pytest.param(0, 8, "grpc", "float32", marks=pytest.mark.repeat),  # with the coordinator; at the end of a round
        pytest.param(1, 37, "shm", "float32", marks=pytest.mark.repeat),  # over two ends of passes
    ],
)
def test_a_local_job_that_lost_a_shard_ends_with_the_weights_of_the_undisturbed_run(
    make_cluster: MakeCluster,
    nursery: Nursery,
    tmp_path: Path,
    undisturbed_rounds: Callable[[str], Found],
    which: int,
    held: int,
    transport: str,
    wire: str,
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints", checkpoint_every="3steps", lease=LEASE)
    store = CheckpointStore(tmp_path / "checkpoints")
    held_at = holds(held, 3, LOCAL.clock)
    with Workers(nursery, cluster.address, tmp_path, held_at, transport, mode="local:4", wire=wire) as workers:
        workers.reach(held, 3, cluster, LOCAL.clock)
        kept = checkpoints(held, 3, LOCAL.clock)[-1]
        until(lambda: last(store) == kept, "the last checkpoint is complete")
        cluster.start_again(which)
        workers.let_go(held)
        assert same(workers.ended(), undisturbed_rounds(wire))


@pytest.mark.long
def test_a_local_job_whose_processes_all_ended_goes_on_to_the_same_weights(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path, undisturbed_rounds: Callable[[str], Found]
) -> None:
    kept = tmp_path / "checkpoints"
    first = make_cluster(checkpoint_dir=kept, checkpoint_every="3steps", lease=LEASE)
    store = CheckpointStore(kept)
    with Workers(nursery, first.address, tmp_path, holds(26, 3, LOCAL.clock), mode="local:4") as workers:
        workers.reach(26, 3, first, LOCAL.clock)
        until(lambda: last(store) == 9, "the last checkpoint is complete")
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, shards=3, lease=LEASE)
    with Workers(nursery, second.address, tmp_path, mode="local:4") as workers:
        assert same(workers.ended(), undisturbed_rounds("float32")), (
            "the inner optimizer's state is small: checkpoints have it"
        )


STREAMED = replace(local_rounds("local:4/2") or LOCAL, warm_up=OUTER["warm_up"])  # and later: 4, 9, 13 and so on


@pytest.fixture(scope="module")
def undisturbed_fragments(nursery: Nursery, shared: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What an undisturbed run of local:4/2 ends with."""
    directory = tmp_path_factory.mktemp("undisturbed-fragments")
    with Workers(nursery, shared.address, directory, mode="local:4/2") as workers:
        return workers.ended()


@pytest.mark.long
@pytest.mark.parametrize("all_end", [False, True], ids=["a-shard", "all-processes"])
def test_a_job_with_fragments_that_is_rolled_back_ends_with_the_weights_of_the_undisturbed_run(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path, undisturbed_fragments: Found, all_end: bool
) -> None:
    """With a fragment under way: what a worker's own weights were is in its state, which is small here."""
    kept, held = tmp_path / "checkpoints", STREAMED.clock(9) + 1
    cluster = make_cluster(checkpoint_dir=kept, checkpoint_every="3steps", lease=LEASE)
    store = CheckpointStore(kept)
    with Workers(nursery, cluster.address, tmp_path, holds(held, 3, STREAMED.clock), mode="local:4/2") as workers:
        workers.reach(held, 3, cluster, STREAMED.clock)
        until(lambda: last(store) == 9, "the last checkpoint is complete")
        if not all_end:
            cluster.start_again(1)
            workers.let_go(held)
            assert same(workers.ended(), undisturbed_fragments)
            return
    cluster.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, shards=3, lease=LEASE)
    with Workers(nursery, second.address, tmp_path, mode="local:4/2") as workers:
        assert same(workers.ended(), undisturbed_fragments)


@pytest.mark.long
def test_workers_that_are_told_to_stop_with_a_fragment_under_way_go_on_at_the_next_round(
    make_cluster: MakeCluster, nursery: Nursery, tmp_path: Path
) -> None:
    """The batches of the round that is left come again, and the clock has counted it."""
    kept, held = tmp_path / "checkpoints", STREAMED.clock(9) + 1
    first = make_cluster(checkpoint_dir=kept, checkpoint_every="1000steps", lease=LEASE)
    with Workers(nursery, first.address, tmp_path, [held], mode="local:4/2") as workers:
        until(lambda: workers.are_held(held), "the clock to be held at")
        for process in workers.processes:
            process.send_signal(signal.SIGTERM)
        for process in workers.processes:
            process.wait(WAIT_SECONDS)
    until(lambda: last(CheckpointStore(kept)) == 10, "a checkpoint of the round that both have left")
    first.stop()
    second = make_cluster(checkpoint_dir=kept, restore=True, lease=LEASE)
    with Workers(nursery, second.address, tmp_path, mode="local:4/2") as workers:
        found = workers.ended(STEPS + 4)
        assert all(tensor.isfinite().all() for tensors in found for tensor in tensors.values())


@pytest.mark.parametrize("mode", ["ssp:1", "async"])
def test_without_a_common_clock_workers_go_on_where_they_are(
    make_cluster: MakeCluster, tmp_path: Path, mode: str
) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="2steps", timing=QUICK)
    store = CheckpointStore(tmp_path)
    with cluster.connect(mode) as session:
        model = torch.nn.Linear(4, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers = DataLoader(torch.arange(40.0), batch_size=1)
        model, optimizer, loader = session.prepare(model, optimizer, numbers, bucket_bytes=128)
        seen = []
        for batch in loader:
            seen.append(batch.item())
            model(batch.expand(4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == 10:
                until(lambda: store.names("default"), "a checkpoint")
                cluster.start_again(1)
        assert seen == [float(number) for number in range(40)], "no batch is given twice"
        metrics = scrape(session.metrics_address)
        assert metrics["ps_worker_rejoins_total"] >= 1
        # A step may be at one clock on one shard, and at a later one on the other.
        assert metrics["ps_worker_lost_steps_total"] == 0
        assert 40 <= session.clock <= 40 + metrics["ps_worker_rejoins_total"]
