"""A worker in C code that keeps the GIL stays alive, one that is stopped does not: the process that beats beside it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ps_protocol.identity import Identity
from ps_protocol.v1 import membership_pb2
from ps_runtime.credentials import Tls
from ps_server.core.membership import LiveWorker
from ps_server.ops import dev_certs
from ps_worker.cluster import heartbeat_child
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from tests.tools.cluster import Cluster, until
from tests.tools.forkserver import Forked, Nursery

LEASE = 6.0  # one that beats has to start within it, on a busy machine, too
SHORT_LEASE = 1.0  # of one that is to lose its place
END_SECONDS = 60.0
MOST_BYTES = 8 * 2**20  # of its own: 5 MiB, and 14 MiB if it imported gRPC

# Makes a step, then does what it is told, and a second step when the test has written into the pipe. Arguments: how.
# "early": keeps the GIL from the end of `prepare` on, before its first step.
SCRIPT = """
import ctypes, os, signal, sys, threading
import torch
import ps_worker
from ps_worker.cluster.own_membership import OwnMembership

if sys.argv[1] == "early":  # the heartbeat's thread has no turn before the script keeps the GIL
    may_beat, beat = threading.Event(), OwnMembership._beat
    OwnMembership._beat = lambda *given: (may_beat.wait(), beat(*given))

session = ps_worker.connect()
model, optimizer = session.prepare(model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1))
pipe = os.open("pipe", os.O_RDWR)
if sys.argv[1] == "early":
    print("keeps the GIL", flush=True)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    may_beat.set()
for how in (sys.argv[1], "end"):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if how == "loads":  # has processes of its own, which hold all that was open when they were forked
        loader = torch.utils.data.DataLoader(range(4), num_workers=2, persistent_workers=True)
        assert len(list(loader)) == 4
    if how in ("busy", "loads"):
        print("keeps the GIL", flush=True)
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    elif how == "stopped":
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
print("is at its end", flush=True)
"""


class Worker:
    """The script as a process, and what the coordinator knows of it."""

    def __init__(self, nursery: Nursery, folder: Path, cluster: Cluster, how: str, **variables: str) -> None:
        self.cluster, self._folder = cluster, folder
        (folder / "train.py").write_text("import os\nos.chdir(os.path.dirname(__file__))\n" + SCRIPT)
        os.mkfifo(folder / "pipe")
        settings = {"PS_SERVER": cluster.address, "PS_MODE": "sync", "PS_WORLD_SIZE": "1", "PS_RANK": "0", **variables}
        self.process: Forked = nursery.run(folder / "train.py", [how], folder / "out", **settings)
        self.says("keeps the GIL" if how != "stopped" else "stops")

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text() if (self._folder / "out").exists() else ""

    def says(self, words: str) -> None:
        until(lambda: words in self.out or self.process.poll() is not None, f"{words!r}", END_SECONDS)
        assert words in self.out, self.out

    def member(self) -> LiveWorker | None:
        """The worker, as long as it counts as live."""
        return next(iter(self.cluster.coordinator.job("default").workers.all()), None)

    def is_taken_off(self) -> bool:
        """Whether it counts as live no more, on the shards either: a step that comes there before is taken."""
        rosters = [shard.jobs()["default"].partition.roster for shard in self.cluster.shards]
        return self.member() is None and not any(rosters)

    def outlives_its_lease(self) -> None:
        """Waits until heartbeats came for longer than its lease after the last one of before."""
        first = self.member()
        assert first is not None, "it has its place"
        until(lambda: (self.member() or first).heard > first.heard + 1.25 * LEASE, "heartbeats", END_SECONDS)
        now = self.member()
        assert now is not None
        assert now.incarnation == first.incarnation

    def goes_on(self) -> None:
        """Has it come to its end."""
        (self._folder / "pipe").write_bytes(b"x")
        assert self.process.wait(END_SECONDS) == 0, self.out
        assert "is at its end" in self.out

    def beside(self) -> list[psutil.Process]:
        """The process that beats beside it."""
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if any(word.endswith("heartbeat_child.py") for word in child.cmdline())
        ]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts a worker: start(cluster, "busy", PS_BUSY_SECONDS="5")."""
    started: list[Worker] = []

    def worker(cluster: Cluster, how: str, **variables: str) -> Worker:
        started.append(Worker(nursery, tmp_path, cluster, how, **variables))
        return started[-1]

    yield worker
    for each in started:
        each.process.kill()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(shards=1, lease=LEASE)


@pytest.mark.parametrize("how", ["busy", "early"])
def test_a_worker_that_keeps_the_gil_for_longer_than_its_lease_keeps_its_place(
    cluster: Cluster, start: Callable[..., Worker], how: str
) -> None:
    worker = start(cluster, how)
    worker.outlives_its_lease()
    [beside] = worker.beside()
    own = beside.memory_full_info().uss
    assert own < MOST_BYTES, f"the process beside it has {own / 2**20:.1f} MiB of its own"
    worker.goes_on()
    assert "lost its place" not in worker.out


