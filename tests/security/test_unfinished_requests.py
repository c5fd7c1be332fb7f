"""Requests that never end keep no worker's heartbeat waiting, and take no more memory than the budget for them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.v1 import jobs_pb2, membership_pb2, types_pb2
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_server.rpc.call_limits import STREAMS_OF_A_CONNECTION, TOLD_AT_ONCE
from ps_server.rpc.health_client import is_serving
from tests.tools.cluster import until
from tests.tools.launching import Command, resident
from tests.tools.raw_worker import vector_job
from tests.tools.unfinished import Unfinished

MIB = 2**20
LARGE = 16 * MIB
BUDGET = 232 * MIB  # the default of --max-receiving-bytes
THREADS = 96 * MIB  # what the threads of all pools, and gRPC itself, may take beside it
LEASE_SECONDS = 60.0  # no slow moment of this machine ends it
CALL_SECONDS = 2.0  # the promise, of most heartbeats: this machine may be busy with other things for longer than that
LONGEST_SECONDS = 30.0
ATTACK_SECONDS = 1.0
HOSTS = tuple(f"127.0.0.{number}" for number in range(2, 6))
HEARTBEAT, CHECK = "/ps_protocol.v1.MembershipService/Heartbeat", "/grpc.health.v1.Health/Check"
PUSH, REGISTER = "/ps_protocol.v1.DataService/Push", "/ps_protocol.v1.JobService/RegisterJob"
EXCHANGE, GATHER = "/ps_protocol.v1.DataService/Exchange", "/ps_protocol.v1.RoundService/GatherValues"
WATCHED_SECONDS, AGAIN_SECONDS = 1.0, 5.0
HELD_SECONDS = 2.0  # for which a stranger's error is kept back here
CROWD, CROWDS = STREAMS_OF_A_CONNECTION, 10  # unfinished calls on each connection: more than may wait
EXCHANGE_PATIENCE = 1.0  # seconds after which an exchange makes room for another; of values it is five
OTHER = "the-worker-of-another-job"


@dataclass
class Victim:
    """A server in a process of its own, and a worker that keeps its place on it by heartbeats."""

    address: str
    pid: int
    worker: types_pb2.WorkerIdentity
    members: MembershipServiceStub

    def beat(self) -> float:
        """Sends a heartbeat; how many seconds it took. Raises if it is not answered, or the place is lost."""
        begun = time.monotonic()
        self.members.Heartbeat(membership_pb2.HeartbeatRequest(worker=self.worker), timeout=LONGEST_SECONDS)
        return time.monotonic() - begun

    def memory(self) -> int:
        """Bytes of the server, after a heartbeat."""
        self.beat()
        return resident(self.pid)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The server's address and its process."""
    directory = tmp_path_factory.mktemp("server")
    tokens = directory / "tokens"
    tokens.write_text(f"worker:job the-worker-of-the-job\nworker:other {OTHER}\ncluster the-clusters-own-token\n")
    tokens.chmod(0o600)
    flags = ["--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0", f"--tokens={tokens}"]
    held = f"from ps_server.rpc import call_limits; call_limits.HELD_SECONDS = {HELD_SECONDS}"
    run = f"{held}; from ps_server.cli import main; main()"
    command = Command(directory, "-c", run, "shard", *flags, f"--lease={LEASE_SECONDS}", OMP_NUM_THREADS="1")
    try:
        [address] = command.says(r"ready at (\S+)")
        yield address, command.process.pid
    finally:
        command.clean_up()


@pytest.fixture
def victim(server: tuple[str, int]) -> Iterator[Victim]:
    address, pid = server
    with open_channel(address, Access(token=lambda: "the-worker-of-the-job")) as channel:
        spec = job_spec_message(vector_job("job", "async", cells=16, world_size=1))
        JobServiceStub(channel).RegisterJob(jobs_pb2.RegisterJobRequest(spec=spec), timeout=30)
        members = MembershipServiceStub(channel)
        place = members.Join(membership_pb2.JoinRequest(job="job", rank=0, host="here"), timeout=30)
        yield Victim(address, pid, place.worker, members)
        members.Leave(membership_pb2.LeaveRequest(worker=place.worker), timeout=30)


def check_promises(victim: Victim, attacks: list[Unfinished], begun: int) -> None:
    """Beats through attacks that come at the same time, and looks at the server's memory meanwhile and afterwards."""
    before = victim.memory()
    with contextlib.ExitStack() as stack:
        for attack in attacks:
            stack.enter_context(attack)
        until(lambda: victim.beat() and sum(attack.begun for attack in attacks) >= begun, "the start of every call")
        took, most = [], 0
        until_then = time.monotonic() + ATTACK_SECONDS
        while time.monotonic() < until_then:
            took.append(victim.beat())
            most = max(most, resident(victim.pid))
            assert is_serving(victim.address, PLAINTEXT)
        sent = sum(attack.sent_bytes for attack in attacks)
    grown = most - before
    print(
        f"{len(took)} heartbeats: median {statistics.median(took) * 1e3:.1f} ms, worst {max(took) * 1e3:.0f} ms; "
        f"{sum(attack.begun for attack in attacks)} calls were begun, {sent / MIB:.0f} MiB were sent; "
        f"the server's memory grew by {grown / MIB:.0f} MiB"
    )
    assert statistics.median(took) < CALL_SECONDS
    assert grown < BUDGET + THREADS
    until(lambda: victim.memory() < before + THREADS, "the memory comes back")


