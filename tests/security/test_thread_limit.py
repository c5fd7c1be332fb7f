"""All threads of a server together stay below what it may have, and past that nobody loses what has been granted."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from ps_frames.frames import Kind
from ps_frames.listener import MOST_STRANGERS
from ps_protocol.errors import PSError
from ps_runtime.credentials import PLAINTEXT, Access, Tls
from ps_runtime.thread_limit import ThreadLimit, thread_limit
from ps_server.core.admission import RequestKind, request_limits, waiting_threads
from ps_server.core.limits import LEAST_THREADS, Limits
from ps_server.core.thread_shares import LEAST_CONNECTIONS, LEAST_OF_A_POOL, ThreadShares, thread_shares
from ps_server.ops import dev_certs
from tests.chaos.cluster import free_ports
from tests.tools.cluster import Cluster, until
from tests.tools.crowded import silent
from tests.tools.frame_client import FrameClient, push_parts, ticket
from tests.tools.launching import Command
from tests.tools.raw_worker import RawWorker, joined, vector_job
from tests.tools.unfinished import Unfinished

SCRIPT = Path(__file__).parents[1] / "scripts" / "few_threads.py"
SILENT = 1000
MOST = 300  # less than a server is to be given: it goes on
CALLS = tuple(
    f"/ps_protocol.v1.{name}"
    for name in ("DataService/Push", "DataService/Pull", "MembershipService/Heartbeat", "JobService/RegisterJob")
)


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine's files: of a process with 3 threads, whose user has 10."""
    status = "Name:\tpython\nUid:\t{}\t{}\nThreads:\t{}\nCapEff:\t{:016x}\n"
    given = {
        "proc/self/status": status.format(7, 7, 3, 0),
        "proc/1/status": status.format(0, 0, 50, 0),
        "proc/2/status": status.format(7, 7, 3, 0),
        "proc/3/status": status.format(7, 7, 7, 0),
        "proc/self/cgroup": "8:pids:/\n0::/a/b\n",
        "proc/sys/kernel/threads-max": "5000\n",
        "proc/sys/kernel/pid_max": "32768\n",
        "proc/loadavg": "0.1 0.2 0.3 2/500 1234\n",
        "proc/self/limits": "Limit   Soft Limit   Hard Limit\nMax processes   unlimited   unlimited   processes\n",
        **files,
    }
    for name, text in given.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "most", "name"),
    [
        ({}, 4503, "threads-max"),
        ({"sys/fs/cgroup/a/pids.max": "max\n", "sys/fs/cgroup/a/pids.current": "4\n"}, 4503, "threads-max"),
        ({"sys/fs/cgroup/a/pids.max": "100\n", "sys/fs/cgroup/a/pids.current": "4\n"}, 99, "pids.max"),
        ({"sys/fs/cgroup/pids/pids.max": "64\n", "sys/fs/cgroup/pids/pids.current": "99\n"}, 3, "pids.max"),
        ({"proc/self/limits": "Max processes   200   400   processes\n"}, 193, "RLIMIT_NPROC"),
        (
            {"proc/self/limits": "Max processes  9  9  processes\n", "proc/self/status": "Uid:\t0\nThreads:\t3\n"},
            4503,
            "",
        ),
        ({"proc/self/limits": ""}, 4503, "kernel"),
        (
            {"proc/self/limits": "Max processes  9  9  processes\n", "proc/self/status": "Threads:\t3\n"},
            4503,
            "kernel",
        ),
    ],
    ids=["kernel", "no limit of a group", "group", "group of version 1", "user", "root", "no limits", "no user"],
)
def test_what_is_free_of_the_narrowest_limit_counts(
    tmp_path: Path, files: dict[str, str], most: int, name: str
) -> None:
    found = thread_limit(machine(tmp_path, files))
    assert found is not None
    assert found.threads == most
    assert name in found.name


def test_where_nothing_says_how_many_threads_there_may_be_there_is_no_limit(tmp_path: Path) -> None:
    assert thread_limit(tmp_path) is None
    assert thread_shares(None, 200, 8, 8192) == thread_shares(10**6, 200, 8, 8192)
    assert ThreadLimit(3, "a") < ThreadLimit(4, "a")


@pytest.mark.parametrize("pools", [3, 6, 8])
@pytest.mark.parametrize("most", [LEAST_THREADS, 1024, 2048, 8000, 32_000])
def test_all_shares_together_are_no_more_than_there_may_be(most: int, pools: int) -> None:
    reserved = 200
    shares = thread_shares(most, reserved, pools, 8192)
    assert pools * shares.pool + shares.connections + reserved <= most
    assert shares.pool >= LEAST_OF_A_POOL
    assert shares.connections >= LEAST_CONNECTIONS


