"""What every process tells Prometheus: the promised names, with the right numbers, valid to Prometheus' own checker."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torch.utils.data import DataLoader

import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_protocol.figures import PHASES
from ps_protocol.versions import VERSION
from ps_runtime.credentials import Tls
from ps_runtime.metrics import serve_metrics
from ps_runtime.version import version
from ps_runtime.web import PAUSES_PER_PAGE, serve
from ps_server.config import ServerConfig
from ps_server.ops import requests, status_text
from ps_server.ops.dev_certs import write
from ps_server.server import Server
from ps_server.shard.metrics import STALENESS_BUCKETS
from ps_worker import Session
from ps_worker.metrics import StepTimer
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.documented_metrics import documented
from tests.tools.raw_worker import RawWorker, joined, vector_job

CELLS = 100  # in buckets of 16: seven buckets over two shards
BUCKETS = 7
BUCKET_BYTES = 64
HELD_SECONDS = 0.2


def test_scrapers_in_a_loop_get_one_page_and_never_an_old_one() -> None:
    """A page takes a core while it is made: not once for each of those that ask at the same time."""
    scraped = CollectorRegistry()
    made = Gauge("made", "Pages made.", registry=scraped)
    made.set_function(lambda: made_so_far.append(time.thread_time()) or _burn(0.02) or len(made_so_far))
    made_so_far: list[float] = []
    port, stop = serve_metrics("127.0.0.1", 0, scraped)
    try:
        asked = threading.Barrier(8)

        def twice(_: int) -> list[float]:
            asked.wait(10)
            return [scrape(f"127.0.0.1:{port}")["made"] for _ in range(4)]

        begun = time.monotonic()
        seen = in_parallel(8, twice)
        took = time.monotonic() - begun
    finally:
        stop()
    assert all(pages == sorted(set(pages)) for pages in seen), "each answer was made after it was asked for"
    # How many share a page depends on when the system runs each thread: here from 4 to 13 pages were made.
    assert 4 <= len(made_so_far) <= 24, "of 32 that were asked for"
    assert took >= (len(made_so_far) - 1) * (1 + PAUSES_PER_PAGE) * 0.02


def test_a_scraper_that_hangs_up_leaves_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As Prometheus does when its time is over, with each scrape of a busy server."""
    write(tmp_path, ["127.0.0.1"])
    asked, hung_up, written = threading.Event(), threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        asked.set()
        assert hung_up.wait(10)
        try:
            yield from [b"x" * 65_536] * 64
        finally:
            written.set()

    def app(_: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return body()

    port, stop = serve(
        "127.0.0.1", 0, app, "a page", "--port", Tls(tmp_path / "server.pem", tmp_path / "server.key", None)
    )
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    try:
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1") as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert asked.wait(10)
        hung_up.set()
        assert written.wait(10)
    finally:
        stop()
    assert "Traceback" not in capfd.readouterr().err


def _burn(seconds: float) -> None:
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then:
        pass


def vector() -> nn.Module:
    return nn.Linear(CELLS, 1, bias=False)


def trained(session: Session, steps: int) -> None:
    """Trains a vector for some steps."""
    model = vector()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=BUCKET_BYTES)
    for _ in range(steps):
        model(torch.ones(CELLS)).backward()
        optimizer.step()
        optimizer.zero_grad()


def total(cluster: Cluster, name: str) -> float:
    """A series, summed over all shards."""
    return sum(scrape(server.metrics_address).get(name, 0.0) for server in cluster.servers)


