"""Real clusters for tests: servers on free ports, in this process; workers as threads. Nothing is mocked."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import math
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import ps_worker
from ps_protocol.tensors import bytes_of
from ps_runtime.free_ports import free_port
from ps_runtime.settings import NATIVE
from ps_server.config import ServerConfig
from ps_server.coordinator.coordinator import Coordinator
from ps_server.ops import requests, status_text
from ps_server.server import Server
from ps_server.shard.shard import Shard
from ps_worker import Session

T = TypeVar("T")

START_SECONDS = 60.0
TEST_SECONDS = 120.0
CONDITION_SECONDS = 90.0


class Cluster:
    """A coordinator inside shard 0, and more shards, all on free ports."""

    def __init__(self, shards: int = 2, lease: float = 10.0, **more: object) -> None:
        """more: fields of ServerConfig that all servers share. PS_NATIVE counts, as for servers that are processes."""
        more = {"native": os.environ.get("PS_NATIVE", NATIVE.default), **more}
        self._first = ServerConfig(shard_count=shards, index=0, lease=lease, **more)  # type: ignore[arg-type]
        first = Server(_at_own_ports(self._first))
        self._rest = ServerConfig(coordinator=first.address, **more)  # type: ignore[arg-type]
        rest = (Server(_at_own_ports(replace(self._rest, index=index))) for index in range(1, shards))
        self.servers = [first, *rest]
        self.address = first.address
        for server in self.servers:
            assert server.wait_ready(START_SECONDS)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that is there now."""
        found = self.servers[0].coordinator
        assert found is not None
        return found

    @property
    def shards(self) -> list[Shard]:
        """Each shard's."""
        return [server.shard for server in self.servers if server.shard is not None]

    def start_again(self, index: int) -> None:
        """Ends a server as its death would, without a last checkpoint, and starts another at its ports."""
        self.servers[index].stop()
        self._start(index)
        assert self.servers[index].wait_ready(START_SECONDS)

    def start_all_again(self) -> None:
        """Ends all servers as SIGTERM does, with last checkpoints, and starts others at their ports, with --resume."""
        self.servers[0].drain(TEST_SECONDS)  # has the coordinator, which asks all shards
        self.stop()
        for index in range(len(self.servers)):
            self._start(index)
        for server in self.servers:
            assert server.wait_ready(START_SECONDS)

    def _start(self, index: int) -> None:
        before = self.servers[index]
        first = replace(self._first, resume=self._first.checkpoint_dir is not None)
        config = replace(self._rest, index=index) if index else first
        ports = {
            name: int(address.rpartition(":")[2])
            for name, address in (("port", before.address), ("metrics_port", before.metrics_address))
        }
        self.servers[index] = Server(replace(config, **ports))

    def connect(self, mode: str, rank: int = 0, world_size: int = 1, **more: object) -> Session:
        """A worker's session; `more` as for ps_worker.connect."""
        return ps_worker.connect(self.address, mode, rank=rank, world_size=world_size, **more)  # type: ignore[arg-type]

    def state(self, job: str) -> dict[str, object]:
        """All that a job is, on the coordinator and every shard: what no bad input may change. Weights as checksums."""
        known = self.coordinator.jobs().get(job)
        found: dict[str, object] = {"known": known is not None}
        if known is not None:
            found["members"] = [(m.rank, m.incarnation) for m in known.workers.all()]
        for index, shard in enumerate(self.shards):
            running = shard.jobs().get(job)
            if running is None:
                continue
            with running.lock:
                found[f"roster on {index}"] = dict(running.partition.roster)
                for number, bucket in running.buckets.items():
                    rule, weights = bucket.rule, bucket.unit.weights
                    found[f"bucket {number} on {index}"] = (
                        (rule.initialised, rule.version, dict(rule.staged), dict(rule.applied)),
                        (sorted(rule.waiting), list(rule.added), len(bucket.waiters)),
                        hashlib.sha256(bytes_of(weights.flat)).hexdigest(),
                        weights.optimizer_bytes,
                    )
        return found

    def end_lease(self, rank: int, job: str = "default") -> None:
        """Has the lease of a worker run out now: of one that is dead or cut off, or it would go on as if it had been.
        After a rollback that is the time in which it is to join again.

        No test waits for the end of a lease that others need as well: on a busy machine it might end for them too.
        """
        coordinated = self.coordinator.job(job)
        members = coordinated.workers
        with members._lock:
            live, rejoining = members._membership.workers, members._membership.rejoining
            incarnation = live[rank].incarnation if rank in live else None
            rejoining.update({rank: -math.inf} if rank in rejoining else {})
        while True:
            with members._lock:
                is_live = rank in live and live[rank].incarnation == incarnation
                live.update({rank: replace(live[rank], expires=-math.inf)} if is_live else {})
            coordinated.expire()
            with members._lock:  # a heartbeat may have come between the two
                if not (is_live and rank in live and live[rank].incarnation == incarnation):
                    return

    def lose_place(self, rank: int, job: str = "default") -> None:
        """As `end_lease`, and waits until each shard has heard of it: what the worker sends there is refused then."""
        self.end_lease(rank, job)
        members = self.coordinator.job(job).workers
        until(lambda: not members.pending_removals(), f"the removal of worker {rank} from all shards")

    def waits(self, job: str) -> dict[int, tuple[int, list[int]]]:
        """Who waits, as `ps-server status` tells it: by rank, its clock and the ranks it waits for."""
        waits = status_text.waits(requests.fetch(self.address), job)
        return {rank: (first["clock"], first["awaited_ranks"]) for rank, (first, *_) in waits.items()}

    def stop(self) -> None:
        for server in reversed(self.servers):
            server.stop()


