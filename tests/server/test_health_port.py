"""The health port: what a probe learns, and that it learns nothing else."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps_runtime.credentials import Tls
from ps_server.config import ServerConfig
from ps_server.ops import dev_certs
from ps_server.server import Server
from tests.tools.cluster import until


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """The status and the text of an answer, asked for without a certificate."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@contextmanager
def serving(config: ServerConfig) -> Iterator[tuple[Server, int]]:
    server = Server(config)
    try:
        assert server.health.port is not None
        yield server, server.health.port.port
    finally:
        server.stop()


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    dev_certs.write(tmp_path)
    return Tls(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")


def test_a_probe_without_a_certificate_learns_health_alone_of_a_server_with_mutual_tls(tls: Tls) -> None:
    with serving(ServerConfig(shard_count=1, tls=tls, health_port=0)) as (_, port):
        assert ask(port, "/livez") == ask(port, "/readyz") == (200, "ok\n")
        assert ask(port, "/readyz", "HEAD") == (200, "")
        assert ask(port, "/readyz", "POST")[0] == 405
        for other in ("/metrics", "/sd", "/", "/livez/.."):
            assert ask(port, other) == (404, "here are /livez and /readyz\n")


def test_a_shard_is_ready_when_the_coordinator_knows_it_and_not_before() -> None:
    with serving(ServerConfig(shard_count=1, health_port=0)) as (coordinator, _):
        host, _, number = coordinator.address.rpartition(":")
        known = ServerConfig(index=0, coordinator=f"{host}:{number}", health_port=0)
        with serving(known) as (_, port):
            until(lambda: ask(port, "/readyz") == (200, "ok\n"), "readiness")
    unknown = ServerConfig(index=0, coordinator=f"{host}:{number}", health_port=0)
    with serving(unknown) as (_, port):
        assert ask(port, "/livez") == (200, "ok\n")
        assert ask(port, "/readyz") == (503, "the coordinator does not know this shard yet\n")


def test_a_server_that_is_told_to_end_is_live_and_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ServerConfig(shard_count=1, checkpoint_dir=tmp_path, health_port=0)) as (server, port):
        entered, leave = threading.Event(), threading.Event()
        assert server.coordinator is not None

        def slow_drain(seconds: float) -> None:
            entered.set()
            leave.wait(seconds)

        monkeypatch.setattr(server.coordinator, "drain", slow_drain)
        draining = threading.Thread(target=server.drain, args=(30.0,))
        draining.start()
        try:
            assert entered.wait(10)
            assert ask(port, "/readyz") == (503, "this server is ending\n")
            assert ask(port, "/livez") == (200, "ok\n")
        finally:
            leave.set()
            draining.join()


def test_without_the_setting_there_is_no_such_port() -> None:
    server = Server(ServerConfig(shard_count=1))
    try:
        assert server.health.port is None
    finally:
        server.stop()
