"""Threads beside the calls: what one meets is counted from 0 on, and one that cannot be had is tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.errors import NotFound, PSError, TryLater
from ps_protocol.identity import Identity
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_runtime import background
from ps_server.core.snapshot import BucketSnapshot, CheckpointFile, RestoreRequest, SnapshotRequest, VersionRange
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.snapshots import SnapshotTask
from ps_server.shard.threads import ApplyThreads, NoThreads, OwnThreads
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cluster import until
from tests.tools.raw_worker import vector_job

SECONDS = 20.0
pytestmark = pytest.mark.usefixtures("caplog")  # the errors are meant


@pytest.fixture
def threads() -> Iterator[background.Background]:
    threads = background.Background()
    threads.start()
    yield threads
    threads.stop()


def test_a_thread_without_errors_has_a_count_of_none() -> None:
    """An alert looks at the increase of the count: a first error that came with the count itself would raise none."""
    background.guarded("all-is-well", lambda: None)
    assert background.errors()["all-is-well"] == 0


def test_work_for_which_no_thread_can_be_had_is_done_when_it_is_asked_for_again(
    threads: background.Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot)
        threads.apart("recovery", "job", done.set)
    assert background.errors()["recovery"] > 0
    assert not done.is_set()
    threads.apart("recovery", "job", done.set)
    assert done.wait(SECONDS)


def test_an_apply_thread_goes_on_after_an_error() -> None:
    threads, done = ApplyThreads(1), threading.Event()
    before = background.errors().get("apply", 0)

    def fails() -> None:
        raise ZeroDivisionError

    threads.submit(fails)
    threads.submit(done.set)
    assert done.wait(SECONDS)
    threads.stop()
    assert background.errors()["apply"] == before + 1


def test_errors_in_a_shards_own_threads_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise KeyError(1)

    store = CheckpointStore(tmp_path)
    assert store.begin("job", "000001")
    shard = Shard(ShardMetrics(CollectorRegistry()), OwnThreads(), checkpoints=store)
    before = {name: background.errors().get(name, 0) for name in ("apply", "checkpoint", "restore")}
    spec = vector_job("job", "async", 16, 1)
    shard.create_job(spec, [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    monkeypatch.setattr(CheckpointStore, "write_shard", fails)
    monkeypatch.setattr(CheckpointStore, "manifest", fails)
    shard.push(PushCall(Identity("job", 0, 1, run="1"), 0, (PushedBucket(0, PushKind.INITIAL_VALUE),), bytes(64)))
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, "1"))
    with pytest.raises(PSError, match="failed on this shard; its log says why"):
        shard.await_snapshot("job", "000001", SECONDS, "1")
    bucket = shard.jobs()["job"].buckets[0].unit.weights
    monkeypatch.setattr(bucket, "add", fails)
    shard.push(PushCall(Identity("job", 0, 1, run="1"), 1, (PushedBucket(0, PushKind.GRADIENT),), bytes(64)))
    until(lambda: background.errors()["apply"] > before["apply"])
    with pytest.raises(PSError, match="cannot be restored on this shard; its log says why"):
        shard.restore_job(RestoreRequest(spec, (0,), "000001", 5, "1"), seconds=SECONDS)
    shard.stop()
    assert {name: background.errors()[name] - count for name, count in before.items()} == dict.fromkeys(before, 1)


def test_a_checkpoint_that_a_stopped_shard_is_asked_for_fails_in_words(tmp_path: Path) -> None:
    """The call was on its way while the shard stopped."""
    store = CheckpointStore(tmp_path)
    assert store.begin("job", "000001")
    shard = Shard(ShardMetrics(CollectorRegistry()), OwnThreads(), checkpoints=store)
    spec = vector_job("job", "async", 16, 1)
    shard.create_job(spec, [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    shard.push(PushCall(Identity("job", 0, 1, run="1"), 0, (PushedBucket(0, PushKind.INITIAL_VALUE),), bytes(64)))
    shard.stop()
    before = background.errors()
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, "1"))
    with pytest.raises(TryLater, match="the shard is stopping"):
        shard.await_snapshot("job", "000001", SECONDS, "1")
    assert background.errors() == before


def test_a_job_that_ends_while_the_shard_stops_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task is there at one look, and gone at the next one."""
    store = CheckpointStore(tmp_path)
    assert store.begin("job", "000001")
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), checkpoints=store)
    shard.create_job(vector_job("job", "async", 16, 1), [0], "1")
    shard.add_worker("job", 0, 1, None, run="1")
    shard.push(PushCall(Identity("job", 0, 1, run="1"), 0, (PushedBucket(0, PushKind.INITIAL_VALUE),), bytes(64)))
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, "1"))
    looks = iter([shard.jobs()["job"].snapshot_task])
    monkeypatch.setattr(HostedJob, "snapshot_task", property(lambda job: next(looks, None)), raising=False)
    shard.stop()


def test_a_checkpoint_that_is_given_up_during_a_copy_writes_nothing() -> None:
    """Another checkpoint takes its place while a thread copies the last bucket."""
    written: list[object] = []

    def copy(index: int) -> BucketSnapshot:
        task.abandon()
        return BucketSnapshot(index, 0, {}, torch.zeros(1), {}, {})

    def write(name: str, copied: object) -> CheckpointFile:
        written.append(copied)
        raise AssertionError

    task = SnapshotTask("1", None, {0: True}, copy, write, NoThreads(), time.monotonic)
    task.begin()
    task.copy(0, VersionRange())
    with pytest.raises(NotFound, match="checkpoint 1 was abandoned for another one"):
        task.wait(0)
    assert written == []
