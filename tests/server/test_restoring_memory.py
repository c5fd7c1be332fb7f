"""What a job takes while it is restored: counted as long as that lasts, and at its peak at most twice what it holds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.convert import job_spec_data
from ps_protocol.errors import LimitExceeded
from ps_protocol.layout import bucket_layout
from ps_protocol.optimizers import with_defaults
from ps_server.core.budget import room_for
from ps_server.core.snapshot import BucketSnapshot, RestoreRequest
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import OwnThreads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest
from tests.tools.held_disk import HeldDisk
from tests.tools.launching import python
from tests.tools.raw_worker import vector_job

SECONDS = 30.0
PEAK = 2.0  # times weights and optimizer state
SPEC = with_defaults(replace(vector_job("job", "sync", 2**16, 2), optimizer="Adam", param_groups=({"lr": 0.1},)))
LAYOUT = bucket_layout(SPEC.parameters, SPEC.bucket_bytes).buckets
NAME, RUN = "000001", "1"
REQUEST = RestoreRequest(SPEC, tuple(range(len(LAYOUT))), NAME, 1, RUN)


def write_checkpoint(store: CheckpointStore) -> None:
    assert store.begin(SPEC.name, NAME)
    snapshots = [BucketSnapshot(bucket.index, 0, {}, torch.zeros(bucket.numel)) for bucket in LAYOUT]
    part = store.write_shard(SPEC.name, NAME, 0, snapshots)
    store.commit(
        SPEC.name,
        Manifest(
            name=NAME,
            job=job_spec_data(SPEC),
            run=RUN,
            mode="sync",
            clock=0,
            placement=(0,) * len(LAYOUT),
            shards={0: part},
            workers={},
            versions=(0, 0),
            clocks={},
            last_incarnation=1,
            restore_count=0,
        ),
    )


def test_what_a_job_is_still_to_take_counts_while_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HeldDisk()
    store = CheckpointStore(tmp_path, disk)
    write_checkpoint(store)
    room = room_for(SPEC, range(len(LAYOUT)))
    monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: room.total)
    shard = Shard(ShardMetrics(CollectorRegistry()), OwnThreads(), checkpoints=store)
    small = vector_job("small", "sync", 16, 1)
    try:
        shard.restore_job(REQUEST, seconds=0.0)
        assert disk.reached.wait(SECONDS)
        left = room.optimizer + room.staged
        monkeypatch.setattr("ps_server.shard.hosted.free_bytes", lambda: left)
        with pytest.raises(LimitExceeded, match=f"{left} are free, of which other jobs here still take {left}"):
            shard.create_job(small, [0], RUN)
        disk.go.set()
        assert shard.restore_job(REQUEST, seconds=SECONDS).extent is not None
        with pytest.raises(LimitExceeded, match=f"still take {left}"):
            shard.create_job(small, [0], RUN)
        shard.drop_job("job", RUN)
        shard.create_job(small, [0], RUN)
    finally:
        disk.go.set()
        shard.stop()


def test_an_elastic_job_takes_what_its_workers_push_ahead_and_no_less_than_its_weights() -> None:
    elastic = room_for(replace(SPEC, world_size=0), range(len(LAYOUT)))
    assert elastic.staged == elastic.weights == 4 * 2**16
    assert elastic.total > elastic.weights + elastic.optimizer + elastic.staged
    assert room_for(replace(SPEC, world_size=1), range(len(LAYOUT))).staged == 0
    assert room_for(replace(SPEC, world_size=0), range(len(LAYOUT)), staged_limit=1000).staged == 1000


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_restore_takes_at_most_twice_what_the_job_holds(tmp_path: Path) -> None:
    """3.4 times once: the old job, the new one, the file and its copies at the same time."""
    results = tmp_path / "found.jsonl"
    flags = ("--mib", "96", "--bucket-kib", "4096", "--rounds", "1")
    done = python("-m", "bench", "restore", *flags, "--json", str(results), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    peaks = {line["system"]: line["ratios"]["weights + optimizer state"] for line in lines if line["system"] != "cp"}
    assert peaks.keys() == {"shard", "shard that has the job"}
    assert max(peaks.values()) <= PEAK, peaks
