"""The deployment files: what they say, read anywhere; and a real cluster of containers, where an engine answers."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
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
import yaml

from tests.chaos.cluster import free_ports
from tests.tools.cases import cases
from tests.tools.launching import python

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = "docker-compose.yml"
OVERLAYS = GPU, GRAFANA = ("docker-compose.gpu.yml", "docker-compose.grafana.yml")
SHARDS = ("shard-0", "shard-1")
SERVERS = ("coordinator", *SHARDS)
TABLES = ("clicks", "movielens")
WORKERS = ("worker", *TABLES, "rl-trainer")
READERS = ("serve", "rl-rollout")  # of a job's weights
PROBED = ("page", "serve", "rl-pool")  # and servers
UNPROBED = (*WORKERS, "rl-rollout", "certs", "certs-renewal", "admin")
ALL_OURS = (*SERVERS, *PROBED, *UNPROBED)
DASHBOARD = ROOT / "deploy/grafana/dashboards/parameter-server.json"
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def read(name: str) -> Any:
    """A YAML file with every ${VARIABLE:-default} at its default."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / name).read_text()))


def services() -> dict[str, dict[str, Any]]:
    """Every service that any of the files describes on its own."""
    overlays = {name: service for file in OVERLAYS for name, service in read(file)["services"].items()}
    return overlays | read(COMPOSE)["services"]


# -- what the files say: no engine needed ----------------------------------------------------------------------------

PROMETHEUS = "deploy/prometheus/prometheus.yml"
PROVISIONING = "deploy/grafana/provisioning"
HOME = "/var/lib/grafana-dashboards"
SD = "https://coordinator:9100/sd"
HEALTHY = {"condition": "service_healthy"}
STARTED = {"condition": "service_started"}


PRIVATE = "size=1m,mode=0700,uid=10001,gid=10001"


def certificates(of: str) -> dict[str, str]:
    return {"PS_TLS_CERT": f"/certs/{of}.pem", "PS_TLS_KEY": f"/certs/{of}.key", "PS_TLS_CA": "/certs/ca.pem"}