def test_so_it_does_over_tls_with_a_certificate_and_a_token(
    make_cluster: Callable[..., Cluster], start: Callable[..., Worker], tmp_path: Path
) -> None:
    """Both are read anew for each heartbeat: the token is another one by the time that the thread has no turn."""
    certs, tokens, shown = tmp_path / "certs", tmp_path / "tokens", tmp_path / "token"
    assert dev_certs.write(certs)
    old, new = secrets.token_hex(16), secrets.token_hex(16)
    for path, text in ((tokens, f"cluster {secrets.token_hex(16)}\nworker {old}\nworker {new}\n"), (shown, old)):
        path.write_text(text)
        path.chmod(0o600)
    tls = Tls(certs / "server.pem", certs / "server.key", certs / "ca.pem")
    cluster = make_cluster(shards=1, lease=LEASE, tls=tls, tokens=tokens)
    files = {"PS_TLS_CERT": "worker.pem", "PS_TLS_KEY": "worker.key", "PS_TLS_CA": "ca.pem"}
    variables = {name: str(certs / file) for name, file in files.items()}
    worker = start(cluster, "busy", PS_TOKEN_FILE=str(shown), **variables)
    shown.write_text(new + "\n")
    tokens.write_text(f"cluster {secrets.token_hex(16)}\nworker {new}\n")
    worker.outlives_its_lease()
    worker.goes_on()


def test_a_worker_that_is_stopped_is_silent(make_cluster: Callable[..., Cluster], start: Callable[..., Worker]) -> None:
    worker = start(make_cluster(shards=1, lease=SHORT_LEASE), "stopped")
    until(worker.beside, "the process beside it")
    until(worker.is_taken_off, "the end of its lease", END_SECONDS)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.process.wait(END_SECONDS) == 0, worker.out
    assert "goes on at clock" in worker.out, "and takes its place again"


@pytest.mark.parametrize("seconds", ["0", "1"])
def test_a_worker_that_keeps_the_gil_for_longer_than_it_may_counts_as_hung(
    make_cluster: Callable[..., Cluster], start: Callable[..., Worker], seconds: str
) -> None:
    worker = start(make_cluster(shards=1, lease=SHORT_LEASE), "busy", PS_BUSY_SECONDS=seconds)
    until(lambda: len(worker.beside()) == (seconds != "0"), "the process beside it, if there is one")
    until(lambda: worker.member() is None, "the end of its lease", END_SECONDS)
    worker.goes_on()


@pytest.mark.parametrize("how", ["busy", "loads"])
def test_the_process_beside_a_worker_ends_with_it(cluster: Cluster, start: Callable[..., Worker], how: str) -> None:
    """Also where processes that the worker has forked hold its pipe."""
    worker = start(cluster, how)
    [beside] = until(worker.beside, "the process beside it")
    held = [child for child in psutil.Process(worker.process.pid).children() if child.pid != beside.pid]
    assert len(held) == (2 if how == "loads" else 0)
    for each in held:
        each.suspend()  # otherwise they end with the worker, too
    worker.process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        beside.wait(END_SECONDS)
    assert not beside.is_running()
    for each in held:
        each.kill()


def test_a_worker_does_without_it_where_it_is_killed(cluster: Cluster, start: Callable[..., Worker]) -> None:
    worker = start(cluster, "busy")
    [beside] = until(worker.beside, "the process beside it")
    beside.kill()
    worker.goes_on()


def test_a_header_of_any_length_is_written_as_hpack_has_it() -> None:
    """RFC 7541, 5.1: a number beyond its prefix goes on in groups of seven bits, the lowest first."""
    assert heartbeat_child._text("te") == b"\x02te"
    assert heartbeat_child._text("a" * 127) == b"\x7f\x00" + b"a" * 127
    assert heartbeat_child._text("a" * 1337) == b"\x7f\xba\x09" + b"a" * 1337


@pytest.mark.parametrize("host", ["node-7", "Anna's laptop"])
def test_a_member_tells_its_host_only_by_a_name_that_a_coordinator_takes(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Otherwise it would be ended by its first heartbeat."""
    sent: list[membership_pb2.HeartbeatRequest] = []

    def heard(request: membership_pb2.HeartbeatRequest, **_: Any) -> membership_pb2.HeartbeatResponse:
        sent.append(request)
        return membership_pb2.HeartbeatResponse(live_count=1)

    monkeypatch.setattr(socket, "gethostname", lambda: host)
    client = CoordinatorClient("127.0.0.1:1", 1.0)
    client._membership = SimpleNamespace(Heartbeat=heard)  # type: ignore[assignment]
    try:
        client.heartbeat(Identity("job", 0, 1, member=1), 0, 1.0)
    finally:
        client.close()
    assert sent[0].host == ("node-7" if host == "node-7" else "")
