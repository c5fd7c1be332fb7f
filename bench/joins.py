"""What the start of a crowd costs the coordinator: all workers join at once, and each watches the roster.

The coordinator and the shards' logic are those that a cluster runs, in one process and without sockets. The work of the
shards is taken off what the process used. Every worker must have got its rank, and have heard at last of all others.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.talk import own_output
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.messages.workers import JoinRequest
from ps_protocol.modes import parse_mode
from ps_protocol.v1 import membership_pb2
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.coordinator import Coordinator
from ps_server.coordinator.job_workers import Roster
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads

CELLS = 64  # weights of each shard: the model costs nothing
LEASE = 600.0
JOB = "crowd"


class Asked:
    """What the coordinator asks of the shards: how many calls, and the CPU seconds that they take. Thread-safe."""

    def __init__(self) -> None:
        self.calls, self.cpu = 0, 0.0
        self._lock = threading.Lock()

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a shard."""
        began = time.thread_time()
        try:
            return method(*arguments)
        finally:
            with self._lock:
                self.calls, self.cpu = self.calls + 1, self.cpu + time.thread_time() - began


class CountedShard:
    """A shard in this process: coordinator.shards.ShardApi."""

    def __init__(self, shard: Shard, process: int, asked: Asked) -> None:
        self._shard, self._process, self._asked = shard, process, asked

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._shard, name)
        return lambda *arguments: self._asked.call(method, *arguments)

    def process(self) -> int:
        return int(self._asked.call(lambda: self._process))

    def close(self) -> None:
        pass


class Rosters:
    """What the workers hear of each other: how many messages, and the ranks in them. Thread-safe."""

    def __init__(self) -> None:
        self.messages = self.ranks = 0
        self._lock = threading.Lock()

    def worker(self, whole: int, heard: threading.Event) -> Callable[[Roster | None], None]:
        """Returns what a worker's stream does with each roster, until it has them all."""

        def told(roster: Roster | None) -> None:
            if roster is None:
                return
            ranks, world_size, started = roster
            membership_pb2.WatchResponse(ranks=ranks, world_size=world_size, started=started).SerializeToString()
            with self._lock:
                self.messages, self.ranks = self.messages + 1, self.ranks + len(ranks)
            if started and len(ranks) == whole:
                heard.set()

        return told


def main() -> None:
    """Has all workers join; answers with what it took."""
    say = own_output()
    order = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as folder:
        say(_measure(order["workers"], order["shards"], Path(folder)))


def _measure(workers: int, shards: int, folder: Path) -> dict[str, float]:
    asked, rosters = Asked(), Rosters()
    logic = [
        Shard(ShardMetrics(CollectorRegistry()), NoThreads(), time.monotonic, index=index) for index in range(shards)
    ]
    coordinator = Coordinator(
        shards,
        lambda index, address: CountedShard(logic[index], index + 1, asked),  # type: ignore[arg-type,return-value]
        LEASE,
        policy=CheckpointPolicy(folder),
    )
    coordinator.start()
    for index in range(shards):
        coordinator.shard_directory.register(index, f"127.0.0.1:{index + 1}", "", 1, index + 1)
    parameters = tuple(ParameterSpec(f"cells-{index}", (CELLS,), "float32", 0) for index in range(shards))
    rule = parse_mode("ssp:4")
    assert rule is not None
    spec = JobSpec(JOB, parameters, "SGD", ({"lr": 1.0},), rule, 4 * CELLS, workers)
    coordinator.register_job(spec)
    calls_before, most, ranks, hear = asked.calls, threading.active_count(), [], threading.Barrier(workers + 1)

    def join(rank: int) -> None:
        hear.wait()
        heard = threading.Event()
        ranks.append(coordinator.join(JOB, rank, JoinRequest(host="here", launch="crowd", attempt=rank + 1)))
        coordinator.job(JOB).watchers.add(rosters.worker(workers, heard))
        heard.wait()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    cpu, began, in_shards = time.process_time(), time.perf_counter(), asked.cpu
    hear.wait()
    while any(thread.is_alive() for thread in threads):
        most = max(most, threading.active_count() - sum(thread.is_alive() for thread in threads))
        threads[-1].join(0.05)
        threads = [thread for thread in threads if thread.is_alive()]
    answer = {
        "ms": round(1e3 * (time.perf_counter() - began), 1),
        "size": 4 * CELLS * shards,
        "coordinator_cpu_seconds": round(time.process_time() - cpu - (asked.cpu - in_shards), 3),
        "shard_calls": asked.calls - calls_before,
        "rosters": rosters.messages,
        "roster_ranks": rosters.ranks,
        "most_threads": most,
    }
    if sorted(each.worker.rank for each in ranks) != list(range(workers)):
        raise SystemExit("wrong result: the workers have not each their own rank")
    coordinator.stop()
    for shard in logic:
        shard.stop()
    return answer


if __name__ == "__main__":
    main()
