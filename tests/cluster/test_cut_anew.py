"""Checkpoints of groups of processes that jobs of another cut continue from: what servers make of them, and refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import JobMismatch
from ps_protocol.layout import ParameterSpec, PiecePlace, bucket_layout
from ps_protocol.messages.workers import group_state
from ps_protocol.modes import parse_mode
from ps_server.config import ServerConfig
from ps_server.server import Server
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cases import cases
from tests.tools.checkpoint_files import CLOCK, filled, write_checkpoint
from tests.tools.cluster import START_SECONDS, Cluster
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.rollbacks import CELLS, LEASE, QUICK, join_again, make_checkpoint, train

PLAIN = vector_job("job", "sync", CELLS, 1)
FIRST = 24  # cells of the first member: the plain job's second bucket has some of both
GROUP = replace(
    PLAIN,
    parameters=tuple(
        ParameterSpec("cells", (count,), "float32", 0, member=member, piece=PiecePlace((CELLS,), (first,)))
        for member, first, count in ((0, 0, FIRST), (1, FIRST, CELLS - FIRST))
    ),
    group_size=2,
)
STATES = {0: group_state([b"state of member 0", b"state of member 1"])}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A directory with a checkpoint of a group of two."""
    found = CheckpointStore(tmp_path)
    write_checkpoint(found, GROUP, filled(GROUP, 2.0), states=STATES)
    return found


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], store: CheckpointStore) -> Cluster:
    return make_cluster(checkpoint_dir=store.directory, restore=True, lease=LEASE, timing=QUICK)


@pytest.mark.parametrize("lost", cases([0], [1]))
def test_a_worker_of_one_process_goes_on_with_a_groups_weights_and_without_its_members_states(
    cluster: Cluster, store: CheckpointStore, lost: int
) -> None:
    """Also where a shard dies before the job has a checkpoint of its own cut."""
    with RawWorker(cluster.address, PLAIN, 0) as worker:
        assert worker.clock == CLOCK
        assert torch.equal(worker.pull(), torch.full((CELLS,), 2.0))
        train(worker, 1)
        cluster.start_again(lost)
        join_again(worker)
        assert worker.clock == CLOCK
        assert not worker.joined.HasField("worker_state")  # type: ignore[attr-defined]
        assert torch.equal(worker.pull(), torch.full((CELLS,), 2.0))
        train(worker, 1)
        assert make_checkpoint(cluster, worker) == CLOCK + 1
        manifest = store.manifest("job", store.names("job")[-1])
        assert store.read_worker("job", manifest.name, manifest.workers[0].part) == b"state of %d" % (CLOCK + 1)
        cluster.start_again(0)
        join_again(worker)
        assert worker.joined.worker_state.content == b"state of %d" % (CLOCK + 1)  # type: ignore[attr-defined]


def test_the_next_checkpoint_has_no_state_of_the_other_cut(cluster: Cluster, store: CheckpointStore) -> None:
    with RawWorker(cluster.address, PLAIN, 0) as worker:
        train(worker, 1)
        cluster.coordinator.job("job").checkpoint()  # which the worker does not hear of
    manifest = store.manifest("job", store.names("job")[-1])
    assert (manifest.clock, dict(manifest.workers), manifest.without) == (CLOCK + 1, {}, (0,))


