"""Servers and workers on three nodes of a real Ray: what is killed comes back, and the others go on meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ps_protocol.errors import InvalidRequest, PSError
from ps_server.ops.dev_certs import write
from tests.scripts.train_on_ray import ENOUGH, in_ray_train, train
from tests.tools.launching import ROOT, environment
from tests.tools.planted import plant
from tests.tools.rays import logs, needs_ray, node_of, steps, three_nodes, until, until_further

pytestmark = needs_ray

LEASE = 120.0  # longer than all that these tests allow: no recovery waits for it
OPTIONS = f"--lease {LEASE:g}"
FIT_SECONDS = 120.0
EXAMPLE_SECONDS = 240.0  # it starts a Ray of its own, too


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture
def servers(nodes: Any, tmp_path: Path) -> Iterator[Any]:
    """Two shards, with certificates and roles."""
    import ray

    from ps_worker.ray import ParameterServer

    write(tmp_path / "certs", [ray.util.get_node_ip_address()])
    options = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": "1s", "server_options": OPTIONS}
    with ParameterServer(2, **options, certificates=str(tmp_path / "certs")) as running:
        yield running


def shard(servers: Any, index: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = servers.status()["shards"]
    return next(each for each in found if each.get("index", 0) == index)


def processes_with(*words: object) -> set[int]:
    """The process ids of the servers whose command lines have some words."""
    wanted, found = {"ps_server", *map(str, words)}, set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if wanted <= {*process.cmdline()}:
                found.add(process.pid)
    return found


@contextmanager
def replaced(nodes: Any, servers: Any, index: int) -> Iterator[int]:
    """Yields the process id of a shard, which is to be ended; waits until another process is the shard."""
    before = shard(servers, index)
    yield int(before["pid"])
    until(lambda: shard(servers, index)["pid"] != before["pid"], "another process of the shard")
    said = f"(pid {before['pid']} at {before['address']}) is gone: its process ended"
    until(lambda: said in logs(nodes), "a report")
    assert shard(servers, index)["address"] != before["address"], "it comes back at another port"


class Worker:
    """A plain actor that trains."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, settings: Any) -> Any:
        return settings.apply()

    def train(self, name: str) -> dict[str, Any]:
        return train(self._folder, name)


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


def test_ray_train_replaces_the_worker_that_failed_alone(nodes: Any, servers: Any, tmp_path: Path) -> None:
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

    with replaced(nodes, servers, 1) as pid:
        os.kill(pid, signal.SIGKILL)
    until_further(tmp_path, {*first, newcomer} - {killed})

    running.finish(tmp_path)
    assert set(steps(tmp_path)) == {*first, newcomer}, "the others kept their processes"
    done = {int(path.name.partition("-")[2]): float(path.read_text()) for path in tmp_path.glob("done-*")}
    assert done.keys() == {pid for _, pid in {*first, newcomer} - {killed}}
    assert max(done.values()) < 0.1, "they have learnt"
    assert servers.status()["shards"], "the servers outlive the workers"


def test_plain_actors_go_on_when_one_of_them_is_killed(servers: Any, tmp_path: Path) -> None:
    import ray

    settings = servers.settings(mode="sync", job="actors")
    workers = [ray.remote(num_cpus=1)(Worker).remote(tmp_path) for _ in range(3)]
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


def test_the_coordinator_comes_back_where_it_was(nodes: Any, servers: Any, tmp_path: Path) -> None:
    import ray

    worker = ray.remote(num_cpus=1)(Worker).remote(tmp_path)
    ray.get(worker.begin.remote(servers.settings(mode="sync", job="back")))
    running = worker.train.remote("0")
    until(lambda: max(steps(tmp_path).values(), default=0) > 20, "a worker that trains")
    until(lambda: list(tmp_path.glob("checkpoints/back/*/manifest.json")), "a checkpoint")

    [pid] = processes_with("coordinator", servers.address.partition(":")[2])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid), "its end")
    until(lambda: servers.status()["jobs"], "the coordinator with its job")
    until_further(tmp_path, set(steps(tmp_path)))
    (tmp_path / ENOUGH).touch()
    assert ray.get(running)["steps"] > 20
    assert "can read it" not in logs(nodes), "a key is for its own user alone"


