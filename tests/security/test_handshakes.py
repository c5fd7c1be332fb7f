"""Connections that have not shown their ticket: they take no thread, no descriptor for good, and no other's place."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest
import torch

from ps_frames import listener as data_listener
from ps_frames.frames import TICKET_BYTES, Kind, write_header
from ps_frames.listener import MOST_STRANGERS, Handshakes, Tickets, _is_of
from ps_frames.server import Opener
from ps_protocol.identity import Identity
from ps_runtime.arrivals import Arrivals, HostLimits
from ps_runtime.credentials import Tls
from ps_runtime.tls_contexts import client_context, server_context
from ps_server.core.limits import Limits
from ps_server.ops import dev_certs
from tests.chaos.cluster import free_ports
from tests.tools.cluster import Cluster, until
from tests.tools.crowded import silent
from tests.tools.frame_client import FrameClient, push_parts, ticket
from tests.tools.raw_worker import joined, vector_job

SECONDS = 20.0  # that a test waits at most
OTHERS = 50  # threads and descriptors that other servers of this process may take meanwhile: far fewer than strangers
UNLIMITED = HostLimits(most=10_000, new=1000.0)
TICKET = bytes(range(TICKET_BYTES))
OPENING = write_header(0, Kind.OPEN, TICKET_BYTES) + TICKET


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    assert dev_certs.write(directory)
    return directory


class Door:
    """A listener with its handshakes, and what they have handed over."""

    def __init__(self, seconds: float, context: ssl.SSLContext | None, limits: HostLimits) -> None:
        self.arrivals = Arrivals(limits)
        self.opened: Queue[tuple[socket.socket, bytes]] = Queue()
        self.handshakes = Handshakes(
            lambda connection, shown, _: self.opened.put((connection, shown)), seconds, self.arrivals
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        self.handshakes.listen(listener, None if context is None else lambda: context)
        self.handshakes.start()

    def knock(self, host: str = "127.0.0.1") -> socket.socket:
        """A connection that says nothing yet. host: its own address"""
        return socket.create_connection(("127.0.0.1", self.port), SECONDS, (host, 0))

    def take(self) -> bytes:
        """The ticket of the connection that is handed over next."""
        connection, shown = self.opened.get(timeout=SECONDS)
        connection.close()
        return shown

    def close(self) -> None:
        self.handshakes.stop()
        while not self.opened.empty():
            self.opened.get()[0].close()


@pytest.fixture
def make_door() -> Iterator[Callable[..., Door]]:
    with ExitStack() as stack:

        def make(
            seconds: float = SECONDS, context: ssl.SSLContext | None = None, limits: HostLimits = UNLIMITED
        ) -> Door:
            door = Door(seconds, context, limits)
            stack.callback(door.close)
            return door

        yield make


def server(certs: Path) -> ssl.SSLContext:
    return server_context(Tls(certs / "server.pem", certs / "server.key", certs / "ca.pem"), "a test")


def client(certs: Path, name: str = "worker") -> ssl.SSLContext:
    return client_context(Tls(certs / f"{name}.pem", certs / f"{name}.key", certs / "ca.pem"))


def is_closed(connection: socket.socket) -> bool:
    """Waits until the other end has closed; False if it says something."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_ticket_may_come_byte_by_byte_while_others_are_silent(make_door: Callable[..., Door]) -> None:
    door = make_door()
    with door.knock(), door.knock() as slow, door.knock() as quick:
        for byte in OPENING[:-1]:
            slow.sendall(bytes([byte]))
        quick.sendall(OPENING)
        assert door.take() == TICKET
        slow.sendall(OPENING[-1:])
        assert door.take() == TICKET


def test_a_ticket_comes_over_tls_while_others_are_in_their_handshakes(
    make_door: Callable[..., Door], certs: Path
) -> None:
    door = make_door(context=server(certs))
    with door.knock(), door.knock() as half:
        half.sendall(b"\x16\x03\x01\x02\x00")  # the beginning of a record of TLS
        with client(certs).wrap_socket(door.knock(), server_hostname="127.0.0.1") as good:
            good.sendall(OPENING)
            assert door.take() == TICKET


@pytest.mark.parametrize(
    "said",
    [
        write_header(0, Kind.PUSH, TICKET_BYTES),
        write_header(0, Kind.OPEN, TICKET_BYTES - 1),
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        b"\xff" * 64,
    ],
    ids=["another kind", "another size", "http", "noise"],
)
def test_what_is_no_ticket_ends_the_connection_at_once(make_door: Callable[..., Door], said: bytes) -> None:
    door = make_door()
    with door.knock() as stranger:
        stranger.sendall(said)
        assert is_closed(stranger)


def test_noise_in_place_of_tls_ends_the_connection_at_once(make_door: Callable[..., Door], certs: Path) -> None:
    door = make_door(context=server(certs))
    with door.knock() as stranger:
        stranger.sendall(OPENING)
        until(lambda: is_closed(stranger), "the end, after an alert of TLS")


