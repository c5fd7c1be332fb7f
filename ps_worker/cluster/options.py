"""A worker's settings for its job: rank, servers, transport and timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ps_protocol.modes import Consistency
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.launch_id import UNKNOWN, LaunchId
from ps_runtime.memory_place import memory_place


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """One worker's part in a job.

    server:           HOST:PORT of the coordinator; None in single and ddp
    consistency:      the mode's rule; None in single and ddp
    rank:             this worker's rank; None: the coordinator gives one
    world_size:       how many workers the job has; 0: elastic
    connect_timeout:  seconds without any progress after which a call gives up
    start_timeout:    seconds to wait until all declared workers have joined, and all members of a group have come
    group_timeout:    seconds without a sign of a member of this worker's group, after which the others end; 0: never
    step_timeout:     seconds for which a member may be in the script while another one waits for it; 0: without end
    transport:        how buckets travel: "shm", "tcp", "grpc", or "auto": shared memory with each shard that can see
                      it, data connections to the others, gRPC without these
    shared_directory: the directory in which shards on this host get that memory
    access:           certificates and token for calls to servers
    busy_seconds:     how long a worker counts as live while C code keeps the GIL from its heartbeat thread; 0: no
                      longer than its lease
    launch:           the launch that started this worker, and whether it takes over from another launch
    group_size:       how many processes the launcher has started as this worker; 0: unknown
    """

    server: str | None
    job: str
    consistency: Consistency | None
    rank: int | None
    world_size: int
    connect_timeout: float
    start_timeout: float
    transport: str
    shared_directory: Path
    access: Access = PLAINTEXT
    launch: LaunchId = UNKNOWN
    busy_seconds: float = 0.0
    group_timeout: float = 0.0
    step_timeout: float = 0.0
    group_size: int = 0

    @property
    def memory_place(self) -> str:
        """The name of the host and namespace whose memory this worker can share with shards; empty: it shares none."""
        return memory_place(self.shared_directory) if self.transport in ("auto", "shm") else ""
