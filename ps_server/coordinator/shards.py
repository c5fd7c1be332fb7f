"""The shards of a cluster, for the coordinator: the interface of one, and which process serves which.

ShardApi   the interface of one shard: over gRPC in a cluster (rpc.shard_client), direct calls in one process
Shards     the registered shards: calls all of them
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ps_protocol.errors import Fenced, InvalidRequest, PSError, TryLater
from ps_protocol.job import JobSpec
from ps_runtime.background import guarded
from ps_runtime.credentials import is_loopback
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.timing import DEFAULT_TIMING, Clock, Timing
from ps_server.core.data_commits import Committed
from ps_server.core.data_leases import WorkerId
from ps_server.core.membership import Arrival, ShardProgress
from ps_server.core.snapshot import RestoreProgress, RestoreRequest, ShardSnapshot, SnapshotRequest
from ps_server.core.statistics import ShardStatistics
from ps_server.core.validation import check_address, check_memory_place

log = logging.getLogger("ps_server")

T = TypeVar("T")

SHARD_CALL_SECONDS = 2.0  # interval at which a shard renews its registration
THREADS_OF_A_SHARD = 64  # most threads that call one shard; they are started when they are needed


class ShardApi(Protocol):
    """The methods of one shard for the coordinator. They raise PSError; all are safe to repeat."""

    def create_job(self, spec: JobSpec, buckets: list[int], run: str, shards: int) -> None:
        """Allocates the buckets of a run of a job. Raises RunEnded if the shard holds a later run.

        buckets: the indices of the buckets
        shards:  the number of shards that share the job's tables
        """

    def drop_job(self, job: str, run: str) -> None:
        """Forgets a run of a job."""

    def add_workers(self, job: str, workers: Sequence[Arrival], run: str) -> list[ShardProgress | Fenced]:
        """Counts up to WORKERS_A_CALL workers as live. Returns for each the shard's state, or a Fenced with the
        reason.
        """

    def remove_workers(self, job: str, workers: Sequence[WorkerId], run: str) -> None:
        """Stops counting up to WORKERS_A_CALL workers as live."""

    def committed(self, job: str, run: str) -> Committed | None:
        """Returns the leased data that every bucket that trains there has had; None if there is no such bucket."""

    def begin_snapshot(self, request: SnapshotRequest) -> None:
        """Begins the shard's part of a checkpoint: each bucket is copied at the request's clock, or now. Returns at
        once.
        """

    def await_snapshot(self, job: str, checkpoint: str, run: str) -> ShardSnapshot:
        """Returns the shard's part of a checkpoint, once it is on disk. Raises TryLater if it is not yet; then repeat
        the call.
        """

    def restore_job(self, request: RestoreRequest) -> RestoreProgress:
        """Restores a job on the shard from a checkpoint, and returns the progress.

        A long restore takes several calls: each returns within seconds. The caller repeats the same call until
        `extent` of the progress is set.
        """

    def statistics(self) -> ShardStatistics:
        """Returns the statistics of the shard and its jobs."""

    def process(self) -> int:
        """Returns the number of the process that answers at the shard's address."""

    def close(self) -> None:
        """Closes the connection."""


# Makes an executor for calls, from a number of threads and a name: ThreadPoolExecutor, or one that runs each call at
# once.
MakeExecutor = Callable[[int, str], Executor]

# Makes the ShardApi of a shard from its index and address.
Connect = Callable[[int, str], ShardApi]


@dataclass(frozen=True)
class RegisteredShard:
    """A shard that has registered.

    process:       the number of the shard's process; no other process has it
    seen:          when the shard last called, on the coordinator's clock
    restart_count: how often its supervisor has restarted it, as the shard reports
    memory_place:  names the memory that the shard can share with workers; empty: not reported
    """

    index: int
    address: str
    api: ShardApi
    metrics_address: str
    pid: int
    process: int
    seen: float
    restart_count: int
    memory_place: str = ""