def test_a_run_has_servers_of_its_own(nodes: Any, tmp_path: Path) -> None:
    """And workers with the ranks of Ray Train, in a job that is not elastic."""
    from ps_worker.ray import PsConfig

    checkpoints = tmp_path / "checkpoints"
    own = {"shards": 1, "checkpoint_dir": str(checkpoints), "insecure": True}
    running = fit(tmp_path, 2, PsConfig(mode="sync", elastic=False, **own))
    until(lambda: len([each for each in steps(tmp_path).values() if each > 20]) == 2, "two workers that train")
    first, serving = set(steps(tmp_path)), processes_with(checkpoints)
    assert len(serving) == 2, "a coordinator and a shard"

    for _, pid in first:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(steps(tmp_path)) == 4, "two workers in their place")
    until_further(tmp_path, set(steps(tmp_path)) - first)
    assert processes_with(checkpoints) == serving, "servers end with the run, and not with its workers"

    running.finish(tmp_path)
    assert sorted(name for name, _ in steps(tmp_path)) == ["0", "0", "1", "1"]
    assert len(list(tmp_path.glob("done-*"))) == 2
    until(lambda: not processes_with(checkpoints), "the end of the servers")
    assert list(checkpoints.rglob("manifest.json")), "the last worker's leaving made a checkpoint"


@pytest.mark.timeout(EXAMPLE_SECONDS + 60)
def test_the_example_runs_on_a_ray_of_its_own(tmp_path: Path) -> None:
    """As on a laptop: half a core for a worker, a tenth of one for a shard."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        own = environment(RAY_ADDRESS="local", RAY_TMPDIR=short, HOME=str(tmp_path))
        words = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--out", str(tmp_path / "runs")]
        done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=EXAMPLE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5, done.stdout
    last, accuracy = re.findall(r"^([\d.]+) is the last loss, ([\d.]+) the accuracy", done.stdout, re.MULTILINE)[0]
    assert float(last) == losses[-1] < 0.3
    assert float(accuracy) > 0.9, "the weights in Ray's checkpoint are those that were trained"
    assert len(list(tmp_path.glob("runs/*/checkpoint_*/model.safetensors"))) == 1


def in_folder(kind: type[Any], folder: str) -> type[Any]:
    """An actor's class whose process is in a folder."""

    class InFolder(kind):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            os.chdir(folder)
            super().__init__(*given)

    return InFolder


def test_the_servers_of_actors_run_no_module_of_the_folder_that_these_are_in(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the command that asks for their status."""
    from ps_worker.ray import ParameterServer, server_actors

    ran = plant(tmp_path)
    for name in ("CoordinatorActor", "ShardActor"):
        monkeypatch.setattr(server_actors, name, in_folder(getattr(server_actors, name), str(tmp_path)))
    with ParameterServer(1, insecure=True) as servers:
        [one] = servers.status()["shards"]
        assert psutil.Process(one["pid"]).cwd() == str(tmp_path)
    assert not list(ran.iterdir())


def test_what_cannot_be_is_refused(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ps_worker.ray import ParameterServer, PsConfig

    with pytest.raises(InvalidRequest, match="insecure=True if the network is trusted"):
        ParameterServer(1)
    with pytest.raises(InvalidRequest, match="mode ddp has no servers"):
        PsConfig(mode="ddp")
    with pytest.raises(InvalidRequest, match="need a checkpoint_dir"):
        PsConfig(checkpoint_every="1s")
    with pytest.raises(InvalidRequest, match="dev-certs"):
        ParameterServer(1, certificates=str(tmp_path))
    with pytest.raises(PSError, match="unknown option --leases"):
        ParameterServer(1, server_options="--leases 3", insecure=True)
    monkeypatch.setattr("ps_worker.ray.server_actors.PLACE_SECONDS", 3.0)
    with pytest.raises(PSError) as refused:
        ParameterServer(40, insecure=True)
    assert re.fullmatch(
        r"Ray has no room for 40 shards with CPU 1 each: it has CPU \d+ \(\d+ free\); "
        "ask for fewer shards, or for less in resources_per_shard, or add nodes",
        str(refused.value),
    )


def test_a_shard_goes_on_elsewhere_when_its_node_is_lost(nodes: Any, servers: Any, tmp_path: Path) -> None:
    """The last test: this node does not come back."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    worker = ray.remote(num_cpus=1, scheduling_strategy=here)(Worker).remote(tmp_path)
    ray.get(worker.begin.remote(servers.settings(mode="sync", job="moves")))
    running = worker.train.remote("0")
    until(lambda: max(steps(tmp_path).values(), default=0) > 20, "a worker that trains")

    index, node = next(
        (index, node) for index in (0, 1) for node in nodes.worker_nodes if node.node_id == node_of(servers, index)
    )
    with replaced(nodes, servers, index):
        nodes.remove_node(node, allow_graceful=False)
    until_further(tmp_path, set(steps(tmp_path)))
    assert node_of(servers, index) != node.node_id
    (tmp_path / ENOUGH).touch()
    assert ray.get(running)["steps"] > 20
