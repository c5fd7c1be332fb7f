"""Each place that starts a thread survives that none can be had, as where `pids.max` or RLIMIT_NPROC is reached.

What is begun with a process is an error at its start, which says so; what comes later is refused so that it may be
tried again, or is done in another thread.
"""

from __future__ import annotations

import ast
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ps_feed import subscription as subscriptions
from ps_feed.subscription import Subscription
from ps_frames.client import ClientConnection, DataLink, reading_threads
from ps_frames.frames import frames_over
from ps_frames.listener import Handshakes
from ps_launch.lifeline import Lifeline
from ps_launch.one_server import OneServer
from ps_protocol.errors import NotShared, TryLater
from ps_runtime.arrivals import Arrivals, HostLimits
from ps_runtime.background import Background
from ps_runtime.credentials import PLAINTEXT
from ps_runtime.pools import DaemonPool
from ps_runtime.retry import Peer
from ps_runtime.web import serve
from ps_server.core.limits import Limits
from ps_server.relay.relayed import Relayed
from ps_server.relay.upstream import Upstream
from ps_server.rpc.auth import Authenticator
from ps_server.rpc.call_limits import CallLimits
from ps_server.rpc.registration import ShardRegistration
from ps_server.shard.threads import OwnThreads
from ps_server.storage.lock_lease import LockLease
from ps_worker.cluster.local_segment import LocalSegment
from ps_worker.made_editions import EditionMaker
from ps_worker.neighbours import Neighbours
from ps_worker.row_feed import RowFeed
from ps_worker.state.checkpoint import WorkerCheckpoint, decode
from tests.tools.cluster import Cluster, until
from tests.tools.imports import PACKAGES, syntax
from tests.tools.launching import environment

ROOT = Path(__file__).parents[2]
SECONDS = 20.0
MESSAGE = "can't start new thread"


@pytest.fixture(autouse=True)
def _no_surprises() -> None:
    """Servers of other tests in this process lack threads meanwhile, too, and say so."""


