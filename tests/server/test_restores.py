"""A shard restores a job in the background: told how far it is, once only, and never by a call of before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import (
    CheckpointDamaged,
    InvalidRequest,
    NotFound,
    OutOfOrder,
    PSError,
    RunEnded,
    TryLater,
    UnknownWorker,
)
from ps_protocol.identity import Identity
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import PullCall
from ps_protocol.optimizers import with_defaults
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.cluster import Checkpointing
from ps_server.coordinator.recovery import MOST_AGAIN, Recovery, Rollback
from ps_server.coordinator.shards import Shards
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.core.placement import place_job
from ps_server.core.snapshot import RestoreProgress, RestoreRequest, VersionRange
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import OwnThreads
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.checkpoint_files import RUN, filled, write_checkpoint
from tests.tools.held_disk import HeldDisk
from tests.tools.one_process import AtOnce, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

SPEC = with_defaults(vector_job("job", "sync", 64, 1))
LAYOUT = bucket_layout(SPEC.parameters, SPEC.bucket_bytes).buckets
BUCKETS = range(len(LAYOUT))


def write_two(store: CheckpointStore) -> None:
    """Writes two checkpoints; in each of them all weights are the number of its name."""
    for number in (1, 2):
        write_checkpoint(store, SPEC, filled(SPEC, float(number)), f"{number:06d}")


@pytest.fixture
def disk() -> HeldDisk:
    return HeldDisk()


@pytest.fixture
def shard(tmp_path: Path, disk: HeldDisk) -> Iterator[Shard]:
    store = CheckpointStore(tmp_path, disk)
    write_two(store)
    shard = Shard(ShardMetrics(CollectorRegistry()), OwnThreads(), checkpoints=store)
    yield shard
    disk.go.set()
    shard.stop()


def restore(shard: Shard, name: str, last_incarnation: int, seconds: float = 30.0, run: str = RUN) -> RestoreProgress:
    return shard.restore_job(RestoreRequest(SPEC, tuple(BUCKETS), name, last_incarnation, run), seconds=seconds)


def weights(shard: Shard) -> float:
    """The value of all weights."""
    [value] = {float(each) for bucket in shard.jobs()["job"].buckets.values() for each in bucket.unit.weights.flat}
    return value


def test_a_call_is_answered_with_how_far_it_is_and_repeated_until_the_job_is_there(
    shard: Shard, disk: HeldDisk, tmp_path: Path
) -> None:
    begun = restore(shard, "000002", 5, seconds=0.0)
    assert begun.extent is None
    assert disk.reached.wait(30)
    size = (tmp_path / "job" / "000002" / "shard-0.safetensors").stat().st_size
    assert restore(shard, "000002", 5, seconds=0.0) == RestoreProgress(0, size, None), "the same restore"
    with pytest.raises(TryLater, match=f"being rolled back to checkpoint 000002: 0 of {size} bytes are read"):
        shard.committed("job", RUN)
    disk.go.set()
    assert restore(shard, "000002", 5) == RestoreProgress(size, size, VersionRange(3, 3, {0: 3}))
    assert weights(shard) == 2.0


def test_what_it_held_is_let_go_before_it_reads_and_workers_are_told_to_join(shard: Shard, disk: HeldDisk) -> None:
    disk.go.set()
    restore(shard, "000001", 5)
    shard.add_worker("job", 0, 6, None, run=RUN)
    disk.go.clear()
    disk.reached.clear()
    restore(shard, "000002", 6, seconds=0.0)
    assert disk.reached.wait(30)
    assert shard.jobs() == {}
    call = PullCall(Identity("job", 0, 6, run=RUN), 3, (0,))
    with pytest.raises(UnknownWorker, match="join again"):
        shard.pull_state(call, None)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        shard.committed("another")


def test_a_late_or_doubled_call_changes_nothing(shard: Shard, disk: HeldDisk) -> None:
    disk.go.set()
    restore(shard, "000002", 5)
    shard.add_worker("job", 0, 6, None, run=RUN)
    done = restore(shard, "000002", 5)
    assert done.extent == VersionRange(3, 3, {0: 3})
    late: dict[tuple[str, int], type[PSError]] = {("000001", 5): OutOfOrder, ("000001", 4): OutOfOrder}
    for (name, incarnation), error in late.items():
        with pytest.raises(error, match="after this call was made"):
            restore(shard, name, incarnation)
    with pytest.raises(RunEnded):
        restore(shard, "000001", 9, run="0")
    assert weights(shard) == 2.0
    assert list(shard.jobs()["job"].partition.roster) == [0], "the worker is live still"
    restore(shard, "000001", 6)
    assert weights(shard) == 1.0


def test_a_call_of_before_a_worker_of_this_shard_changes_nothing(shard: Shard, disk: HeldDisk) -> None:
    disk.go.set()
    shard.create_job(SPEC, list(BUCKETS), RUN)
    shard.add_worker("job", 0, 3, None, run=RUN)
    shard.remove_worker("job", 0, 3, run=RUN)
    with pytest.raises(OutOfOrder, match="a worker of incarnation 3 since this call was made with 2"):
        restore(shard, "000001", 2)
    assert restore(shard, "000001", 3).extent is not None


def test_a_later_call_takes_the_place_of_one_that_reads(shard: Shard, disk: HeldDisk) -> None:
    restore(shard, "000002", 5, seconds=0.0)
    assert disk.reached.wait(30)
    restore(shard, "000001", 6, seconds=0.0)
    with pytest.raises(OutOfOrder):
        restore(shard, "000002", 5, seconds=0.0)
    disk.go.set()
    assert restore(shard, "000001", 6).extent is not None
    assert weights(shard) == 1.0


def test_a_job_that_is_dropped_meanwhile_does_not_come_back(shard: Shard, disk: HeldDisk) -> None:
    restore(shard, "000002", 5, seconds=0.0)
    assert disk.reached.wait(30)
    shard.drop_job("job", RUN)
    disk.go.set()
    shard.stop()
    assert shard.jobs() == {}


def test_a_damaged_checkpoint_leaves_the_shard_without_the_job_and_the_one_before_is_restored(
    shard: Shard, disk: HeldDisk, tmp_path: Path
) -> None:
    disk.go.set()
    path = tmp_path / "job" / "000002" / "shard-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointDamaged, match="SHA-256"):
        restore(shard, "000002", 5)
    assert shard.jobs() == {}
    assert restore(shard, "000001", 5).extent is not None, "the one that failed is no call of before"
    assert weights(shard) == 1.0


class ReadingShard:
    """A shard as the coordinator asks it, whose answers are given."""

    def __init__(self, answers: list[RestoreProgress | PSError]) -> None:
        self.answers, self.asked = answers, list[tuple[str, int]]()
        self.seen: list[str] = []
        self.recovery: Recovery | None = None

    def process(self) -> int:
        return 1

    def restore_job(self, request: RestoreRequest) -> RestoreProgress:
        self.asked.append((request.checkpoint, request.last_incarnation))
        assert self.recovery is not None
        told = self.recovery.progress("job")
        assert told is not None
        self.seen.append(f"{told} [{told.progress}]")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, PSError):
            raise answer
        return answer


def recovery_of(tmp_path: Path, api: ReadingShard) -> tuple[Recovery, Shards]:
    store = CheckpointStore(tmp_path)
    write_two(store)
    shards = Shards(1, lambda index, address: api, AtOnce)  # type: ignore[arg-type, return-value]
    shards.register(0, "127.0.0.1:1", "", 1, 1)
    api.recovery = Recovery(Checkpointing(store, CheckpointPolicy(tmp_path), lambda: None, SharedRoom(0)), shards)
    return api.recovery, shards


def test_the_coordinator_asks_until_the_shard_has_read_all_and_says_how_far_it_is(tmp_path: Path) -> None:
    gigabyte = 10**9
    api = ReadingShard(
        [
            RestoreProgress(0, 13 * gigabyte),
            RestoreProgress(3_200_000_000, 13 * gigabyte),
            RestoreProgress(13 * gigabyte, 13 * gigabyte, VersionRange(3, 3)),
        ]
    )
    recovery, shards = recovery_of(tmp_path, api)
    restored = recovery.restore(place_job(SPEC, 1, RUN), shards.all(), 4)
    assert (restored.manifest.name, restored.last_incarnation) == ("000002", 4)
    assert api.seen[0] == "job 'job' is being rolled back to checkpoint 000002 [000002:0:0]"
    assert api.seen[2] == (
        "job 'job' is being rolled back to checkpoint 000002: shard 0 has read 3.2 of 13.0 GB [000002:0:3200000000]"
    )
    assert recovery.progress("job") is None


def test_a_restore_that_begins_again_is_progress_a_few_times_only() -> None:
    """A worker waits as long as the text changes: for a shard that died once, and not for one that dies each time."""
    rollback, texts = Rollback("job", RUN, "000002", 1), []
    for _ in range(10):
        for done in (0, 40):
            rollback.note(0, RestoreProgress(done, 100))
            texts.append(rollback.progress())
    assert len(set(texts)) == 2 * (MOST_AGAIN + 1)
    assert len(set(texts[2 * (MOST_AGAIN + 1) :])) == 1
    rollback.note(0, RestoreProgress(50, 100))
    assert rollback.progress() not in texts


def test_each_rollback_that_differs_from_the_one_before_has_a_higher_incarnation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = RestoreProgress(1, 1, VersionRange(3, 3))
    api = ReadingShard([TryLater("away"), CheckpointDamaged("torn"), whole])
    recovery, shards = recovery_of(tmp_path, api)
    placed = place_job(SPEC, 1, RUN)
    with pytest.raises(TryLater):
        recovery.restore(placed, shards.all(), 4)
    assert recovery.restore(placed, shards.all(), 4).last_incarnation == 5
    assert api.asked == [("000002", 4), ("000002", 4), ("000001", 5)]
    assert "checkpoint 000002 cannot be used, trying the one before: torn" in caplog.text
    recovery.restore(placed, shards.all(), 5)
    assert api.asked[3:] == [("000002", 6)]
    recovery.restore(placed, shards.all(), 9)
    assert api.asked[4:] == [("000002", 9)]


def test_a_shard_that_reads_nothing_any_more_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    api = ReadingShard([RestoreProgress(5, 10)])
    recovery, shards = recovery_of(tmp_path, api)
    with pytest.raises(TryLater, match="shard 0 reads nothing of checkpoint 000002"):
        recovery.restore(place_job(SPEC, 1, RUN), shards.all(), 4)


def test_a_worker_that_joins_meanwhile_is_told_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = OneProcess(tmp_path, shards=1)
    worker = DirectWorker(cluster, SPEC, 0)
    worker.initialise()
    worker.checkpoint()
    told: list[tuple[str, str | None]] = []
    read = CheckpointStore.read_files

    def join_and_read(*arguments: Any) -> Any:
        with pytest.raises(TryLater) as error:
            worker.rejoin()
        told.append((str(error.value), error.value.progress))
        return read(*arguments)

    monkeypatch.setattr(CheckpointStore, "read_files", join_and_read)
    cluster.start_shard(0)
    cluster.coordinator.recover_jobs()
    [(text, progress)] = told
    assert text.startswith("job 'job' is being rolled back to checkpoint 00000")
    assert progress is not None
    assert worker.rejoin().worker.incarnation > 1
    cluster.stop()


@pytest.mark.parametrize(("buckets", "got"), [((0, 99), 99), ((1, 0, 1), 1)])
def test_a_call_with_buckets_that_cannot_be_leaves_the_job_as_it_is(
    shard: Shard, disk: HeldDisk, buckets: tuple[int, ...], got: int
) -> None:
    """A fuzzer found that the job was given up before it was looked at what was asked for."""
    disk.go.set()
    restore(shard, "000001", 5)
    with pytest.raises(InvalidRequest, match=f"each once, got {got}"):
        shard.restore_job(RestoreRequest(SPEC, tuple(buckets), "000002", 6, RUN))
    assert weights(shard) == 1.0
