"""A cluster of containers, as docker-compose.yml starts it, where an engine answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import free_ports
from tests.tools.compose_files import COMPOSE, DOCKERFILE, SERVERS, TABLES, UNPROBED, read
from tests.tools.launching import ROOT


@dataclass(frozen=True)
class Deployment:
    """The shipped compose file, under a project name, an image tag and ports of its own."""

    compose: list[str]
    project: str
    image: str
    prometheus_port: int
    environment: dict[str, str]

    def __call__(self, *words: str, check: bool = True) -> str:
        """What a compose command prints."""
        done = subprocess.run(
            [*self.compose, "-f", COMPOSE, *words],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=ENGINE_SECONDS,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def containers(self) -> list[tuple[str, dict[str, Any]]]:
        """What the engine says of each container, with its service's name; stopped ones too."""
        ids = self("--profile", "tables", "ps", "-a", "-q").split()
        told = subprocess.run(["docker", "inspect", *ids], capture_output=True, text=True, check=True).stdout
        return [(it["Config"]["Labels"]["com.docker.compose.service"], it) for it in json.loads(told)]

    def workers(self) -> dict[int, int]:
        """Clock of each live worker, by rank: from `ps-server status --json` in the coordinator's container."""
        status = self("exec", "-T", "coordinator", "ps-server", "status", "--server", "coordinator:50051", "--json")
        return {worker["rank"]: worker["clock"] for job in json.loads(status)["jobs"] for worker in job["workers"]}

    def all_advance(self) -> bool:
        """Whether every live worker finishes steps."""
        before = self.workers()
        return eventually(lambda: all(clock > before.get(rank, 0) + 2 for rank, clock in self.workers().items()))

    def prometheus(self, path: str) -> Any:
        """The data of an answer of Prometheus' API; nothing while it does not answer."""
        try:
            url = f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except (urllib.error.URLError, ConnectionError):
            return {}

    def series(self, query: str) -> list[dict[str, str]]:
        """The labels of what a query finds."""
        found = self.prometheus(f"query?query={urllib.parse.quote(query)}")
        return [it["metric"] for it in found.get("result", [])]

    def targets(self) -> list[tuple[str, str]]:
        """(role, health) of every process of ours that Prometheus scrapes."""
        found = self.prometheus("targets?state=active").get("activeTargets", [])
        return sorted((it["labels"]["role"], it["health"]) for it in found if "role" in it["labels"])


PROFILES = ("tables", "rl", "serve", "relay")
ENGINE_SECONDS = 900  # an engine without an overlay file system copies 1.5 GB for every layer and container


