"""TLS on every port: who is let in, what is said when a file is wrong, and certificates that change while in use."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from cryptography import x509
from torch import nn

import ps_worker
from ps_frames.frames import TICKET_BYTES, Kind, frames_over, write_header
from ps_frames.listener import Tickets
from ps_frames.loans import Loans
from ps_frames.server import FrameSender, LentFrame
from ps_protocol.errors import InvalidRequest, Untrusted
from ps_runtime import reloading
from ps_runtime.credentials import Access, Tls, access, certificate_expiry, require_encryption
from ps_runtime.tls_contexts import client_context, server_context
from ps_server.ops import dev_certs, requests
from ps_server.rpc.health_client import is_serving
from tests.chaos.cluster import free_ports
from tests.tools.cluster import Cluster, until
from tests.tools.launching import ROOT, python

MakeCluster = Callable[..., Cluster]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates; in others/ those of another CA, in old/ some that have expired."""
    directory = tmp_path_factory.mktemp("certs")
    assert dev_certs.write(directory)
    assert dev_certs.write(directory / "others")
    assert dev_certs.write(directory / "old", life=timedelta(0))
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
    return access(certs / "worker.pem", certs / "worker.key", certs / "ca.pem")


def files(certs: Path) -> dict[str, str]:
    """As arguments of ps_worker.connect."""
    return {
        "tls_cert": str(certs / "worker.pem"),
        "tls_key": str(certs / "worker.key"),
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
    for transport in ("grpc", "tcp", "shm"):
        assert one_step(cluster, transport=transport, **files(certs)) == -1.0
    until(
        lambda: requests.fetch(cluster.address, client(certs))["shards"][0]["reachable"]
    )  # within 2 s, or it is said not to be
    assert is_serving(cluster.address, client(certs))


def test_large_buckets_cross_an_encrypted_data_connection_both_ways(make_cluster: MakeCluster, certs: Path) -> None:
    cluster = make_cluster(tls=server_tls(certs))

    def trained(transport: str) -> torch.Tensor:
        model = nn.Linear(1024, 2048)
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        nn.init.zeros_(model.bias)
        with cluster.connect("sync", job=transport, transport=transport, **files(certs)) as session:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            model, optimizer = session.prepare(model, optimizer, bucket_bytes=2**20)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(2, 1024)).square().mean().backward()
                optimizer.step()
        return model.weight.detach().clone()

    assert torch.equal(trained("tcp"), trained("grpc"))


