"""A process that serves no more says so to probes, and ends itself: then whoever has started it starts it again."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ps_runtime.credentials import Tls
from ps_runtime.pools import Pool
from ps_server import cli
from ps_server.config import ServerConfig
from ps_server.ops import dev_certs
from ps_server.rpc import own_ports
from ps_server.server import Server
from tests.tools.cluster import until


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def make_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    servers = []

    def make(**settings: object) -> Server:
        servers.append(Server(ServerConfig(shard_count=1, index=0, health_port=0, **settings)))  # type: ignore[arg-type]
        assert servers[-1].wait_ready(20.0)
        return servers[-1]

    yield make  # type: ignore[misc]
    for server in servers:
        server.stop()


@pytest.mark.parametrize("secure", [False, True], ids=["plaintext", "tls"])
def test_live_is_what_answers_calls_and_takes_data_connections(
    make_server: Callable[..., Server], tmp_path: Path, secure: bool
) -> None:
    tls = None
    if secure:
        dev_certs.write(tmp_path)
        tls = Tls(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")
    server = make_server(tls=tls)
    assert server.health.port is not None
    assert ask(server.health.port.port, "/livez") == ask(server.health.port.port, "/readyz") == (200, "ok\n")


def test_pools_end_only_after_all_calls_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's thread hands a call to a pool that may have come before the server stopped: an exception would end it."""
    shutdown, ended, before = Pool.shutdown, list[str](), list[str]()

    def note(pool: Pool, wait: bool = True, **more: bool) -> None:
        ended.append(pool._name)
        shutdown(pool, wait, **more)

    monkeypatch.setattr(Pool, "shutdown", note)
    server = Server(ServerConfig(shard_count=1, index=0))
    server._stops.append(lambda: before.extend(ended))
    server.stop()
    of_calls = {"push", "pull", "feed", "heartbeat", "watch", "shard", "health"}
    assert of_calls <= {*ended}
    assert not of_calls & {*before}


@pytest.fixture
def gone() -> threading.Thread:
    """A thread that has ended."""
    thread = threading.Thread(name="gone", target=int)
    thread.start()
    thread.join()
    return thread


def test_a_server_whose_thread_that_hands_out_calls_has_ended_is_not_live(
    make_server: Callable[..., Server], gone: threading.Thread
) -> None:
    """As with an exception of `submit`, which grpcio does not survive."""
    server = make_server()
    assert server.health.port is not None
    names = [thread.name for thread in server._serving]
    assert len(names) == 3
    assert {"data-listener", "slow-peers"} < {*names}
    assert names[-1].endswith("(_serve)"), "grpcio's own"
    assert not server.ports.lost()
    server._serving.append(gone)
    for path in ("/livez", "/readyz"):
        until(lambda path=path: ask(server.health.port.port, path)[0] == 503, "an answer that is not of before")  # type: ignore[misc, union-attr]
        assert "has ended, without which nothing is served" in ask(server.health.port.port, path)[1]


def test_a_data_port_that_takes_no_connection_is_not_live(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_ports, "ANSWER_SECONDS", 0.5)
    leave = threading.Event()
    server = make_server()
    monkeypatch.setattr("ps_frames.listener.Handshakes._turn", lambda self: leave.wait(0.05))
    with socket.create_connection(("127.0.0.1", server.ports._data_port)):  # wakes the thread, which turns no more
        until(lambda: "the data port" in server.ports.trouble(), "what is wrong")
    monkeypatch.undo()


def test_a_process_that_serves_no_more_ends_itself(
    gone: threading.Thread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        assert code == 1
        raise Ended

    monkeypatch.setattr(cli, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cli.os, "_exit", end)

    with pytest.raises(Ended):
        cli._await_end(threading.Event(), own_ports.OwnPorts("127.0.0.1", 1, 0, None, "here", [gone]))
    assert "the thread 'gone' has ended, without which nothing is served: this process ends" in caplog.text
