"""Where no directory is shared, each shard keeps its parts of checkpoints on a disk of its own.

The coordinator's directory and each shard's are different ones here, as on machines of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import InvalidRequest, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_runtime.free_ports import free_port
from ps_server.config import ServerConfig
from ps_server.coordinator.coordinator import Coordinator
from ps_server.server import Server
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export
from tests.tools.cases import cases
from tests.tools.cluster import START_SECONDS, Cluster, until
from tests.tools.forkserver import Nursery, address_in
from tests.tools.launching import END_SECONDS
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rollbacks import CELLS, LEASE, QUICK, job_of, join_again, make_checkpoint, train

DISK = re.compile("[0-9a-f]{16}")


class Machines:
    """A coordinator and shards, each with a directory that no other one sees."""

    def __init__(self, root: Path, shards: int = 2, **more: object) -> None:
        self.root = root
        where = root / "coordinator"
        first = ServerConfig(shard_count=shards, checkpoint_dir=where, lease=LEASE, timing=QUICK, **more)  # type: ignore[arg-type]
        self.alone = Server(first)
        self.address = self.alone.address
        self.servers = [self._start(index, root / f"machine-{index}") for index in range(shards)]

    def _start(self, index: int, directory: Path, port: int = 0) -> Server:
        port = port or free_port()  # one that is free once more when the shard has moved
        config = ServerConfig(index=index, coordinator=self.address, checkpoint_dir=directory, own_disk=True, port=port)
        server = Server(config)
        assert server.wait_ready(START_SECONDS)
        return server

    def move(self, index: int, machine: str) -> None:
        """Ends a shard as its death would, and starts it on another machine."""
        port = int(self.servers[index].address.rpartition(":")[2])
        self.servers[index].stop()
        self.servers[index] = self._start(index, self.root / machine, port)

    @property
    def coordinator(self) -> Coordinator:
        found = self.alone.coordinator
        assert found is not None
        return found

    def names(self) -> list[str]:
        """The complete checkpoints."""
        return CheckpointStore(self.root / "coordinator").names("job")

    def parts(self, index: int) -> list[str]:
        """The checkpoints of which a shard's disk has something."""
        there = self.root / f"machine-{index}" / f".shard-{index}" / "job"
        return sorted(path.name for path in there.iterdir())

    def stop(self) -> None:
        for server in [*self.servers, self.alone]:
            server.stop()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    running = Machines(tmp_path)
    yield running
    running.stop()


def cluster_of(machines: Machines) -> Cluster:
    """What the helpers of rollbacks ask of: the coordinator and the address."""
    return machines  # type: ignore[return-value]


@pytest.mark.parametrize(("mode", "held"), cases([("sync", 3.0), ("async", 5.0)], [("ssp:2", 5.0)]))
def test_a_shard_that_died_goes_on_from_its_own_disk(machines: Machines, mode: str, held: float) -> None:
    with job_of(cluster_of(machines), mode) as [worker]:
        train(worker, 3)
        assert make_checkpoint(cluster_of(machines), worker) == 3
        assert not list((machines.root / "coordinator").rglob("shard-*.safetensors"))
        train(worker, 2)
        machines.move(1, "machine-1")
        join_again(worker)
        there = torch.cat([torch.full((16,), shard) for shard in worker.shard_of])
        assert torch.equal(worker.pull(), torch.where(there == 1, 3.0, held))


@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_a_job_waits_for_the_disk_that_has_its_last_checkpoint_and_says_for_which(
    machines: Machines, mode: str
) -> None:
    with job_of(cluster_of(machines), mode) as [worker]:
        train(worker, 3)
        make_checkpoint(cluster_of(machines), worker)
        store, name = CheckpointStore(machines.root / "coordinator"), machines.names()[-1]
        manifest = store.manifest("job", name)
        disk = manifest.shards[1].disk
        assert DISK.fullmatch(disk)
        assert disk != manifest.shards[0].disk

        machines.move(1, "another-machine")

        def reason() -> str:
            with pytest.raises(TryLater) as told:
                machines.coordinator.join("job", 0, JoinRequest(pid=1))
            return str(told.value)

        directory = machines.root / "another-machine" / ".shard-1"
        text = f"shard-1.safetensors of checkpoint {name} is on disk {disk}, and {directory} is on disk "
        until(lambda: text in reason(), "the reason for which nothing goes on")
        assert "start shard 1 where that disk is" in reason()
        assert "job" in machines.coordinator.jobs(), "nothing is given up"

        machines.move(1, "machine-1")
        join_again(worker)
        assert torch.equal(worker.pull(), torch.full((CELLS,), 3.0))


def test_all_machines_were_switched_off(tmp_path: Path) -> None:
    first = Machines(tmp_path)
    spec = vector_job("job", "sync", CELLS, 1)
    with job_of(cluster_of(first), "sync") as [worker]:
        train(worker, 4)
        make_checkpoint(cluster_of(first), worker)
        first.stop()
    second = Machines(tmp_path, restore=True)
    try:
        with RawWorker(second.address, spec, 0) as worker:
            assert worker.clock == 4
            assert torch.equal(worker.pull(), torch.full((CELLS,), 4.0))
    finally:
        second.stop()