# What each of some services says, or a whole file without any: see `differs`.
PROMISES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    # What waits for servers itself starts at once: Compose gives up for good where a server is slow to be healthy. A
    # probe in exec form needs no shell in the image.
    (COMPOSE, WORKERS, {"depends_on": dict.fromkeys(SERVERS, STARTED), "command": ["--connect-timeout=600"]}),
    (COMPOSE, SHARDS, {"depends_on": {"coordinator": STARTED}}),
    (COMPOSE, ("coordinator",), {"depends_on": {"certs": {"condition": "service_completed_successfully"}}}),
    (COMPOSE, ("page", "prometheus"), {"depends_on": {"coordinator": HEALTHY}}),
    (COMPOSE, (*SERVERS, "page", "prometheus"), {"healthcheck": {"test": ["CMD"]}}),
    # A start on a busy machine is no failure.
    (COMPOSE, (*SERVERS, *PROBED), {"healthcheck": {"start_period": "600s", "interval": "15s"}}),
    # Two workers by default; a container name could not be scaled.
    (COMPOSE, WORKERS, {"entrypoint": ["ps-worker"], "deploy": {"replicas": 2}, "container_name": None}),
    # Jobs with tables are started when they are asked for. The folder of data is read, and may be missing.
    (COMPOSE, TABLES, {"profiles": ["tables"]}),
    (COMPOSE, ("worker",), {"profiles": None}),
    # Who follows a job's weights has a reader's certificate, and waits for the job itself.
    (COMPOSE, ("serve",), {"profiles": ["serve"], "ports": ["127.0.0.1:8000:8000"], "command": ["--job=default"]}),
    (COMPOSE, ("rl-pool", "rl-trainer", "rl-rollout"), {"profiles": ["rl"], "networks": ["data"]}),
    (COMPOSE, ("rl-rollout",), {"deploy": {"replicas": 2}, "ports": [], "healthcheck": {"disable": True}}),
    (COMPOSE, ("rl-trainer", "rl-rollout"), {"command": ["--job=rl", "--pool=rl-pool:8100"]}),
    (COMPOSE, READERS, {"environment": {**certificates("reader"), "PS_TOKENS": None}, "networks": ["data"]}),
    (COMPOSE, READERS, {"volumes": ["reader-certs:/certs:ro"], "depends_on": {"coordinator": STARTED}}),
    (
        COMPOSE,
        ("movielens",),
        {"volumes": ["movielens:/movielens:ro"], "command": ["--data=/movielens"], "restart": "no"},
    ),
    # One service builds the image, and none pulls it.
    (COMPOSE, ("certs",), {"build": {"dockerfile": "deploy/Dockerfile"}}),
    (COMPOSE, tuple(sorted({*ALL_OURS, "prometheus"} - {"certs"})), {"build": None}),
    (COMPOSE, ALL_OURS, {"pull_policy": "never", "image": "ps-torch:local"}),
    # Each process sees its own certificates and no other's; shards and workers share memory.
    (COMPOSE, SERVERS, {"environment": {**certificates("server"), "PS_TOKENS": "/certs/roles"}}),
    *((COMPOSE, (name,), {"volumes": [f"{name}-certs:/certs:ro"]}) for name in SERVERS),
    (COMPOSE, WORKERS, {"environment": {**certificates("worker"), "PS_TOKENS": None}}),
    (COMPOSE, WORKERS, {"volumes": ["worker-certs:/certs:ro"]}),
    # The page shows what a reader may see, on a network without workers: it asks no browser who it is.
    (COMPOSE, ("page",), {"environment": {**certificates("reader"), "PS_TOKENS": None}, "networks": ["page"]}),
    (COMPOSE, ("page",), {"volumes": ["reader-certs:/certs:ro"], "ports": ["127.0.0.1:8470:8470"]}),
    (COMPOSE, ("coordinator",), {"networks": ["page"]}),
    # An admin's key is in no container that runs by itself.
    (COMPOSE, ("admin",), {"environment": certificates("admin"), "profiles": ["admin"]}),
    (COMPOSE, ("admin",), {"volumes": ["admin-certs:/certs:ro"]}),
    # Certificates are renewed while the cluster runs, by containers without a network.
    (COMPOSE, ("certs-renewal",), {"command": ["--every=43200"], "restart": "unless-stopped"}),
    (COMPOSE, ("certs", "certs-renewal"), {"network_mode": "none", "networks": None}),
    # Two networks: Grafana is out of the workers' reach. Connections are files.
    (COMPOSE, (*SERVERS, *WORKERS, "admin"), {"networks": ["data"]}),
    (COMPOSE, ("prometheus",), {"networks": ["data", "monitoring"]}),
    (GRAFANA, ("grafana",), {"networks": ["monitoring"]}),
    (COMPOSE, (*SERVERS, "prometheus"), {"ulimits": {"nofile": {"hard": 16384}}}),
    (PROMETHEUS, (), {"rule_files": ["alerts.yml"]}),
    (COMPOSE, ("prometheus",), {"volumes": ["reader-certs:/certs:ro"]}),
    (COMPOSE, (*SHARDS, *WORKERS), {"volumes": ["shared:/shared"], "environment": {"PS_SHARED_DIRECTORY": "/shared"}}),
    # The shared directory is memory that only our user enters. It holds sockets: a file there could be cut short.
    (COMPOSE, (), {"volumes": {"shared": {"driver_opts": {"type": "tmpfs", "o": PRIVATE}}}}),
    # The overlay for GPUs changes workers alone, and gives them an image of their own.
    (GPU, (), {"services": dict.fromkeys({*services()} - {"worker"})}),
    (GPU, ("worker",), {"image": "ps-torch:local-cuda", "build": {"args": {"TORCH": re.compile("torch.*")}}}),
    (GPU, ("worker",), {"deploy": {"resources": {"reservations": {"devices": [{"capabilities": ["gpu"]}]}}}}),
    # Prometheus asks the coordinator for the processes, and keeps our label `job`.
    (COMPOSE, ("coordinator",), {"command": ["--metrics-port=9100"]}),
    (COMPOSE, ("prometheus",), {"image": re.compile(r"prom/prometheus:v\d+\.\d+\.\d+")}),
    (COMPOSE, ("prometheus",), {"volumes": ["./deploy/prometheus:/etc/prometheus:ro"]}),
    (COMPOSE, ("prometheus",), {"command": ["--config.file=/etc/prometheus/prometheus.yml"]}),
    (PROMETHEUS, (), {"scrape_configs": [{"static_configs": [{"targets": ["coordinator:9100"]}]}]}),
    (PROMETHEUS, (), {"scrape_configs": [{"http_sd_configs": [{"url": SD}], "honor_labels": True}]}),
    # Grafana finds the dashboard and Prometheus.
    (GRAFANA, ("grafana",), {"volumes": [f"./{PROVISIONING}:/etc/grafana/provisioning:ro"]}),
    (GRAFANA, ("grafana",), {"volumes": [f"./{DASHBOARD.parent.relative_to(ROOT)}:{HOME}:ro"]}),
    (
        GRAFANA,
        ("grafana",),
        {"environment": {"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{HOME}/{DASHBOARD.name}"}},
    ),
    (f"{PROVISIONING}/dashboards/dashboards.yml", (), {"providers": [{"options": {"path": HOME}}]}),
    (f"{PROVISIONING}/datasources/prometheus.yml", (), {"datasources": [{"url": "http://prometheus:9090"}]}),
]
LOCKED_DOWN = {
    "user": re.compile(r"[1-9]\d*:\d+"),  # not root
    "read_only": True,
    "init": True,
    "cap_drop": ["ALL"],
    "cap_add": None,
    "security_opt": ["no-new-privileges:true"],
    "mem_limit": re.compile(r"\d+[mg]"),
    "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
    "privileged": None,
}


