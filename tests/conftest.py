"""Real clusters for tests: servers on free ports, in this process; workers as threads. Nothing is mocked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

import ps_worker
from ps_server.app import Server, ServerConfig
from ps_worker import Session

T = TypeVar("T")

START_SECONDS = 20.0
TEST_SECONDS = 120.0


class Cluster:
    """A coordinator inside shard 0, and more shards, all on free ports."""

    def __init__(self, shards: int = 2, lease: float = 10.0, **more: object) -> None:
        """more: fields of ServerConfig that all servers share."""
        first = Server(ServerConfig(shard_count=shards, index=0, lease=lease, **more))  # type: ignore[arg-type]
        rest = [
            Server(ServerConfig(index=index, coordinator=first.address, **more))  # type: ignore[arg-type]
            for index in range(1, shards)
        ]
        self.servers = [first, *rest]
        self.address = first.address
        for server in self.servers:
            assert server.wait_ready(START_SECONDS)

    def connect(self, mode: str, rank: int = 0, world_size: int = 1, **more: object) -> Session:
        """A worker's session; `more` as for ps_worker.connect."""
        return ps_worker.connect(self.address, mode, rank=rank, world_size=world_size, **more)  # type: ignore[arg-type]

    def stop(self) -> None:
        for server in reversed(self.servers):
            server.stop()


def in_parallel(count: int, work: Callable[[int], T]) -> list[T]:
    """The results of work(0) .. work(count - 1), each in a thread of its own; raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TEST_SECONDS)
    if errors:
        raise errors[0]
    assert len(results) == count, "a worker is stuck"
    return [results[index] for index in range(count)]


def in_order(count: int) -> Callable[[int], threading.Event]:
    """Events by number, for tests that fix an order between threads."""
    events = [threading.Event() for _ in range(count)]
    return events.__getitem__


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the caller's shell reaches a test, and each starts from the same random state."""
    for name in [name for name in os.environ if name.startswith("PS_")] + ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards."""
    running = Cluster()
    yield running
    running.stop()


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """Clusters to order: make_cluster(shards=3, lease=1.0)."""
    made: list[Cluster] = []

    def make(**options: object) -> Cluster:
        made.append(Cluster(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for running in made:
        running.stop()