def eventually(holds: Callable[[], bool], seconds: float = 120) -> bool:
    """Waits for what other machines bring about; False if they did not."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not holds():
        if time.monotonic() > end:
            return False
        pause.wait(1)
    return True


def answers(*words: str) -> bool:
    """Whether there is such a command, and it succeeds."""
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, capture_output=True, timeout=ENGINE_SECONDS).returncode == 0


def says_anything(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether a port of this machine answers a request with so much as one byte."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
        try:
            with context.wrap_socket(plain) if context else plain as connection:
                http2 = context is not None and connection.selected_alpn_protocol() == "h2"  # type: ignore[attr-defined]
                connection.sendall(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
                    if http2
                    else b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
                )
                return connection.recv(1) not in (b"", b"\x15")  # an alert of TLS is no answer
        except (ssl.SSLError, ConnectionError):
            return False


def installed_composes() -> list[list[str]]:
    """The commands of Compose that are here, v2 first."""
    return [it for it in (["docker", "compose"], ["docker-compose"]) if answers(*it, "version")]


@contextmanager
def deployed(compose: list[str]) -> Iterator[Deployment]:
    """The first run on a machine that has no image of ours: one command builds it and starts everything."""
    base = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", DOCKERFILE, re.MULTILINE)[0]
    for image in (base, read(COMPOSE)["services"]["prometheus"]["image"]):
        if not answers("docker", "image", "inspect", image) and not answers("docker", "pull", "-q", image):
            pytest.skip(f"the image {image} is not here and cannot be pulled")
    name, port = f"ps-test-{os.getpid()}-{len(compose)}", free_ports(6)
    settings = {
        "COMPOSE_PROJECT_NAME": name,
        "COMPOSE_HTTP_TIMEOUT": str(ENGINE_SECONDS),  # Compose 1.29 gives up after 60 s
        "PS_IMAGE": f"{name}:test",
        "PS_JOB": "compose",
        "PS_MODE": "ssp:4",
        "PS_STEPS": "100000",  # more than anybody waits for: the tests end it
        "PS_PUBLISH_PORT": str(port + 1),
        "PS_PUBLISH_METRICS_PORT": str(port + 2),
        "PS_PUBLISH_PAGE_PORT": str(port + 3),
        "PS_PUBLISH_SERVE_PORT": str(port + 4),
        "PS_PUBLISH_RELAY_PORT": str(port + 5),
        "PS_PUBLISH_PROMETHEUS_PORT": str(port),
    }
    found = Deployment(compose, name, settings["PS_IMAGE"], port, {**os.environ, **settings})
    try:
        found("up", "--build", "-d")
        yield found
    finally:
        profiles = (word for name in PROFILES for word in ("--profile", name))
        found(*profiles, "down", "--volumes", check=False)
        answers("docker", "image", "rm", "-f", found.image)


@pytest.fixture(scope="module")
def composes() -> list[list[str]]:
    if not answers("docker", "info"):
        pytest.skip("no Docker engine answers")
    found = installed_composes()
    if not found:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    return found


@pytest.fixture(scope="module")
def deployment(composes: list[list[str]]) -> Iterator[Deployment]:
    with deployed(composes[0]) as found:
        yield found


@pytest.mark.docker
@pytest.mark.timeout(2 * ENGINE_SECONDS)
def test_the_first_run_works_with_the_other_compose_too(composes: list[list[str]]) -> None:
    """The tests below are of a first run too, with the one that is preferred."""
    if len(composes) < 2:
        pytest.skip(f"only `{' '.join(composes[0])}` is installed")
    with deployed(composes[1]) as other:
        assert eventually(lambda: len(other.workers()) == 2), other("logs", "--tail=50")
        assert other.all_advance()


@pytest.mark.docker
@pytest.mark.timeout(2 * ENGINE_SECONDS)
class TestDeployment:
    """In this order, on one deployment, because building and starting one takes minutes."""

    def test_servers_become_healthy_and_nobody_is_root(self, deployment: Deployment) -> None:
        def healthy() -> bool:
            found = [it["State"]["Health"]["Status"] for name, it in deployment.containers() if name not in UNPROBED]
            return found == ["healthy"] * (len(SERVERS) + 2)  # the page and Prometheus, too

        assert eventually(healthy), deployment("ps")
        for name, container in deployment.containers():
            mounts = {it["Destination"]: it["RW"] for it in container["Mounts"]}
            assert name.startswith("certs") or mounts["/certs"] is False, "only these can change the certificates"
            assert ("/shared" in mounts) == (name == "worker" or name.startswith("shard"))
        for name in (*SERVERS, "worker", "page", "prometheus"):
            assert int(deployment("exec", "-T", name, "id", "-u")) > 0

    def test_two_workers_train(self, deployment: Deployment) -> None:
        assert eventually(lambda: len(deployment.workers()) == 2), deployment("logs", "--tail=50")
        assert deployment.all_advance()

    def test_the_page_is_at_the_address_that_it_prints(self, deployment: Deployment) -> None:
        said = deployment("logs", "--no-color", "page")
        [address] = set(re.findall(r"the page of coordinator:50051 is at (http://127\.0\.0\.1:\d+/)", said))
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/html")
        with urllib.request.urlopen(f"{address}api/view", timeout=30) as answer:
            assert [job["job"] for job in json.load(answer)["jobs"]] == ["compose"]
        reach = "import socket; socket.create_connection(('page', {}), timeout=5)"
        command = ("exec", "-T", "{}", "python", "-c", reach.format(address.rpartition(":")[2].strip("/")))
        deployment(*(word.format("coordinator") for word in command))
        with pytest.raises(AssertionError, match=r"Name or service not known|name resolution"):
            deployment(*(word.format("worker") for word in command))

    def test_prometheus_scrapes_every_process(self, deployment: Deployment) -> None:
        everyone = [("coordinator", "up"), ("shard", "up"), ("shard", "up"), ("worker", "up"), ("worker", "up")]
        assert eventually(lambda: deployment.targets() == everyone), deployment.targets()
        assert eventually(lambda: len(deployment.series("ps_push_total{job='compose', role='shard'}")) >= 2)
        steps = "ps_worker_steps_total{job='compose', role='worker'}"
        assert eventually(lambda: {it["rank"] for it in deployment.series(steps)} == {"0", "1"})
        ends = "ps_certificate_expiry_timestamp_seconds{file!='/certs/ca.pem'} > time() + 300 * 86400"
        assert eventually(lambda: len(deployment.series(ends)) == len(everyone)), deployment.series(ends)

    def test_a_workers_certificate_ends_no_job(self, deployment: Deployment) -> None:
        end = ("ps-server", "end", "--server", "coordinator:50051", "--job", "compose")
        deployment("exec", "-T", "worker", *end, check=False)
        assert deployment.all_advance(), "the job goes on"
        status = ("run", "--rm", "-T", "admin", "status", "--server", "coordinator:50051")
        assert "compose" in deployment(*status), "an admin's certificate is known"

    def test_nobody_has_the_key_of_another(self, deployment: Deployment) -> None:
        for name, key in (
            ("coordinator", "server"),
            ("shard-1", "server"),
            ("worker", "worker"),
            ("page", "reader"),
            ("prometheus", "reader"),
        ):
            keys = [word for word in deployment("exec", "-T", name, "ls", "/certs").split() if word.endswith(".key")]
            assert keys == [f"{key}.key"]

    def test_buckets_go_through_memory_that_containers_share(self, deployment: Deployment) -> None:
        shared = "grpc_server_handled_total{grpc_method='Exchange', grpc_code='OK', role='shard'}"
        assert eventually(lambda: len(deployment.series(shared)) == 2), deployment("logs", "--tail=50", "worker")

    def test_jobs_with_tables_are_a_second_profile(self, deployment: Deployment) -> None:
        deployment("--profile", "tables", "up", "-d")

        def ends() -> dict[str, list[int]]:
            states = [(name, it["State"]) for name, it in deployment.containers() if name in TABLES]
            return {
                name: [it["ExitCode"] for each, it in states if each == name and it["Status"] == "exited"]
                for name in TABLES
            }

        assert eventually(lambda: ends() == {"clicks": [0, 0], "movielens": [1, 1]}, 600), ends()
        assert re.search(
            r"AUC 0\.7\d+ on new samples", deployment("--profile", "tables", "logs", "--no-color", "clicks")
        )
        assert "/movielens has neither ml-100k.inter, " in deployment(
            "--profile", "tables", "logs", "--no-color", "movielens"
        )
        assert deployment.all_advance(), "the first job goes on"

    def test_rollout_processes_of_a_third_profile_come_and_go(self, deployment: Deployment, tmp_path: Path) -> None:
        # More steps than anybody waits for. A second file replaces a command as a whole.
        longer = [*read(COMPOSE)["services"]["rl-trainer"]["command"], "--steps=100000"]
        overlay = tmp_path / "longer.yml"
        overlay.write_text(json.dumps({"services": {"rl-trainer": {"command": longer}}}))
        rl = ("-f", str(overlay), "--profile", "rl")
        asks = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8100/counts').read().decode())"

        def used() -> int:
            """How many groups of texts the trainers have learnt from."""
            counts = json.loads(deployment(*rl, "exec", "-T", "rl-pool", "python", "-c", asks))
            return sum(counts["used"].values())

        def begun() -> int:
            said = deployment(*rl, "logs", "--no-color", "rl-rollout")
            return len(re.findall(r"rollout-\d+ begins with version \d+", said))

        def goes_on() -> bool:
            before = used()
            return eventually(lambda: used() > before + 8)

        try:
            deployment(*rl, "up", "-d")
            assert eventually(lambda: begun() == 2), deployment(*rl, "logs", "--tail=50")
            assert goes_on()
            [killed, _] = deployment(*rl, "ps", "-q", "rl-rollout").split()
            assert answers("docker", "kill", killed)
            assert goes_on(), "with the other one"
            deployment(*rl, "up", "-d", "--scale", "rl-rollout=3")
            assert eventually(lambda: begun() == 4), deployment(*rl, "logs", "--tail=50", "rl-rollout")
            assert goes_on()
        finally:
            deployment(*rl, "rm", "--stop", "--force", "rl-rollout", "rl-trainer", "rl-pool")
        assert deployment.all_advance(), "the first job goes on"

    def test_the_model_is_served_through_a_relay(self, deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(deployment.environment, "PS_FEED_SERVER", "relay:50051")
        profiles = ("--profile", "relay", "--profile", "serve")
        address = f"http://127.0.0.1:{deployment.environment['PS_PUBLISH_SERVE_PORT']}"

        def version() -> int:
            """The version in an answer to a request; -1: there is none yet."""
            body, kind = b'{"prompt": "def ", "length": 8}', {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{address}/generate", body, kind)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.load(answer)["text"].startswith("def ")
                    return int(answer.headers["x-model-version"])
            except OSError:
                return -1

        def rises() -> bool:
            before = version()
            return eventually(lambda: version() > before + 2)

        try:
            deployment(*profiles, "up", "-d")
            assert eventually(lambda: version() >= 0), deployment(*profiles, "logs", "--tail=50", "serve", "relay")
            assert rises()
            deployment(*profiles, "kill", "relay")
            last = version()
            assert last >= 0, "the last weights are served"
            assert version() == last, "there is no other way to newer ones"
            deployment(*profiles, "up", "-d")
            assert rises()
        finally:
            deployment(*profiles, "rm", "--stop", "--force", "serve", "relay")
        assert deployment.all_advance()

    @pytest.mark.parametrize("setting", ["PS_PUBLISH_PORT", "PS_PUBLISH_METRICS_PORT"])
    def test_nobody_gets_in_without_a_certificate(self, deployment: Deployment, setting: str) -> None:
        port = int(deployment.environment[setting])
        assert not says_anything(port, None), "plaintext"
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        stranger.set_alpn_protocols(["h2", "http/1.1"])
        assert not says_anything(port, stranger), "TLS without a certificate"

    def test_workers_come_and_go_by_scaling(self, deployment: Deployment) -> None:
        deployment("up", "-d", "--scale", "worker=4")
        assert eventually(lambda: len(deployment.workers()) == 4), deployment("logs", "--tail=50", "worker")
        assert eventually(lambda: deployment.targets().count(("worker", "up")) == 4), deployment.targets()
        assert deployment.all_advance()
        deployment("up", "-d", "--scale", "worker=1")
        assert eventually(lambda: len(deployment.workers()) == 1)
        assert eventually(lambda: [role for role, _ in deployment.targets()].count("worker") == 1)
        assert deployment.all_advance()
        said = deployment("logs", "--no-color", "coordinator")
        left = [line for line in said.splitlines() if "job compose: " in line and " leaves" in line]
        assert len(left) == 3, left  # three workers said good-bye; another job's may have before
        assert "no sign of life" not in said, "and nobody had to wait for a lease to run out"

    def test_stopping_is_clean(self, deployment: Deployment) -> None:
        deployment("stop")
        for name, container in deployment.containers():
            state = container["State"]
            # A script that SIGTERM ends has the code 128 + 15, also when it has left the job as it should.
            assert state["ExitCode"] == {"worker": 143, "movielens": 1}.get(name, 0), f"{name}: {state}"
            assert not state["OOMKilled"]
        said = deployment("logs", "--no-color")
        assert "Traceback" not in said
        for shard in ("shard 0", "shard 1"):
            assert f"job compose: {shard} has given its memory back" in said, "the job ended with its last worker"
