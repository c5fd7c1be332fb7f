"""What the files of a deployment with containers say: read anywhere, no engine is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cases import cases
from tests.tools.compose_files import (
    ALL_OURS,
    COMPOSE,
    DOCKERFILE,
    GPU,
    GRAFANA,
    OVERLAYS,
    PROBED,
    READERS,
    RELAY,
    SERVERS,
    SHARDS,
    TABLES,
    WORKERS,
    read,
)
from tests.tools.launching import ROOT, run_here

DASHBOARD = ROOT / "deploy/grafana/dashboards/parameter-server.json"


def services() -> dict[str, dict[str, Any]]:
    """Every service that any of the files describes on its own."""
    overlays = {name: service for file in OVERLAYS for name, service in read(file)["services"].items()}
    return overlays | read(COMPOSE)["services"]


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
    # A relay is a reader of the servers, and has callers of its own, whose roles it knows.
    (COMPOSE, (RELAY,), {"profiles": ["relay"], "networks": ["data"], "depends_on": {"coordinator": STARTED}}),
    (COMPOSE, (RELAY,), {"environment": {**certificates("relay"), "PS_TOKENS": "/certs/roles"}}),
    (COMPOSE, (RELAY,), {"volumes": ["relay-certs:/certs:ro"], "ports": ["127.0.0.1:8090:8090"]}),
    (PROMETHEUS, (), {"scrape_configs": [{"dns_sd_configs": [{"names": ["relay"], "port": 9100}]}]}),
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
    assert given.relay == [RELAY]
    dev_certs.write(tmp_path, given.host, split=given.split, relays=given.relay)
    made = {path.name for path in tmp_path.iterdir()}
    folders = {
        volume.split(":")[1].removeprefix("/new-certs/") for volume in service["volumes"] if "new-certs" in volume
    }
    assert folders == made, "each in a volume of its own"
    holders = {holder for holder in read(COMPOSE)["services"] if held_by(holder)} - {"certs", "certs-renewal"}
    assert holders == {*SERVERS, RELAY, *WORKERS, *READERS, "admin", "page", "prometheus"}
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


def test_the_relays_command_is_ours() -> None:
    from ps_server.cli import parser

    service = read(COMPOSE)["services"][RELAY]
    given = parser().read(service["command"])
    assert given.command == "relay"
    assert f"--advertise={given.upstream}" in read(COMPOSE)["services"]["coordinator"]["command"]
    assert given.advertise == f"{RELAY}:{given.port}"
    assert given.host == given.metrics_host == given.http_host == "0.0.0.0"
    assert service["ports"] == [f"127.0.0.1:{given.http_port}:{given.http_port}"]
    assert service["healthcheck"]["test"][-2:] == [str(given.health_port), "/readyz"]
    text = (ROOT / COMPOSE).read_text()
    assert f"PS_FEED_SERVER={given.advertise}" in text, "what readers are given to ask the relay"
    assert text.count("--server=${PS_FEED_SERVER:-coordinator:50051}") == len(READERS)


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What a script says of its flags. It runs in this process: another one takes seconds to import torch."""

    def said(script: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run_here(monkeypatch, ROOT / script, "--help")
        assert not ended.value.code
        return capsys.readouterr().out

    return said


@pytest.mark.parametrize(
    ("file", "name"),
    cases([(COMPOSE, "worker")], [*((COMPOSE, name) for name in WORKERS if name != "worker"), (GPU, "worker")]),
)
def test_the_workers_command_is_ours(file: str, name: str, help_of: Callable[[str], str]) -> None:
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
def test_the_commands_of_what_follows_a_job_are_ours(name: str, help_of: Callable[[str], str]) -> None:
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
