"""TLS on every port: who is let in, what is said when a file is wrong, and certificates that change while in use."""

from __future__ import annotations

import shutil
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, Untrusted
from ps_runtime import reloading
from ps_runtime.credentials import Access, Tls, access, require_encryption
from ps_server.ops import dev_certs, status
from tests.tools.cluster import Cluster
from tests.tools.launching import python

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates; in others/ those of another CA, in old/ some that have expired."""
    directory = tmp_path_factory.mktemp("certs")
    assert dev_certs.write(directory)
    assert dev_certs.write(directory / "others")
    assert dev_certs.write(directory / "old", days=0)
    return directory


@pytest.fixture(scope="module")
def encrypted(certs: Path) -> Iterator[Cluster]:
    """A server on every address of this machine, with TLS."""
    running = Cluster(shards=1, tls=server_tls(certs), host="0.0.0.0")
    yield running
    running.stop()


def server_tls(certs: Path) -> Tls:
    return Tls(certs / "server.pem", certs / "server.key", certs / "ca.pem")


def client(certs: Path) -> Access:
    return access(certs / "client.pem", certs / "client.key", certs / "ca.pem")


def files(certs: Path) -> dict[str, str]:
    """As arguments of ps_worker.connect."""
    return {
        "tls_cert": str(certs / "client.pem"),
        "tls_key": str(certs / "client.key"),
        "tls_ca": str(certs / "ca.pem"),
    }


def port_of(cluster: Cluster) -> str:
    return cluster.address.rpartition(":")[2]


def one_step(cluster: Cluster, **more: object) -> float:
    """Trains a scalar by one step of 1; returns where it ended."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with cluster.connect("sync", **more) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return model.weight.item()


def test_a_worker_with_a_certificate_trains_over_mutual_tls(make_cluster: MakeCluster, certs: Path) -> None:
    cluster = make_cluster(tls=server_tls(certs))
    for transport in ("grpc", "shm"):
        assert one_step(cluster, transport=transport, **files(certs)) == -1.0
    assert status.fetch(cluster.address, client(certs))["shards"][0]["reachable"]
    assert status.is_serving(cluster.address, client(certs))


@pytest.mark.parametrize(
    ("host", "cert", "ca", "says"),
    [
        ("127.0.0.1", None, None, "the server wants TLS"),
        ("127.0.0.1", None, "ca.pem", "asks for a client certificate"),
        ("127.0.0.1", "client", "others/ca.pem", "not signed by the CA in .*others"),
        ("127.0.0.1", "others/client", "ca.pem", "refuses the client"),
        ("127.0.0.2", "client", "ca.pem", "not for the host name '127.0.0.2'"),
    ],
)
def test_what_the_two_ends_do_not_agree_on_is_said_in_one_line(
    encrypted: Cluster, certs: Path, host: str, cert: str | None, ca: str | None, says: str
) -> None:
    pair = (certs / f"{cert}.pem", certs / f"{cert}.key") if cert else (None, None)
    with pytest.raises(Untrusted, match=says) as caught:
        status.fetch(f"{host}:{port_of(encrypted)}", access(*pair, certs / ca if ca else None))
    assert "\n" not in str(caught.value)


def test_the_command_says_what_is_wrong_in_one_line_and_nothing_else(encrypted: Cluster, certs: Path) -> None:
    """Not even what grpc writes about a handshake that fails."""
    words = [f"--tls-cert={certs}/client.pem", f"--tls-key={certs}/client.key", f"--tls-ca={certs}/others/ca.pem"]
    ended = python("-m", "ps_server", "status", "--server", f"127.0.0.1:{port_of(encrypted)}", *words)
    assert ended.returncode == 1
    assert ended.stderr.startswith("ps-server: ")
    assert "not signed by the CA" in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_client_that_wants_tls_is_told_of_a_server_that_has_none(shared: Cluster, certs: Path) -> None:
    with pytest.raises(Untrusted, match="speaks no TLS"):
        status.fetch(shared.address, client(certs))


