"""The metrics port on loopback: a page that a browser shows on this machine learns nothing from it."""

from __future__ import annotations

import contextlib
import socket

import pytest
from prometheus_client import CollectorRegistry

from ps_runtime.arrivals import Arrivals, HostLimits
from ps_runtime.metrics import serve_metrics
from tests.tools.browsing import ask
from tests.tools.cluster import Cluster


@pytest.fixture(autouse=True)
def _pages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is made again without a pause: that of a cluster which has been shared for long takes long."""
    monkeypatch.setattr("ps_runtime.web.PAUSES_PER_PAGE", 0)


@pytest.mark.parametrize("path", ["/metrics", "/sd"])
def test_no_other_name_than_one_of_loopback_is_answered(shared: Cluster, path: str) -> None:
    """DNS rebinding: the page's own name is pointed at 127.0.0.1, and the browser sends that name."""
    address = shared.servers[0].metrics_address
    port = address.rpartition(":")[2]
    for host in (address, f"localhost:{port}", f"LOCALHOST.:{port}", f"[::1]:{port}"):
        assert ask(address, path, host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1"):
        code, _, body = ask(address, path, host)
        assert (code, b"this machine alone" in body) == (403, True)


@pytest.mark.parametrize("path", ["/metrics", "/sd", "/nothing"])
def test_it_is_only_to_be_read(shared: Cluster, path: str) -> None:
    address = shared.servers[0].metrics_address
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(address, path, method=method)[0] == 405
    code, headers, body = ask(address, path, method="HEAD")
    assert (code, body) == (404 if path == "/nothing" else 200, b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(("path", "method"), [("/metrics", "GET"), ("/", "GET"), ("/" + "x" * 70_000, "GET")])
def test_no_answer_tells_a_version(shared: Cluster, path: str, method: str) -> None:
    _, headers, _ = ask(shared.servers[0].metrics_address, path, method=method)
    assert headers["Server"] == "ps-torch"


def test_the_silent_are_closed_and_a_host_opens_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_runtime.web.SILENT_SECONDS", 0.2)
    monkeypatch.setattr("ps_runtime.web._Silent.timeout", 0.2)
    for said in (b"", b"GET /metrics HTTP/1.1\r\nHost: "):
        # One, and the next in a hundred seconds: however long this one takes.
        port, stop = serve_metrics("127.0.0.1", 0, CollectorRegistry(), limits=HostLimits(new=0.01))
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 20.0) as silent,
                contextlib.suppress(ConnectionError),  # it may be closed before this process says anything
            ):
                silent.sendall(said)
                assert silent.recv(1) == b""
            with pytest.raises(OSError, match=r".*"):
                ask(f"127.0.0.1:{port}", "/metrics")
        finally:
            stop()


def test_a_connection_for_which_there_is_no_file_left_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: socket.socket) -> socket.socket:
        raise OSError(24, "Too many open files")

    port, stop = serve_metrics("127.0.0.1", 0, CollectorRegistry(), limits=HostLimits(most=2))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "dup", refuse)
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port), 20.0) as refused:
                    assert refused.recv(1) == b""
        assert ask(f"127.0.0.1:{port}", "/metrics")[0] == 200
    finally:
        stop()


def test_what_a_host_may_open_comes_back_with_time() -> None:
    now = 0.0
    assert Arrivals(HostLimits(new=0.01)).comes("10.0.0.1"), "one at the least"
    arrivals = Arrivals(HostLimits(most=3, new=0.1), lambda: now)
    assert arrivals.comes("10.0.0.1")
    assert not arrivals.comes("10.0.0.1"), "ten seconds' worth is one"
    assert arrivals.comes("10.0.0.2")
    assert all(arrivals.comes("") for _ in range(9)), "this machine's own socket"
    now = 10.0
    assert arrivals.comes("10.0.0.1")
    now = 100.0
    assert arrivals.comes("10.0.0.1")
    now = 200.0
    assert not arrivals.comes("10.0.0.1"), "it has three"
    arrivals.goes("10.0.0.1")
    assert arrivals.comes("10.0.0.1")


def test_a_machine_is_one_host_by_all_its_addresses_of_version_6() -> None:
    arrivals = Arrivals(HostLimits(most=1))
    assert arrivals.comes("2001:db8::1")
    assert not arrivals.comes("2001:db8::2")
    assert arrivals.comes("2001:db8:0:1::1")
    assert arrivals.comes("::ffff:10.0.0.1")
    assert not arrivals.comes("10.0.0.1")


def test_beyond_loopback_each_name_is_answered() -> None:
    """There a scraper has the name that its configuration gives, and a browser learns no more than all others."""
    port, stop = serve_metrics("0.0.0.0", 0, CollectorRegistry())
    try:
        assert ask(f"127.0.0.1:{port}", "/metrics", "shard-0.example:9100")[0] == 200
    finally:
        stop()