def page(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return str(response.read().decode())


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", cases(["tcp"], ["shm", "grpc"]))
def test_pushes_pulls_and_updates_are_counted(cluster: Cluster, transport: str) -> None:
    steps, workers = 5, 2
    sessions = [cluster.connect("sync", rank, workers, job="j", transport=transport) for rank in range(workers)]
    in_parallel(workers, lambda rank: trained(sessions[rank], steps))
    # Rank 0's initial values, then a gradient of each worker and step; everyone pulls at the start and every step.
    pushes, pulls = 1 + workers * steps, workers * (1 + steps)
    padded = 112 * 4  # bytes of the vector: whole 64-byte lines
    expected = {
        'ps_push_total{job="j",result="staged"}': BUCKETS * pushes,
        'ps_push_bytes_total{job="j"}': padded * pushes,
        'ps_pull_total{job="j"}': BUCKETS * pulls,
        'ps_pull_bytes_total{job="j"}': padded * pulls,
        'ps_accumulate_seconds_count{job="j"}': BUCKETS * workers * steps,
        'ps_apply_seconds_count{job="j"}': BUCKETS * steps,
        'ps_apply_staleness_clocks_count{job="j"}': BUCKETS * steps,
        'ps_apply_staleness_clocks_sum{job="j"}': 0,
        'ps_buckets{job="j"}': BUCKETS,
        'ps_job_bytes{job="j",kind="parameters"}': padded,
        'ps_staged_bytes{job="j"}': 0,
        'ps_waiting_pulls{job="j"}': 0,
    }
    # What is sent is counted a moment after it has arrived.
    pulled = [name for name in expected if name.startswith("ps_pull_")]
    until(lambda: all(total(cluster, name) >= expected[name] for name in pulled), "all that was sent")
    assert {name: total(cluster, name) for name in expected} == expected
    for server in cluster.servers:
        samples = scrape(server.metrics_address)
        for name in ("ps_bucket_version_min", "ps_bucket_version_max"):
            assert samples[f'{name}{{job="j"}}'] == steps
        for rank in range(workers):
            assert samples[f'ps_shard_clock{{job="j",rank="{rank}"}}'] == steps
    samples = scrape(cluster.servers[0].metrics_address)
    assert (samples["ps_shards"], samples["ps_jobs"], samples['ps_workers{job="j"}']) == (2, 1, workers)
    assert samples['ps_placement_imbalance_ratio{job="j"}'] == pytest.approx(4 * 64 / (padded / 2))
    for session in sessions:
        samples = scrape(session.metrics_address)
        assert samples["ps_worker_steps_total"] == samples["ps_worker_clock"] == steps
        assert samples["ps_worker_push_bytes_total"] >= padded * steps
        assert samples["ps_worker_pull_bytes_total"] >= padded * steps
        session.close()


def test_repeats_and_refusals_are_counted_apart(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "sync", cells=16, world_size=1)) as [worker]:
        push = worker.message(0, 1)
        for _ in range(3):
            worker.send(push)
        for _ in range(4):
            with pytest.raises(InvalidRequest):
                worker.send(worker.message(0, 2, b"short"))
    for result, count in (("staged", 2), ("duplicate", 2), ("refused", 4)):
        assert total(shared, f'ps_push_total{{job="{job}",result="{result}"}}') == count
    assert total(shared, f'ps_push_refused_total{{job="{job}",reason="INVALID_REQUEST"}}') == 4


def test_staleness_is_that_of_the_weights_a_gradient_was_taken_at(shared: Cluster, job: str) -> None:
    with joined(shared.address, vector_job(job, "async", cells=16, world_size=2)) as [fast, slow]:
        for _ in range(5):
            fast.step(torch.ones(16))
            fast.pull()
        slow.step(torch.ones(16))  # at the weights of clock 0, with five updates in
        slow.pull()
    name = "ps_apply_staleness_clocks"
    assert total(shared, f'{name}_count{{job="{job}"}}') == 6
    assert total(shared, f'{name}_sum{{job="{job}"}}') == 5
    assert total(shared, f'{name}_bucket{{job="{job}",le="4.0"}}') == 5
    assert total(shared, f'{name}_bucket{{job="{job}",le="6.0"}}') == 6


