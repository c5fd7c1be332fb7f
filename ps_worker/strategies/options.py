"""What a job on a parameter server is, as `prepare` was told."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.job import NonFinite
from ps_protocol.modes import Consistency
from ps_runtime.launch_id import UNKNOWN, LaunchId
from ps_worker.cluster.connection import ConnectionOptions


@dataclass(frozen=True)
class JobOptions:
    """What a job on a parameter server is, besides model and optimizer.

    bucket_bytes: of a full bucket; None: what the job has, or the server chooses
    start_timeout: seconds to wait until all declared workers have joined
    link:    how shards, and the coordinator at `server`, are reached
    overlap: whether full buckets leave while backward runs; None: once the script was seen to allow it
    launch:  what started this worker
    """

    server: str
    job: str
    consistency: Consistency
    rank: int | None
    world_size: int
    bucket_bytes: int | None
    non_finite: NonFinite
    gradient_wire: str
    weight_wire: str
    start_timeout: float
    link: ConnectionOptions
    overlap: bool | None
    launch: LaunchId = UNKNOWN
