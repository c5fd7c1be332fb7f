"""The warm-up of local:H: a job that was shorter than it has trained as in sync, and says so."""

from __future__ import annotations

import pytest

from ps_worker import Session
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import step
from tests.tools.small_steps import batch, make_net, sgd


def train(session: Session, steps: int, warm_up: int = 64) -> None:
    model = make_net()
    model, optimizer = session.prepare(model, sgd(model), bucket_bytes=256, outer={"warm_up": warm_up})
    for number in range(steps):
        step(model, optimizer, batch(session.rank, number))


def never_warm(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "never left its warm-up" in record.getMessage()]


@pytest.mark.parametrize("mode", ["local:4", "local:4/2", "local:30s"])
def test_a_job_that_never_leaves_its_warm_up_says_so_once(
    shared: Cluster, job: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int) -> None:
        with shared.connect(mode, rank, 2, job=job) as session:
            train(session, 5, warm_up=5)

    in_parallel(2, work)
    assert never_warm(caplog) == [
        f"mode {mode} never left its warm-up: all 5 steps of this job were rounds of one step, as in sync "
        "(prepare(..., outer={'warm_up': N}) makes the warm-up of 5 steps shorter)"
    ]


def test_a_job_that_leaves_its_warm_up_and_one_without_steps_say_nothing(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    for steps, warm_up in ((6, 5), (0, 64)):
        with shared.connect("local:4", job=f"{job}-{steps}") as session:
            train(session, steps, warm_up)
    assert never_warm(caplog) == []


def test_a_script_that_is_cut_short_does_not_speak_of_its_warm_up(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted() -> None:
        with shared.connect("local:4", job=job) as session:
            train(session, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert never_warm(caplog) == []