@pytest.fixture(autouse=True)
def none(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """From now on no thread can be started, until this is undone."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(MESSAGE)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch


def at_start(make: Callable[[], object]) -> None:
    """What is made when a process starts: an error that says what is wrong."""
    with pytest.raises(TryLater, match=MESSAGE):
        make()


def repeated(_: Path) -> None:
    background = Background()
    at_start(lambda: background.repeat("looks", 1.0, lambda: None))
    background.stop()


def run_later(_: Path) -> None:
    background, ran = Background(), threading.Event()
    background.start()
    background.run("done later", ran.set)
    assert not ran.is_set()
    background._run_delayed()  # as what is repeated does: still none
    assert [name for name, _ in background._delayed] == ["done later"]


def run_after_a_while(_: Path) -> None:
    background, ran = Background(), threading.Event()
    background.start()
    assert not background.later("done after a while", 0.0, ran.set)  # the caller does it itself
    assert not ran.is_set()


def run_apart(_: Path) -> None:
    background, calls = Background(), list[int]()
    background.start()
    background.apart("looks", "job", lambda: calls.append(1))
    assert not background._apart, "the next call tries again"


def sites(_: Path) -> None:
    port = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        return []

    def make() -> None:
        port.append(serve("127.0.0.1", 0, app, "metrics", "--metrics-port"))

    at_start(make)


def registration(_: Path) -> None:
    at_start(lambda: ShardRegistration(Peer("coordinator", "127.0.0.1:1"), 0, "here:1", "here:2", 1))


def slow_peers(_: Path) -> None:
    at_start(lambda: CallLimits(Authenticator(), Limits()))


def handshakes(_: Path) -> None:
    made = Handshakes(lambda connection, ticket, host: connection.close(), 1.0, Arrivals(HostLimits()))
    made.listen(socket.create_server(("127.0.0.1", 0)), None)
    at_start(made.start)
    made.stop()


class Store:
    """A lease's store, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self, path: Path) -> list[str]:
        return [each.name for each in path.iterdir()]

    def read(self, path: Path, most: int) -> bytes:
        return path.read_bytes()[:most]

    def create(self, path: Path, data: bytes) -> None:
        with path.open("xb") as file:
            file.write(data)

    def put(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def remove(self, path: Path) -> None:
        path.unlink()


def lease(folder: Path) -> None:
    """It is given back, as nothing would renew it: another process may have it at once."""
    store = Store(folder)
    first = LockLease(store, folder / "lease", b"one", 60.0)
    with pytest.raises(OSError, match=MESSAGE):
        first.take()
    with pytest.raises(OSError, match=MESSAGE):
        LockLease(store, folder / "lease", b"two", 60.0).take()


def notices(_: Path) -> None:
    at_start(lambda: OwnThreads.repeat(SimpleNamespace(), 1.0, lambda: False))  # type: ignore[arg-type]


def pools_of_a_session(_: Path) -> None:
    at_start(lambda: DaemonPool(2, "push"))


def data_connection(_: Path) -> None:
    here, there = socket.socketpair()
    reading = reading_threads()
    with there:
        at_start(lambda: ClientConnection(frames_over(here), reading))
        assert there.recv(1) == b"", "it is closed"
    reading.close()


def data_link(_: Path) -> None:
    """It tries again later, as after any connection that cannot be made."""
    link = DataLink(lambda: pytest.fail("not without a thread"), "shard 0", threading.Event())
    link._next = time.monotonic()
    assert link.current is None
    assert not link._is_opening
    assert link._next > time.monotonic()
    assert link.threads == []


def segments(folder: Path) -> None:
    """The worker uses the network."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotShared, match=MESSAGE):
        LocalSegment(4096, folder)
    # Servers of other tests open and close connections meanwhile.
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "no descriptor more than before")
    assert not list(folder.iterdir())


def row_feed(folder: Path) -> None:
    at_start(lambda: RowFeed("rows", "127.0.0.1:1"))


def subscription(_: Path) -> None:
    """One that has no thread is not among those that are ended with the process."""
    before = {*subscriptions._open}
    at_start(lambda: Subscription("127.0.0.1:1"))
    assert {*subscriptions._open} == before


def maker_of_editions(_: Path) -> None:
    """Readers make the tensors themselves, until there is a thread."""
    maker = EditionMaker()
    maker.begin(lambda: None)
    assert not maker.runs
    maker.close()


def one_server(_: Path) -> None:
    """The process that it has started ends with it."""
    at_start(lambda: OneServer(["health", "--server=127.0.0.1:1"], environment()))


def lifeline(_: Path) -> None:
    at_start(lambda: Lifeline(0, lambda: None))


def upstream(_: Path) -> None:
    at_start(lambda: Upstream("127.0.0.1:1", PLAINTEXT))


def relayed(_: Path) -> None:
    at_start(lambda: Relayed(SimpleNamespace()))  # type: ignore[arg-type]


def neighbours(_: Path) -> None:
    at_start(Neighbours(SimpleNamespace(), "group", 0, 2, 60.0).begin)


HERE: dict[str, Callable[[Path], None]] = {
    "ps_runtime/background.py Background.repeat": repeated,
    "ps_runtime/background.py Background.run": run_later,
    "ps_runtime/background.py Background.later": run_after_a_while,
    "ps_runtime/background.py Background.apart": run_apart,
    "ps_runtime/web.py run_server": sites,
    "ps_server/relay/upstream.py Upstream.__init__": upstream,
    "ps_server/relay/relayed.py Relayed.__init__": relayed,
    "ps_server/rpc/registration.py ShardRegistration.__init__": registration,
    "ps_server/rpc/call_limits.py CallLimits.__init__": slow_peers,
    "ps_frames/listener.py Handshakes.__init__": handshakes,
    "ps_server/storage/lock_lease.py LockLease.__init__": lease,
    "ps_server/shard/threads.py OwnThreads.repeat": notices,
    "ps_runtime/pools.py DaemonPool._add_thread": pools_of_a_session,
    "ps_frames/reading.py ReadingThreads._start": data_connection,
    "ps_frames/client.py DataLink.current": data_link,
    "ps_worker/cluster/local_segment.py LocalSegment.__init__": segments,
    "ps_worker/neighbours.py Neighbours.__init__": neighbours,
    "ps_worker/row_feed.py RowFeed.__init__": row_feed,
    "ps_feed/subscription.py Subscription.__init__": subscription,
    "ps_worker/made_editions.py EditionMaker.begin": maker_of_editions,
    "ps_launch/one_server.py OneServer.__init__": one_server,
    "ps_launch/lifeline.py Lifeline.__init__": lifeline,
}
# By the test that holds it, or why none does.
ELSEWHERE = {
    "ps_worker/cluster/own_membership.py OwnMembership.join": (
        "tests/security/test_no_thread.py",
        "test_a_worker_without_a_thread_for_its_place_leaves_and_says_why",
    ),
    "ps_worker/row_feed.py RowFollower.__init__": (
        "tests/security/test_no_thread.py",
        "test_a_feed_follows_shards_when_there_are_threads_again",
    ),
    "ps_worker/state/checkpoint.py WorkerCheckpoint._capture_first": (
        "tests/security/test_no_thread.py",
        "test_a_state_is_saved_at_once_where_nothing_can_wait_for_the_next_step",
    ),
    "ps_worker/launched.py end_at_once": ("ps_worker/launched.py", "os._exit(code)"),
    "ps_worker/ray/actors.py _ServerActor.__init__": ("ps_worker/ray/actors.py", "self.stop(0.0)"),
}


@pytest.mark.parametrize("place", HERE)
def test_a_place_that_starts_a_thread_survives_that_none_can_be_had(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of some the log says so."""
    HERE[place](tmp_path)


def test_every_place_that_starts_a_thread_has_its_case() -> None:
    """A new one that has none fails here. Pools are a kind of their own: tests/server/test_pools.py."""
    found = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            for name, body in (
                _functions(syntax(text)) if "Thread" in text or "Timer" in text or "_new_thread" in text else ()
            ):
                calls = [ast.unparse(node.func) for node in ast.walk(body) if isinstance(node, ast.Call)]
                if {"threading.Thread", "Thread", "threading.Timer", "Timer", "_thread.start_new_thread"} & {*calls}:
                    found.add(f"{path.relative_to(ROOT)} {name}")
    assert found == HERE.keys() | ELSEWHERE.keys()
    for file, name in ELSEWHERE.values():
        assert name in (ROOT / file).read_text()


def _functions(tree: ast.AST, within: str = "") -> list[tuple[str, ast.AST]]:
    """The functions of a module and the methods of its classes, by name."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found += _functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found.append((within + node.name, node))
    return found


def refuse(name: str, patch: pytest.MonkeyPatch, start: Callable[[threading.Thread], None]) -> None:
    """No thread of a name can be started."""

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError(MESSAGE)
        start(thread)

    patch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize("name", ["heartbeat", "watch"])
def test_a_worker_without_a_thread_for_its_place_leaves_and_says_why(
    make_cluster: Callable[..., Cluster], none: pytest.MonkeyPatch, name: str
) -> None:
    none.undo()
    cluster, model = make_cluster(shards=1), nn.Linear(2, 1)
    start = threading.Thread.start
    with cluster.connect("sync", job="job") as session, none.context() as patch:
        refuse(name, patch, start)
        with pytest.raises(TryLater, match=f"'{name}'.*{MESSAGE}"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    statistics = cluster.coordinator.statistics().jobs
    assert not any(job.workers for job in statistics.values())


def test_a_feed_follows_shards_when_there_are_threads_again(none: pytest.MonkeyPatch) -> None:
    none.undo()
    start = threading.Thread.start
    with none.context() as patch:
        patch.setattr("ps_worker.row_feed.shard_addresses", lambda *_: ({}, 2))
        refuse("row-feed-1", patch, start)
        with RowFeed("rows", "127.0.0.1:1") as feed:
            until(lambda: feed.trouble is not None and MESSAGE in str(feed.trouble), "what is wrong")
            assert not feed._coming, "none of the shards alone"
            patch.setattr(threading.Thread, "start", start)
            until(lambda: len(feed._coming) == 2, "all shards")


def test_a_state_is_saved_at_once_where_nothing_can_wait_for_the_next_step() -> None:
    states: list[bytes] = []
    checkpoint = WorkerCheckpoint(torch.device("cpu"), lambda clock, state: states.append(state))
    checkpoint.want(1)
    checkpoint.stepped()
    assert [decode(state).at_step for state in states] == [None]
