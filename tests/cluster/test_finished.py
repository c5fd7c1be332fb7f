"""A job that has ended stays to be seen: how it ended, its last loss, its curves and its last checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ps_runtime.retry import Peer
from ps_server.ops import screen
from ps_server.rpc.operator_client import OperatorClient
from ps_server.rpc.plain import plain
from ps_server.rpc.position import Position
from ps_server.view.finished import KEPT, End, FinishedJobs
from ps_server.view.history import Samples
from ps_server.view.view import JobView, View
from tests.tools.cluster import Cluster, until


def view(address: str, told: Position = Position()) -> dict[str, Any]:  # noqa: B008
    with OperatorClient(Peer("coordinator", address)) as client:
        return plain(client.view(told))


def train_one(cluster: Cluster, job: str, steps: int = 3) -> dict[str, Any]:
    """A job from its beginning to its end; the last view in which it is told that it has ended."""
    with cluster.connect("async", job=job) as session:
        model = nn.Linear(4, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(steps):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            session.log(loss=0.25)

        def is_seen() -> bool:
            seen = view(cluster.address)
            clocks = [worker["clock"] for each in seen["status"]["jobs"] for worker in each["workers"]]
            return clocks == [steps] and any(each == pytest.approx(0.25) for each in values(seen, job))

        until(is_seen, "its last step, and its curve")
    return until(lambda: (seen := view(cluster.address))["finished_jobs"] and not seen["jobs"] and seen)


def values(seen: dict[str, Any], job: str) -> list[float]:
    """The curve of the loss of a job that runs."""
    series = (seen["history"] or {"series": []})["series"]
    return [x for each in series if (each["job"], each["name"]) == (job, "value.loss") for x in each["values"]]


def test_a_job_stays_with_its_curves_and_its_end(lively: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = lively(checkpoint_dir=tmp_path)
    seen = train_one(cluster, "first")
    [finished] = seen["finished_jobs"]
    assert (finished["job"], finished["text"]) == ("first", "the job has finished")
    assert (finished["min_clock"], finished["max_clock"]) == (3, 3)
    assert 0 < finished["age_duration"] < 300
    assert [(value["name"], value["mean"]) for value in finished["values"]] == [("loss", pytest.approx(0.25))]
    assert finished["last_checkpoint"]["clock"] == 3, "the one that was made at its end"
    [curve] = [each for each in finished["history"]["series"] if each["name"] == "value.loss"]
    assert [x for x in curve["values"] if x == pytest.approx(0.25)]
    assert len(curve["values"]) == len(finished["history"]["times"])
    line = "\n".join(screen.screen(seen))
    assert "first: the job has finished, " in line
    assert " ago · 3 steps · loss 0.25 · ran for " in line
    assert f"last checkpoint {finished['last_checkpoint']['name']}" in line

    told = Position(seen["process"], 0, seen["history"]["first_sample"] + len(seen["history"]["times"]))
    [again] = view(cluster.address, told)["finished_jobs"]
    assert again["history"] is None, "its curves are sent once"
    assert again["job"] == "first"


def test_a_new_job_of_the_name_takes_its_place(lively: Callable[..., Cluster]) -> None:
    cluster = lively()
    train_one(cluster, "again")
    with cluster.connect("async", job="again") as session:
        model = nn.Linear(4, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        until(lambda: (seen := view(cluster.address))["jobs"] and not seen["finished_jobs"])


def test_what_is_told_of_its_end_is_what_its_workers_had_come_to(lively: Callable[..., Cluster]) -> None:
    """No heartbeat comes in so short a job: what workers say as they leave counts."""
    cluster = lively(lease=3600.0)
    with cluster.connect("async", job="short") as session:
        model = nn.Linear(4, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        until(lambda: view(cluster.address)["jobs"])
        for step in range(5):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            session.log(loss=10.0 - step)
    seen = until(lambda: (found := view(cluster.address))["finished_jobs"] and found)
    [finished] = seen["finished_jobs"]
    assert (finished["min_clock"], finished["max_clock"]) == (5, 5)
    assert [(value["name"], value["last"]) for value in finished["values"]] == [("loss", 6.0)]


def job_view(name: str, run: str, age: float, workers: int = 1) -> JobView:
    statistics: Any = SimpleNamespace(name=name, run=run)
    return JobView(statistics, "training", "", (SimpleNamespace(),) * workers, 1.0, age)  # type: ignore[arg-type]


def test_the_last_few_are_kept_with_the_samples_of_their_own_run() -> None:
    finished, time = FinishedJobs(), 1000.0
    times = array("d", [990.0, 1000.0, 1010.0])
    curve = {"loss": array("f", [9.0, 1.0, 0.5])}

    def samples(name: str) -> Samples:
        return Samples(7, times, {name: {(key, None): each for key, each in curve.items()}})

    def look(*jobs: JobView) -> None:
        finished.look(View(time, 10.0, {job.statistics.name: job for job in jobs}, ()), 42, samples, lambda _: End())

    for number in range(KEPT + 2):
        look(job_view(f"job-{number}", f"{number:x}", age=5.0))
    look()
    assert [each.job.statistics.name for each in finished.kept] == [f"job-{n}" for n in range(KEPT + 1, 1, -1)]
    last = finished.kept[0]
    assert (last.ended, last.gone, last.began) == (1000.0, 42, 995.0)
    assert list(last.samples.times) == [1000.0, 1010.0], "what was before its beginning is another run's"
    assert last.samples.first == 8
    assert list(last.samples.series["job-5"]["loss", None]) == [1.0, 0.5]


def test_a_job_is_kept_as_it_was_with_its_last_workers() -> None:
    finished = FinishedJobs()
    with_workers, without = job_view("j", "1", 5.0, workers=2), replace(job_view("j", "1", 6.0), workers=())
    for time, jobs in ((1000.0, {"j": with_workers}), (1001.0, {"j": without}), (1003.0, {})):
        finished.look(View(time, 10.0, jobs, ()), 1, lambda _: Samples(0, array("d"), {}), lambda _: End())
    [kept] = finished.kept
    assert len(kept.job.workers) == 2
    assert kept.job.age == 8.0, "until it was gone"