def differs(there: Any, expected: Any) -> bool:
    """Whether a document lacks something: a mapping a key with its value (None: no such key), a list an element."""
    if isinstance(expected, dict):
        return not isinstance(there, dict) or any(differs(there.get(key), value) for key, value in expected.items())
    if isinstance(expected, list):
        return not isinstance(there, list) or any(all(differs(each, one) for each in there) for one in expected)
    return not expected.fullmatch(there) if isinstance(expected, re.Pattern) else bool(there != expected)


@pytest.mark.parametrize(
    ("file", "names", "expected"), PROMISES, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_the_files_say_what_is_promised(file: str, names: tuple[str, ...], expected: dict[str, Any]) -> None:
    document = read(file)
    assert [name for name in names if differs(document["services"][name], expected)] == []
    assert names or not differs(document, expected)


@pytest.mark.parametrize("name", sorted(services()))
def test_every_container_is_locked_down_and_publishes_ports_on_this_machine_only(name: str) -> None:
    service = services()[name]
    assert {key for key, value in LOCKED_DOWN.items() if differs(service, {key: value})} == set()
    assert service["pids_limit"] <= 2048
    assert "cpus" in service or name not in services(), "limited, or a setting"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (DOCKERFILE, r'^ENTRYPOINT \["ps-server"\]$'),  # exec form: the program hears SIGTERM
        (DOCKERFILE, "PYTHONUNBUFFERED=1"),
        (DOCKERFILE, r"^USER 10001:10001\n\Z"),  # at the end, and so that of the image; compose's is the same
        ((ROOT / COMPOSE).read_text(), r'^  user: "10001:10001"$'),
        (DOCKERFILE, r"/src\[examples\]"),
        ((ROOT / "pyproject.toml").read_text(), r"(?s)^examples = \[.*^ps-server = .*^ps-worker = "),
    ],
    ids=["entry", "output", "user", "compose's user", "extra", "commands"],
)
def test_the_image_runs_our_commands_as_a_user(text: str, pattern: str) -> None:
    assert re.search(pattern, text, re.MULTILINE)


def held_by(name: str) -> set[str]:
    """The volumes of certificates that a container sees."""
    volumes = read(COMPOSE)["services"][name].get("volumes", [])
    return {volume.split(":")[0] for volume in volumes if volume.split(":")[0] == "ca" or "-certs:" in volume}


