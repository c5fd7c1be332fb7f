"""The page without a browser: what is served, to whom, and with which headers. tests/browser looks at what it shows."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_server.ops.dev_certs import write
from ps_server.ops.page import FILES
from ps_server.server import Server
from tests.tools.browsing import ask
from tests.tools.cluster import Cluster, until
from tests.tools.launching import Commands

OWN = ["/", "/page.js", "/page.css", "/favicon.svg", "/uPlot.iife.min.js", "/uPlot.min.css", "/uPlot.LICENSE.txt"]


def metrics_of(cluster: Cluster) -> str:
    return cluster.servers[0].metrics_address


def test_everything_that_the_page_needs_is_served_with_headers_that_let_nothing_else_in(shared: Cluster) -> None:
    kinds = {}
    for path in [*OWN, "/api/view"]:
        code, headers, body = ask(metrics_of(shared), path)
        assert (code, len(body)) == (200, int(headers["Content-Length"]))
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert not any(name.startswith("Access-Control") for name in headers), "no other site may read it"
        kinds[path] = headers["Content-Type"]
    assert kinds["/"].startswith("text/html")
    assert kinds["/page.js"].startswith("text/javascript")
    assert kinds["/api/view"] == "application/json"
    assert b"The MIT License" in ask(metrics_of(shared), "/uPlot.LICENSE.txt")[2]
    assert {f"/{path.name}" for path in FILES.iterdir()} == {*OWN[1:], "/index.html"}


def test_the_page_names_nothing_outside(shared: Cluster) -> None:
    for path in ("/", "/page.js", "/page.css"):
        text = ask(metrics_of(shared), path)[2].decode()
        assert [line for line in text.splitlines() if "http" in line and "www.w3.org" not in line] == []
        assert "innerHTML" not in text
        assert " style=" not in text


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "localhost", "LOCALHOST:{port}", "[::1]:{port}"]
)
def test_the_page_answers_to_the_names_of_loopback(shared: Cluster, host: str) -> None:
    address = metrics_of(shared)
    assert ask(address, "/", host.format(port=address.rpartition(":")[2]))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1:{port}"],
)
def test_a_name_that_was_pointed_here_reads_nothing(shared: Cluster, host: str) -> None:
    """DNS rebinding: a page of another site asks for its own name, which leads here by now."""
    address = metrics_of(shared)
    for path in ("/", "/api/view"):
        code, _, body = ask(address, path, host.format(port=address.rpartition(":")[2]))
        assert code == 403
        assert b"this machine alone" in body


def test_the_page_is_only_read(shared: Cluster) -> None:
    address = metrics_of(shared)
    assert [ask(address, "/api/view", method=method)[0] for method in ("POST", "PUT", "DELETE")] == [405] * 3
    code, headers, body = ask(address, "/", method="HEAD")
    assert (code, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "query",
    ["process=x", "next_sample=-1", "last_event=" + "9" * 17, "job=a", "process=", "&".join("a=1" for _ in range(20))],
)
def test_a_question_that_is_none_is_refused(shared: Cluster, query: str) -> None:
    code, headers, body = ask(metrics_of(shared), f"/api/view?{query}")
    assert code == 400
    assert headers["Content-Type"].startswith("text/plain")
    assert len(body) < 200


def test_only_a_coordinator_on_loopback_has_the_page(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    assert ask(cluster.servers[1].metrics_address, "/")[0] == 404, "a shard"
    cluster.stop()
    open_to_all = make_cluster(metrics_host="0.0.0.0", metrics_insecure=True)
    server: Server = open_to_all.servers[0]
    port = server.metrics_address.rpartition(":")[2]
    assert [ask(f"127.0.0.1:{port}", path)[0] for path in ("/metrics", "/", "/api/view")] == [200, 404, 404]


def train(cluster: Cluster, job: str) -> Any:
    session = cluster.connect("ssp:2", job=job)
    model = nn.Linear(8, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        session.log(loss=float("nan"))
    return session


def test_the_view_is_json_that_brings_what_is_new(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    address = metrics_of(cluster)

    def view(**told: int) -> dict[str, Any]:
        query = "&".join(f"{name}={value}" for name, value in told.items())
        code, _, body = ask(address, f"/api/view?{query}")
        assert code == 200
        found: dict[str, Any] = json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        return found

    session = train(cluster, "j")
    # The job is there before its worker is.
    first = until(lambda: (seen := view())["jobs"] and seen["jobs"][0]["state"] == "training" and seen)
    assert first["jobs"][0]["job"] == "j"
    first = until(lambda: (seen := view())["history"]["series"] and seen)
    series = {(each["name"], each["rank"]): each["values"] for each in first["history"]["series"]}
    assert len(series["steps_per_second", None]) == len(first["history"]["times"])
    count = first["history"]["first_sample"] + len(first["history"]["times"])
    later = until(
        lambda: (
            (seen := view(process=first["process"], next_sample=count, last_event=first["events"][-1]["number"]))
            and seen["history"]["times"]
            and seen
        )
    )
    assert (later["history"]["first_sample"], later["events"]) == (count, [])
    # A logged NaN comes as a word, so that the page can show it; as a sample it is a gap.
    told = until(lambda: (seen := view())["status"]["jobs"][0]["workers"][0]["figures"] and seen)
    assert told["status"]["jobs"][0]["workers"][0]["figures"]["values"][0]["last"] == "NaN"
    session.close()


# -- ps-server page ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ps_server_page_shows_a_cluster_that_asks_for_certificates(tmp_path: Path, commands: Commands) -> None:
    certs = tmp_path / "certs"
    write(certs, ["127.0.0.1"])
    tls = [
        word
        for name in ("cert", "key")
        for word in (f"--tls-{name}", str(certs / f"server.{'pem' if name == 'cert' else name}"))
    ]
    tls += ["--tls-ca", str(certs / "ca.pem")]
    ports = ["--port", "0", "--metrics-port", "0"]
    up = commands.start("-m", "ps_server", "up", "--shards", "1", *ports, "--tokens", str(certs / "roles"), *tls)
    [server] = up.says(r"ready at (\S+) \(1 shard")
    reader = [
        "--tls-cert",
        str(certs / "reader.pem"),
        "--tls-key",
        str(certs / "reader.key"),
        "--tls-ca",
        str(certs / "ca.pem"),
    ]
    page = commands.start("-m", "ps_server", "page", "--server", server, "--page-port", "0", *reader)
    [address] = page.says(rf"the page of {server} is at http://(127\.0\.0\.1:\d+)/")
    assert ask(address, "/")[0] == 200
    assert ask(address, "/api/view", "evil.example")[0] == 403
    seen = json.loads(ask(address, "/api/view")[2])
    assert seen["status"]["coordinator"]["address"] == server
    assert up.end(signal.SIGTERM) == 0
    code, _, body = ask(address, "/api/view")
    assert code == 502
    assert b"does not answer" in body
    page.process.send_signal(signal.SIGINT)
    assert page.process.wait(30) == 130


@pytest.mark.long
def test_ps_server_page_in_a_container_answers_only_where_it_is_called_loopback(
    shared: Cluster, commands: Commands
) -> None:
    """In a container it listens beyond loopback, and is told to stop by SIGTERM."""
    where = ("-m", "ps_server", "page", "--server", shared.address, "--page-port", "0", "--page-host", "0.0.0.0")
    refused = commands.start(*where)
    assert refused.process.wait(120) == 1
    assert "the page on 0.0.0.0 would be open" in refused.err
    assert "--page-insecure" in refused.err
    page = commands.start(*where, "--page-insecure")
    [address] = page.says(rf"the page of {shared.address} is at http://(127\.0\.0\.1:\d+)/")
    assert [ask(address, "/", host)[0] for host in ("", "localhost", "page:8470")] == [200, 200, 403]
    page.process.send_signal(signal.SIGTERM)
    assert page.process.wait(30) == 0


def test_ps_server_page_says_at_once_what_is_wrong(commands: Commands) -> None:
    page = commands.start("-m", "ps_server", "page", "--server", "127.0.0.1:1", "--page-port", "0")
    assert page.process.wait(120) == 1
    assert "coordinator at 127.0.0.1:1 does not answer" in page.err
