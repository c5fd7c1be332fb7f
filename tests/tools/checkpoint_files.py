"""Checkpoints that a test writes itself, without a cluster: the buckets of one shard, and the states of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ps_protocol.convert import job_spec_data
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_server.core.snapshot import BucketSnapshot, CheckpointFile
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.manifest import Manifest, WorkerFile

CLOCK = 3
RUN = "1"


def filled(spec: JobSpec, value: float = 1.0) -> list[BucketSnapshot]:
    """Returns each bucket of a job at CLOCK, with this value in all its elements."""
    return [
        BucketSnapshot(bucket.index, CLOCK, {0: CLOCK}, torch.full((bucket.numel,), value))
        for bucket in bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    ]


def manifest_of(
    spec: JobSpec, name: str, part: CheckpointFile, clock: int = CLOCK, workers: Mapping[int, WorkerFile] | None = None
) -> Manifest:
    """Returns the manifest of a sync job whose buckets are all on shard 0, which wrote this part."""
    return Manifest(
        name=name,
        job=job_spec_data(spec),
        run=RUN,
        mode="sync",
        clock=clock,
        placement=(0,) * len(bucket_layout(spec.parameters, spec.bucket_bytes).buckets),
        shards={0: part},
        workers=workers or {},
        versions=(clock, clock),
        clocks={0: clock},
        last_incarnation=1,
        restore_count=0,
    )


def read_buckets(
    store: CheckpointStore, manifest: Manifest, buckets: Sequence[BucketSpec]
) -> dict[int, BucketSnapshot]:
    """Returns snapshots of buckets, by index, from the files that a manifest names."""
    job = manifest.job["name"]
    return store.read_files(job, store.files(job, manifest, buckets))


def write_checkpoint(
    store: CheckpointStore,
    spec: JobSpec,
    snapshots: Sequence[BucketSnapshot],
    name: str = "000001",
    states: Mapping[int, bytes] | None = None,
) -> Manifest:
    """Writes a whole checkpoint at CLOCK. states: what workers have saved, by rank."""
    assert store.begin(spec.name, name)
    part = store.write_shard(spec.name, name, 0, snapshots)
    saved = {rank: store.write_worker(spec.name, name, rank, state) for rank, state in (states or {}).items()}
    workers = {rank: WorkerFile(part, CLOCK) for rank, part in saved.items()}
    manifest = manifest_of(spec, name, part, workers=workers)
    store.commit(spec.name, manifest)
    return manifest
