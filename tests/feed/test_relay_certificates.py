"""A relay has a certificate of its own: a reader to its upstream, a server to its readers, and nothing beyond that."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load

import ps_torch as ps
from ps_protocol.errors import Forbidden, InvalidRequest
from ps_runtime.credentials import Tls, access
from ps_server.config import ServerConfig
from ps_server.ops import dev_certs, requests
from tests.tools.cluster import Cluster, until
from tests.tools.followed_trainer import FollowedTrainer, relay

NAME = "127.0.0.1"
MakeCluster = Callable[..., Cluster]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_relay_that_is_named_gets_a_certificate_with_the_role_of_a_reader(tmp_path: Path) -> None:
    assert "relay.pem" not in dev_certs.write(tmp_path)
    assert dev_certs.write(tmp_path, relays=("near", "far")) == ["relay.pem"]
    assert "cn:ps-relay reader\n" in (tmp_path / "roles").read_text()
    before = contents(tmp_path)
    assert dev_certs.write(tmp_path, relays=("near", "far")) == []
    assert contents(tmp_path) == before
    assert dev_certs.write(tmp_path, relays=("a third",)) == ["relay.pem"]


def test_relays_have_folders_of_their_own_and_know_the_roles_of_their_readers(tmp_path: Path) -> None:
    dev_certs.write(tmp_path, ("coordinator",), split=True, relays=("relay", "far"))
    for name in ("relay", "far"):
        held = tmp_path / name
        assert {path.name for path in held.iterdir()} == {"relay.pem", "relay.key", "ca.pem", "roles"}
        Tls(*(held / file for file in ("relay.pem", "relay.key", "ca.pem"))).load()
    for name in ("coordinator", "relay"):
        roles = (tmp_path / name / "roles").read_text()
        assert {"cn:ps-relay.relay reader", "cn:ps-relay.far reader", "cn:ps-reader reader"} <= {*roles.splitlines()}


@pytest.mark.parametrize("name", ["reader", "ca", "a/b", "..", "x" * 60, "coordinator"])
def test_a_relay_whose_folder_another_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"--relay {name}: with --split, that cannot name a certificate"):
        dev_certs.write(tmp_path / "certs", ("coordinator",), split=True, relays=(name,))
    assert not (tmp_path / "certs").exists()


def config(folder: Path, name: str) -> ServerConfig:
    files = (folder / file for file in (f"{name}.pem", f"{name}.key", "ca.pem"))
    return ServerConfig(tls=Tls(*files), tokens=folder / "roles")


def arguments(folder: Path, name: str) -> dict[str, str]:
    files = {"tls_cert": f"{name}.pem", "tls_key": f"{name}.key", "tls_ca": "ca.pem"}
    return {key: str(folder / file) for key, file in files.items()}


def check_download(address: str, reader: dict[str, str], trainer: FollowedTrainer, version: int) -> None:
    """The version is a file over HTTPS for those who have a certificate, whole and in parts."""
    context = ssl.create_default_context(cafile=reader["tls_ca"])
    context.load_cert_chain(reader["tls_cert"], reader["tls_key"])
    host, port = address.split(":")

    def got(**headers: str) -> tuple[int, str | None, bytes]:
        with contextlib.closing(http.client.HTTPSConnection(host, int(port), context=context, timeout=30)) as asked:
            asked.request("GET", "/jobs/default/latest.safetensors", headers=headers)
            answer = asked.getresponse()
            return answer.status, answer.getheader("x-model-version"), answer.read()

    status, _, body = until(lambda: found if (found := got())[1] == str(version) else None, "the version")
    assert status == 200
    assert trainer.has(load(body), version)
    assert got(Range="bytes=100-3099") == (206, str(version), body[100:3100])


def test_a_relay_reads_by_its_certificate_and_serves_readers_and_may_do_nothing_else(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """As docker-compose.yml and deploy/kubernetes have it: mutual TLS, and roles by certificates."""
    dev_certs.write(tmp_path, ("localhost",), split=True, relays=("relay", "far"))
    own = config(tmp_path / "localhost", "server")
    cluster = make_cluster(tls=own.tls, tokens=own.tokens)
    worker, reader = (arguments(tmp_path / role, role) for role in ("worker", "reader"))
    with (
        relay(cluster.address, config(tmp_path / "relay", "relay")) as near,
        relay(near.address, config(tmp_path / "far", "relay"), http_port=0) as far,
        ps.connect(cluster.address, mode="sync", **worker) as session,
        ps.subscribe(far.address, **reader) as feed,
    ):
        trainer = FollowedTrainer(session)
        last = trainer.steps(2)
        assert trainer.has(feed.wait_for(last).state_dict(), last)
        check_download(far.http_address, reader, trainer, last)
        with pytest.raises(Forbidden), ps.subscribe(far.address, **worker) as other:
            other.wait_for(0)
        held = tmp_path / "relay"
        shown = access(held / "relay.pem", held / "relay.key", held / "ca.pem")
        assert requests.fetch(cluster.address, shown)["shards"]
        with pytest.raises(Forbidden):
            requests.end_job(cluster.address, "default", shown)
