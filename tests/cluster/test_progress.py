"""How much is left of a job: its scripts say how many steps they make, and those who watch see what that means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_protocol.figures import WorkerFigures
from ps_protocol.v1 import figures_pb2, membership_pb2
from ps_runtime.quantities import duration_text
from ps_runtime.retry import Peer
from ps_server.core.server_figures import check_worker_figures
from ps_server.ops import requests, screen, status_text
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import plain
from ps_server.rpc.position import Position
from ps_worker import Session
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.raw_worker import RawWorker, vector_job


def prepared(session: Session) -> Callable[[int], None]:
    """Has a session prepare a small model; returns what makes so many steps."""
    model = nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def view(address: str) -> dict[str, Any]:
    with OperatorClient(Peer("coordinator", address)) as client:
        return plain(client.view(Position()))


def told(cluster: Cluster, ready: Callable[[dict[str, Any]], object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only job's status and view, once its view is as wanted."""

    def look() -> tuple[dict[str, Any], dict[str, Any]] | None:
        seen = view(cluster.address)
        return (seen["status"]["jobs"][0], seen["jobs"][0]) if seen["jobs"] and ready(seen["jobs"][0]) else None

    found = until(look, "a view as wanted")
    assert found is not None
    return found


def test_steps_percent_and_time_are_told_to_those_who_watch(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    sessions = [cluster.connect("async", rank, 2, job="j") for rank in range(2)]
    trains = in_parallel(2, lambda rank: prepared(sessions[rank]))
    for session in sessions:
        session.progress(total=40)
    trains[0](10)
    trains[1](20)
    job, seen = told(cluster, lambda seen: seen["done_fraction"] == (10 / 40 + 20 / 40) / 2)
    assert status_text.steps_text(job) == "step 10-20 of 40"
    assert 0 < seen["age_duration"] < 300
    text = "\n".join(screen.screen(view(cluster.address)))
    assert "step 10-20 of 40 · 38 %" in text
    assert "running for " in text
    assert "; step 10-20 of 40" in status_text.table(requests.fetch(cluster.address))
    assert scrape(sessions[0].metrics_address)["ps_worker_total_steps"] == 40

    trains[0](5)
    trains[1](20)
    _, seen = told(cluster, lambda seen: seen["left_duration"] is not None and seen["done_fraction"] > 0.6)
    assert seen["left_duration"] > 0, "the slower worker has 25 steps to make"
    sessions[0].progress(total=15)
    told(cluster, lambda seen: seen["left_duration"] == 0 and seen["done_fraction"] == 1)
    for session in sessions:
        session.close()


def test_steps_are_steps_where_the_clock_counts_rounds(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    with cluster.connect("local:4", job="j") as session:
        model = nn.Linear(4, 1)
        options = {"outer": {"warm_up": 0}}
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
        session.progress(total=16)
        for _ in range(8):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        assert (session.clock, session.round) == (8, 2)
        job, _ = told(cluster, lambda seen: seen["done_fraction"] == 0.5)
        assert status_text.steps_text(job) == "step 8 of 16"


def test_a_job_whose_script_says_nothing_has_no_total(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    with cluster.connect("async", job="j") as session:
        prepared(session)(3)
        job, seen = told(cluster, lambda seen: seen["workers"] and seen["workers"][0]["steps_per_second"] is not None)
        assert (seen["done_fraction"], seen["left_duration"], status_text.steps_text(job)) == (None, None, "")
        assert " left" not in "\n".join(screen.screen(view(cluster.address)))


@pytest.mark.parametrize("total", [0, -1, 2.5, "40", True, None, 2**53 + 1])
def test_what_is_no_number_of_steps_is_refused(total: Any) -> None:
    with ps_worker.connect(mode="single") as session:
        session.progress(np.int64(7))
        with pytest.raises(InvalidRequest, match=r"session.progress takes a total of 1 to 2\^53 steps, got "):
            session.progress(total)
        assert scrape(session.metrics_address)["ps_worker_total_steps"] == 7


def test_servers_refuse_a_number_that_no_script_can_say(shared: Cluster, job: str) -> None:
    with RawWorker(shared.address, vector_job(job, "async", 4, 1), 0) as worker:
        wrong = figures_pb2.WorkerFigures(total_step_count=2**60)
        request = membership_pb2.HeartbeatRequest(worker=worker.identity(), clock=0, figures=wrong)
        with pytest.raises(InvalidRequest, match=r"total_step_count must be 2\^53 at most"):
            worker._call(worker.members.Heartbeat, request)
    with pytest.raises(InvalidRequest, match="done_step_count"):
        check_worker_figures(replace(WorkerFigures(), done=2**60))


def test_durations_are_in_units_that_people_read() -> None:
    times = {0.0: "0 s", 0.4: "0.4 s", 12.3: "12 s", 119: "119 s", 180: "3 min", 5400: "90 min", 9000: "2.5 h"}
    assert {seconds: duration_text(seconds) for seconds in times} == times
    assert duration_text(3 * 86400) == "3.0 days"
