"""Accelerate's FSDP2 plugin where its processes are one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import close, needs, run_workers

pytestmark = needs("accelerate", "transformers")
SCRIPT = "accelerate_groups"


@pytest.mark.parametrize(("accumulate", "sized"), [(1, False), (2, True)], ids=["plugin", "with a ParallelismConfig"])
def test_two_groups_of_two_end_as_one_process_on_the_combined_batch(
    shared: Cluster, job: str, accumulate: int, sized: bool
) -> None:
    found = run_workers(SCRIPT, "train", 10, accumulate, sized, cluster=shared, job=job, members=2)
    [alone] = run_workers(SCRIPT, "alone", 10, accumulate)
    assert all(each == found[0] for each in found)
    assert close(found[0]["weights"], alone)
    assert found[0]["clock"] == 10
    assert found[0]["kinds"] == ["AcceleratedOptimizer", "AcceleratedScheduler"]


def test_groups_go_on_from_what_accelerate_has_saved_as_if_they_had_not_ended(
    shared: Cluster, job: str, tmp_path: Path
) -> None:
    kept = tmp_path / "state"
    groups = {"cluster": shared, "members": 2}
    whole = run_workers(SCRIPT, "train", 6, job=f"{job[-60:]}-1", **groups)
    run_workers(SCRIPT, "train", 4, saves=kept, job=f"{job[-60:]}-2", **groups)
    rest = run_workers(SCRIPT, "train", 6, loads=kept, skip=4, job=f"{job[-60:]}-3", **groups)
    for name in ("weights", "rate"):
        assert [each[name] for each in rest] == [each[name] for each in whole]


def test_what_groups_do_not_have_is_refused_by_name(shared: Cluster, job: str, tmp_path: Path) -> None:
    found = run_workers(SCRIPT, "refusals", tmp_path, cluster=shared, job=job, members=2, workers=1)
    for replicas, tensors, context, scaler, offload, cpus, trainer in found:
        assert "ParallelismConfig(dp_replicate_size=2)" in replicas
        assert "ParallelismConfig(tp_size=2)" in tensors
        assert "ParallelismConfig(cp_size=2)" in context
        assert 'use "bf16"' in scaler
        assert "cpu_offload=True" in offload
        assert "leaves the plugin out on CPUs. Here it has MULTI_CPU" in cpus
        assert "ps_torch.accelerate.join" in trainer


def test_join_names_the_variable_that_makes_processes_a_group(shared: Cluster, job: str) -> None:
    for said in run_workers(SCRIPT, "without_a_group_size", cluster=shared, job=job, members=2, workers=1):
        assert "PS_GROUP_SIZE=N for the torchrun of each group" in said
