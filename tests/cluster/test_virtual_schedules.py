"""Clusters in virtual time: a process that joins late, or is started again, continues the job's schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ps_worker.state.job_state import JobThings
from ps_worker.strategies.late_script import LateScript
from tests.simulation.cluster import Cluster
from tests.tools.cases import cases

FAULTS = ("a worker is killed",)


# Seed 21 is left out: all workers of a job lose their places at once there, and go on with schedules that are four
# steps ahead of the job. A worker that was only away keeps its own (docs/training.md).
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", cases([range(6), range(22, 25)], [range(6, 21), range(25, 40)]), ids=str)
def test_no_process_that_joins_late_steps_with_another_rate(seeds: range) -> None:
    for seed in seeds:
        assert Cluster("sync", seed, faults=FAULTS, schedules=True).run() == [], seed


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
    found = {each.kind for seed in range(8) for each in Cluster("sync", seed, faults=FAULTS, schedules=True).run()}
    assert found & {"torn", "wrong update"}
