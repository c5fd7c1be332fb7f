"""No worker takes a shard down through the memory that they share.

Servers that are attacked are processes of their own: a test would die with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import NotShared, TryLater, UnknownWorker
from ps_protocol.handover import SOCKET_PREFIX
from ps_protocol.segment_layout import SegmentOffer
from ps_runtime import local_sockets
from ps_worker.cluster.local_segment import LocalSegment
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery, address_in
from tests.tools.launching import Commands
from tests.tools.sharing_worker import SharingWorker

CELLS = 48
START_SECONDS = 120.0  # two processes that import torch, beside whatever else this machine does
PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private")
# Runs Python as in a container: it sees no process of this machine, and its /dev/shm is memory of its own.
IN_NAMESPACES = f"""
import os, sys
words = {UNSHARE!r}, ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && "$@"', "sh", sys.executable), sys.argv[1:]
os.execvp("unshare", [word for part in words for word in part])
"""


def can_unshare() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


root_only = pytest.mark.skipif(not can_unshare(), reason="needs root and `unshare`, to make namespaces")


@dataclass(frozen=True)
class Apart:
    """A server of one shard in a process of its own, and the directory that it shares with workers."""

    address: str
    directory: Path


@contextlib.contextmanager
def server(path: Path, *prefix: str) -> Iterator[Apart]:
    """prefix: what is to run the server's words."""
    commands, directory = Commands(path), path / "shared"
    directory.mkdir()
    words = ["-m", "ps_server", "up", "--shards=1", "--port=0", "--metrics-port=0", "--lease=60"]
    try:
        command = commands.start(*prefix, *words, f"--shared-directory={directory}")
        [address] = command.says(r"ready at (\S+)", seconds=START_SECONDS)
        yield Apart(address, directory)
    finally:
        commands.close()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Apart]:
    """A server that tests share, each with a job of its own."""
    path = tmp_path_factory.mktemp("process")
    directory, log = path / "shared", path / "log"
    directory.mkdir()
    words = ("shard", "--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0", "--lease=60")
    running = nursery.serve([*words, f"--shared-directory={directory}"], log)
    yield Apart(address_in(log), directory)
    running.kill()


def train(address: str, job: str, directory: Path) -> None:
    """Three steps of another job, through memory that is shared."""
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.zero_()
    with ps_worker.connect(
        address, "sync", job=job, rank=0, world_size=1, transport="shm", shared_directory=str(directory)
    ) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight.detach(), torch.full((1, 4), -3.0))


def test_processes_that_have_only_a_directory_in_common_share_memory(process: Apart, job: str) -> None:
    own = list(process.directory.iterdir())  # of the shard: where workers open data connections
    train(process.address, job, process.directory)
    assert list(process.directory.iterdir()) == own


@pytest.mark.long
@root_only
def test_containers_that_have_only_a_directory_in_common_share_memory(tmp_path: Path, job: str) -> None:
    with server(tmp_path, "-c", IN_NAMESPACES) as container:
        own = list(container.directory.iterdir())
        train(container.address, job, container.directory)
        assert list(container.directory.iterdir()) == own


def test_a_worker_can_cut_nothing_off_what_a_shard_reads_and_other_jobs_train_on(process: Apart, job: str) -> None:
    with SharingWorker(process.address, job, CELLS, directory=process.directory) as worker:
        with memory_of(worker) as (descriptor, size):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
            worker.memory.gradients["float32"][:CELLS] = 1.0
            assert len(worker.headers(worker.exchange(1, [0, 1, 2], [0, 1, 2]))) == 3
            # Holes it can make: they are read as zeros, and filled when they are written.
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.fallocate(descriptor, PUNCH, ctypes.c_long(0), ctypes.c_long(size)) == 0
            assert os.fstat(descriptor).st_blocks == 0
        assert len(worker.headers(worker.exchange(2, [0, 1, 2], [0, 1, 2]))) == 3
        assert torch.equal(worker.memory.weights["float32"][:CELLS], torch.full((CELLS,), -1.0)), "a gradient of zeros"
        train(process.address, job + ".other", process.directory)


@contextlib.contextmanager
def memory_of(worker: SharingWorker) -> Iterator[tuple[int, int]]:
    """The memory file of a worker in this process: a descriptor that can write it, and its size."""
    nonce = worker.segment.offer.nonce
    [path] = [path for path in Path("/proc/self/fd").iterdir() if _begins_with(path, nonce)]
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _begins_with(path: Path, nonce: bytes) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile
        return str(path.readlink()).startswith("/memfd:ps-torch") and path.read_bytes()[: len(nonce)] == nonce
    return False


class SilentSocket:
    """A worker's socket at which nothing is handed over until `close`."""

    def __init__(self, directory: Path, number: int) -> None:
        name = SOCKET_PREFIX + f"{number:032x}"
        self._path = directory / name
        self._listener, inode = local_sockets.listen(directory, name, 8)
        self.offer = SegmentOffer(name, inode, bytes(32))
        probe, _ = self._listener.accept()
        probe.close()

    def wait_for_shard(self) -> socket.socket:
        """Returns the shard's connection."""
        self._listener.settimeout(20.0)
        connection, _ = self._listener.accept()
        return connection

    def close(self) -> None:
        self._listener.close()
        self._path.unlink()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[SilentSocket]:
    made = SilentSocket(tmp_path, 1)
    yield made
    made.close()


def test_a_worker_that_hands_nothing_over_holds_one_call_and_delays_no_other(
    make_cluster: Callable[..., Cluster],
    tmp_path: Path,
    job: str,
    silent: SilentSocket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.shard.segments.HANDOVER_SECONDS", START_SECONDS)  # it is not over meanwhile
    cluster = make_cluster(shards=1, shared_directory=tmp_path, lease=120.0)  # this worker sends no heartbeats
    with SharingWorker(cluster.address, job, CELLS, directory=tmp_path) as worker:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.attach, silent.offer)
            with silent.wait_for_shard() as connection:
                connection.recv(32, socket.MSG_WAITALL)
                for _ in range(3):
                    with pytest.raises(TryLater, match="is handing over a segment already"):
                        worker.attach(silent.offer)
                train(cluster.address, job + ".other", tmp_path)
                assert not waiting.done()
            with pytest.raises(NotShared, match="was closed"):
                waiting.result(20.0)
        worker.memory.gradients["float32"][:CELLS] = 1.0
        assert len(worker.headers(worker.exchange(1, [0, 1, 2], [0, 1, 2]))) == 3, "the segment before is kept"
        with LocalSegment(worker.segment.memory.size(), tmp_path) as again:
            worker.attach(again.offer)


def test_a_worker_that_is_fenced_while_it_hands_a_segment_over_has_none(
    make_cluster: Callable[..., Cluster], tmp_path: Path, job: str, silent: SilentSocket
) -> None:
    cluster = make_cluster(shards=1, shared_directory=tmp_path, lease=120.0)  # this worker sends no heartbeats
    with SharingWorker(cluster.address, job, CELLS, directory=tmp_path) as worker, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.attach, silent.offer)
        with silent.wait_for_shard() as connection, LocalSegment(worker.segment.memory.size(), tmp_path) as segment:
            connection.recv(32, socket.MSG_WAITALL)
            worker.raw.join()
            segment.memory[:32] = bytes(32)
            socket.send_fds(connection, [b"\0"], [segment._descriptor])
            with pytest.raises(UnknownWorker):
                waiting.result(20.0)
        assert cluster.shards[0].jobs()[job].of_workers.segments == {}
