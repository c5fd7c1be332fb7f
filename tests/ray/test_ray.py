"""Servers and workers on three nodes of a real Ray: what is killed comes back, and the others go on meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import InvalidRequest, PSError
from tests.scripts.train_on_ray import ENOUGH, in_ray_train, train
from tests.tools.rays import needs_ray, steps, three_nodes, until, until_further

pytestmark = needs_ray

LEASE = 120.0  # longer than all that these tests allow: no recovery waits for it
OPTIONS = f"--lease {LEASE:g}"
FIT_SECONDS = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture
def servers(nodes: Any, tmp_path: Path) -> Iterator[Any]:
    from ps_worker.ray import ParameterServer

    options = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": "1s"}
    with ParameterServer(2, **options, server_options=OPTIONS, insecure=True) as running:
        yield running


def shard(servers: Any, index: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = servers.status()["shards"]
    return next(each for each in found if each.get("index", 0) == index)


def kill_shard(servers: Any, index: int) -> None:
    """Kills the process of a shard, and waits until another one is the shard."""
    before = shard(servers, index)
    os.kill(int(before["pid"]), signal.SIGKILL)
    until(lambda: shard(servers, index)["pid"] != before["pid"], "another process of the shard")


class Fit(threading.Thread):
    """A run of Ray Train in a thread of its own."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error

    def finish(self, folder: Path) -> None:
        """Has the workers end, and waits for it. Raises what the run raised."""
        (folder / ENOUGH).touch()
        self.join(FIT_SECONDS)
        assert not self.is_alive(), "the run does not end"
        if self.error is not None:
            raise self.error


def fit(folder: Path, workers: int, config: Any) -> Fit:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    trainer = DataParallelTrainer(
        in_ray_train,
        train_loop_config={"folder": str(folder)},
        backend_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), name="run", failure_config=FailureConfig(max_failures=-1)
        ),
    )
    running = Fit(trainer)
    running.start()
    return running


def test_ray_train_replaces_the_worker_that_failed_alone(servers: Any, tmp_path: Path) -> None:
    from ps_worker.ray import PsConfig

    running = fit(tmp_path, 3, PsConfig(mode="ssp:4", servers=servers))
    until(lambda: len([each for each in steps(tmp_path).values() if each > 20]) == 3, "three workers that train")
    first = set(steps(tmp_path))
    killed = next(process for process in first if process[0] == "1")

    begun = time.monotonic()
    os.kill(killed[1], signal.SIGKILL)
    until_further(tmp_path, first - {killed})
    until(lambda: len(steps(tmp_path)) == 4, "a worker in its place")
    [newcomer] = set(steps(tmp_path)) - first
    assert newcomer[0] == "1"
    until_further(tmp_path, {*first, newcomer} - {killed})
    assert time.monotonic() - begun < LEASE, "it waited for the lease"

    address = shard(servers, 1)["address"]
    kill_shard(servers, 1)
    until_further(tmp_path, {*first, newcomer} - {killed})
    assert shard(servers, 1)["address"] != address, "it came back at another port, as Ray wished"

    running.finish(tmp_path)
    assert set(steps(tmp_path)) == {*first, newcomer}, "the others kept their processes"
    done = {int(path.name.partition("-")[2]): float(path.read_text()) for path in tmp_path.glob("done-*")}
    assert done.keys() == {pid for _, pid in {*first, newcomer} - {killed}}
    assert max(done.values()) < 0.1, "they have learnt"
    assert servers.status()["shards"], "the servers outlive the workers"


def test_plain_actors_go_on_when_one_of_them_is_killed(servers: Any, tmp_path: Path) -> None:
    import ray

    class Worker:
        def begin(self, settings: Any) -> Any:
            return settings.apply()

        def train(self, name: str) -> dict[str, Any]:
            return train(tmp_path, name)

    settings = servers.settings(mode="sync", job="actors")
    workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(3)]
    processes = ray.get([worker.begin.remote(settings) for worker in workers])
    running = [worker.train.remote(str(number)) for number, worker in enumerate(workers)]
    until(lambda: len([each for each in steps(tmp_path).values() if each > 20]) == 3, "three workers that train")
    first = set(steps(tmp_path))

    begun = time.monotonic()
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(running[1])
    assert len(servers.report_end(processes[1])) == 1, "a live worker was taken off"
    assert servers.report_end(processes[1]) == (), "a report may come twice"
    until_further(tmp_path, first - {("1", processes[1].pid)})
    assert time.monotonic() - begun < LEASE, "it waited for the lease"

    (tmp_path / ENOUGH).touch()
    found = ray.get([running[0], running[2]])
    assert {each["loss"] < 0.5 for each in found} == {True}


def test_a_run_has_servers_of_its_own(nodes: Any, tmp_path: Path) -> None:
    """And workers with the ranks of Ray Train, in a job that is not elastic."""
    from ps_worker.ray import PsConfig

    running = fit(tmp_path, 2, PsConfig(mode="sync", elastic=False, shards=1, insecure=True))
    until(lambda: len([each for each in steps(tmp_path).values() if each > 20]) == 2, "two workers that train")
    first = set(steps(tmp_path))
    running.finish(tmp_path)
    assert set(steps(tmp_path)) == first
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_what_cannot_be_is_refused_before_anything_starts(nodes: Any, tmp_path: Path) -> None:
    from ps_worker.ray import ParameterServer, PsConfig

    with pytest.raises(InvalidRequest, match="insecure=True on a trusted network"):
        ParameterServer(1)
    with pytest.raises(InvalidRequest, match="mode ddp has no servers"):
        PsConfig(mode="ddp")
    with pytest.raises(InvalidRequest, match="need a checkpoint_dir"):
        PsConfig(checkpoint_every="1s")
    with pytest.raises(InvalidRequest, match="dev-certs"):
        ParameterServer(1, certificates=str(tmp_path))
    with pytest.raises(PSError, match="unrecognized arguments: --leas 3"):
        ParameterServer(1, server_options="--leas 3", insecure=True)
    with pytest.raises(PSError, match="Ray has no room for 40 shards"):
        ParameterServer(40, insecure=True)
