"""What waits for nothing in particular wakes seldom: the ticker of a shard, and a worker's watch of its job."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import STAGED_AFTER_SECONDS
from ps_server.shard.shard import Shard
from ps_server.shard.threads import IDLE_SECONDS, OwnThreads
from tests.tools.cluster import Cluster, until
from tests.tools.small_models import step
from tests.tools.small_steps import batch, make_net, sgd

SECONDS = 60.0


def begun_since(before: set[threading.Thread], *names: str) -> list[int]:
    new = [each for each in threading.enumerate() if each not in before and each.name.startswith(names)]
    return [each.native_id for each in new if each.native_id is not None]


@pytest.fixture
def long_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle task runs when it is woken, and not before the test is over."""
    monkeypatch.setattr("ps_server.shard.threads.IDLE_SECONDS", 3600.0)


def test_the_ticker_of_a_shard_without_work_wakes_seldom(long_idle: None) -> None:
    """It becomes idle, and nothing of the shard's own wakes it then."""
    assert IDLE_SECONDS >= 10 * STAGED_AFTER_SECONDS
    threads = OwnThreads()
    shard = Shard(ShardMetrics(CollectorRegistry()), threads)
    until(lambda: threads._is_idle, "the ticker is idle", SECONDS)
    shard.statistics()
    assert threads._is_idle
    shard.stop()


def test_a_repeated_task_runs_as_soon_as_something_waits_for_it(long_idle: None) -> None:
    waits, ran = threading.Event(), threading.Event()
    threads = OwnThreads()

    def task() -> bool:
        if waits.is_set():
            ran.set()
        return waits.is_set()

    threads.repeat(0.01, task)
    for _ in range(3):
        until(lambda: threads._is_idle, "the task is idle", SECONDS)
        waits.set()
        threads.wake()
        assert ran.wait(SECONDS)
        waits.clear()
        ran.clear()
    threads.stop()


def test_a_repeated_task_that_something_waits_for_does_not_become_idle() -> None:
    calls: list[float] = []
    threads = OwnThreads()

    def task() -> bool:
        calls.append(time.monotonic())
        return True

    threads.repeat(0.001, task)
    until(lambda: len(calls) > 50, "calls", SECONDS)
    assert not threads._is_idle
    threads.stop()


def test_threads_end_at_once_while_their_task_is_idle(long_idle: None) -> None:
    threads = OwnThreads()
    threads.repeat(0.001, lambda: False)
    until(lambda: threads._is_idle, "the task is idle", SECONDS)
    threads.stop()


def test_a_worker_that_does_nothing_wakes_seldom_for_the_roster(shared: Cluster, job: str) -> None:
    """gRPC looks for signals five times a second in a thread that reads. With a thread of its own it is 15 times."""
    before = set(threading.enumerate())
    with shared.connect("async", job=job) as session:
        model = make_net()
        model, optimizer = session.prepare(model, sgd(model))
        step(model, optimizer, batch(0, 0))
        until(lambda: len(begun_since(before, "watch")) == 1, "the watch", SECONDS)
        assert begun_since(before, "Thread-") == [], "gRPC's, beside the one that reads"