def test_what_cannot_be_cut_anew_is_refused_by_name_and_leaves_nothing_on_any_shard(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    values = ({"lr": 1.0, "momentum": 0.9},)
    group, store = replace(GROUP, param_groups=values), CheckpointStore(tmp_path)
    layout = bucket_layout(group.parameters, group.bucket_bytes).buckets
    sizes = {bucket.index: bucket.slices[0].length for bucket in layout if bucket.member}
    states = {index: {0: {"momentum_buffer": torch.ones(size)}} for index, size in sizes.items()}
    write_checkpoint(store, group, [replace(each, state=states.get(each.index, {})) for each in filled(group)])
    cluster = make_cluster(checkpoint_dir=tmp_path, restore=True, lease=LEASE, timing=QUICK)
    with pytest.raises(JobMismatch, match="only some pieces of 'cells' have the optimizer's state 'momentum_buffer'"):
        RawWorker(cluster.address, replace(PLAIN, param_groups=values), 0)
    assert not any(shard.jobs() for shard in cluster.shards)
    with RawWorker(cluster.address, group, 0) as worker:  # nothing is lost
        assert worker.clock == CLOCK


def test_a_damaged_checkpoint_of_another_cut_is_left_for_the_one_before_it(
    make_cluster: Callable[..., Cluster], store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(store, GROUP, filled(GROUP, 5.0), name="000002", states=STATES)
    file = store.directory / "job" / "000002" / "shard-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    cluster = make_cluster(checkpoint_dir=store.directory, restore=True, lease=LEASE, timing=QUICK)
    with RawWorker(cluster.address, PLAIN, 0) as worker:
        assert torch.equal(worker.pull(), torch.full((CELLS,), 2.0))
    assert "checkpoint 000002 cannot be used, trying the one before" in caplog.text


def test_a_checkpoint_on_the_shards_own_disks_is_not_cut_anew(tmp_path: Path) -> None:
    where = tmp_path / "coordinator"
    first = Server(ServerConfig(shard_count=1, checkpoint_dir=where, lease=LEASE, timing=QUICK, restore=True))
    config = ServerConfig(index=0, coordinator=first.address, checkpoint_dir=tmp_path / "shard", own_disk=True)
    shard = Server(config)
    try:
        assert shard.wait_ready(START_SECONDS)
        with RawWorker(first.address, PLAIN, 0) as worker:
            worker.initialise()
            train(worker, 1)
            worker.leave()
        with pytest.raises(JobMismatch, match="of one process, and this one has groups of 2, cut otherwise: "):
            RawWorker(first.address, GROUP, 0)
    finally:
        for server in (shard, first):
            server.stop()


@pytest.mark.parametrize(("before", "after", "lost"), cases([(2, 3, 2), (3, 2, 0)], [(2, 3, 0), (3, 2, 1), (2, 1, 0)]))
def test_a_shard_that_dies_before_the_next_checkpoint_of_a_job_on_another_number_of_shards_goes_back_to_the_first(
    make_cluster: Callable[..., Cluster], tmp_path: Path, before: int, after: int, lost: int
) -> None:
    """The coordinator is with shard 0: it comes back with the state that it has written since the restore."""
    options = {"checkpoint_dir": tmp_path, "lease": LEASE, "timing": QUICK}
    first = make_cluster(shards=before, **options)
    with RawWorker(first.address, PLAIN, 0) as worker:
        worker.initialise()
        train(worker, 2)
        clock = make_checkpoint(first, worker)
        expected = worker.pull()
    first.stop()
    cluster = make_cluster(shards=after, restore=True, **options)
    with RawWorker(cluster.address, PLAIN, 0) as worker:
        assert worker.clock == clock
        train(worker, 3)
        cluster.start_again(lost)
        join_again(worker)
        assert worker.clock == clock
        assert torch.equal(worker.pull(), expected)
        train(worker, 1)
        assert make_checkpoint(cluster, worker) == clock + 1


def test_a_shard_that_dies_alone_after_a_restore_on_another_number_of_shards_gets_its_part_of_all_files(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """In async the others keep what they have."""
    options = {"checkpoint_dir": tmp_path, "lease": LEASE, "timing": QUICK}
    spec = replace(PLAIN, consistency=parse_mode("async"))
    first = make_cluster(shards=2, **options)
    with RawWorker(first.address, spec, 0) as worker:
        worker.initialise()
        train(worker, 2)
        make_checkpoint(first, worker)
        saved = worker.pull()
    first.stop()
    cluster = make_cluster(shards=3, restore=True, **options)
    with RawWorker(cluster.address, spec, 0) as worker:
        trained = train(worker, 3)
        assert not torch.any(trained == saved)
        lost = list(cluster.shards[2].jobs()["job"].buckets)
        cluster.start_again(2)
        join_again(worker)
        buckets = zip(worker.pull().chunk(4), saved.chunk(4), trained.chunk(4), strict=True)
        for index, (now, before, after) in enumerate(buckets):
            assert torch.equal(now, before if index in lost else after)
    assert lost