def test_the_silent_are_closed_and_so_is_who_takes_too_long(
    make_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(data_listener, "SILENT_SECONDS", 0.2)
        with make_door().knock() as silent:
            assert is_closed(silent)
    with make_door(seconds=0.2).knock() as slow:
        slow.sendall(OPENING[:3])
        assert is_closed(slow)


def test_a_flood_of_one_host_takes_the_places_of_that_host_alone(make_door: Callable[..., Door]) -> None:
    door = make_door()
    with ExitStack() as stack:
        other = stack.enter_context(door.knock("127.0.0.2"))
        other.sendall(OPENING[:-1])
        flood = [stack.enter_context(door.knock()) for _ in range(4 * MOST_STRANGERS)]
        for early in flood[: 3 * MOST_STRANGERS]:
            assert is_closed(early)
        other.sendall(OPENING[-1:])
        assert door.take() == TICKET


def test_a_host_has_so_many_connections_and_opens_so_many_a_second(make_door: Callable[..., Door]) -> None:
    door = make_door(limits=HostLimits(most=2, new=1000.0))
    with door.knock() as first, door.knock(), door.knock() as third, door.knock("127.0.0.2") as other:
        assert is_closed(third)
        other.sendall(OPENING)
        assert door.take() == TICKET
        first.sendall(b"no ticket, so that it is closed")
        assert is_closed(first)
        until(lambda: door.arrivals.comes("127.0.0.1"), "room for another one")
    slow = make_door(limits=HostLimits(most=100, new=0.2))
    with slow.knock() as first, slow.knock(), slow.knock() as third, slow.knock("127.0.0.2") as other:
        assert is_closed(third), "two at once"
        for good in (first, other):
            good.sendall(OPENING)
            assert slow.take() == TICKET


@pytest.mark.parametrize(
    "limits", [Limits(connections_of_a_host=2), Limits(new_connections=0.01)], ids=["at a time", "in a second"]
)
def test_what_a_host_may_have_is_what_the_limits_of_the_server_say(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """On the data port and on that of metrics. Nothing else closes a silent one in the test's time."""
    monkeypatch.setattr(data_listener, "SILENT_SECONDS", 10 * SECONDS)
    for name in ("SILENT_SECONDS", "CONNECTION_SECONDS", "_Silent.timeout"):
        monkeypatch.setattr(f"ps_runtime.web.{name}", 10 * SECONDS)
    port = free_ports(1)
    cluster = make_cluster(shards=1, data_port=port, limits=replace(limits, handshake_seconds=10 * SECONDS))
    for number in (port, int(cluster.servers[0].metrics_address.rpartition(":")[2])):
        with ExitStack() as stack:
            *_, third = [
                stack.enter_context(socket.create_connection(("127.0.0.1", number), SECONDS)) for _ in range(3)
            ]
            assert is_closed(third)


def test_handshakes_that_stop_close_everything(make_door: Callable[..., Door]) -> None:
    door = make_door()
    with door.knock() as stranger:
        stranger.sendall(OPENING[:5])
        door.handshakes.stop()
        assert is_closed(stranger)
        with pytest.raises(ConnectionRefusedError):
            door.knock()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plaintext", "tls"])
def test_a_thousand_silent_connections_take_no_thread_and_keep_no_descriptor(
    make_cluster: Callable[..., Cluster], certs: Path, encrypted: bool
) -> None:
    tls = Tls(certs / "server.pem", certs / "server.key", certs / "ca.pem") if encrypted else None
    port = free_ports(1)
    make_cluster(shards=1, tls=tls, data_port=port)
    threads, descriptors = threading.active_count() + OTHERS, len(os.listdir("/proc/self/fd")) + OTHERS
    with silent(port, 1000, MOST_STRANGERS + 64) as strangers:
        until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 1000 + MOST_STRANGERS, "room to be made")
        assert threading.active_count() <= threads
        assert is_closed(strangers[0])
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "the end of all of them")


def test_where_no_thread_can_be_had_a_connection_is_closed_and_the_next_one_works(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=1, lease=120.0)  # nobody sends a heartbeat
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "data":
            raise RuntimeError("can't start new thread")
        start(thread)

    with joined(cluster.address, vector_job("job", "async", 16, 1)) as [worker]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            found = ticket(cluster.address, worker)
            with FrameClient(found.port, found.ticket) as client:
                assert not client.is_open()
        found = ticket(cluster.address, worker)
        with FrameClient(found.port, found.ticket) as client:
            assert client.is_open()
            assert client.ask(Kind.PUSH, push_parts(worker.message(0, 1, torch.ones(16).numpy().tobytes())))


def test_a_ticket_is_good_for_the_certificate_that_got_it_alone(certs: Path) -> None:
    tickets = Tickets()
    here, there = socket.socketpair()
    opener = Opener(Identity("job", 0, 1), "ipv4:127.0.0.1:1", (), {"x509_common_name": [b"worker"]})
    with ThreadPoolExecutor(1) as pool:
        shaking = pool.submit(lambda: server(certs).wrap_socket(there, server_side=True))
        with client(certs, "reader").wrap_socket(here, server_hostname="127.0.0.1"), shaking.result() as stranger:
            shown = tickets.issue(opener)
            assert tickets.redeem(shown, lambda opener: _is_of(stranger, opener)) is None
            assert tickets.redeem(shown, lambda _: True) is opener, "it stays good for the worker"
