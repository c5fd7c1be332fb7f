"""Clusters in virtual time: a process that joins late, or is started again, continues the job's schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.state.job_state import JobThings
from ps_worker.strategies.late_script import LateScript
from tests.simulation.cluster import Cluster
from tests.tools.cases import cases

FAULTS = ("a worker is killed",)
ROLLBACKS = (*FAULTS, "a shard is killed")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", cases([range(2), range(21, 23)], [range(2, 21), range(23, 40)]), ids=str)
def test_no_process_that_joins_late_steps_with_another_rate(seeds: range) -> None:
    for seed in seeds:
        assert Cluster("sync", seed, faults=FAULTS, schedules=True).run() == [], seed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", cases([range(2)], [range(2, 14), range(14, 24)]), ids=str)
def test_a_schedule_goes_back_with_the_job(seeds: range) -> None:
    for seed in seeds:
        assert Cluster("sync", seed, faults=ROLLBACKS, schedules=True).run() == [], seed


@pytest.mark.timeout(600)
def test_a_schedule_that_stays_where_the_job_was_rolled_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerCheckpoint, "rollback", lambda *_: None)
    found = {each.kind for each in Cluster("sync", 2, faults=ROLLBACKS, schedules=True).run()}
    assert "torn" in found


def begins_anew(patch: pytest.MonkeyPatch) -> None:
    """A process that joins late begins its schedule at its beginning."""
    patch.setattr(LateScript, "joins", lambda self: self._checkpoint.comes_late())


def adopts_nothing(patch: pytest.MonkeyPatch) -> None:
    """It asks, and leaves what it hears."""
    patch.setattr(JobThings, "adopt", lambda *_: None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("breaks", [begins_anew, adopts_nothing])
def test_a_late_worker_with_another_schedule_is_found_out(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    assert any(
        each.kind in ("torn", "wrong update")
        for seed in range(8)
        for each in Cluster("sync", seed, faults=FAULTS, schedules=True).run()
    )
