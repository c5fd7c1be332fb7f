"""Shared by all jobs of a coordinator: the shards, the limits, the directory of checkpoints, and the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.job import JobSpec
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.ended_jobs import FinishedJob
from ps_server.coordinator.events import EventLog
from ps_server.coordinator.shards import MakeExecutor, Shards
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.timing import Clock, Timing
from ps_server.core.limits import Limits
from ps_server.core.membership import Membership
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.files import Files


@dataclass(frozen=True)
class Checkpointing:
    """The checkpoints of a cluster: their directory, and the policy by which they are made.

    release: gives up the lock on the directory, so that another coordinator can use it
    room:    the memory budget for the workers' states of all jobs
    """

    store: CheckpointStore
    policy: CheckpointPolicy
    release: Callable[[], None]
    room: SharedRoom

    @classmethod
    def open(cls, policy: CheckpointPolicy, disk: Files, since: float, limits: Limits) -> Checkpointing:
        """Locks the directory for this coordinator. Raises InvalidRequest if another coordinator has locked it.

        since: when this coordinator began, in seconds since 1970
        """
        store = CheckpointStore(policy.directory, disk)
        release = lock_directory(policy.directory, policy.address, disk, since)
        return cls(store, policy, release, SharedRoom(limits.all_state_bytes))


@dataclass(frozen=True)
class Cluster:
    """The cluster, for the jobs of its coordinator.

    lease:         seconds for which a worker counts as live without a heartbeat
    checkpointing: None: the servers make no checkpoints
    events:        the log of recent events
    rounds_room:   the memory budget for the values that the workers of all jobs exchange
    """

    shards: Shards
    lease: float
    limits: Limits
    checkpointing: Checkpointing | None
    timing: Timing
    clock: Clock
    make_executor: MakeExecutor
    events: EventLog
    rounds_room: SharedRoom


def new_membership(spec: JobSpec, cluster: Cluster, last_incarnation: int = 0) -> Membership:
    """Returns the membership of a job without workers.

    last_incarnation: the highest incarnation of any worker that the job has had
    """
    return Membership(
        spec.world_size,
        cluster.lease,
        last_incarnation=last_incarnation,
        absence=cluster.timing.absence,
        group_size=spec.group_size,
    )


class Registry(Protocol):
    """The calls that a job makes to its coordinator."""

    def save(self) -> None:
        """Writes all jobs to the state file. If the write fails, the coordinator repeats it later."""

    def save_ahead(self) -> None:
        """Writes all jobs to the state file before the caller acts on a decision. Raises TryLater if the
        write fails.
        """

    def later(self, seconds: float, work: Callable[[], None]) -> bool:
        """Schedules `work` on another thread after `seconds`. Returns False, and schedules nothing, if it has no thread
        for it.
        """

    def holds(self, name: str) -> bool:
        """Whether a job goes on without workers: its parameters were added to another job that has not ended. A worker
        of that one may add them later, and needs their weights.
        """

    def forget(self, name: str, why: str, finished: FinishedJob | None) -> None:
        """Drops a job that has ended, and frees its name. Before, it finishes the jobs that this one held.

        why:      the reason, as text; empty if all its workers have left
        finished: the record of the job that is kept if its workers were done; None if they were not
        """
