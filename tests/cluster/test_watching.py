"""Watching a live cluster: what workers and shards say of themselves reaches those who look, and harms no training."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_protocol.figures import PHASES
from ps_protocol.v1 import cluster_pb2, figures_pb2, membership_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access
from ps_runtime.retry import Peer
from ps_server.core.limits import Limits
from ps_server.ops import requests, screen
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import json_text, plain
from ps_server.rpc.position import Position
from ps_worker import Session
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.launching import Commands
from tests.tools.raw_worker import RawWorker, vector_job

CELLS = 64


def train(session: Session, steps: int, **values: Any) -> None:
    model = nn.Linear(CELLS, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), bucket_bytes=64)
    for step in range(steps):
        loss = model(torch.ones(CELLS)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, step=step, **values)


def view(address: str, told: Position = Position()) -> dict[str, Any]:  # noqa: B008
    """What WatchStatus says, as plain data."""
    with OperatorClient(Peer("coordinator", address)) as client:
        return plain(client.view(told))


def figures_of(address: str, job: str, ready: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A job's first worker's figures, once they are as wanted."""

    def look() -> dict[str, Any] | None:
        jobs = {each["name"]: each for each in requests.fetch(address)["jobs"]}
        workers = jobs[job]["workers"] if job in jobs else []
        return workers[0]["figures"] if workers and workers[0]["figures"] and ready(workers[0]["figures"]) else None

    found = until(look, "figures as wanted")
    assert found is not None
    return found


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_and_logged_values_ride_with_the_heartbeat(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    with cluster.connect("ssp:1", job="j") as session:
        train(session, 5, broken=math.nan)
        figures = figures_of(cluster.address, "j", lambda figures: figures["step_count"] == 5)
        values = {value["name"]: value for value in figures["values"]}
        assert set(values) == {"loss", "step", "broken"}
        assert values["step"]["last"] == 4
        assert values["step"]["mean"] == 2, "the plain mean of the first ones"
        assert math.isnan(values["broken"]["last"]), "NaN is a value that people want to see"
        phases = sum(figures[f"{phase}_duration"] for phase in PHASES)
        assert 0 < phases < figures["measured_duration"]
        assert figures["sent_bytes"] >= 5 * 4 * CELLS
        samples = scrape(session.metrics_address)
        assert samples['ps_worker_value{name="step"}'] == 4
        assert samples['ps_worker_value_mean{name="step"}'] == 2
        assert math.isnan(samples['ps_worker_value{name="broken"}'])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss": "0.5"}, "takes numbers, and tensors of one element, got loss as str"),
        ({"loss": None}, "got loss as NoneType"),
        ({"loss": torch.ones(2)}, r"got loss as a tensor of shape \(2,\)"),
        ({"loss": 1j}, "got loss as complex"),
        ({"Loss": 0.5}, "a letter of a to z.*got 'Loss'"),
        ({"loss/train": 0.5}, "got 'loss/train'"),
        ({"l" * 41: 0.5}, "40 characters at most"),
        ({f"v{number}": 0.0 for number in range(8)}, "at most 8 names in all, got good, v0"),
    ],
)
def test_a_value_that_is_none_is_refused_and_none_is_taken(values: dict[str, Any], says: str) -> None:
    with ps_worker.connect(mode="single") as session:
        session.log(good=1)
        with pytest.raises(InvalidRequest, match=says):
            session.log(good=2, **values)
        samples = scrape(session.metrics_address)
        assert {name: value for name, value in samples.items() if name.startswith("ps_worker_value{")} == {
            'ps_worker_value{name="good"}': 1
        }
        session.log(good=torch.tensor([3.0]), loss=10**400 > 0)
        assert scrape(session.metrics_address)['ps_worker_value{name="good"}'] == 3


def test_the_mean_recovers_from_a_value_that_is_not_finite() -> None:
    with ps_worker.connect(mode="single") as session:
        for loss in (1.0, math.nan, math.inf, 3.0):
            session.log(loss=loss)
        samples = scrape(session.metrics_address)
        assert samples['ps_worker_value_mean{name="loss"}'] == 2.0
        for _ in range(400):
            session.log(loss=7.0)
        assert scrape(session.metrics_address)['ps_worker_value_mean{name="loss"}'] == pytest.approx(7.0)


