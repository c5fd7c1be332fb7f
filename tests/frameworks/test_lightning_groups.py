"""Lightning's ModelParallelStrategy where its processes are one worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import close, needs, run_workers
from tests.tools.launching import ROOT, run

pytestmark = needs("lightning")
SCRIPT = "lightning_groups"


@pytest.mark.parametrize(("data", "cut", "batch"), [(2, 1, 2), (1, 2, 4)], ids=["FSDP2", "tensor parallel"])
def test_two_groups_of_two_end_as_one_process_on_the_combined_batch(
    shared: Cluster, job: str, tmp_path: Path, data: int, cut: int, batch: int
) -> None:
    groups = {"cluster": shared, "job": job, "members": 2}
    found = run_workers(SCRIPT, "fit", tmp_path, data, cut, batch, **groups)
    [alone] = run_workers(SCRIPT, "alone", tmp_path, 8)
    assert all(each["weights"] == found[0]["weights"] for each in found)
    assert close(found[0]["weights"], alone["weights"])
    assert [each["place"] for each in found] == [(0, 2, True, 0), (1, 2, False, 1), (0, 2, False, 2), (1, 2, False, 3)]
    assert [each["steps"] for each in found] == [(18, 18)] * 4  # 48 samples in batches of 8, 3 epochs
    assert all(each["metrics"]["process"] == 1.5 for each in found), "metrics with sync_dist are means over all"
    assert all(each["metrics"]["val"] == pytest.approx(alone["loss"], abs=1e-5) for each in found)
    samples = [{tuple(batch) for batch in each["seen"]} for each in found]
    if data == 2:
        assert all(not samples[one] & samples[other] for one in range(4) for other in range(one))
    else:
        assert samples[0] == samples[1]
        assert not samples[0] & samples[2]
    assert len({each["best"] for each in found}) == 1


@pytest.mark.parametrize("is_one_file", [False, True], ids=["a folder", "one file"])
def test_groups_go_on_from_a_checkpoint_as_if_they_had_not_ended(
    shared: Cluster, job: str, tmp_path: Path, is_one_file: bool
) -> None:
    arguments = (tmp_path, job[-60:], is_one_file)
    for whole, resumed, files in run_workers(SCRIPT, "resume", *arguments, cluster=shared, job=job, members=2):
        assert whole == resumed
        assert len([name for name in files if name.endswith(".distcp")]) == (0 if is_one_file else 2), "of one group"


@pytest.mark.long
@pytest.mark.parametrize("divides", [True, False])
def test_groups_share_the_data_where_optimizers_ask_for_the_number_of_steps(
    shared: Cluster, job: str, tmp_path: Path, divides: bool
) -> None:
    found = run_workers(SCRIPT, "estimate", tmp_path, divides, cluster=shared, job=job, members=2)
    assert [each[:2] for each in found] == [(3, 3)] * 4, "48 samples, four processes, batches of 4"
    assert len({sample for each in found for sample in each[2]}) == 48


def test_a_group_that_is_started_again_goes_on_with_the_jobs_weights_and_counts_its_own_steps(
    shared: Cluster, job: str, tmp_path: Path
) -> None:
    words = ("--workers", "2", "--group", "2", "--mode", "sync", "--max-restarts", "1")
    script = str(ROOT / "tests" / "scripts" / "lightning_restarted.py")
    done = run(*words, script, str(tmp_path), PS_SERVER=shared.address, PS_JOB=job[-100:])
    assert done.returncode == 0, done.stderr[-6000:]
    assert "failed with code 7" in done.stderr
    names = "0-0", "0-1", "1-0", "1-1"
    first, other, again, last = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert (first["clock"], again["clock"]) == (0, 6)
    assert again["begin"] == last["begin"] == first["stood"] == other["stood"]
    assert not close(again["begin"], first["begin"], 1e-3), "nothing was learnt"
    # 48 samples in batches of 2 for four processes, 3 epochs
    assert [(each["steps"], each["ended"]) for each in (first, other, again, last)] == [(18, 18)] * 2 + [(18, 24)] * 2


def test_what_a_group_saves_in_a_round_is_the_jobs_and_not_its_own(shared: Cluster, job: str, tmp_path: Path) -> None:
    found = run_workers(SCRIPT, "save_apart", tmp_path, cluster=shared, job=job, mode="local:16", members=2)
    assert found == [{"the job's": True, "not its own": True}] * 4


def test_strategies_of_one_process_a_worker_are_refused_in_a_group_and_name_what_to_take(
    shared: Cluster, job: str
) -> None:
    for trainers, fabrics in run_workers(SCRIPT, "refusals", cluster=shared, job=job, members=2, workers=1):
        assert "has started 2 processes as this worker" in trainers
        assert "take ParameterServerGroupStrategy" in trainers
        assert "take a loop of your own, with session.prepare(..., group=mesh)" in fabrics


def test_without_a_group_the_strategy_says_how_to_start_one_and_a_cut_module_is_refused(
    shared: Cluster, job: str, tmp_path: Path
) -> None:
    for said in run_workers(SCRIPT, "without_a_group", cluster=shared, job=job, workers=1):
        assert "ps-worker run --group N" in said
    [said] = run_workers(SCRIPT, "sharded_in_another_strategy", tmp_path, cluster=shared, job=job, workers=1)
    assert "the model is sharded by fully_shard (FSDP2)" in said
