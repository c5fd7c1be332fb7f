"""What all jobs of a coordinator share: the shards, the limits, the directory of checkpoints, and the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ps_server.coordinator.ended_jobs import FinishedJob
from ps_server.coordinator.events import EventLog
from ps_server.coordinator.policy import CheckpointPolicy
from ps_server.coordinator.shards import MakeExecutor, Shards
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.timing import Clock, Timing
from ps_server.core.limits import Limits
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.files import Files


@dataclass(frozen=True)
class Checkpointing:
    """Where checkpoints are, and when they are made.

    release: gives the directory back to other coordinators
    room:    for the workers' states of all jobs
    """

    store: CheckpointStore
    policy: CheckpointPolicy
    release: Callable[[], None]
    room: SharedRoom

    @classmethod
    def open(cls, policy: CheckpointPolicy, disk: Files, since: float, limits: Limits) -> Checkpointing:
        """Takes the directory for one coordinator, which began at `since`. Raises InvalidRequest if one has it."""
        store = CheckpointStore(policy.directory, disk)
        release = lock_directory(policy.directory, policy.address, disk, since)
        return cls(store, policy, release, SharedRoom(limits.all_state_bytes))


@dataclass(frozen=True)
class Cluster:
    """The cluster, as its jobs see it.

    lease:         seconds for which a worker counts as live without a heartbeat
    checkpointing: None: there are no checkpoints
    events:        what happened lately
    rounds_room:   for the values that workers of all jobs exchange
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


class Registry(Protocol):
    """What a job tells its coordinator."""

    def save(self) -> None:
        """Writes all jobs to the state file. Where the disk refuses that, it is tried again soon."""

    def save_ahead(self) -> None:
        """Keeps all jobs on disk before something is done. Raises TryLater where the disk does not take it."""

    def later(self, seconds: float, work: Callable[[], None]) -> bool:
        """Calls `work` after so many seconds, beside the caller. False: it cannot."""

    def forget(self, name: str, why: str, finished: FinishedJob | None) -> None:
        """Drops a job that has ended, and frees its name.

        why: in words; empty where its workers have left. finished: as it stays known, if they were done
        """
