"""Hugging Face's Trainer and Accelerate train on parameter servers, with what their users use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import close, needs, run_workers

pytestmark = needs("transformers", "accelerate")


def test_two_workers_with_all_that_a_trainer_does(shared: Cluster, job: str, tmp_path: Path) -> None:
    first, second = run_workers("huggingface_jobs", "train", tmp_path, cluster=shared, job=job)
    assert first["weights"] == second["weights"]
    assert first["average"] == second["average"] != first["weights"]
    # 32 samples, 2 workers, batches of 2, every second one steps, 2 epochs
    assert first["steps"] == second["steps"] == (8, 8)
    assert first["total"] == second["total"] == 8, "those who watch know how much is left"
    assert first["rate"] == second["rate"] == 0.0, "the schedule has come to its end"
    assert first["evaluated"] == second["evaluated"], "the mean over workers"
    assert first["evaluated"][-1] == pytest.approx(first["whole"], abs=1e-6), "over all samples, none twice"
    assert first["again"] == pytest.approx(first["whole"], abs=1e-6)
    assert first["losses"] != second["losses"], "each has its own share of the data"
    assert first["place"] == (0, True, True, True)
    assert second["place"] == (1, False, False, False)
    assert first["world"] == second["world"] == (1, 0, "DistributedType.NO")
    assert first["reported"] > 0
    assert second["reported"] == 0
    names = sorted(path.name for path in (tmp_path / "checkpoint-8").iterdir())
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"} <= {*names}
    assert "rng_state.pth" not in names


def test_only_rank_0_writes(shared: Cluster, job: str, tmp_path: Path) -> None:
    run_workers("huggingface_jobs", "write_apart", tmp_path, cluster=shared, job=job)
    assert (tmp_path / "rank-0" / "checkpoint-4" / "model.safetensors").exists()
    assert [path for path in tmp_path.rglob("rank-1/**/*") if path.is_file()] == []


@pytest.mark.parametrize("mode", ["async", "local:4"])
def test_what_rank_0_saves_is_the_jobs_and_not_its_own(shared: Cluster, job: str, tmp_path: Path, mode: str) -> None:
    """In async with the other worker's last steps, in local:H as the round began."""
    found, _ = run_workers("huggingface_jobs", "save_apart", tmp_path, cluster=shared, job=job, mode=mode)
    assert found == {"the job's": True, "not its own": True, "tied once": True}


@pytest.mark.parametrize("mode", ["single", "sync", "ssp:2", "async"])
def test_one_worker_equals_the_trainer_alone_to_the_last_digit(
    shared: Cluster, job: str, tmp_path: Path, mode: str
) -> None:
    cluster = None if mode == "single" else shared
    [(plain, served)] = run_workers(
        "huggingface_jobs", "beside_plain", tmp_path, cluster=cluster, job=job, mode=mode, workers=1
    )
    assert plain == served


def test_two_workers_in_sync_equal_one_process_with_twice_the_batch(shared: Cluster, job: str, tmp_path: Path) -> None:
    sgd = {"optim": "sgd", "learning_rate": 0.1}
    first, second = run_workers("huggingface_jobs", "compare", tmp_path, 2, "served", cluster=shared, job=job, **sgd)
    [alone] = run_workers("huggingface_jobs", "compare", tmp_path, 4, "plain", **sgd)
    assert first == second
    assert close(first, alone)


def test_two_workers_in_async_learn(shared: Cluster, job: str, tmp_path: Path) -> None:
    first, second = run_workers("huggingface_jobs", "train", tmp_path, cluster=shared, job=job, mode="async")
    assert first["steps"] == second["steps"] == (8, 8)
    assert first["evaluated"] == second["evaluated"]
    assert first["evaluated"][-1] < 2.9


def test_resuming_within_a_pass_equals_the_uninterrupted_run(shared: Cluster, job: str, tmp_path: Path) -> None:
    found = run_workers("huggingface_jobs", "resume", tmp_path, job[-60:], cluster=shared, job=job)
    for whole, resumed in found:
        assert whole == resumed
    assert found[0] == found[1]


def test_metrics_of_predictions_are_rank_0s_over_all_data(shared: Cluster, job: str, tmp_path: Path) -> None:
    first, second = run_workers("huggingface_jobs", "metrics", tmp_path, cluster=shared, job=job)
    assert first["last"] == second["last"]
    assert first["last"][1] == 0
    assert first["counted"] == second["counted"] == [6, 5]
    assert first["predicted"] == second["predicted"] == 5


def test_a_dataset_without_a_length(shared: Cluster, job: str, tmp_path: Path) -> None:
    first, second = run_workers("huggingface_jobs", "stream", tmp_path, cluster=shared, job=job)
    assert first == second
    assert first[1] == 6


def test_a_sampler_that_cannot_be_divided_is_refused(shared: Cluster, job: str, tmp_path: Path) -> None:
    for said in run_workers("huggingface_jobs", "refused", tmp_path, cluster=shared, job=job):
        assert "LengthGroupedSampler cannot be divided" in said


# -- Accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate_with_two_workers(shared: Cluster, job: str) -> None:
    first, second = run_workers("huggingface_jobs", "accelerated", 4, cluster=shared, job=job)
    assert first["weights"] == second["weights"]
    # 32 samples, 2 workers, batches of 4, every second one steps, 3 passes
    assert first["clock"] == second["clock"] == 6
    assert first["rate"] == 0.01
    assert first["place"] == (0, True, 1)
    assert second["place"] == (1, False, 1)
    assert "AcceleratedOptimizer is a framework's wrapper" in first["refused"]
    assert "before accelerator.prepare" in first["refused"]


def test_accelerate_in_sync_equals_one_process_with_twice_the_batch(shared: Cluster, job: str) -> None:
    # A worker clips its own gradient, before the mean: nothing is clipped here.
    first, second = run_workers("huggingface_jobs", "accelerated", 4, 1e9, cluster=shared, job=job)
    [alone] = run_workers("huggingface_jobs", "accelerated_alone", 8, 1e9)
    assert first["weights"] == second["weights"]
    assert close(first["weights"], alone)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_accelerate_with_one_worker_equals_accelerate_alone_to_the_last_digit(
    shared: Cluster, job: str, mode: str
) -> None:
    [(plain, served)] = run_workers(
        "huggingface_jobs", "accelerated_beside_plain", cluster=shared, job=job, mode=mode, workers=1
    )
    assert plain == served


@pytest.mark.parametrize("mode", ["sync", "async", "local:2"])
def test_accelerate_and_the_hub_save_and_load_all_of_a_prepared_model(
    shared: Cluster, job: str, mode: str, tmp_path: Path
) -> None:
    [found] = run_workers(
        "huggingface_jobs", "saved_by_others", str(tmp_path), cluster=shared, job=job, mode=mode, workers=1
    )
    assert all(found.values()), found
