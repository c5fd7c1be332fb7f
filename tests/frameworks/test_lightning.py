"""Lightning's Trainer and Fabric train on parameter servers, with what their users use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import close, needs, run_workers

pytestmark = needs("lightning")


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_two_workers_with_all_that_a_trainer_does(shared: Cluster, job: str, tmp_path: Path) -> None:
    first, second = run_workers("lightning_jobs", "fit", tmp_path, cluster=shared, job=job)
    assert first["weights"] == second["weights"]
    assert first["place"] == (0, 2, True, 0, 0)
    assert second["place"] == (1, 2, False, 1, 1)
    # 48 samples, 2 workers, batches of 4, every second one steps, 3 epochs
    assert first["batches"] == second["batches"] == 18
    assert first["steps"] == second["steps"] == (9, 9)
    assert first["total"] == second["total"] == 9, "those who watch know how much is left"
    assert first["rates"] == second["rates"] == [0.02 / 8]
    assert [*first["monitored"]] == ["lr-AdamW"], "as without parameter servers"
    assert sorted({*first["monitored"]["lr-AdamW"]}) == [0.02 / 4, 0.02 / 2, 0.02]
    for found in (first, second):
        assert found["metrics"]["rank"] == 0.5, "metrics with sync_dist are means over workers"
        assert found["metrics"]["sum"] == 4, "or sums: two batches of validation data on each worker"
        assert found["metrics"]["val"] == pytest.approx(found["whole"], abs=1e-6), "validation is over all data"
        assert found["validated"]["val"] == pytest.approx(found["whole"], abs=1e-6)
    assert first["metrics"]["train"] != second["metrics"]["train"], "each has its own share of the data"
    assert files(tmp_path / "rank-1") == []
    assert [Path(name).suffix for name in files(tmp_path / "rank-0")] == [".ckpt", ".csv"]
    assert first["best"] == second["best"]
    assert Path(first["best"]).is_relative_to(tmp_path / "rank-0")


@pytest.mark.parametrize("mode", ["single", "sync", "ssp:2", "async"])
def test_one_worker_equals_lightning_alone_to_the_last_digit(
    shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    cluster = None if mode == "single" else shared
    [(plain, served)] = run_workers(
        "lightning_jobs", "beside_plain", tmp_path, cluster=cluster, job=job, mode=mode, workers=1
    )
    assert plain == served


def test_two_workers_in_sync_equal_one_process_with_twice_the_batch(shared: Cluster, job: str, tmp_path: Path) -> None:
    [alone] = run_workers("lightning_jobs", "compare", tmp_path, 8, "auto")
    first, second = run_workers("lightning_jobs", "compare", tmp_path, 4, "ps", cluster=shared, job=job)
    assert first == second
    assert close(first, alone)


def test_two_workers_in_async_share_the_data_and_learn(shared: Cluster, job: str, tmp_path: Path) -> None:
    first, second = run_workers("lightning_jobs", "fit", tmp_path, cluster=shared, job=job, mode="async")
    assert first["batches"] == second["batches"] == 18
    assert first["metrics"]["val"] == second["metrics"]["val"] < 2.5


@pytest.mark.parametrize("mode", ["async", "local:4"])
def test_what_a_trainer_saves_is_the_jobs_and_not_rank_0s_own(
    shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    """In async with the other worker's last steps, in local:H as the round began."""
    found, _ = run_workers("lightning_jobs", "save_apart", tmp_path, cluster=shared, job=job, mode=mode)
    assert found == {"the job's": True, "not its own": True, "the optimizer's": True}


def test_resuming_from_a_checkpoint_equals_the_uninterrupted_run(shared: Cluster, job: str, tmp_path: Path) -> None:
    for whole, resumed in run_workers("lightning_jobs", "resume", tmp_path, job[-60:], cluster=shared, job=job):
        assert whole == resumed


@pytest.mark.parametrize(("divides", "combined"), [(True, False), (False, False), (False, True)])
def test_workers_share_the_data_where_optimizers_ask_for_the_number_of_steps(
    shared: Cluster, job: str, tmp_path: Path, divides: bool, combined: bool
) -> None:
    arguments = (tmp_path, divides, combined)
    first, second = run_workers("lightning_jobs", "estimate", *arguments, cluster=shared, job=job)
    assert first[:2] == second[:2] == (6, 6), "48 samples, two workers, batches of 4"
    assert len({*first[2], *second[2]}) == 48


