"""The frameworks under both launchers, as users start them: `ps-worker run`, and torchrun with PS_SERVER set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import close, needs, run_workers
from tests.tools.launching import ROOT, environment

pytestmark = needs("lightning", "transformers", "accelerate")

LAUNCHERS = {
    "ps-worker run": ["-m", "ps_worker", "run", "--workers", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}

SCRIPT = ROOT / "tests" / "scripts" / "train_with_frameworks.py"


def launch(launcher: str, cluster: Cluster, job: str, directory: Path, *kinds: str) -> dict[str, list[Any]]:
    """What each worker left, by kind and mode, in the order of ranks."""
    variables = {"PS_SERVER": cluster.address, "PS_JOB": job[-90:], "PS_METRICS_HOST": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(SCRIPT), str(directory), *kinds],
        capture_output=True,
        text=True,
        env=environment(**variables, OMP_NUM_THREADS="1"),
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    names = sorted({path.stem.rpartition("-")[0] for path in directory.glob("*.json")})
    return {name: [json.loads((directory / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in names}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_framework_trains_under_each_launcher(shared: Cluster, job: str, tmp_path: Path, launcher: str) -> None:
    found = launch(launcher, shared, job, tmp_path, "accelerate", "trainer", "lightning")
    assert [*found] == [
        f"{kind}-{mode}" for kind in ("accelerate", "lightning", "trainer") for mode in ("async", "sync")
    ]
    for name, (first, second) in found.items():
        assert (first["rank"], second["rank"]) == (0, 1), name
        for worker in (first, second):
            assert not close(worker["after"], worker["before"], 1e-3), f"{name}: nothing was learnt"
        if name.endswith("-sync"):
            assert first["after"] == second["after"], name
    [alone] = run_workers("huggingface_jobs", "accelerated_alone", 8, 1e9)
    assert close(found["accelerate-sync"][0]["after"], alone)


def test_the_frameworks_as_they_are_train_under_torchrun(shared: Cluster, job: str, tmp_path: Path) -> None:
    """There they move the model to "cpu:0", which copies its parameters, and wrap it in DistributedDataParallel."""
    found = launch("torchrun", shared, job, tmp_path, "plain-accelerate", "plain-trainer")
    assert [*found] == ["plain-accelerate-sync", "plain-trainer-sync"]
    for name, (first, second) in found.items():
        assert first["after"] == second["after"], name
        assert not close(first["after"], first["before"], 1e-3), f"{name}: nothing was learnt"
    sgd = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    [alone] = run_workers("huggingface_jobs", "compare", tmp_path, 4, "plain", **sgd)
    assert close(found["plain-trainer-sync"][0]["after"], alone, 1e-5)