def test_wrong_figures_are_refused_with_the_heartbeat_and_change_nothing(shared: Cluster, job: str) -> None:
    with RawWorker(shared.address, vector_job(job, "async", CELLS, 1), 0) as worker:
        worker.heartbeat()  # as a worker of an earlier version does: without figures
        before = shared.coordinator.job(job).statistics()
        assert before.figures == {}
        wrong = figures_pb2.WorkerFigures(values=[figures_pb2.LoggedValue(name="<img>", last=1.0)])
        request = membership_pb2.HeartbeatRequest(worker=worker.identity(), clock=9, figures=wrong)
        with pytest.raises(InvalidRequest, match="a value's name is a letter of a to z"):
            worker._call(worker.members.Heartbeat, request)
        after = shared.coordinator.job(job).statistics()
        assert (after.figures, [(w.clock, w.expires) for w in after.workers]) == (
            {},
            [(w.clock, w.expires) for w in before.workers],
        )
        right = figures_pb2.WorkerFigures(step_count=4)
        worker._call(
            worker.members.Heartbeat,
            membership_pb2.HeartbeatRequest(worker=worker.identity(), clock=0, figures=right),
        )
        assert [figures.steps for figures in shared.coordinator.job(job).statistics().figures.values()] == [4]


def test_a_shard_says_what_it_measured_of_itself_and_of_each_job(cluster: Cluster) -> None:
    sessions = [cluster.connect("sync", rank, 2, job="j") for rank in range(2)]
    in_parallel(2, lambda rank: train(sessions[rank], 6))

    def answered() -> dict[str, Any] | None:  # by all shards: on a busy machine one may need longer than a status waits
        found = requests.fetch(cluster.address)
        return found if all(shard["reachable"] for shard in found["shards"]) else None

    running = until(answered, "an answer of both shards") or {}
    held = [job for shard in running["shards"] for job in shard["jobs"] if job["job"] == "j"]
    assert sum(job["figures"]["apply_count"] for job in held) == 6 * sum(job["bucket_count"] for job in held)
    assert all(job["figures"]["apply_duration"] > 0 for job in held)
    assert sum(count["gradient_count"] for job in held for count in job["figures"]["staleness"]) == 6 * 5
    ends = [count["max_clocks"] for count in held[0]["figures"]["staleness"]]
    assert ends[:10] == list(range(10)), "each staleness that ssp:K allows has a count of its own"
    assert ends[-1] is None
    for shard, server in zip(running["shards"], cluster.servers, strict=True):
        samples = scrape(server.metrics_address)
        assert shard["figures"]["resident_bytes"] == pytest.approx(samples["process_resident_memory_bytes"], rel=0.3)
        assert shard["figures"]["memory_limit_bytes"] > shard["figures"]["resident_bytes"]
    received = sum(job["figures"]["received_bytes"] for job in held)
    assert received == sum(scrape(s.metrics_address)['ps_push_bytes_total{job="j"}'] for s in cluster.servers)
    for session in sessions:
        session.close()


# -- the stream --------------------------------------------------------------------------------------------------------


