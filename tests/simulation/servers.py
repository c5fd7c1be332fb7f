"""The servers' processes: the real Coordinator and the real Shard, called over the simulated network.

What stands here is what the services of ps_server.rpc do besides: it takes a call apart and hands it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from ps_feed.edition_client import KnownShards
from ps_protocol.convert import AnsweringShard
from ps_protocol.errors import Deposed, InvalidRequest, PSError, TryLater
from ps_protocol.identity import Identity
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.shards import SHARD_CALL_SECONDS
from ps_server.coordinator.timing import DEFAULT_SERVER_CALL_SECONDS, Clock
from ps_server.core.data_commits import Committed
from ps_server.core.snapshot import ShardSnapshot
from ps_server.rpc.data_service import DataService
from ps_server.rpc.shard_client import STATUS_SECONDS
from ps_server.rpc.shard_service import AWAIT_SECONDS, RESTORE_SECONDS
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Outbox
from ps_server.shard.shard import Shard
from ps_server.shard.terms import CoordinatorTerms
from ps_server.shard.threads import OwnThreads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.own_disk import take_own_disk
from tests.simulation.disk import SimulatedDisk
from tests.simulation.network import Network
from tests.simulation.processes import Host
from tests.simulation.threads import Lock, ThreadPoolExecutor
from tests.simulation.world import World

COORDINATOR = "10.0.0.1:7000"
SECONDS = dict.fromkeys(("statistics", "process", "committed"), STATUS_SECONDS)
ASKED_OF_SHARDS = ("create_job", "drop_job", "add_workers", "remove_workers", "begin_snapshot")


class WorldClock(Clock):
    """The clock of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        """Returns the time."""
        return self._world.now

    def since_1970(self) -> float:
        """Returns the date."""
        return self._world.now + 1.7e9


class SilentMetrics(ShardMetrics):
    """Counts nothing: no scraper comes."""

    def _of(self, metric: Any, job: str, *labels: str) -> Any:
        return _SERIES

    def forget(self, job: str) -> None:
        """Does nothing."""


_SERIES = SimpleNamespace(inc=lambda *_: None, observe=lambda *_: None)
METRICS = SilentMetrics(CollectorRegistry())


class RemoteShard:
    """A shard as the coordinator calls it: coordinator.shards.ShardApi, with the deadlines of rpc.shard_client."""

    def __init__(self, network: Network, address: str, charge: Charge) -> None:
        self._network, self._address, self._charge = network, address, charge

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seconds, asked = SECONDS.get(method, DEFAULT_SERVER_CALL_SECONDS), (method, self._charge.term, *arguments)
            try:
                return self._network.call(self._address, "for_coordinator", *asked, seconds=seconds, repeats=False)
            except Deposed as error:
                self._charge.refused(error)
                raise

        return call

    def close(self) -> None:
        """Closes the connection."""


class CoordinatorProcess:
    """A process as a coordinator; it may be a shard, too."""

    def __init__(
        self,
        network: Network,
        host: Host,
        disk: SimulatedDisk,
        shards: int,
        lease: float,
        policy: CheckpointPolicy | None,
    ) -> None:
        self.host, self._disk = host, disk
        self.coordinator: Coordinator | None = None
        self._network, self._shards, self._lease, self._policy = network, shards, lease, policy
        self.host.spawn("main", self._main)

    def _main(self) -> None:
        world, charge = self.host.world, Charge()

        def connect(index: int, address: str) -> RemoteShard:
            return RemoteShard(self._network, address, charge)

        coordinator = Coordinator(
            self._shards,
            connect,  # type: ignore[arg-type]
            self._lease,
            policy=self._policy,
            clock=WorldClock(world),
            make_executor=partial(ThreadPoolExecutor, world),  # type: ignore[arg-type]
            disk=self._disk,
            charge=charge,
        )
        coordinator.start()
        self.coordinator = coordinator
        self.host.methods |= {
            "register_shard": coordinator.shard_directory.register,
            "register_job": self._register_job,
            "join": self._join,
            "heartbeat": lambda job, run, *rest: coordinator.job(job, run).workers.heartbeat(*rest),
            "roster": lambda job, run: coordinator.job(job, run).workers.announced(),
            "save_state": lambda job, run, *rest: coordinator.job(job, run).save_worker_state(*rest),
            "leave": coordinator.leave,
            "heartbeat_of_script": self._heartbeat_of_script,
            "ask_script": self._ask_script,
            "tell_script": self._tell_script,
            "known_shards": self._known_shards,
        }

    @property
    def is_serving(self) -> bool:
        """Whether it answers."""
        return self.host.alive and not self.host.stopped and "register_job" in self.host.methods

    def _known_shards(self) -> KnownShards:
        assert self.coordinator is not None
        addresses = {index: shard.address for index, shard in self.coordinator.shards().items()}
        return KnownShards(addresses, self._shards, frozenset(self.coordinator.jobs()))

    def _register_job(self, spec: Any) -> str:
        assert self.coordinator is not None
        job, _ = self.coordinator.register_job(spec)
        return job.placed.run

    def _heartbeat_of_script(self, name: str, run: str, rank: int, *rest: Any) -> int:
        assert self.coordinator is not None
        job = self.coordinator.job(name, run)
        job.workers.heartbeat(rank, *rest)
        return job.script.asked_by_heartbeat(rank)

    def _ask_script(self, name: str, run: str, rank: int, incarnation: int, key: bytes) -> Any:
        assert self.coordinator is not None
        job = self.coordinator.job(name, run)
        job.workers.check(rank, incarnation, key)
        return job.script.ask(rank, incarnation)

    def _tell_script(
        self, name: str, run: str, rank: int, incarnation: int, key: bytes, request: int, told: Any
    ) -> None:
        assert self.coordinator is not None
        job = self.coordinator.job(name, run)
        job.workers.check(rank, incarnation, key)
        job.script.tell(rank, request, told)

    def _join(self, *arguments: Any) -> tuple[Any, dict[int, str]]:
        assert self.coordinator is not None
        result = self.coordinator.join(*arguments)
        return result, {index: shard.address for index, shard in self.coordinator.shards().items()}