@pytest.mark.parametrize("name", ["certs", "certs-renewal"])
def test_certificates_are_made_for_every_holder(name: str, tmp_path: Path) -> None:
    from ps_server.cli import parser
    from ps_server.ops import dev_certs

    service = read(COMPOSE)["services"][name]
    given = parser().read(service["command"])
    assert given.host == list(SERVERS)
    dev_certs.write(tmp_path, given.host, split=given.split)
    made = {path.name for path in tmp_path.iterdir()}
    folders = {
        volume.split(":")[1].removeprefix("/new-certs/") for volume in service["volumes"] if "new-certs" in volume
    }
    assert folders == made, "each in a volume of its own"
    holders = {holder for holder in read(COMPOSE)["services"] if held_by(holder)} - {"certs", "certs-renewal"}
    assert holders == {*SERVERS, *WORKERS, *READERS, "admin", "page", "prometheus"}
    for holder in holders:
        assert len(held_by(holder)) == 1, f"{holder} sees its own key and no other"
        assert "ca" not in held_by(holder), "the CA's key could make any certificate"
    made_by_image = re.findall(r"/new-certs/([\w-]+)", DOCKERFILE.replace("shard-%g", "shard-0 /new-certs/shard-1"))
    assert made <= set(made_by_image), "a volume takes its owner from the image"


def test_nothing_is_killed_while_it_stops() -> None:
    from ps_launch.worker_launch import STOP_SECONDS
    from ps_server.rpc.grpc_port import STOP_GRACE_SECONDS

    takers = dict.fromkeys(SERVERS, 5 * STOP_GRACE_SECONDS) | dict.fromkeys(WORKERS, STOP_SECONDS)
    for name, takes in takers.items():
        assert int(read(COMPOSE)["services"][name]["stop_grace_period"].removesuffix("s")) > takes


def test_the_servers_commands_are_ours() -> None:
    from ps_server.cli import parser

    found = read(COMPOSE)["services"]
    arguments = {name: parser().read(found[name]["command"]) for name in SERVERS}
    assert arguments["coordinator"].command == "coordinator"
    shards = [name for name in SERVERS if arguments[name].command == "shard"]
    assert [arguments[name].index for name in shards] == list(range(arguments["coordinator"].shards))
    for name, given in arguments.items():
        assert given.advertise == f"{name}:{given.port}", "the others reach it by its service's name"
        assert given.host == given.metrics_host == "0.0.0.0"
        assert found[name]["healthcheck"]["test"][-2:] == [str(given.health_port), "/readyz"]
    for name in shards:
        assert arguments[name].coordinator == arguments["coordinator"].advertise


@functools.cache
def help_of(script: str) -> str:
    return python(script, "--help", folder=ROOT).stdout


@pytest.mark.parametrize(
    ("file", "name"),
    cases([(COMPOSE, "worker")], [*((COMPOSE, name) for name in WORKERS if name != "worker"), (GPU, "worker")]),
)
def test_the_workers_command_is_ours(file: str, name: str) -> None:
    from ps_worker.cli import parser

    command = read(file)["services"][name]["command"]
    given = parser().read(command)
    assert given.server == read(COMPOSE)["services"]["coordinator"]["command"][4].removeprefix("--advertise=")
    assert given.elastic
    script = next(word for word in command if word.endswith(".py"))
    assert (ROOT / script).is_file()
    options = [word.split("=")[0] for word in command[command.index(script) + 1 :]]
    told = help_of(script)
    assert all(option in told for option in options), f"{script} knows {options}"


@pytest.mark.parametrize("name", [*READERS, "rl-pool"])
def test_the_commands_of_what_follows_a_job_are_ours(name: str) -> None:
    service = read(COMPOSE)["services"][name]
    python_, script = service["entrypoint"]
    assert python_ == "python"
    assert (ROOT / script).is_file()
    given = dict(word.split("=") for word in service["command"])
    told = help_of(script)
    assert all(option in told for option in given), f"{script} knows {[*given]}"
    if name in READERS:
        assert f"--advertise={given['--server']}" in read(COMPOSE)["services"]["coordinator"]["command"]
    if "healthcheck" in service and "test" in service["healthcheck"]:
        assert service["healthcheck"]["test"][-2] == given["--port"]


def must_end_before(name: str) -> set[str]:
    """The services that have to be there before one starts, by its `depends_on` and theirs."""
    direct = set(read(COMPOSE)["services"][name].get("depends_on", ()))
    return direct.union(*map(must_end_before, direct))