def test_the_time_waited_is_told_with_the_rank_that_was_waited_for(cluster: Cluster) -> None:
    sessions = [cluster.connect("sync", rank, 2, job="j") for rank in range(2)]

    def seconds_waited() -> float:
        """For how long rank 0 has waited on every shard, as `ps-server status` says."""
        return min(wait["wait_duration"] for wait in status_text.waits(requests.fetch(cluster.address), "j")[0])

    def waited_for(rank: int) -> float:
        return total(cluster, f'ps_waited_for_seconds_total{{job="j",rank="{rank}"}}')

    before: list[float] = []

    def work(rank: int) -> None:
        model = vector()
        model, optimizer = sessions[rank].prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=BUCKET_BYTES
        )
        model(torch.ones(CELLS)).backward()
        if rank == 1:
            until(lambda: total(cluster, 'ps_waiting_pulls{job="j"}') == BUCKETS)
            until(lambda: seconds_waited() > 1.5 * HELD_SECONDS)
            before.append(waited_for(0))
        optimizer.step()

    in_parallel(2, work)
    held = BUCKETS * HELD_SECONDS
    assert waited_for(1) >= held
    assert waited_for(0) - before[0] < waited_for(1), "what was waited for its initial weights, and hardly more"
    assert total(cluster, 'ps_pull_wait_seconds_sum{job="j",mode="sync"}') >= held
    fast, slow = (scrape(session.metrics_address) for session in sessions)
    assert fast['ps_worker_step_seconds_sum{phase="wait"}'] >= HELD_SECONDS
    assert slow['ps_worker_step_seconds_sum{phase="wait"}'] < fast['ps_worker_step_seconds_sum{phase="wait"}']
    for session in sessions:
        session.close()


@pytest.mark.parametrize("mode", cases(["local:2/2"], ["local:2"]))
def test_a_round_is_split_into_steps_and_the_exchange_that_a_worker_waits_for(
    shared: Cluster, job: str, mode: str
) -> None:
    """Rank 0 waits for rank 1, which comes to each round's last step when rank 0 has waited for it."""
    sessions, rounds, late = [shared.connect(mode, rank, 2, job=job) for rank in range(2)], 3, HELD_SECONDS

    def waited() -> float:
        waits = status_text.waits(requests.fetch(shared.address), job).get(0, [])
        return max((wait["wait_duration"] for wait in waits), default=0.0)

    def work(rank: int) -> dict[str, float]:
        model = vector()
        model, optimizer = sessions[rank].prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=BUCKET_BYTES, outer={"warm_up": 0}
        )
        for number in range(2 * rounds):
            if rank == 1 and number % 2:
                before = waited()  # which may be more than nothing, where this thread was held up
                until(lambda before=before: waited() > before + late, "rank 0 to wait")  # type: ignore[misc]
            model(torch.ones(CELLS)).backward()
            optimizer.step()
        return scrape(sessions[rank].metrics_address)

    fast, slow = in_parallel(2, work)
    name = "ps_worker_round_seconds"
    for found in (fast, slow):
        for phase in ("steps", "exchange"):
            assert found[f'{name}_count{{phase="{phase}"}}'] == rounds == sessions[0].round
    assert slow[f'{name}_sum{{phase="steps"}}'] >= rounds * late
    assert fast[f'{name}_sum{{phase="exchange"}}'] >= rounds * late
    for session in sessions:
        session.close()


def spend(seconds: float) -> None:
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        pass


class Slow(nn.Module):
    """Takes its time forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.ones(1))  # the last layer's gradient is the first to be ready

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spend(0.02)
        y = self.weight * x
        if y.requires_grad:
            y.register_hook(lambda gradient: spend(0.03))
        return y * self.scale


def collate_slowly(samples: list[float]) -> torch.Tensor:
    spend(0.01)
    return torch.tensor(samples)


def phases_of(session: Session, steps: int) -> dict[str, float]:
    """The seconds of each phase of a worker's steps so far, of which there were so many."""
    samples = scrape(session.metrics_address)
    for phase in PHASES:
        assert samples[f'ps_worker_step_seconds_count{{phase="{phase}"}}'] == steps
    return {phase: samples[f'ps_worker_step_seconds_sum{{phase="{phase}"}}'] for phase in PHASES}


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_a_step_is_split_into_phases_that_add_up(shared: Cluster, job: str, mode: str) -> None:
    steps = 4
    with ps_worker.connect(shared.address, mode, job) as session:
        model = Slow()
        loader = DataLoader([1.0] * steps, collate_fn=collate_slowly)
        model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        with torch.no_grad():
            for x in session.prepare(DataLoader([1.0] * 20, collate_fn=collate_slowly)):
                model(x)  # in no phase: it trains nothing
        begun = time.perf_counter()
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            spend(0.05)  # in no phase
        wall = time.perf_counter() - begun - 0.05 * steps
        seconds = phases_of(session, steps)
    assert seconds["data"] >= 0.01 * steps
    assert seconds["forward"] >= 0.02 * steps
    assert seconds["backward"] >= 0.03 * steps
    assert 0.06 * steps <= sum(seconds.values()) <= wall
    assert (seconds["push"] > 0) == (seconds["pull"] > 0) == (mode == "sync")
    assert mode == "sync" or seconds["wait"] == 0


