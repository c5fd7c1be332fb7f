"""Where no thread can be had any more, servers go on with those that they have."""

from __future__ import annotations

import ast
import threading
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from ps_protocol.errors import TryLater
from ps_runtime.background import Background
from ps_runtime.pools import DaemonPool, FairPool, Pool
from ps_server.coordinator.job_workers import JobWorkers
from ps_server.shard.threads import OwnThreads
from tests.tools.cluster import Cluster, in_parallel, until
from tests.tools.imports import syntax
from tests.tools.raw_worker import joined, vector_job

ROOT = Path(__file__).parents[2]
POOLS = {"push", "pull", "send", "control", "heartbeat", "watch", "watch-rows", "feed", "status", "health", "apply"}
SECONDS = 20.0


def refuse_threads(monkeypatch: pytest.MonkeyPatch, names: Collection[str] = POOLS) -> Queue[str]:
    """From now on no thread of these can be started, as where `pids.max` is reached. Returns those that were wanted."""
    start, refused = threading.Thread.start, Queue[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.rpartition("_")[0] in names or thread.name in names:
            refused.put(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


def test_a_pool_that_gets_no_more_threads_does_its_work_with_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Pool(8, "push") as pool:
        refuse_threads(monkeypatch)
        entered, leave = threading.Event(), threading.Event()
        first = pool.submit(lambda: entered.set() or leave.wait(SECONDS))
        entered.wait(SECONDS)
        others: list[Future[int]] = [pool.submit(int, number) for number in range(5)]
        leave.set()
        assert [future.result(SECONDS) for future in (first, *others)] == [True, 0, 1, 2, 3, 4]
        monkeypatch.undo()
    assert caplog.text.count("the pool 'push' goes on with the threads that it has, 1: can't start new thread") == 1


def test_a_pool_that_gets_no_thread_at_all_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    with pytest.raises(TryLater, match="can't start new thread"):
        Pool(8, "push")


def test_a_server_without_another_thread_goes_on_with_joins_pushes_pulls_and_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """grpcio's own thread calls `submit`, and would end with its exception: then nothing is answered any more."""
    cluster = Cluster(shards=1, lease=120.0)  # each worker sends one heartbeat
    heartbeat = JobWorkers.heartbeat

    def beat(*arguments: Any) -> int:
        until(lambda: not refused.empty(), "a thread for the other one")
        return heartbeat(*arguments)

    monkeypatch.setattr(JobWorkers, "heartbeat", beat)
    try:
        refused = refuse_threads(monkeypatch)
        with joined(cluster.address, vector_job("job", "sync", 16, 2)) as workers:
            in_parallel(2, lambda rank: workers[rank].heartbeat())
            waiting = [worker.ask(1, [0]) for worker in workers]
            for worker in workers:
                worker.step(torch.ones(16))
            for worker, call in zip(workers, waiting, strict=True):
                assert next(worker.answers(call)).buckets[0].version == 1
        monkeypatch.undo()
    finally:
        cluster.stop()


def test_what_runs_beside_a_coordinator_is_begun_when_there_is_a_thread_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a job's checkpoints: otherwise it would have none for good."""
    background, ran = Background(), threading.Event()
    background.start()
    refuse_threads(monkeypatch, {"checkpoints"})
    background.run("checkpoints", ran.set)
    assert not ran.is_set()
    assert "can't start new thread" in caplog.text
    background.repeat("looks", 0.01, lambda: None)
    monkeypatch.undo()
    assert ran.wait(SECONDS)
    background.stop()


def test_what_did_not_start_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    background, threads = Background(), OwnThreads()
    refuse_threads(monkeypatch, {"looks", "notices"})
    with pytest.raises(TryLater, match="can't start new thread"):
        background.repeat("looks", 1.0, lambda: None)
    with pytest.raises(TryLater, match="can't start new thread"):
        threads.repeat(1.0, lambda: False)
    background.stop()
    threads.stop()


def test_tasks_of_one_that_take_long_keep_those_of_another_from_no_thread() -> None:
    pool, end, done = FairPool(Pool(4, "fair"), 2), threading.Event(), Queue[str]()
    for number in range(6):
        source = f"connection {number}"
        pool.submit("slow", source, lambda number=number: done.put(f"slow {number}") if end.wait(SECONDS) else None)  # type: ignore[misc]
    pool.submit("other", "connection", lambda: done.put("other"))
    assert done.get(timeout=SECONDS) == "other"
    end.set()
    assert {done.get(timeout=SECONDS) for _ in range(6)} == {f"slow {number}" for number in range(6)}
    pool.stop()


def test_tasks_of_one_source_that_take_long_or_are_many_keep_those_of_no_other_waiting() -> None:
    pool, end, done = FairPool(Pool(4, "fair"), 2), threading.Event(), Queue[str]()
    pool.submit("owner", "slow", lambda: end.wait(SECONDS) and done.put("slow 0"))
    for number in range(1, 4):
        pool.submit("owner", "slow", lambda number=number: done.put(f"slow {number}"))  # type: ignore[misc]
    pool.submit("owner", "other", lambda: done.put("other"))
    assert done.get(timeout=SECONDS) == "other"
    assert done.empty()
    end.set()
    assert [done.get(timeout=SECONDS) for _ in range(4)] == [f"slow {number}" for number in range(4)]
    pool.stop()


def test_a_pool_of_daemon_threads_has_as_many_as_there_were_calls_at_a_time() -> None:
    """A worker of many shards has a pool with a place for each, and mostly needs one."""
    pool, end = DaemonPool(3, "pull"), threading.Event()
    for number in range(20):
        assert pool.submit(lambda number=number: number).result(SECONDS) == number  # type: ignore[misc]
    assert len(pool.threads) == 1
    waiting = [pool.submit(lambda: end.wait(SECONDS)) for _ in range(2)]
    assert pool.submit(int).result(SECONDS) == 0, "a third thread carried it out"
    queued = [pool.submit(lambda: end.wait(SECONDS)) for _ in range(4)]
    assert len(pool.threads) == 3
    end.set()
    assert all(future.result(SECONDS) for future in (*waiting, *queued))
    pool.close()
    pool.join()
    assert not any(thread.is_alive() for thread in pool.threads)


def test_a_pool_of_daemon_threads_that_gets_no_more_does_its_work_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, end = DaemonPool(3, "pull"), threading.Event()
    refused = refuse_threads(monkeypatch, {"pull"})
    first, second = pool.submit(lambda: end.wait(SECONDS)), pool.submit(int)
    assert refused.get(timeout=SECONDS) == "pull"
    end.set()
    assert first.result(SECONDS)
    assert second.result(SECONDS) == 0
    pool.close()
    pool.join()


def test_no_server_has_a_pool_of_another_kind() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "ps_server").rglob("*.py"))
        for node in ast.walk(syntax(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ThreadPoolExecutor")
    ]
    assert not found