def _at_own_ports(config: ServerConfig) -> ServerConfig:
    """Where a test gives no port: one that `start_again` finds free once more. The system gives its own to outgoing
    connections meanwhile."""
    port, metrics_port = config.port or free_port(), config.metrics_port
    return replace(config, port=port, metrics_port=free_port(taken=[port]) if metrics_port == 0 else metrics_port)


def in_parallel(count: int, work: Callable[[int], T]) -> list[T]:
    """The results of work(0) .. work(count - 1), each in a thread of its own; raises the first error at once."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    changed = threading.Condition()

    def run(index: int) -> None:
        try:
            result = work(index)
        except BaseException as error:
            with changed:
                errors.append(error)
                changed.notify()
        else:
            with changed:
                results[index] = result
                changed.notify()

    for index in range(count):
        threading.Thread(target=run, args=(index,), daemon=True).start()
    with changed:
        ended = changed.wait_for(lambda: bool(errors) or len(results) == count, TEST_SECONDS)
    if errors:
        raise errors[0]
    assert ended, f"stuck: workers {sorted(set(range(count)) - results.keys())}"
    return [results[index] for index in range(count)]


def hear_of_a_lost_place(session: Session, cluster: Cluster, job: str) -> None:
    """Has worker 0 know that it has lost its place before its next step begins."""
    participation = session._strategy._training.participation  # type: ignore[attr-defined]
    cluster.lose_place(0, job)
    until(
        lambda: (participation.membership.await_change(participation.connection.place), not participation.has_place)[1],
        "the worker to hear of it",
    )


def until(
    condition: Callable[[], T], what: str = "the condition", seconds: float = CONDITION_SECONDS, every: float = 0.005
) -> T:
    """Looks at a condition until it holds and returns it. For what has no event to wait on.

    every: so many seconds it looks
    """
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true"
        pause.wait(every)


def scrape(address: str) -> dict[str, float]:
    """Every sample that is served at HOST:PORT/metrics, by its name and labels as they stand in the text."""

    def asked() -> list[str] | None:
        # A scrape is cut off after 10 s, wherever it is then: on a machine that is as busy as that, another one gets
        # through.
        cut_off = contextlib.suppress(http.client.HTTPException, ConnectionResetError, TimeoutError)
        with cut_off, urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            found: list[str] = response.read().decode().splitlines()
            return found
        return None

    lines = until(asked, f"a scrape of {address}")
    assert lines is not None
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def in_order(count: int) -> Callable[[int], threading.Event]:
    """Events by number, for tests that fix an order between threads."""
    events = [threading.Event() for _ in range(count)]
    return events.__getitem__