# What happens after so many seconds, step by step; and a step's seconds of data, forward and backward.
LOOP = {
    "the first step, accumulated over three batches": (
        "100 asked, 1 yielded, 10 gradient, 100 gradient, 100 asked, 1 yielded, 10 gradient, 100 gradient, "
        "100 asked, 1 yielded, 10 gradient, 100 stepping, 1000",  # the last is what `step` tells by itself
        (3, 30, 500),
    ),
    "after a scheduler, a log line and an evaluation": (
        "1000 asked, 5 yielded, 50 asked, 5 yielded, 50 asked, 5 yielded, 50 asked, 5 ended, "
        "1000 asked, 2 yielded, 20 gradient, 200 stepping",
        (2, 20, 200),
    ),
    "without asking a loader, or a second one with the same batch": ("30 gradient, 300 stepping", (0, 30, 300)),
    "with a closure, inside `step`": ("1 stepping, 40 gradient, 400", (0, 41, 400)),
    "without data, made by the loader": ("7 asked, 3 stepping", (3, 0, 0)),
    "with gradients that backward did not make": ("4 yielded, 40 stepping", (4, 40, 0)),
}


def test_the_timer_splits_time_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("ps_worker.metrics.time", clock)
    timer = StepTimer()
    for what, (events, expected) in LOOP.items():
        for seconds, _, event in (part.partition(" ") for part in events.split(", ")):
            clock.now += float(seconds)
            if event:
                getattr(timer, event)()
        seconds_of = timer.stepped()
        assert tuple(seconds_of[phase] for phase in ("data", "forward", "backward")) == expected, what


@pytest.mark.parametrize("mode", ["single", "sync"])
def test_a_closed_session_has_left_no_hook(shared: Cluster, job: str, mode: str) -> None:
    model = vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ps_worker.connect(shared.address, mode, job) as session:
        session.prepare(model, optimizer)
        modules = [*model._forward_pre_hooks.values(), *model._forward_hooks.values(), *model._backward_hooks.values()]
        assert modules == [], "nor is there ever one on a module"
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model.weight._post_accumulate_grad_hooks