@pytest.mark.parametrize("name", ALL_OURS)
def test_the_image_is_built_before_a_service_needs_it(name: str) -> None:
    """A first run: Compose 1.29 looks for the images one service after the other, in the order of `depends_on`. What it
    neither finds nor builds it pulls: it knows no `pull_policy`. Compose v2 builds all that can be, and then looks."""
    described = read(COMPOSE)["services"]
    builders = {other for other in ALL_OURS if "build" in described[other]}
    assert all(described[builder]["image"] == described[name]["image"] for builder in builders)
    assert name in builders or builders & must_end_before(name)


def test_only_the_page_and_whom_it_asks_are_on_its_network() -> None:
    described = read(COMPOSE)["services"]
    assert {name for name in described if "page" in described[name].get("networks", [])} == {"page", "coordinator"}
    assert described["page"]["networks"] == ["page"]


def test_the_pages_command_is_ours() -> None:
    from ps_server.cli import parser

    page, coordinator = (read(COMPOSE)["services"][name] for name in ("page", "coordinator"))
    given = parser().read(page["command"])
    assert given.command == "page"
    assert f"--advertise={given.server}" in coordinator["command"]
    assert page["ports"] == [f"127.0.0.1:{given.page_port}:{given.page_port}"], "it prints the address to open"
    assert page["healthcheck"]["test"][-2:] == [str(given.page_port), "/"]


def probes(name: str, port: int) -> bool:
    """Whether the probe of a container is content with a port of this machine, in an environment like a container's."""
    kind, program, *words = read(COMPOSE)["services"][name]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    words[-2] = str(port)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env={})
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("name", SERVERS)
def test_a_servers_probe_is_content_when_the_server_serves_and_not_before(name: str) -> None:
    from ps_server.ops.health_port import HealthPort

    known = threading.Event()
    port = HealthPort("127.0.0.1", 0, known.is_set)
    try:
        assert not probes(name, port.port), "the coordinator does not know it yet"
        known.set()
        assert probes(name, port.port)
        port.is_ending = True
        assert not probes(name, port.port)
    finally:
        port.stop()
    assert not probes(name, port.port), "nothing listens"


def test_the_pages_probe_is_content_with_the_page() -> None:
    from ps_runtime.web import serve
    from ps_server.ops.page import page_site
    from ps_server.rpc.views import Position

    def unasked(position: Position) -> None:
        raise AssertionError(f"a probe asks for the files alone, not for a view at {position}")

    port, stop = serve("127.0.0.1", 0, page_site(unasked).app, "the page", "--page-port")
    try:
        assert probes("page", port)
    finally:
        stop()
    assert not probes("page", port)


def test_a_probe_imports_next_to_nothing() -> None:
    """It runs for as long as a container does: with what `ps-server health` imports, three took a sixth of a core."""
    words = read(COMPOSE)["services"]["shard-0"]["healthcheck"]["test"][2:]
    where = words.index("-c") + 1
    listed = "import socket, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, *words[: where - 1], "-c", listed], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert re.findall(r"^ *(?:import|from) (.*)$", words[where], re.MULTILINE) == ["socket, sys"]
    assert not {"site", "grpc", "ssl", "urllib", "http", "email", "ps_server"} & set(loaded)


@pytest.mark.parametrize("file", [COMPOSE, *OVERLAYS])
def test_every_file_that_is_named_exists(file: str) -> None:
    described = read(file)
    for service in described["services"].values():
        if "build" in service:
            assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            for argument in service["build"]["args"]:
                assert re.search(rf"^ARG .*\b{argument}=", DOCKERFILE, re.MULTILINE)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).is_dir() if source.startswith(".") else source in described["volumes"]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            assert (ROOT / line[1:]).exists(), f"{line} lets nothing in"


# -- a cluster of containers -----------------------------------------------------------------------------------------


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
    name, port = f"ps-test-{os.getpid()}-{len(compose)}", free_ports(4)
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
        "PS_PUBLISH_PROMETHEUS_PORT": str(port),
    }
    found = Deployment(compose, name, settings["PS_IMAGE"], port, {**os.environ, **settings})
    try:
        found("up", "--build", "-d")
        yield found
    finally:
        found("--profile", "tables", "down", "--volumes", check=False)
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
