"""A coordinator and its shards in one process: calls instead of gRPC, and a clock that moves when somebody waits."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import PSError
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import PullCall, PulledBucket, PushCall, PushedBucket, PushKind
from ps_protocol.messages.workers import JoinRequest
from ps_protocol.tensors import bytes_of
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.timing import Clock
from ps_server.core.data_commits import Committed
from ps_server.core.membership import JoinedWorker
from ps_server.core.snapshot import ShardSnapshot
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Answer, Lent, Outbox
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.disk import Disk
from ps_server.storage.manifest import Manifest
from tests.tools.raw_worker import vector_job

CELLS = 64  # four buckets of 16 weights, on two shards


class AtOnce(Executor):
    """Runs each call when it is submitted, in the thread that does."""

    def __init__(self, workers: int = 1, name: str = "") -> None:
        pass

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualClock(Clock):
    """Time that passes where the coordinator waits. meanwhile: what the rest of the cluster does then."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.meanwhile: Callable[[], object] = lambda: None

    def now(self) -> float:
        return self.seconds

    def since_1970(self) -> float:
        return self.seconds

    def wait(self, changed: threading.Condition, holds: Callable[[], bool], seconds: float) -> bool:
        until = self.seconds + seconds
        while not holds() and self.seconds < until:
            self.seconds += 0.01
            self.meanwhile()
        return holds()


class DirectShard:
    """A shard in this process as the coordinator asks it: coordinator.shards.ShardApi.

    process: the number of its process
    """

    def __init__(self, shard: Shard, process: int) -> None:
        self._shard, self._process = shard, process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)  # all that is asked without gRPC as with it

    def committed(self, job: str, run: str) -> Committed | None:
        committed, has_say = self._shard.committed(job, run)
        return committed if has_say else None

    def await_snapshot(self, job: str, checkpoint: str, run: str) -> ShardSnapshot:
        return self._shard.await_snapshot(job, checkpoint, 0.0, run)

    def process(self) -> int:
        return self._process

    def close(self) -> None:
        pass


def _process_at(address: str) -> int:
    return int(address.rpartition(":")[2])  # each process has an address of its own


class FullDisk(Disk):
    """A disk that takes nothing while it is full."""

    full = False

    def write(self, *arguments: Any, **named: Any) -> Any:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(*arguments, **named)


class OneProcess:
    """A coordinator and its shards, without threads."""

    def __init__(self, directory: Path, shards: int = 2, lease: float = 10.0, disk: Disk | None = None) -> None:
        self._store, self._processes = CheckpointStore(directory), 0
        self._disk = disk
        self._count, self._lease = shards, lease
        self._coordinators: list[Coordinator] = []
        self._at: dict[str, Shard] = {}  # every shard there ever was, by its address
        self.shards: dict[int, Shard] = {}
        self.clock = VirtualClock()
        self.start_coordinator(CheckpointPolicy(directory))
        for index in range(shards):
            self.start_shard(index)

    @property
    def coordinator(self) -> Coordinator:
        """The one that is there now."""
        return self._coordinators[-1]

    def address_of(self, shard: int) -> str:
        return next(address for address, other in self._at.items() if other is self.shards[shard])

    def process_of(self, shard: int) -> int:
        return _process_at(self.address_of(shard))

    def start_coordinator(self, policy: CheckpointPolicy | None, calling: Sequence[int] | None = None) -> None:
        """Starts a coordinator, in place of one that died.

        calling: the shards that call in; None: all that are there
        """
        self.clock.seconds += 1
        for before in self._coordinators[-1:]:
            before.stop()  # its directory is free
        coordinator = Coordinator(
            self._count,
            lambda index, address: DirectShard(self._at[address], _process_at(address)),
            self._lease,
            policy=policy,
            clock=self.clock,
            make_executor=AtOnce,
            disk=self._disk,
        )
        self._coordinators.append(coordinator)
        for index in self.shards if calling is None else calling:
            self.coordinator.shard_directory.register(index, self.address_of(index), "", 1, self.process_of(index))

    def start_shard(self, index: int) -> None:
        """Starts a shard, in place of one that died."""
        self.start_process(index)
        self.clock.seconds += 60  # the one before is lost by now
        self.coordinator.shard_directory.register(index, self.address_of(index), "", 1, self._processes)

    def start_process(self, index: int) -> None:
        """Starts a process of a shard, which does not call in."""
        if index in self.shards:
            self.shards[index].stop()
        self._processes += 1
        address = f"127.0.0.1:{self._processes}"
        shard = Shard(
            ShardMetrics(CollectorRegistry()), NoThreads(), self.clock.now, checkpoints=self._store, index=index
        )
        self.shards[index] = self._at[address] = shard

    def while_waiting(self, work: Callable[[], object] = lambda: None) -> None:
        """Has the coordinator make checkpoints, and this be done, whenever the coordinator waits."""

        def meanwhile() -> None:
            self.coordinator.make_checkpoints()
            work()

        self.clock.meanwhile = meanwhile

    def stop(self) -> None:
        self.coordinator.stop()
        for shard in self.shards.values():
            shard.stop()