def test_every_process_says_what_it_runs(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        trained(session, 1)
        for address in (*(server.metrics_address for server in shared.servers), session.metrics_address):
            runs = {name: number for name, number in scrape(address).items() if name.startswith("ps_build_info")}
            labels = f'openssl="{ssl.OPENSSL_VERSION}",protocol="{VERSION}",'
            labels += f'torch="{version("torch")}",version="{version()}"'
            assert runs == {f"ps_build_info{{{labels}}}": 1.0}
            assert "# TYPE ps_background_errors_total counter" in page(address, "/metrics")
    running = requests.fetch(shared.address)
    assert running["coordinator"]["software_version"] == version()
    assert status_text.table(running).endswith(f"\nthe coordinator runs ps-torch {version()}")
    running["coordinator"]["software_version"] = ""
    assert "the coordinator runs" not in status_text.table(running), "an earlier one does not say"


def test_the_standard_grpc_counters_are_there(cluster: Cluster) -> None:
    with joined(cluster.address, vector_job("j", "sync", cells=16, world_size=1)) as [worker]:
        worker.step(torch.ones(16))
        worker.pull()
        with pytest.raises(InvalidRequest):
            worker.send(worker.message(0, 2, b"short"))

        def calls(name: str, method: str, more: str = "") -> float:
            kind = "server_stream" if method == "Pull" else "unary"
            labels = f'{more}grpc_method="{method}",grpc_service="ps_protocol.v1.DataService",grpc_type="{kind}"'
            return total(cluster, f"grpc_server_{name}{{{labels}}}")

        assert calls("started_total", "Push") == 3
        assert calls("handled_total", "Push", 'grpc_code="OK",') == 2
        assert calls("handled_total", "Push", 'grpc_code="INVALID_ARGUMENT",') == 1
        assert calls("msg_received_total", "Push") == 3
        assert calls("msg_sent_total", "Push") == 2
        assert calls("handling_seconds_count", "Push") == 3
        assert calls("started_total", "Pull") == 1
        until(lambda: calls("handled_total", "Pull", 'grpc_code="OK",') == 1)  # a moment after its answer has arrived
        assert calls("msg_sent_total", "Pull") == 1


# -- what is gone is gone --------------------------------------------------------------------------------------------


def test_the_series_of_an_ended_job_vanish(cluster: Cluster) -> None:
    pages = [server.metrics_address for server in cluster.servers]
    with cluster.connect("sync", job="shortlived") as session:
        trained(session, 3)
        assert all('job="shortlived"' in page(address, "/metrics") for address in pages)
    assert not any('job="shortlived"' in page(address, "/metrics") for address in pages)
    assert scrape(pages[0])["ps_jobs"] == 0


def test_service_discovery_lists_who_is_there_and_drops_who_leaves(cluster: Cluster) -> None:
    def targets() -> list[tuple[str, dict[str, str]]]:
        found = json.loads(page(cluster.servers[0].metrics_address, "/sd"))
        return [(target, entry["labels"]) for entry in found for target in entry["targets"]]

    shards = [
        (server.metrics_address, {"role": "shard", "index": str(index)}) for index, server in enumerate(cluster.servers)
    ]
    assert targets() == shards
    first, second = (cluster.connect("async", elastic=True, job="j") for _ in range(2))
    for session in (first, second):
        trained(session, 1)
    worker = {"role": "worker", "job_name": "j"}
    assert targets() == [
        *shards,
        (first.metrics_address, {**worker, "rank": "0"}),
        (second.metrics_address, {**worker, "rank": "1"}),
    ]
    for address, _ in targets():
        assert scrape(address), "everything that is listed can be scraped"
    first.close()
    assert targets() == [*shards, (second.metrics_address, {**worker, "rank": "1"})]
    second.close()
    assert targets() == shards


def test_a_dead_worker_leaves_service_discovery_with_its_lease(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(lease=60.0)
    with RawWorker(cluster.address, vector_job("j", "async", cells=16, world_size=0), 0):
        assert scrape(cluster.servers[0].metrics_address)['ps_workers{job="j"}'] == 1
        cluster.end_lease(0, "j")
        until(lambda: scrape(cluster.servers[0].metrics_address)['ps_workers{job="j"}'] == 0)


def test_only_the_coordinator_serves_service_discovery(shared: Cluster) -> None:
    for server, path in zip(shared.servers, ("/nothing", "/sd"), strict=True):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            page(server.metrics_address, path)


# -- valid -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed(shared: Cluster) -> dict[str, str]:
    """The text of /metrics of each kind of process, with every kind of series in it."""
    found = {}
    with shared.connect("async", job="rows") as rows, shared.connect("ssp:1", job="exposed") as session:
        table = ps_worker.Embedding(2)
        rows.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        trained(session, 2)
        with RawWorker(shared.address, shared.coordinator.jobs()["exposed"].spec, 0) as worker:
            for bucket in worker.trained:
                with pytest.raises(InvalidRequest):
                    worker.send(worker.message(bucket, 3, b"short"))
            for index, server in enumerate(shared.servers):
                found["coordinator with a shard" if index == 0 else "shard"] = page(server.metrics_address, "/metrics")
            found["worker"] = page(session.metrics_address, "/metrics")
    with ps_worker.connect(mode="single") as session:
        trained(session, 2)
        found["worker alone"] = page(session.metrics_address, "/metrics")
    coordinator = Server(ServerConfig(shard_count=1))
    found["coordinator"] = page(coordinator.metrics_address, "/metrics")
    coordinator.stop()
    return found


PROCESSES = ["coordinator with a shard", "coordinator", "shard", "worker", "worker alone"]
LABELS = {
    "job",
    "kind",
    "result",
    "reason",
    "rank",
    "mode",
    "phase",
    "le",
    "direction",
    "format",
    "generation",
    "loader",
    "state",
    "thread",
    "transport",
}
LABELS |= {"name"}  # of what a script logs
LABELS |= {"table", "level"}
LABELS |= {"grpc_type", "grpc_service", "grpc_method", "grpc_code"}
LABELS |= {"implementation", "major", "minor", "patchlevel", "version"}  # of python_info
LABELS |= {"protocol", "torch", "openssl"}  # of ps_build_info
UNITS = ("_seconds", "_bytes", "_clocks")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("process", PROCESSES)
def test_promtool_finds_nothing_to_complain_about(exposed: dict[str, str], process: str) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=exposed[process],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stdout.strip(), checked.stderr.strip()) == (0, "", "")


ROLES = {
    "coordinator with a shard": {"coordinator", "shard"},
    "coordinator": {"coordinator"},
    "shard": {"shard"},
    "worker": {"worker"},
    "worker alone": {"worker"},
}
WITH_TLS_ALONE = {"ps_certificate_expiry_timestamp_seconds"}


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_serves_what_the_docs_say_of_its_kind(exposed: dict[str, str], process: str) -> None:
    said = {metric.name: metric for metric in documented() if metric.is_served_by(ROLES[process])}
    families = {
        family.name + "_total" * (family.type == "counter"): {label for it in family.samples for label in it.labels}
        for family in text_string_to_metric_families(exposed[process])
        if family.name.startswith("ps_")
    }
    assert families.keys() == said.keys() - WITH_TLS_ALONE
    for name, labels in families.items():
        assert labels - {"le"} in (set(), said[name].labels), name


@pytest.mark.parametrize("bound", [*range(9), 16, 32, 64])
def test_the_most_that_a_mode_allows_is_counted_apart(bound: int) -> None:
    """ssp:K allows K + 1. More than that would be a fault, and must not be in the same bucket."""
    assert {bound, bound + 1} <= set(STALENESS_BUCKETS)


@pytest.mark.parametrize("process", PROCESSES)
def test_names_follow_the_rules_of_prometheus(exposed: dict[str, str], process: str) -> None:
    families = list(text_string_to_metric_families(exposed[process]))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert family.name.startswith(("ps_", "grpc_server_", "process_", "python_"))
        assert family.documentation, f"{family.name} has no help"
        assert family.type in ("counter", "gauge", "histogram")
        assert not family.name.endswith(("_ms", "_milliseconds", "_micros", "_kb", "_mib", "_percent", "_minutes"))
        if family.type == "histogram":
            assert family.name.endswith(UNITS)
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, f"{sample.name} has labels {sorted(sample.labels)}"
            if family.type == "counter":
                assert sample.name.endswith("_total")
            # When a counter was made, as a series of its own: a fifth more of them, and nothing reads them.
            assert not sample.name.endswith("_created")


def test_every_promised_name_is_there(exposed: dict[str, str]) -> None:
    promised = {
        "shard": "ps_push_total ps_push_bytes_total ps_push_refused_total ps_pull_total ps_pull_bytes_total "
        "ps_apply_seconds_count ps_accumulate_seconds_count ps_apply_staleness_clocks_count ps_job_bytes "
        "ps_staged_bytes ps_buckets ps_bucket_version_min ps_bucket_version_max ps_waiting_pulls ps_shard_clock "
        "ps_shard_workers ps_shard_restarts_total ps_native_loops ps_table_rows ps_table_bytes ps_table_lookups_total "
        "ps_table_pushed_rows_total ps_table_admitted_rows_total ps_table_forgotten_rows_total "
        "ps_table_dropped_gradients_total grpc_server_started_total grpc_server_handled_total "
        "grpc_server_msg_received_total grpc_server_msg_sent_total grpc_server_handling_seconds_count "
        "process_resident_memory_bytes",
        "coordinator with a shard": "ps_shards ps_jobs ps_workers ps_worker_clock ps_placement_imbalance_ratio "
        "ps_push_total",
        "coordinator": "ps_shards ps_jobs",
        "worker": "ps_worker_step_seconds_count ps_worker_steps_total ps_worker_push_bytes_total "
        "ps_worker_pull_bytes_total ps_worker_non_finite_total ps_worker_clock ps_worker_total_steps",
        "worker alone": "ps_worker_step_seconds_count ps_worker_steps_total ps_worker_clock",
    }
    for process, names in promised.items():
        found = {line.partition(" ")[0].partition("{")[0] for line in exposed[process].splitlines()}
        assert set(names.split()) <= found, f"{process} lacks {sorted(set(names.split()) - found)}"