def test_a_reader_is_told_all_at_first_and_then_what_is_new(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    with cluster.connect("ssp:1", job="j") as session:
        train(session, 3)
        first = until(lambda: (seen := view(cluster.address))["jobs"] and len(seen["history"]["times"]) > 1 and seen)
        assert [event["kind"] for event in first["events"]] == ["started", "join"]
        assert first["history"]["first_sample"] == 0
        told = Position(first["process"], first["events"][-1]["number"], len(first["history"]["times"]))
        train_more = cluster.connect("ssp:1", job="k")
        train(train_more, 1)
        second = until(lambda: len((seen := view(cluster.address, told))["events"]) >= 2 and seen)
        assert {event["job"] for event in second["events"]} == {"k"}
        assert second["history"]["first_sample"] == told.next_sample
        stranger = view(cluster.address, Position(first["process"] + 1, 10**6, 10**6))
        assert len(stranger["events"]) == 4, "numbers of another coordinator mean nothing"
        assert stranger["history"]["first_sample"] == 0
        train_more.close()


def test_a_stream_comes_every_period_and_ends_with_the_coordinator(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    with open_channel(cluster.address) as channel:
        call = ClusterServiceStub(channel).WatchStatus(cluster_pb2.WatchStatusRequest(history_wanted=True))
        times: list[float] = []
        for response in call:
            assert not response.history.times or response.history.first_sample == len(times)
            times += response.history.times
            if len(times) == 4:
                break
        assert times == sorted(set(times)), "each sample came once"
        cluster.servers[0].stop()
        for _ in call:
            pass  # ends without an error


def test_a_reader_that_reads_nothing_has_one_answer_waiting_and_not_more(cluster: Cluster) -> None:
    """What is sent to it is made when the one before has gone."""
    from ps_server.rpc.views import Views, ViewStream
    from ps_server.view.watch import Watch

    class Stuck:
        """A stream whose reader takes nothing."""

        def __init__(self) -> None:
            self.queued: list[Callable[[], Any]] = []

        def put(self, make: Callable[[], Any]) -> None:
            self.queued.append(make)

        def on_close(self, callback: Callable[[], None]) -> None:
            pass

    watch = Watch(cluster.coordinator, 4)
    views = Views(watch, cluster.coordinator.events, 2, lambda: ("host:1", ""))
    stuck, request = Stuck(), cluster_pb2.WatchStatusRequest(history_wanted=True)
    request.period_duration.FromMilliseconds(500)
    stream = ViewStream(views, stuck, lambda _: True, request)  # type: ignore[arg-type]
    stream.begin()
    for _ in range(10):
        stream._due = 0.0
        watch.look()
    [make] = stuck.queued
    assert len(make().history.times) == 10, "it misses answers, and nothing of the history"
    stream._due = 0.0
    watch.look()
    assert len(stuck.queued) == 2


def test_too_many_readers_and_wrong_periods_are_refused(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(limits=Limits(views=4))
    with open_channel(cluster.address) as channel:
        stub = ClusterServiceStub(channel)
        calls = [stub.WatchStatus(cluster_pb2.WatchStatusRequest()) for _ in range(2)]
        for call in calls:
            next(call)
        with OperatorClient(Peer("coordinator", cluster.address)) as client:
            with pytest.raises(LimitExceeded, match="its share is half of max-views"):
                client.view(Position())
            calls[0].cancel()

            def is_free() -> bool:
                try:
                    return bool(client.view(Position()))
                except LimitExceeded:
                    return False

            until(is_free, "the place of the one that left")
            calls[1].cancel()
            for period in (0.1, 61.0):
                with pytest.raises(InvalidRequest, match=r"the period must be 0.5 to 60 s"):
                    next(client.watch(period))


TOKENS = {"cluster": "c" * 32, "reader": "r" * 32, "reader:mine": "m" * 32, "worker": "w" * 32}


def test_a_reader_sees_the_jobs_that_its_role_lets_it_see(tmp_path: Path, lively: Callable[..., Cluster]) -> None:
    (tmp_path / "tokens").write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    cluster = lively(tokens=tmp_path / "tokens")
    (tmp_path / "worker").write_text(TOKENS["worker"])
    sessions = [cluster.connect("ssp:1", job=job, token_file=str(tmp_path / "worker")) for job in ("mine", "others")]
    for session in sessions:
        train(session, 2)

    def seen_with(role: str) -> dict[str, Any]:
        access = Access(None, lambda: TOKENS[role], False)
        with OperatorClient(Peer("coordinator", cluster.address, access)) as client:
            return plain(client.view(Position()))

    def jobs_in(seen: dict[str, Any]) -> set[str]:
        found = {job["name"] for job in seen["status"]["jobs"]} | {job["job"] for job in seen["jobs"]}
        found |= {job["job"] for shard in seen["status"]["shards"] for job in shard["jobs"]}
        return found | {each["job"] for each in (*seen["events"], *seen["history"]["series"])}

    until(lambda: jobs_in(seen_with("reader")) == {"mine", "others"})
    assert jobs_in(seen_with("reader:mine")) == {"mine"}
    port = cluster.servers[0].metrics_address
    with pytest.raises(urllib.error.HTTPError, match="404"):  # it would tell all to every process of this machine
        urllib.request.urlopen(f"http://{port}/api/view", timeout=10)
    for session in sessions:
        session.close()


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_hung_shard_is_told_and_delays_no_view(commands: Commands) -> None:
    up = commands.start("-m", "ps_server", "up", "--shards", "2", "--port", "0", "--metrics-port", "0")
    [address] = up.says(r"ready at (\S+) \(2 shards\)")
    hung = next(process for process in up.family() if "--index 1" in " ".join(process.cmdline()))
    with OperatorClient(Peer("coordinator", address)) as client:
        stream = client.watch(0.5)
        next(stream)
        hung.suspend()
        try:
            late: list[float] = []
            before = None
            for response in stream:
                now = response.view_time.ToNanoseconds() / 1e9
                late += [now - before] if before is not None else []
                before = now
                silent = response.shards[1].silent_duration.ToNanoseconds() / 1e9 if len(response.shards) > 1 else 0
                if silent >= 5:
                    break
            assert median(late) < 2.0, "a call to that shard takes 2 s until it is given up"
            assert not response.status.shards[1].reachable
            assert response.shards[0].silent_duration.ToNanoseconds() == 0
        finally:
            hung.resume()
    until(lambda: any("answers again" in event["text"] for event in view(address)["events"]))
    texts = [event["text"] for event in view(address)["events"] if event["kind"] == "shard"]
    assert texts == ["shard 1 does not answer", "shard 1 answers again"]
    assert up.end(signal.SIGTERM) == 0


def test_what_happens_to_workers_is_told(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(lease=60.0)
    with cluster.connect("ssp:1", rank=0, world_size=2, job="j") as stays:
        leaves = cluster.connect("ssp:1", rank=1, world_size=2, job="j")
        in_parallel(2, lambda rank: train((stays, leaves)[rank], 2))
        leaves.close()
        with RawWorker(cluster.address, cluster.coordinator.job("j").spec, 1) as dies:

            def kinds() -> list[str]:
                return [event["kind"] for event in view(cluster.address)["events"] if event["job"] == "j"]

            cluster.end_lease(dies.rank, "j")
            until(lambda: "lost" in kinds())
        assert kinds() == ["started", "join", "join", "leave", "join", "lost"]


# -- the terminal ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Enough(Exception):
    """Ends a watch that would go on for ever."""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_status_watch_shows_the_race(
    lively: Callable[..., Cluster], kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = lively()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", "60")
    out = kind()
    with cluster.connect("ssp:4", job="j") as session:
        train(session, 3)

        def shown(*_: object) -> None:
            draw(*_)
            if re.search(r" 2  training", out.getvalue()):  # its heartbeat has told of its steps
                raise Enough

        name = "_redraw" if kind is Terminal else "_append"
        draw = getattr(screen, name)
        monkeypatch.setattr(screen, name, shown)
        with pytest.raises(Enough):
            screen.watch(cluster.address, period=0.5, out=out)
    text = out.getvalue()
    assert ("\x1b" in text) == (kind is Terminal)
    last = text.rpartition("\x1b[H")[2]
    assert re.search(r"^j · ssp:4 · training · [\d.-]+ steps/s", last, re.MULTILINE)
    assert re.search(r"^ rank  host +steps  slowest → fastest +steps/s +loss +step  now", last, re.MULTILINE)
    assert re.search(r"^ +0  \S+ +\d+  ─{12}●─{11} +\S+ +\S+ +2  training", last, re.MULTILINE)
    assert "ROLE" in last, "the table of `status`"


def test_no_text_of_a_peer_does_anything_to_the_terminal(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    with cluster.connect("ssp:4", job="j") as session:
        train(session, 1)

        def with_worker() -> dict[str, Any] | None:
            found = view(cluster.address)
            of_job = [job["workers"] for job in (*found["jobs"], *found["status"]["jobs"])]
            return found if len(of_job) == 2 and all(of_job) else None

        seen = until(with_worker, "a view of the job and its worker")
    [worker] = seen["status"]["jobs"][0]["workers"]
    worker["host"] = worker["metrics_address"] = "evil\x1b[2J\x9b31m\r\n\u202egpj"
    seen["jobs"][0]["workers"][0]["activity"] = "\x07training"
    text = "\n".join(screen.screen(seen))
    assert not [each for each in text.replace("\n", "") if not each.isprintable()]
    assert "evil\\x1b[2J\\x9b31m\\r\\n\\u202egpj" in text


def test_a_window_that_is_too_low_says_how_much_is_missing(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "4")
    seen = until(lambda: len((found := view(cluster.address))["shards"]) == 2 and found)
    out = Terminal()
    screen._redraw(out, seen)
    lines = out.getvalue().removeprefix("\x1b[H").removesuffix("\x1b[J").splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("… and ")
    assert all(len(line.removesuffix("\x1b[K")) <= 40 for line in lines)


def test_status_json_is_json_whatever_is_logged(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    with cluster.connect("ssp:4", job="j") as session:
        train(session, 1, broken=math.nan, endless=-math.inf)
        figures_of(cluster.address, "j", lambda figures: figures["values"])

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        text = json_text(requests.fetch(cluster.address))
        [job] = json.loads(text, parse_constant=refuse)["jobs"]
        values = {value["name"]: value["last"] for value in job["workers"][0]["figures"]["values"]}
        assert (values["broken"], values["endless"]) == ("NaN", "-Infinity")
