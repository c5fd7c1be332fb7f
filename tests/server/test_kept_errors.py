"""An error that is kept, and raised again, keeps nothing alive that the frames had in which it was raised first."""

from __future__ import annotations

import errno
import logging
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import Backlogged, CheckpointDamaged, CheckpointFailed, anew
from ps_protocol.framing import Buffer
from ps_protocol.identity import Identity
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.optimizers import with_defaults
from ps_server.core.snapshot import RestoreRequest, SnapshotRequest
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.disk import Disk
from tests.tools.checkpoint_files import RUN, filled, write_checkpoint
from tests.tools.one_process import OneProcess, join_all
from tests.tools.raw_worker import vector_job

SPEC = with_defaults(vector_job("job", "async", 16, 1))


class Copy:
    """Stands for what a frame holds."""


class FailingDisk(Disk):
    """Takes and gives no files of checkpoints while it fails. held: what the frame had that failed last"""

    fails = False

    def __init__(self) -> None:
        self.held: weakref.ref[Copy] = weakref.ref(Copy())

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        copy = Copy()
        if self.fails:
            self.held = weakref.ref(copy)
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, chunks)

    def open(self, path: Path) -> BinaryIO:
        copy = Copy()
        if self.fails and path.suffix == ".safetensors":
            self.held = weakref.ref(copy)
            raise OSError(errno.EIO, "Input/output error")
        return super().open(path)


@pytest.fixture(autouse=True)
def _no_records(caplog: pytest.LogCaptureFixture) -> None:
    """pytest keeps each record of a log, and with it the error."""
    caplog.set_level(logging.CRITICAL, "ps_server")


def test_a_shard_keeps_no_copy_of_a_checkpoint_that_it_could_not_write(tmp_path: Path) -> None:
    disk = FailingDisk()
    store = CheckpointStore(tmp_path, disk)
    store.begin("job", "000001")
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), checkpoints=store)
    shard.create_job(SPEC, [0], RUN)
    shard.add_worker("job", 0, 1, None, run=RUN)
    shard.push(PushCall(Identity("job", 0, 1, run=RUN), 0, (PushedBucket(0, PushKind.INITIAL_VALUE),), bytes(64)))
    disk.fails = True
    shard.begin_snapshot(SnapshotRequest("job", "000001", None, RUN))
    for _ in range(2):
        with pytest.raises(CheckpointFailed, match="No space left"):
            shard.await_snapshot("job", "000001", 0.0, RUN)
    assert shard.jobs()["job"].snapshot_task is not None
    assert disk.held() is None
    shard.stop()


def test_a_shard_keeps_nothing_of_a_checkpoint_that_it_could_not_read(tmp_path: Path) -> None:
    disk = FailingDisk()
    store = CheckpointStore(tmp_path, disk)
    write_checkpoint(store, SPEC, filled(SPEC))
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), checkpoints=store)
    disk.fails = True
    with pytest.raises(CheckpointDamaged, match="Input/output error"):
        shard.restore_job(RestoreRequest(SPEC, (0,), "000001", 5, RUN))
    assert disk.held() is None
    shard.stop()


def test_a_coordinator_keeps_nothing_of_a_checkpoint_that_failed(tmp_path: Path) -> None:
    disk = FailingDisk()
    cluster = OneProcess(tmp_path, disk=disk)
    [worker] = join_all(cluster, "async", 1)
    cluster.while_waiting()
    disk.fails = True
    with pytest.raises(CheckpointFailed, match="No space left"):
        cluster.coordinator.job("job").checkpoint()
    assert disk.held() is None
    disk.fails = False
    worker.leave()
    cluster.stop()


def test_an_error_that_is_made_anew_says_the_same() -> None:
    error = Backlogged("no room")
    error.retry_after, error.progress = 7.0, "half"
    with pytest.raises(Backlogged) as raised:
        raise error from ValueError()
    found = anew(raised.value)
    assert type(found) is Backlogged
    assert (str(found), found.retry_after, found.progress) == ("no room", 7.0, "half")
    assert (found.__traceback__, found.__cause__, found.__context__) == (None, None, None)