@pytest.mark.parametrize("running", [True, False])
def test_another_number_of_shards_waits_and_says_how_many_it_takes(tmp_path: Path, running: bool) -> None:
    spec = vector_job("job", "sync", CELLS, 1)
    first = Machines(tmp_path)
    with job_of(cluster_of(first), "sync") as [worker]:
        train(worker, 2)
        make_checkpoint(cluster_of(first), worker)
        if not running:
            worker.leave()
            until(lambda: not first.coordinator.jobs(), "the job's end")
        first.stop()
    wrong = Machines(tmp_path, shards=3, restore=True)

    def ask() -> None:
        if running:
            wrong.coordinator.join("job", 0, JoinRequest(pid=1))
        else:
            wrong.coordinator.register_job(spec)

    def reason() -> str:
        with pytest.raises(TryLater) as told:
            ask()
        return str(told.value)

    until(lambda: re.search(r"checkpoint 00000\d is on the own disks of 2 shards.*start 2", reason()), "the reason")
    wrong.stop()
    right = Machines(tmp_path, restore=True)
    try:
        with RawWorker(right.address, spec, 0) as worker:
            assert torch.equal(worker.pull(), torch.full((CELLS,), 2.0)), "nothing was lost by that"
    finally:
        right.stop()


def test_a_file_that_is_missing_on_the_right_disk_is_a_damaged_checkpoint(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    with job_of(cluster_of(machines), "sync") as [worker]:
        for _ in range(2):
            train(worker, 2)
            make_checkpoint(cluster_of(machines), worker)
        last = machines.names()[-1]
        (machines.root / "machine-1" / ".shard-1" / "job" / last / "shard-1.safetensors").unlink()
        machines.move(1, "machine-1")
        join_again(worker)
        assert worker.clock == 2
        assert f"checkpoint {last} cannot be used, trying the one before" in caplog.text


def test_a_shard_removes_what_the_coordinator_does_not_keep(tmp_path: Path) -> None:
    machines = Machines(tmp_path, keep=2)
    try:
        with job_of(cluster_of(machines), "async") as [worker]:
            for _ in range(5):
                train(worker, 1)
                make_checkpoint(cluster_of(machines), worker)
            assert machines.names() == ["000004", "000005"]
            # What the fifth replaced goes when the next one begins: until then its manifest might have been the last.
            assert machines.parts(0) == machines.parts(1) == ["000003", "000004", "000005"]
    finally:
        machines.stop()


def test_a_shards_directory_is_for_one_process(machines: Machines) -> None:
    config = ServerConfig(index=1, coordinator=machines.address, checkpoint_dir=machines.root / "machine-1")
    with pytest.raises(InvalidRequest, match=r"\.shard-1 is in use by shard 1 with pid \d+ on .*: each cluster needs"):
        Server(replace(config, own_disk=True))


def test_export_reads_the_parts_where_they_were_gathered(machines: Machines, tmp_path: Path) -> None:
    with job_of(cluster_of(machines), "async") as [worker]:
        train(worker, 2)
        machines.coordinator.job("job").checkpoint()
    gathered = tmp_path / "coordinator"
    with pytest.raises(TryLater, match=r"\.shard-0 is not there: start shard 0 where that disk is, or bring its dir"):
        export(gathered, "job", None, tmp_path / "out")
    for index in range(2):
        (tmp_path / f"machine-{index}" / f".shard-{index}").rename(gathered / f".shard-{index}")
    assert "at clock 2" in export(gathered, "job", None, tmp_path / "out")


@pytest.mark.long
def test_servers_as_they_are_started(nursery: Nursery, tmp_path: Path) -> None:
    """Processes with flags of their own; the shard is killed, and started again."""
    flags = ["--port=0", "--metrics-port=0", "--checkpoint-dir"]
    coordinator = nursery.serve(
        ["coordinator", "--shards=1", *flags, str(tmp_path / "coordinator"), "--checkpoint-every=1s"], tmp_path / "log"
    )
    address = address_in(tmp_path / "log")
    shard = ["shard", "--index=0", f"--coordinator={address}", *flags, str(tmp_path / "mine"), "--own-disk"]
    first = nursery.serve(shard, tmp_path / "log-0")
    port = address_in(tmp_path / "log-0").rpartition(":")[2]
    with RawWorker(address, vector_job("job", "async", CELLS, 1), 0) as worker:
        worker.initialise()
        train(worker, 3)
        store = CheckpointStore(tmp_path / "coordinator")
        until(lambda: any(store.manifest("job", name).clock == 3 for name in store.names("job")), "a checkpoint of all")
        first.kill()
        first.wait(END_SECONDS)
        second = nursery.serve([*shard, f"--port={port}"], tmp_path / "log-1")
        join_again(worker)
        assert torch.equal(worker.pull(), torch.full((CELLS,), 3.0))
    for process in (second, coordinator):
        process.kill()