class Shards:
    """The registered shards. Methods may be called from any thread.

    Each shard has its own threads for calls: if one shard hangs, calls to the others do not queue behind it. A
    coordinator that is no longer in charge makes no calls.

    count:   the number of shards of the cluster
    connect: makes the ShardApi of a shard from its index and address
    """

    def __init__(
        self,
        count: int,
        connect: Connect,
        make_executor: MakeExecutor,
        timing: Timing = DEFAULT_TIMING,
        clock: Clock | None = None,
        charge: Charge | None = None,
    ) -> None:
        self.count, self.charge = count, charge or Charge()
        self._connect = connect
        self._lanes = [make_executor(THREADS_OF_A_SHARD, f"shard-{index}") for index in range(count)]
        self._lost_after, self._clock = timing.shard_lost, clock or Clock()
        self._began = self._clock.now()
        self._known: dict[int, RegisteredShard] = {}
        self._replaced: set[int] = set()  # processes that served a shard before another one did
        self._ended: set[int] = set()  # processes that have a shard's index, and whose launcher has seen them end
        self._lock = threading.Lock()
        self.is_closing = False  # True: `close` was called, and long work must end soon

    def register(
        self,
        index: int,
        address: str,
        metrics_address: str,
        pid: int,
        process: int,
        restart_count: int = 0,
        memory_place: str = "",
    ) -> None:
        """Registers a shard, or renews its registration. Raises TryLater while another process has its index, and for a
        new process if this coordinator is no longer in charge.

        The number of a new process is first verified by a call to its address: the process may have died since it
        registered, and another one may have its address now. That call brings the coordinator's term, so a shard that
        is registered refuses earlier coordinators.
        """
        _check_index(index, self.count)
        check_address(address, "a shard's address")
        if metrics_address:
            check_address(metrics_address, "where metrics are served")
        check_memory_place(memory_place)
        with self._lock:
            before = self._known.get(index)
            if before is not None and before.process == process and process not in self._ended:
                self._known[index] = replace(before, seen=self._clock.now(), restart_count=restart_count)
                return
            self._check_free(before, address, process)
        self.charge.check()
        api = self._connect(index, address)
        try:
            if api.process() != process:
                raise TryLater(f"shard {index}: process {pid} is gone, and another one serves at {address}")
            seen = self._clock.now()
            shard = RegisteredShard(
                index, address, api, metrics_address, pid, process, seen, restart_count, memory_place
            )
            with self._lock:
                current = self._known.get(index)
                if current is not None and (before is None or current.process != before.process):
                    raise TryLater(f"shard {index} was taken by process {current.pid} at this moment")
                if before is not None and before.process != process:
                    self._replaced.add(before.process)
                self._ended -= {process, before.process if before is not None else process}
                self._known[index] = shard
        except PSError:
            api.close()
            raise
        log.info("shard %d at %s", index, address)

    def _check_free(self, before: RegisteredShard | None, address: str, process: int) -> None:
        """Raises TryLater if a new process cannot get a shard's index yet. The caller holds the lock."""
        if process in self._replaced:  # a late call of a replaced process: the job parts that it held are lost
            raise TryLater(f"a process at {address} was replaced by another one")
        # A new process at the same address is the shard, started again: only one process can listen at an address.
        if before is None or before.process in self._ended:
            return
        if before.address != address and self._clock.now() < before.seen + self._lost_after:
            raise TryLater(f"shard {before.index} is already served by process {before.pid} at {before.address}")

    def report_end(self, index: int, process: int) -> bool:
        """Frees a shard's index at once, because its launcher has seen `process` end. Returns whether that process had
        the index.

        If the process lives after all, it gets the index back with its next call.
        """
        _check_index(index, self.count)
        with self._lock:
            known = self._known.get(index)
            if known is None or known.process != process:
                return False
            self._ended.add(process)
        log.warning("shard %d (pid %d at %s) is gone: its process ended", index, known.pid, known.address)
        return True

    def known(self) -> dict[int, RegisteredShard]:
        """Returns the registered shards, by index."""
        with self._lock:
            return dict(self._known)

    def all(self) -> list[RegisteredShard]:
        """Returns every shard of the cluster, by index. Raises TryLater that names those that have not
        registered yet.
        """
        known = self.known()
        missing = [index for index in range(self.count) if index not in known]
        if missing:
            raise TryLater(f"waiting for shards {', '.join(map(str, missing))} of {self.count} to start")
        return [known[index] for index in range(self.count)]

    def others_answer(self, index: int | None) -> bool:
        """Whether any shard answers, apart from the one with this index."""

        def answers(shard: RegisteredShard) -> bool:
            with contextlib.suppress(PSError):
                return shard.api.process() == shard.process
            return False

        return any(self.call([shard for shard in self.known().values() if shard.index != index], answers))

    def are_awaited(self, seconds: float) -> bool:
        """Whether a shard has not registered yet, and the coordinator has run for less than `seconds`."""
        return len(self.known()) < self.count and self._clock.now() < self._began + seconds

    def on_one_machine(self, memory_place: str = "") -> bool:
        """Whether a worker is on the same machine as all shards: it names the same shared memory, or only this machine
        can reach them.
        """
        shards = self.known().values()
        if memory_place and all(shard.memory_place == memory_place for shard in shards):
            return True
        return all(is_loopback(shard.address.rpartition(":")[0]) for shard in shards)

    def call_all(self, call: Callable[[RegisteredShard], T]) -> list[T]:
        """Calls every shard of the cluster, as `call` does. Raises TryLater while one is missing."""
        return self.call(self.all(), call)

    def call(self, shards: Iterable[RegisteredShard], call: Callable[[RegisteredShard], T]) -> list[T]:
        """Calls shards at the same time, and returns their answers. Raises the first error after all have answered."""
        return answers_of([self._submit(shard.index, call, shard) for shard in shards])

    def beside(self, index: int, work: Callable[[], object]) -> None:
        """Runs `work`, which calls a shard, in a thread for that shard. Returns at once."""
        with contextlib.suppress(TryLater):
            self._submit(index, guarded, f"shard-{index}", work)

    def _submit(self, index: int, call: Callable[..., T], *arguments: Any) -> Future[T]:
        self.charge.check()
        try:
            return self._lanes[index].submit(call, *arguments)
        except RuntimeError:  # after `close`
            raise TryLater("the coordinator is stopping") from None

    def runs_of(self, job: str) -> list[int]:
        """Returns the run of a job that each shard holds, as a number; 0 for a shard without the job."""
        answers = self.call_all(lambda shard: shard.api.statistics())
        return [int(shard.jobs[job].run or "0", 16) if job in shard.jobs else 0 for shard in answers]

    def close(self) -> None:
        """Waits for the calls under way, then ends the threads and closes the connections."""
        self.is_closing = True
        for lane in self._lanes:
            lane.shutdown(wait=True)
        for shard in self.known().values():
            shard.api.close()


def answers_of(futures: Sequence[Future[T]]) -> list[T]:
    """Returns the results of calls. Raises the first error after all have ended."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _check_index(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise InvalidRequest(f"shard index must be below {count}, got {index}")