def test_a_worker_says_at_once_that_it_is_not_trusted(encrypted: Cluster) -> None:
    with pytest.raises(ps_worker.Unreachable, match="wants TLS"):
        one_step(encrypted, connect_timeout=60.0)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("old/server.pem", "old/server.key", "old/ca.pem"), "expired on"),
        (("server.pem", "client.key", "ca.pem"), "does not belong to the certificate"),
        (("server.pem", "nothing.key", "ca.pem"), "cannot read .*nothing.key"),
        (("server.key", "server.key"), "holds no certificate"),
        (("server.pem", "server.pem"), "holds no private key"),
        (("server.pem",), "needs its key"),
    ],
)
def test_files_that_do_not_fit_are_refused_at_the_start(certs: Path, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        Tls(*(certs / name for name in names)).load()
    assert "\n" not in str(caught.value)


def test_certificates_change_under_a_running_cluster(
    make_cluster: MakeCluster, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    used = tmp_path / "used"
    shutil.copytree(certs, used)
    cluster = make_cluster(shards=1, tls=server_tls(used))
    kept = client(used)
    assert one_step(cluster, **files(used)) == -1.0
    for name in dev_certs.FILES:  # another CA, and everything it signed
        shutil.copy(certs / "others" / name, used / name)
    assert one_step(cluster, **files(certs / "others")) == -1.0
    assert status.fetch(cluster.address, kept)["jobs"] == []
    with pytest.raises(Untrusted):
        status.fetch(cluster.address, client(certs))


def test_files_that_are_half_replaced_leave_what_was_there(
    make_cluster: MakeCluster, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    used = tmp_path / "used"
    shutil.copytree(certs, used)
    cluster = make_cluster(shards=1, tls=server_tls(used))
    (used / "server.key").write_text("half a ke")
    assert one_step(cluster, **files(certs)) == -1.0


def test_metrics_are_served_over_tls_to_who_has_a_certificate(encrypted: Cluster, certs: Path) -> None:
    where = f"https://{encrypted.servers[0].metrics_address}/metrics"
    trusting = ssl.create_default_context(cafile=certs / "ca.pem")
    with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|eof"):
        urllib.request.urlopen(where, context=trusting, timeout=10).read()
    trusting.load_cert_chain(certs / "client.pem", certs / "client.key")
    with urllib.request.urlopen(where, context=trusting, timeout=10) as answer:
        assert b"ps_tls 1.0" in answer.read()


def test_keys_are_open_to_nobody_else_and_nothing_is_overwritten(tmp_path: Path) -> None:
    assert dev_certs.write(tmp_path / "certs")
    before = {path: path.read_bytes() for path in (tmp_path / "certs").iterdir()}
    assert {path.name for path in before} == set(dev_certs.FILES)
    assert {path.stat().st_mode & 0o777 for path in before if path.suffix != ".pem"} == {0o600}
    assert not dev_certs.write(tmp_path / "certs")
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "certs" / "ca.pem").unlink()
    with pytest.raises(InvalidRequest, match="already; remove all"):
        dev_certs.write(tmp_path / "certs")


def test_certificates_can_be_split_by_who_needs_them(tmp_path: Path) -> None:
    assert dev_certs.write(tmp_path, split=True)
    for holder, names in dev_certs.HOLDERS.items():
        assert {path.name for path in (tmp_path / holder).iterdir()} == set(names)
        assert [name for name in names if name.endswith(".key")] == [f"{holder}.key"], "no other's key"
        Tls(*(tmp_path / holder / name for name in (f"{holder}.pem", f"{holder}.key", "ca.pem"))).load()
    assert not dev_certs.write(tmp_path, split=True)
    (tmp_path / "client" / "ca.pem").unlink()
    with pytest.raises(InvalidRequest, match="already; remove all"):
        dev_certs.write(tmp_path, split=True)


def test_what_is_secret_is_not_in_a_repr(certs: Path) -> None:
    loaded = server_tls(certs).load()
    assert b"PRIVATE KEY" in (loaded.key or b"")
    assert "PRIVATE KEY" not in repr(loaded)
    assert "server.key" not in repr(server_tls(certs))


HERE = ["127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"]
ELSEWHERE = ["0.0.0.0", "::", "192.0.2.1", "parameter-server", ""]


@pytest.mark.parametrize("host", HERE + ELSEWHERE)
def test_plaintext_beyond_this_machine_has_to_be_said(host: str) -> None:
    def has_to_be_said(encrypted: bool = False, allowed: bool = False) -> bool:
        return require_encryption(host, encrypted=encrypted, allowed=allowed, what="this server", flag="--insecure")

    if host in HERE:
        assert not has_to_be_said()
    else:
        with pytest.raises(InvalidRequest, match="--insecure"):
            has_to_be_said()
        assert has_to_be_said(allowed=True)
        assert not has_to_be_said(encrypted=True)


def test_insecure_is_said_in_the_log_and_in_a_metric(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(shards=1, host="0.0.0.0", insecure=True)
    assert "plaintext beyond this machine" in caplog.text
    with urllib.request.urlopen(f"http://{cluster.servers[0].metrics_address}/metrics", timeout=10) as answer:
        assert b"ps_insecure 1.0" in answer.read()