def test_a_decision_of_one_worker_stops_all(shared: Cluster, job: str, tmp_path: Path) -> None:
    epochs = run_workers("lightning_jobs", "stop_early", tmp_path, cluster=shared, job=job)
    assert epochs[0] == epochs[1] < 8


def test_manual_optimization_with_two_optimizers(shared: Cluster, job: str, tmp_path: Path) -> None:
    [alone] = run_workers("lightning_jobs", "gan", tmp_path, "auto", 8)
    first, second = run_workers("lightning_jobs", "gan", tmp_path, "ps", cluster=shared, job=job)
    assert first == second
    assert close(first, alone)


def test_a_strategy_serves_one_fit_and_any_validation_before(shared: Cluster, job: str, tmp_path: Path) -> None:
    for validated, refused, whole in run_workers("lightning_jobs", "once_only", tmp_path, cluster=shared, job=job):
        assert validated["val"] == pytest.approx(whole, abs=1e-6)
        assert "has its models already" in refused
        assert "new strategy" in refused


def test_synchronised_statistics_are_refused_and_not_left_out(shared: Cluster, job: str, tmp_path: Path) -> None:
    for refused in run_workers("lightning_jobs", "synchronised_statistics", tmp_path, cluster=shared, job=job):
        assert "net.1 is a SyncBatchNorm, which needs a process group" in refused


def test_its_collectives_are_those_of_the_session(shared: Cluster, job: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run_workers("lightning_jobs", "collectives", tmp_path, cluster=shared, job=job)):
        assert found["alone"] == [rank + 1, rank, rank + 1], "nothing to reduce before it has joined"
        assert found["reduced"] == [1.5, 1.5, 3.0, 2.0, 1.0, 1.5, 3.0]
        assert found["kept"] == "no tensor"
        assert found["decided"] == [False, True]
        assert found["gathered"] == [[1.0], [2.0]]
        assert found["path"] == Path("of-0")
        assert "mean, sum, max and min" in found["refused"]


def test_fabric_with_two_workers_equals_one_process(shared: Cluster, job: str) -> None:
    first, second = run_workers("lightning_jobs", "fabric", 4, cluster=shared, job=job)
    [alone] = run_workers("lightning_jobs", "fabric", 8)
    assert first == second
    assert close(first, alone)


def test_fabric_with_one_worker_equals_fabric_alone_to_the_last_digit(shared: Cluster, job: str) -> None:
    [(plain, served)] = run_workers("lightning_jobs", "fabric_beside_plain", cluster=shared, job=job, workers=1)
    assert plain == served


def test_fabric_saves_and_loads(shared: Cluster, job: str, tmp_path: Path) -> None:
    for whole, resumed in run_workers("lightning_jobs", "fabric_resume", tmp_path, job[-60:], cluster=shared, job=job):
        assert whole == resumed


@pytest.mark.parametrize("mode", ["async", "local:4"])
def test_what_fabric_saves_is_the_jobs_and_not_rank_0s_own(
    shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    """In async with the other worker's last steps, in local:H as the round began."""
    found, _ = run_workers("lightning_jobs", "fabric_save_apart", tmp_path, cluster=shared, job=job, mode=mode)
    assert found == {"the job's": True, "not its own": True, "another's": True}


def test_fabric_saves_without_a_copy_where_rank_0_has_the_jobs_weights(shared: Cluster, job: str) -> None:
    assert run_workers("lightning_jobs", "fabric_saves_its_own", cluster=shared, job=job) == [True, True]


def test_fabric_says_what_it_wants_first_and_takes_what_a_session_prepared(shared: Cluster, job: str) -> None:
    for loader_first, once_more, (trained, before) in run_workers(
        "lightning_jobs", "fabric_refusals", cluster=shared, job=job
    ):
        assert "before fabric.setup_dataloaders" in loader_first
        assert "has its models already" in once_more
        assert trained != before


def test_an_elastic_job_is_refused_as_all_of_its_workers_would_write_the_files_of_rank_0(
    shared: Cluster, job: str
) -> None:
    for said in run_workers("lightning_jobs", "refused_elastic", cluster=shared, job=job):
        assert ["an elastic job" in each and "Lightning asks for" in each for each in said] == [True, True]