class Exchanges(DataService):
    """The real service of data, for exchanges alone: what it knows of those before is kept for a connection."""

    def _outbox(self, call: Any, send: object, write: object) -> Outbox:
        outbox: Outbox = call.outbox
        return outbox

    def carry_out(self, method: str, request: bytes, connection: DataConnection, outbox: Outbox) -> None:
        """Begins an exchange: one after the other, as they come over a connection."""
        call: Any = SimpleNamespace(worker=connection.worker, kept=connection.kept, outbox=outbox)
        with connection.reading:
            self._streams[method](request, call, lambda _: None)


@dataclass
class DataConnection:
    """A worker's data connection. reading: held by what carries out a request of it; kept: see ServerCall"""

    worker: Identity
    reading: Lock
    kept: dict[str, Any] = field(default_factory=dict)


class ShardProcess:
    """A process as a shard.

    process:     the number that no other process of a shard has
    known_since: when it called in first with the coordinator of now
    """

    def __init__(
        self,
        network: Network,
        host: Host,
        disk: SimulatedDisk,
        index: int,
        process: int,
        store: Path | None,
        own_disk: bool,
    ) -> None:
        self.host, self._disk, self._own_disk = host, disk, own_disk
        self.index, self.process = index, process
        self.known_since = math.inf
        self.shard: Shard | None = None
        self._connections: dict[int, DataConnection] = {}
        self._network, self._store = network, store
        self.host.spawn("main", self._main)

    def _main(self) -> None:
        world = self.host.world
        try:
            checkpoints = self._open_checkpoints(world.now)
        except InvalidRequest as error:  # the disk is full: it ends, and is started again
            self.host.kill(f": {error}")
            return
        shard = self.shard = Shard(METRICS, OwnThreads(1), lambda: world.now, checkpoints=checkpoints, index=self.index)
        self.host.methods |= {
            name: getattr(shard, name) for name in (*ASKED_OF_SHARDS, "statistics", "push", "push_rows", "pull")
        }
        exchanges = Exchanges(shard, AnsweringShard(self.index, self.process))
        self.host.methods |= {"attach": shard.attach, "open": self._open}
        self.host.methods["exchange"] = partial(self._exchange, exchanges, "Exchange")
        self.host.methods["exchange_rows"] = partial(self._exchange, exchanges, "ExchangeRows")
        self.host.methods |= {"await_snapshot": self._await_snapshot, "committed": self._committed}
        self.host.methods |= {"describe_weights": shard.weight_feeds.describe, "pull_edition": shard.weight_feeds.pull}
        self.host.methods["process"] = lambda: self.process
        self.host.methods["restore_job"] = lambda request: shard.restore_job(request, RESTORE_SECONDS)
        self.host.methods["for_coordinator"] = partial(self._obey, CoordinatorTerms(), dict(self.host.methods))
        self.host.spawn("registration", self._register)

    def _obey(
        self, terms: CoordinatorTerms, methods: dict[str, Callable[..., Any]], method: str, term: int, *rest: Any
    ) -> Any:
        """Does as rpc.shard_service."""
        terms.check(term, is_look=method in ("statistics", "process"))
        return methods[method](*rest)

    def _open_checkpoints(self, now: float) -> CheckpointStore | None:
        if self._store is None or not self._own_disk:
            return CheckpointStore(self._store, self._disk) if self._store is not None else None
        name, _ = take_own_disk(self._store, self.index, self.host.address, now, self._disk)
        return CheckpointStore(self._store, self._disk, name)

    def hosted(self) -> dict[str, HostedJob]:
        """Returns the jobs that the shard holds, by name, as they are at this moment: no lock is taken."""
        return self.shard._hosted.jobs if self.shard is not None else {}

    def _open(self, worker: Identity) -> int:
        """Opens a data connection, and returns its number.

        None is ever closed here: a request that was sent before may be read after that.
        """
        assert self.shard is not None
        self.shard.check_worker(worker)
        number = next(self.host.world.numbers)
        self._connections[number] = DataConnection(worker, Lock(self.host.world))
        return number

    def _exchange(self, exchanges: Exchanges, method: str, number: int, request: bytes, outbox: Outbox) -> None:
        connection = self._connections.get(number)
        if connection is None:  # it led to a process before this one
            raise TryLater("the connection is closed")
        exchanges.carry_out(method, request, connection, outbox)

    def _await_snapshot(self, job: str, checkpoint: str, run: str) -> ShardSnapshot:
        assert self.shard is not None
        return self.shard.await_snapshot(job, checkpoint, AWAIT_SECONDS, run)

    def _committed(self, *arguments: Any) -> Committed | None:
        assert self.shard is not None
        committed, has_say = self.shard.committed(*arguments)
        return committed if has_say else None

    def _register(self) -> None:
        """Does as rpc.registration does."""
        world, process = self.host.world, self.process
        who = self.index, self.host.address, "", process, process
        knows: Host | None = None
        while True:
            try:
                self._network.call(COORDINATOR, "register_shard", *who, seconds=SHARD_CALL_SECONDS, ready=True)
                if knows is not self._network.listener(COORDINATOR):
                    knows, self.known_since = self._network.listener(COORDINATOR), world.now
            except PSError as error:
                world.trace(f"{self.host.name}: {error}; trying again")
            world.let_pass(SHARD_CALL_SECONDS)