class DirectWorker:
    """A worker that trains a job of one vector, with a step of minus one in each of its cells."""

    def __init__(self, cluster: OneProcess, spec: JobSpec, rank: int, launch: str = "") -> None:
        self.cluster, self.spec, self.rank = cluster, spec, rank
        self.layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        self.clock, self.in_checkpoint = 0, False
        self.run = cluster.coordinator.register_job(spec, launch)[0].placed.run
        self.place = self.join(JoinRequest(host="here", run=self.run, launch=launch))

    def join(self, request: JoinRequest) -> JoinedWorker:
        self.place = self.cluster.coordinator.join(self.spec.name, self.rank, request)
        self.clock = self.place.clock
        return self.place

    def rejoin(self) -> JoinedWorker:
        previous = self.place.worker.incarnation
        return self.join(JoinRequest(host="here", previous=previous, clock=self.clock, run=self.run))

    def leave(self, state: tuple[int, bytes] | None = None, done: bool = False) -> bool:
        """Leaves, with a clock and a state or nothing. done: its script has come to its end"""
        member = self.place.worker
        return self.cluster.coordinator.leave(
            self.spec.name, self.rank, member.incarnation, member.key, self.run, state, done
        )

    def initialise(self) -> None:
        for bucket in self.layout.buckets:
            self._push(bucket.index, 0, PushKind.INITIAL_VALUE, torch.zeros(bucket.numel))

    def push(self) -> None:
        """The next step."""
        self.clock += 1
        for bucket in self.layout.buckets:
            self._push(bucket.index, self.clock, PushKind.GRADIENT, -torch.ones(bucket.numel))

    def _push(self, bucket: int, clock: int, kind: PushKind, values: torch.Tensor) -> None:
        member = self.place.worker
        call = PushCall(
            Identity(self.spec.name, self.rank, member.incarnation, key=member.key, run=self.run),
            clock,
            (PushedBucket(bucket, kind),),
            bytes(bytes_of(values)),
        )
        self._shard(bucket).push(call)

    def pull(self) -> torch.Tensor:
        """The weights after the last step of all workers. Notes whether this one is to save its state."""
        weights: dict[int, torch.Tensor] = {}
        self.in_checkpoint = False
        for bucket in self.layout.buckets:
            member, outbox = self.place.worker, _Outbox()
            worker = Identity(self.spec.name, self.rank, member.incarnation, member.key, self.run)
            self._shard(bucket.index).pull(PullCall(worker, self.clock, (bucket.index,)), outbox)
            for index, save_state, values in outbox.buckets():
                weights[index] = values
                self.in_checkpoint |= save_state
        return torch.cat([weights[index] for index in sorted(weights)])

    def checkpoint(self) -> Manifest:
        """Has a checkpoint made while this worker, the only one, trains and sends its state where it is asked for."""
        self.cluster.while_waiting(lambda: train([self]))
        return self.cluster.coordinator.job(self.spec.name).checkpoint()

    def save_state(self) -> None:
        member, state = self.place.worker, b"state at %d" % self.clock
        job = self.cluster.coordinator.job(self.spec.name, self.run)
        job.save_worker_state(self.rank, member.incarnation, member.key, self.clock, state)

    def _shard(self, bucket: int) -> Shard:
        return self.cluster.shards[self.place.placement[bucket]]


def join_all(cluster: OneProcess, mode: str, count: int = 2) -> list[DirectWorker]:
    """Returns the workers of a job of CELLS weights, all of them zeros."""
    joined = [DirectWorker(cluster, vector_job("job", mode, CELLS, count), rank) for rank in range(count)]
    joined[0].initialise()
    return joined


def train(workers: Sequence[DirectWorker]) -> torch.Tensor:
    """Makes one step of all workers, after which each sends its state if that belongs to a checkpoint.

    Returns the weights, which all workers pull alike.
    """
    for worker in workers:
        worker.push()
    weights = [worker.pull() for worker in workers]
    assert all(torch.equal(other, weights[0]) for other in weights)
    for worker in workers:
        if worker.in_checkpoint:
            worker.save_state()
    return weights[0]


class _Outbox(Outbox):
    """Collects the answers to one pull."""

    def __init__(self) -> None:
        self._buckets: list[tuple[int, bool, torch.Tensor]] = []
        self._error: PSError | None = None
        self._over = False

    def tell(self, answer: Answer) -> None:
        if isinstance(answer, PulledBucket) and answer.waiting is None:
            weights = torch.frombuffer(bytearray(answer.payload), dtype=torch.float32)
            self._buckets.append((answer.bucket, answer.save_state, weights))

    def lend(self, lent: Callable[[], AbstractContextManager[Lent]], is_small: bool = False) -> None:
        with lent() as (answer, _):
            self.tell(answer)

    def finish(self) -> None:
        self._over = True

    def fail(self, error: PSError) -> None:
        self._error, self._over = error, True

    def on_close(self, callback: Callable[[], None]) -> None:
        pass

    def buckets(self) -> list[tuple[int, bool, torch.Tensor]]:
        """Each bucket, whether it is in a checkpoint for which to save the worker's state, and its weights."""
        assert self._over, "the pull is not answered"
        if self._error is not None:
            raise self._error
        return self._buckets