def test_a_thousand_requests_that_never_arrive_keep_no_heartbeat_waiting(victim: Victim) -> None:
    nothing: dict[str, Any] = {"size": 64, "kept_back": 64 + 5, "calls": 512}
    attacks = [
        Unfinished(victim.address, (CHECK,), **nothing),
        Unfinished(victim.address, (HEARTBEAT,), token=OTHER, **nothing),
    ]
    check_promises(victim, attacks, 1024)


@pytest.mark.long
def test_requests_of_many_hosts_that_never_arrive_keep_no_heartbeat_waiting(victim: Victim) -> None:
    attack = Unfinished(victim.address, (HEARTBEAT,), 64, 64 + 5, calls=512, sources=HOSTS, token=OTHER)
    check_promises(victim, [attack], 512 * len(HOSTS))


@pytest.mark.parametrize("path", [EXCHANGE, GATHER])
def test_exchanges_and_values_that_lack_their_end_keep_none_of_another_job_waiting(victim: Victim, path: str) -> None:
    """Of the kinds of which few are received at a time. What is asked is nonsense: it is read, and then refused."""
    with (
        Unfinished(victim.address, (path,), 1000, 900, calls=CROWD, token=OTHER) as attack,
        open_channel(victim.address, Access(token=lambda: "the-worker-of-the-job")) as channel,
    ):
        ask = channel.unary_stream(path) if path == EXCHANGE else channel.unary_unary(path)
        until(lambda: victim.beat() and attack.begun >= CROWD, "the start of every call")
        took = []
        for _ in range(9):
            begun = time.monotonic()
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(b"\xff", timeout=30) if path == EXCHANGE else [ask(b"\xff", timeout=30)])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            took.append(time.monotonic() - begun)
        assert statistics.median(took) < EXCHANGE_PATIENCE, "it waits until no attacker has made room"


def is_calm(victim: Victim, attacks: list[Unfinished], calls: int) -> bool:
    """Watches for a while; returns whether each call was begun again no more than once in five seconds."""
    began, begun = time.monotonic(), sum(attack.begun for attack in attacks)
    while (took := time.monotonic() - began) < WATCHED_SECONDS:
        victim.beat()
    return sum(attack.begun for attack in attacks) - begun <= calls * (1 + took / AGAIN_SECONDS)


@pytest.mark.parametrize("path", [EXCHANGE, PUSH, REGISTER, HEARTBEAT])
def test_calls_of_which_too_many_are_unfinished_wait_and_are_not_told_to_come_again(victim: Victim, path: str) -> None:
    """Told at once they would come again at once: thousands a second, of which each delays all others."""
    with contextlib.ExitStack() as stack:
        attacks = [
            stack.enter_context(Unfinished(victim.address, (path,), 1000, 900, calls=CROWD, token=OTHER))
            for _ in range(CROWDS)
        ]
        until(lambda: victim.beat() and sum(attack.begun for attack in attacks) >= CROWD * CROWDS, "every call")
        assert is_calm(victim, attacks, CROWD * CROWDS)


def test_strangers_are_refused_later_where_they_come_in_a_flood(victim: Victim) -> None:
    """Each call is measured, from before the server can know of it: on a busy machine it only lasts longer."""
    began = time.monotonic()
    with Unfinished(victim.address, (PUSH,), 1000, 900, calls=CROWD, token="unknown") as attack:
        until(lambda: victim.beat() and len(attack.lasted) > CROWD + TOLD_AT_ONCE, "each is refused, some twice")
    took = time.monotonic() - began
    at_once = sum(seconds < HELD_SECONDS for seconds in attack.lasted)
    assert at_once <= TOLD_AT_ONCE * (took + 1)
    assert at_once < len(attack.lasted)


def test_calls_of_a_worker_whose_threads_are_taken_leave_nothing_behind_on_its_connection(
    victim: Victim,
) -> None:
    """gRPC would refuse the next ones of a connection, once more of its calls are alive than it may have at a time."""
    with Unfinished(victim.address, (HEARTBEAT,), 64, 64 + 5, calls=CROWD, token=OTHER) as attack:
        until(lambda: victim.beat() and attack.begun >= CROWD, "the start of every call")
        for _ in range(200):
            victim.beat()


@pytest.mark.long
def test_large_requests_that_lack_their_end_fit_the_budget_and_those_of_strangers_are_not_taken_in(
    victim: Victim,
) -> None:
    strangers = [
        Unfinished(victim.address, (CHECK,), LARGE, calls=80),
        Unfinished(victim.address, (PUSH,), LARGE, calls=80, token="unknown"),
    ]
    paths = (PUSH, HEARTBEAT, REGISTER)
    attack = Unfinished(victim.address, paths, LARGE, calls=80 * len(paths), sources=HOSTS, token=OTHER)
    check_promises(victim, [*strangers, attack], 80 * (len(strangers) + len(HOSTS) * len(paths)))
    for stranger in strangers:
        assert stranger.sent_bytes < stranger.begun * 2**16


def test_what_is_packed_is_not_unpacked(victim: Victim) -> None:
    """So no version of gRPC unpacks a megabyte into a gigabyte before it looks at the size."""
    packed = membership_pb2.HeartbeatRequest(worker=types_pb2.WorkerIdentity(job="x" * 10_000))
    with pytest.raises(grpc.RpcError) as caught:
        victim.members.Heartbeat(packed, timeout=30, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
