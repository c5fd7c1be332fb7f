"""TensorBoard and Weights & Biases beside a job, as docs/watching.md recommends: what examples/trackers.py leaves."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cluster import Cluster
from tests.tools.framework_processes import needs
from tests.tools.launching import ROOT, environment

SCRIPT = ROOT / "examples/trackers.py"
WORKERS = 2
BLOCK = 32 * 1024
POINTS = [10, 20, 30, 40, 50, 60, 70, 80, 90]  # 3 passes of 4096 points in batches of 64, halved: 96 steps


def train(cluster: Cluster, job: str, tracker: str, out: Path, **variables: str) -> str:
    """Runs the example with two workers; returns what it printed."""
    run = ["-m", "ps_worker", "run", "--workers", str(WORKERS), "--mode", "sync", "--server", cluster.address]
    done = subprocess.run(
        [sys.executable, *run, "--job", job[-90:], str(SCRIPT), "--tracker", tracker, "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment(**variables, OMP_NUM_THREADS="1"),
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def records(file: Path) -> Iterator[Any]:
    """The records of a run that was kept offline: a log in blocks, as LevelDB has it, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no header fits in what is left of the block
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


class TestTensorBoard:
    pytestmark = needs("tensorboard")

    def test_rank_0_writes_the_loss_of_the_job(self, shared: Cluster, job: str, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        train(shared, job, "tensorboard", tmp_path / "board")
        files = list((tmp_path / "board").iterdir())
        assert len(files) == 1, "one process writes"
        events = EventAccumulator(str(tmp_path / "board"))
        events.Reload()
        losses = events.Scalars("loss")
        assert [point.step for point in losses] == POINTS
        assert all(math.isfinite(point.value) for point in losses)
        assert losses[-1].value < 0.5 * losses[0].value, "the model has learnt"


class TestWeightsAndBiases:
    pytestmark = needs("wandb")

    def test_each_worker_is_a_run_of_the_jobs_group(self, shared: Cluster, job: str, tmp_path: Path) -> None:
        offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONFIG_DIR": str(tmp_path / "config")}
        train(shared, job, "wandb", tmp_path, **offline)
        runs = {}
        for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
            [begun] = [record.run for record in records(file) if record.WhichOneof("record_type") == "run"]
            history = [it.history.item for it in records(file) if it.WhichOneof("record_type") == "history"]
            assert begun.run_group == job[-90:]
            runs[begun.display_name] = [
                {item.key or item.nested_key[0]: float(item.value_json) for item in items} for items in history
            ]
        assert set(runs) == {f"{job[-90:]}-rank-{rank}" for rank in range(WORKERS)}
        first, second = runs.values()
        assert [point["_step"] for point in first] == POINTS
        assert [point["mean loss"] for point in first] == [point["mean loss"] for point in second]
        assert first[-1]["mean loss"] == pytest.approx((first[-1]["loss"] + second[-1]["loss"]) / 2, rel=1e-5)
