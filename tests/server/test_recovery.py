"""What a coordinator counts of the rollbacks of all its jobs, what it keeps of them, and which shards they restore."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import UnknownWorker
from ps_protocol.optimizers import with_defaults
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.cluster import Checkpointing
from ps_server.coordinator.recovery import Recovery, Rollback
from ps_server.coordinator.shards import Shards
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.core.placement import place_job
from ps_server.core.statistics import RecoveryStatistics
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.checkpoint_files import RUN, filled, write_checkpoint
from tests.tools.one_process import AtOnce, OneProcess, join_all, train
from tests.tools.raw_worker import vector_job

LONG_ENOUGH = 0.3  # for another thread, unless it has to wait for this one


def test_jobs_that_are_restored_at_the_same_time_are_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, specs = CheckpointStore(tmp_path), [with_defaults(vector_job(name, "async", 16, 1)) for name in ("a", "b")]
    for spec in specs:
        write_checkpoint(store, spec, filled(spec))
    shards = Shards(1, lambda index, address: None, AtOnce)  # type: ignore[arg-type, return-value]
    restores = Recovery(Checkpointing(store, CheckpointPolicy(tmp_path), lambda: None, SharedRoom(0)), shards)
    first, second = (
        threading.Thread(target=restores.restore, args=(place_job(spec, 1, RUN), [], 0, True)) for spec in specs
    )
    count = RecoveryStatistics.__add__

    def count_while_the_other_counts(counts: RecoveryStatistics, more: RecoveryStatistics) -> RecoveryStatistics:
        if not second.ident:
            second.start()
            second.join(LONG_ENOUGH)
        return count(counts, more)

    monkeypatch.setattr(RecoveryStatistics, "__add__", count_while_the_other_counts)
    first.start()
    for thread in (first, second):
        thread.join()
    assert restores.statistics().restored == 2


def rollbacks() -> list[Rollback]:
    return [each for each in gc.get_objects() if type(each) is Rollback]


def test_of_a_job_that_has_ended_no_rollback_is_kept(cluster: OneProcess) -> None:
    of_other_tests = rollbacks()
    [worker] = join_all(cluster, "async", 1)
    train([worker])
    worker.checkpoint()
    cluster.while_waiting()
    cluster.start_shard(1)
    cluster.coordinator.recover_jobs()
    with pytest.raises(UnknownWorker):
        worker.push()
    worker.rejoin()
    [kept] = [weakref.ref(each) for each in rollbacks() if each not in of_other_tests]
    assert worker.leave()
    assert kept() is None


@pytest.mark.parametrize("mode", ["sync", "ssp:2", "async"])
def test_a_shard_that_is_lost_while_another_one_is_restored_is_restored_after_it(
    cluster: OneProcess, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Workers would wait for ever for a shard that counts as restored and holds nothing."""
    [worker] = join_all(cluster, mode, 1)
    train([worker])
    worker.checkpoint()
    cluster.start_shard(0)
    restore = cluster.shards[0].restore_job

    def meanwhile(*arguments: Any) -> Any:
        cluster.start_shard(1)
        return restore(*arguments)

    monkeypatch.setattr(cluster.shards[0], "restore_job", meanwhile)
    job = cluster.coordinator.job("job")
    cluster.coordinator.recover_jobs()
    assert job.lost() == [1]
    monkeypatch.undo()
    cluster.coordinator.recover_jobs()
    assert job.lost() == []
    worker.rejoin()
    assert worker.pull().min() >= 1, "both shards have what the checkpoint has"