def test_a_data_port_looks_at_no_ticket_of_who_shows_no_certificate(
    make_cluster: MakeCluster, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, looked_at = free_ports(1), list[bytes]()
    monkeypatch.setattr(Tickets, "redeem", lambda tickets, ticket, is_of: looked_at.append(ticket))
    make_cluster(shards=1, tls=server_tls(certs), data_port=port)
    good, others = client(certs).tls, client(certs / "others").tls
    for tls in (None, Tls(ca=certs / "ca.pem"), others):
        show(port, tls)
    assert not looked_at
    show(port, good)
    assert looked_at == [bytes(TICKET_BYTES)]


def show(port: int, tls: Tls | None) -> None:
    """Shows a data port these certificates, and then a ticket; returns when the connection has ended."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), 10.0) as plain,
        plain if tls is None else client_context(tls).wrap_socket(plain, server_hostname="127.0.0.1") as end,
    ):
        end.sendall(write_header(0, Kind.OPEN, TICKET_BYTES) + bytes(TICKET_BYTES))
        end.recv(1)


def test_neither_end_may_ask_for_a_new_handshake(certs: Path) -> None:
    for context in (server_context(server_tls(certs), "tests"), client_context(client(certs).tls)):
        assert context.options & ssl.OP_NO_RENEGOTIATION


def test_what_is_lent_to_an_encrypted_connection_arrives_as_it_was(certs: Path) -> None:
    """The sender gives way in the middle of what OpenSSL has begun, and goes on with a copy."""
    memory, loans = bytearray(b"x" * 2**24), Loans()
    ours, theirs = socket.socketpair()
    contexts = server_context(server_tls(certs), "tests"), client_context(client(certs).tls)

    @contextlib.contextmanager
    def lender() -> Iterator[LentFrame]:
        with loans.lend() as loan:
            yield [memoryview(memory)], loan

    with ThreadPoolExecutor(2) as pool:
        shaking = pool.submit(contexts[0].wrap_socket, ours, server_side=True)
        with contexts[1].wrap_socket(theirs, server_hostname="127.0.0.1") as reader:
            reader.settimeout(20.0)
            frames = frames_over(shaking.result(20.0))
            FrameSender(frames, pool, contextlib.nullcontext).lend(lender)
            try:
                read = reader.recv(1)
                loans.recall()
                memory[:] = b"y" * len(memory)
                while len(read) < len(memory):
                    read += reader.recv(2**20)
            finally:
                frames.abort()
    frames.close()
    assert set(read) == set(b"x")


@pytest.mark.parametrize(
    ("host", "cert", "ca", "says"),
    [
        ("127.0.0.1", None, None, "the server wants TLS"),
        ("127.0.0.1", None, "ca.pem", "asks for a client certificate"),
        ("127.0.0.1", "worker", "others/ca.pem", "not signed by the CA in .*others"),
        ("127.0.0.1", "others/worker", "ca.pem", "refuses the client"),
        ("127.0.0.2", "worker", "ca.pem", "not for the host name '127.0.0.2'"),
    ],
)
def test_what_the_two_ends_do_not_agree_on_is_said_in_one_line(
    encrypted: Cluster, certs: Path, host: str, cert: str | None, ca: str | None, says: str
) -> None:
    pair = (certs / f"{cert}.pem", certs / f"{cert}.key") if cert else (None, None)
    with pytest.raises(Untrusted, match=says) as caught:
        requests.fetch(f"{host}:{port_of(encrypted)}", access(*pair, certs / ca if ca else None))
    assert "\n" not in str(caught.value)


def test_the_command_says_what_is_wrong_in_one_line_and_nothing_else(encrypted: Cluster, certs: Path) -> None:
    """Not even what grpc writes about a handshake that fails."""
    words = [f"--tls-cert={certs}/worker.pem", f"--tls-key={certs}/worker.key", f"--tls-ca={certs}/others/ca.pem"]
    ended = python("-m", "ps_server", "status", "--server", f"127.0.0.1:{port_of(encrypted)}", *words)
    assert ended.returncode == 1
    assert ended.stderr.startswith("ps-server: ")
    assert "not signed by the CA" in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_client_that_wants_tls_is_told_of_a_server_that_has_none(shared: Cluster, certs: Path) -> None:
    with pytest.raises(Untrusted, match="speaks no TLS"):
        requests.fetch(shared.address, client(certs))


def test_a_worker_says_at_once_that_it_is_not_trusted(encrypted: Cluster) -> None:
    with pytest.raises(ps_worker.Unreachable, match="wants TLS"):
        one_step(encrypted, connect_timeout=60.0)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("old/server.pem", "old/server.key", "old/ca.pem"), "expired on"),
        (("server.pem", "worker.key", "ca.pem"), "does not belong to the certificate"),
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
    shutil.copytree(certs / "others", used, dirs_exist_ok=True)  # another CA, and everything it signed
    assert one_step(cluster, **files(certs / "others")) == -1.0
    assert requests.fetch(cluster.address, kept)["jobs"] == []
    with pytest.raises(Untrusted):
        requests.fetch(cluster.address, client(certs))


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
    trusting.load_cert_chain(certs / "worker.pem", certs / "worker.key")
    with urllib.request.urlopen(where, context=trusting, timeout=10) as answer:
        assert b"ps_tls 1.0" in answer.read()


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path from there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def hosts_in(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_keys_are_open_to_nobody_else_and_nothing_is_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    made = dev_certs.write(directory)
    assert made == ["server.pem", "worker.pem", "reader.pem", "admin.pem"]
    before = contents(directory)
    assert set(before) == {*made, *(name.replace(".pem", ".key") for name in made), "ca.pem", "ca.key", "roles"}
    secret = [path for path in directory.iterdir() if path.suffix != ".pem"]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    assert dev_certs.write(directory) == []
    assert contents(directory) == before


def test_certificates_can_be_split_by_who_needs_them(tmp_path: Path) -> None:
    hosts = ("coordinator", "shard-0")
    dev_certs.write(tmp_path, hosts, split=True)
    folders = {**dict.fromkeys(hosts, "server"), "worker": "worker", "reader": "reader", "admin": "admin"}
    assert {path.name for path in tmp_path.iterdir()} == {"ca", *folders}
    for folder, name in folders.items():
        held = tmp_path / folder
        assert [path.name for path in held.glob("*.key")] == [f"{name}.key"], "no other's key"
        assert (held / "roles").exists() == (name == "server")
        Tls(*(held / file for file in (f"{name}.pem", f"{name}.key", "ca.pem"))).load()
    assert dev_certs.write(tmp_path, hosts, split=True) == []


def test_no_server_can_pass_for_another(make_cluster: MakeCluster, tmp_path: Path) -> None:
    own, other = socket.gethostname(), "127.0.0.3"
    dev_certs.write(tmp_path, (own, other), split=True)
    held = tmp_path / own
    cluster = make_cluster(shards=1, host="0.0.0.0", tls=server_tls(held))
    reader = access(*(tmp_path / "reader" / name for name in ("reader.pem", "reader.key", "ca.pem")))
    until(lambda: requests.fetch(f"{own}:{port_of(cluster)}", reader)["shards"][0]["reachable"])
    with pytest.raises(Untrusted, match=f"not for the host name '{re.escape(other)}'"):
        requests.fetch(f"{other}:{port_of(cluster)}", reader)


@pytest.mark.parametrize("host", ["worker", "ca", "a/b", "..", "x" * 60])
def test_a_host_that_cannot_be_a_folder_of_its_own_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot name a certificate"):
        dev_certs.write(tmp_path / "certs", (host,), split=True)
    assert not (tmp_path / "certs").exists()


def test_a_host_that_is_new_gets_a_certificate_and_a_role(tmp_path: Path) -> None:
    dev_certs.write(tmp_path, ("a",), split=True)
    own = (tmp_path / "a" / "roles").read_text().replace("cn:ps-worker worker", "cn:ps-worker worker:mine")
    (tmp_path / "a" / "roles").write_text(own)
    assert dev_certs.write(tmp_path, ("a", "b"), split=True) == ["b/server.pem"]
    assert (tmp_path / "a" / "roles").read_text() == own + "cn:ps-server.b cluster\n"
    assert "cn:ps-server.a cluster\n" in (tmp_path / "b" / "roles").read_text()


# The start of a certificate lies 5 minutes back, so that one of 2 minutes is in the last third of its life at once, and
# one of an hour is not.
SHORT, LONG = timedelta(minutes=2), timedelta(hours=1)


def test_what_ends_within_a_third_of_its_life_is_renewed_by_the_same_ca(tmp_path: Path) -> None:
    dev_certs.write(tmp_path, ("a-host",), SHORT)
    with (tmp_path / "roles").open("a") as roles:
        roles.write("cn:ps-reader admin\n")
    before = contents(tmp_path)
    assert len(dev_certs.write(tmp_path, life=SHORT)) == 4
    after = contents(tmp_path)
    assert {name for name in after if after[name] == before[name]} == {"ca.pem", "ca.key", "roles"}
    assert {"a-host", "localhost", "ps-torch"} <= hosts_in(tmp_path / "server.pem"), "a renewal keeps the names"
    for name in ("server", "worker", "reader", "admin"):
        Tls(tmp_path / f"{name}.pem", tmp_path / f"{name}.key", tmp_path / "ca.pem").load()
        renewed = x509.load_pem_x509_certificate(after[f"{name}.pem"])
        renewed.verify_directly_issued_by(x509.load_pem_x509_certificate(after["ca.pem"]))


def test_what_does_not_end_soon_is_left_alone(tmp_path: Path) -> None:
    dev_certs.write(tmp_path, ("a-host",), LONG)
    before = contents(tmp_path)
    assert dev_certs.write(tmp_path, ("a-host",), LONG) == []
    (tmp_path / "worker.pem").unlink()
    assert dev_certs.write(tmp_path, ("a-host",), LONG) == ["worker.pem"]
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"worker.pem", "worker.key"}
    assert dev_certs.write(tmp_path, ("another",), LONG) == ["server.pem"]
    assert {"a-host", "another"} <= hosts_in(tmp_path / "server.pem")


def test_a_ca_that_ends_soon_is_replaced_with_all_that_it_signed(tmp_path: Path) -> None:
    dev_certs.write(tmp_path, life=SHORT)
    before = contents(tmp_path)
    assert len(dev_certs.write(tmp_path)) == 4, "the CA ends before a third of a year is over"
    assert {name for name, content in contents(tmp_path).items() if content == before[name]} == {"roles"}
    assert dev_certs.write(tmp_path) == []
    assert len(dev_certs.write(tmp_path, new_ca=True)) == 4


def test_a_ca_whose_key_was_taken_away_is_said_when_it_is_needed(tmp_path: Path) -> None:
    dev_certs.write(tmp_path)
    (tmp_path / "ca.key").unlink()
    assert dev_certs.write(tmp_path) == []
    (tmp_path / "admin.key").unlink()
    before = contents(tmp_path)
    with pytest.raises(InvalidRequest, match=r"ca.key is not there to sign admin.pem"):
        dev_certs.write(tmp_path)
    assert contents(tmp_path) == before


def test_certificates_of_another_ca_are_not_touched_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "server.pem").write_text("from our own CA")
    with pytest.raises(InvalidRequest, match=r"holds server.pem already, but no ca.pem"):
        dev_certs.write(tmp_path)
    assert contents(tmp_path) == {"server.pem": b"from our own CA"}
    assert len(dev_certs.write(tmp_path, new_ca=True)) == 4


def served_by(address: str, certs: Path) -> int:
    """The serial number of the certificate that a port shows."""
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    context.load_cert_chain(certs / "worker.pem", certs / "worker.key")
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"").serial_number


def expiry(address: str, certs: Path) -> dict[str, float]:
    """ps_certificate_expiry_timestamp_seconds of a process, by the file's name."""
    context = ssl.create_default_context(cafile=certs / "ca.pem")
    context.load_cert_chain(certs / "worker.pem", certs / "worker.key")
    context.check_hostname = False  # a worker's is for the name that Prometheus asks for, and not for its address
    with urllib.request.urlopen(f"https://{address}/metrics", context=context, timeout=10) as answer:
        page = answer.read().decode()
    found = re.findall(r'^ps_certificate_expiry_timestamp_seconds{file="([^"]+)"} (\S+)$', page, re.MULTILINE)
    return {Path(name).name: float(value) for name, value in found}


def test_a_renewed_certificate_is_used_without_a_restart(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    dev_certs.write(tmp_path, life=SHORT)
    cluster = make_cluster(shards=1, tls=server_tls(tmp_path))
    server = cluster.servers[0]
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with cluster.connect("sync", **files(tmp_path)) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        def ends() -> tuple[float, float]:
            """When the server's certificate ends, and the worker's."""
            return (
                expiry(server.metrics_address, tmp_path)["server.pem"],
                expiry(session.metrics_address, tmp_path)["worker.pem"],
            )

        step()
        old = served_by(cluster.address, tmp_path), served_by(server.metrics_address, tmp_path)
        assert old[0] == old[1] == x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes()).serial_number
        before = ends()
        dev_certs.write(tmp_path, life=2 * SHORT)
        new = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
        assert new.serial_number != old[0]
        assert served_by(cluster.address, tmp_path) == served_by(server.metrics_address, tmp_path) == new.serial_number
        after = ends()
        assert after[0] == new.not_valid_after_utc.timestamp()
        assert before[0] < after[0]
        assert before[1] < after[1]
        step()
    assert model.weight.item() == -2.0, "the worker's connection went on"


def test_every_process_tells_when_what_it_trusts_and_shows_ends(
    make_cluster: MakeCluster, certs: Path, tmp_path: Path
) -> None:
    cluster = make_cluster(shards=2, tls=server_tls(certs))
    assert len({server.metrics_address for server in cluster.servers}) == 2
    for server in cluster.servers:
        ends = expiry(server.metrics_address, certs)
        for name in ("server.pem", "ca.pem"):
            held = x509.load_pem_x509_certificate((certs / name).read_bytes())
            assert ends.pop(name) == held.not_valid_after_utc.timestamp()
        assert ends == {}


def test_certificates_that_cannot_be_used_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "CHECK_SECONDS", 0.0)
    dev_certs.write(tmp_path)
    ends = certificate_expiry(server_tls(tmp_path))
    before = ends()
    shutil.copy(tmp_path / "admin.pem", tmp_path / "server.pem")
    assert ends() == before, "its key is another's, so the one from before is in force"


def test_the_command_stays_and_makes_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ps_server", "dev-certs", str(tmp_path), "--every", "0.05"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        assert running.stdout is not None
        assert "made server.pem, worker.pem, reader.pem, admin.pem" in running.stdout.readline()
        (tmp_path / "reader.pem").unlink()
        assert any("made reader.pem" in line for line in running.stdout)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
    assert (tmp_path / "reader.pem").exists()


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