@pytest.mark.parametrize("pool", [LEAST_OF_A_POOL, 100, 1024])
@pytest.mark.parametrize("receiving", [232 * 2**20, 2**36])
def test_requests_that_wait_for_a_place_never_have_all_threads_of_a_pool(pool: int, receiving: int) -> None:
    of = request_limits(Limits(receiving_bytes=receiving), is_shard=True, pool=pool)
    together = [RequestKind.QUICK, RequestKind.EXCHANGE, RequestKind.DATA]  # pulls and the like
    unary = 2 * waiting_threads(pool)  # quick ones and pushes: what answers in a stream waits without a thread
    assert sum(of[kind].places for kind in together) + unary < pool
    of = request_limits(Limits(receiving_bytes=receiving), is_shard=False, pool=pool)
    assert sum(of[kind].places for kind in (RequestKind.QUICK, RequestKind.LARGE)) + 2 * waiting_threads(pool) < pool


@pytest.mark.parametrize("kind", RequestKind)
def test_as_many_requests_may_wait_where_there_are_few_threads(kind: RequestKind) -> None:
    """A heartbeat or a look of a small server would be refused otherwise, where it could wait."""
    assert (
        request_limits(Limits(), True, LEAST_OF_A_POOL)[kind].waiting
        == request_limits(Limits(), True)[kind].waiting
        >= 1024
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Command, str]]]:
    """Starts a coordinator that is a shard too, with few threads; returns it and its address."""
    started: list[Command] = []

    def begin(*flags: str) -> tuple[Command, str]:
        server = ["shard", "--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0", *flags]
        run = [str(SCRIPT), str(MOST), sys.executable, "-m", "ps_server"]
        started.append(Command(tmp_path, *run, *server, OMP_NUM_THREADS="1"))
        [address] = started[-1].says(r"ready at (\S+)")
        return started[-1], address

    yield begin
    for command in started:
        command.clean_up()


def taken(call: Callable[[], object]) -> bool:
    """Makes a call, as a worker does: it may be told to try again."""
    try:
        call()
    except PSError as error:
        if error.retryable:
            return False
        raise
    return True


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="to be another user, of whom there is no other process, takes root and setpriv",
)
@pytest.mark.parametrize("encrypted", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plaintext", "tls"])
def test_a_thousand_silent_connections_and_waiting_calls_leave_a_server_with_few_threads_at_work(
    start: Callable[..., tuple[Command, str]], tmp_path: Path, encrypted: bool
) -> None:
    port = free_ports(1)
    flags = [f"--data-port={port}", "--lease=600"]
    if encrypted:  # of the data port, at which the strangers are
        assert dev_certs.write(tmp_path / "certs")
        flags += [f"--tls-cert={tmp_path}/certs/server.pem", f"--tls-key={tmp_path}/certs/server.key"]
    command, address = start(*flags)
    assert f"at most {MOST}" in command.err
    assert "RLIMIT_NPROC" in command.err
    with ExitStack() as stack:
        access = Access(Tls(ca=tmp_path / "certs/ca.pem")) if encrypted else PLAINTEXT
        worker = stack.enter_context(RawWorker(address, vector_job("job", "async", 16, 1), 0, access))
        worker.initialise()
        if not encrypted:
            hosts = "127.0.0.2", "127.0.0.3"
            attack = stack.enter_context(Unfinished(address, CALLS, 64, 64 + 5, calls=128, sources=hosts))
            until(lambda: attack.begun >= 200, "the start of the calls")
        stack.enter_context(silent(port, SILENT, MOST_STRANGERS + 64))
        gradient = torch.ones(16).numpy().tobytes()
        for clock in range(1, 6):
            push = partial(worker.send, worker.message(0, clock, gradient))
            until(lambda push=push: taken(push), "a push")  # type: ignore[misc]
            until(lambda: taken(worker.heartbeat), "a heartbeat")
        assert psutil.Process(command.process.pid).num_threads() <= MOST
    assert "can't start new thread" not in command.err


def test_past_its_share_of_threads_who_has_most_data_connections_makes_room_for_others(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    who = ["one"]
    monkeypatch.setattr("ps_server.rpc.grpc_port.thread_shares", lambda *_: ThreadShares(64, connections=2))
    monkeypatch.setattr("ps_server.rpc.data_service.caller_name", lambda: who[-1])
    cluster = make_cluster(shards=1, lease=120.0)  # nobody sends a heartbeat
    with joined(cluster.address, vector_job("job", "async", 16, 5)) as workers, ExitStack() as stack:

        def knock(worker: RawWorker) -> FrameClient:
            found = ticket(cluster.address, worker)
            return stack.enter_context(FrameClient(found.port, found.ticket))

        first, second = (knock(worker) for worker in workers[:2])
        assert first.is_open()
        assert second.is_open()
        assert not knock(workers[2]).is_open(), "it is of the same caller"
        who.append("another")
        assert knock(workers[3]).is_open()
        assert not first.is_open(), "it has had to make room"
        assert second.ask(Kind.PUSH, push_parts(workers[1].message(0, 1, torch.ones(16).numpy().tobytes())))
        assert not knock(workers[4]).is_open(), "now both have as many"
