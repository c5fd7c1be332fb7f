"""docs/how-it-works.md names the files that run in a step, a join, a checkpoint and after a lost shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from ps_protocol.v1.jobs_pb2 import CheckpointJobRequest
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from tests.tools.cluster import Cluster, until
from tests.tools.files_that_run import FilesThatRun
from tests.tools.rollbacks import QUICK

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-it-works.md").read_text()
LIVES = ("A step", "A join", "A checkpoint", "A lost shard")
TRANSPORTS = ("shm", "tcp", "grpc")
SECONDS = 60.0


def named(section: str) -> set[str]:
    """The files in the tables of a section. One without a folder lies in that of the one before it in its row."""
    _, _, text = PAGE.partition(f"\n## {section}\n")
    found = set()
    for row in text.partition("\n## ")[0].splitlines():
        folder = ""
        for name in re.findall(r"`([\w/]+(?:\.py)?)`", row) if row.startswith("|") else []:
            if not name.endswith(".py"):
                folder = name if name.startswith("ps_") else folder
                continue
            if name.startswith("ps_"):
                folder = name.rpartition("/")[0]
            found.add(name if name.startswith("ps_") else f"{folder}/{name}")
    return found


class Life:
    """A worker of a cluster of two shards that keep checkpoints."""

    def __init__(self, directory: Path, transport: str) -> None:
        # It steps while a checkpoint is made: the state of the worker is in each, however busy the machine is.
        # What `fallback` takes of the time of a request is not left for its workers.
        timing = replace(QUICK, asked_checkpoint=SECONDS, fallback=5.0)
        self.cluster = Cluster(2, checkpoint_dir=directory, timing=timing)
        self._transport = transport

    def join(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.session = self.cluster.connect("sync", 0, 1, transport=self._transport)
        self.model, self.optimizer = self.session.prepare(model, optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def step_until(self, condition: Callable[[], bool], what: str) -> None:
        def steps() -> bool:
            self.step()
            return condition()

        until(steps, what)

    def checkpoint(self) -> None:
        with grpc.insecure_channel(self.cluster.address) as channel:
            asked = JobServiceStub(channel).CheckpointJob.future(CheckpointJobRequest(job="default"), timeout=SECONDS)
            self.step_until(asked.done, "the checkpoint")
            asked.result()

    def lose_a_shard(self) -> None:
        def incarnation() -> int:
            return next((member.incarnation for member in self.cluster.coordinator.job("default").workers.all()), 0)

        before = incarnation()
        self.cluster.start_again(1)
        self.step_until(lambda: incarnation() > before, "the worker's next place")
        self.step()


def what_runs(directory: Path, transport: str) -> dict[str, set[str]]:
    """The files that run in each section's part of a worker's life, in worker and servers."""
    found: dict[str, set[str]] = {}
    with FilesThatRun() as files:

        def live(section: str, part: Callable[[], None]) -> None:
            files.found.clear()
            with files.during():
                part()
            ran = [*files.found]
            found[section] = {name for name in ran if "/v1/" not in name and not name.endswith("__init__.py")}

        run = Life(directory, transport)
        try:
            live("A join", run.join)
            for _ in range(3):
                run.step()
            live("A step", run.step)
            live("A checkpoint", run.checkpoint)
            run.step()  # otherwise the worker may be at the checkpoint's clock, and goes back to nothing
            live("A lost shard", run.lose_a_shard)
            run.session.close()
        finally:
            run.cluster.stop()
    return found


@pytest.mark.long
def test_the_page_names_what_runs(tmp_path: Path) -> None:
    """Every file that runs is on the page, and every file that a section names runs there, on some transport."""
    runs = [what_runs(tmp_path / transport, transport) for transport in TRANSPORTS]
    somewhere = {section: set.union(*(run[section] for run in runs)) for section in LIVES}
    everywhere = set.union(*(named(section) for section in (*LIVES, "Files on every way")))
    nothing: dict[str, set[str]] = {section: set() for section in LIVES}
    found = {section: ran - everywhere for section, ran in somewhere.items()}
    assert found == nothing, "the page does not name them"
    found = {section: named(section) - ran for section, ran in somewhere.items()}
    assert found == nothing, "the page names them here, and they do not run"


def test_the_files_that_the_page_names_are_there() -> None:
    found = set.union(*(named(section) for section in (*LIVES, "Files on every way")))
    assert len(found) > 150
    assert sorted(name for name in found if not (ROOT / name).is_file()) == []
