"""Checkpoints: what is written is what was there, what is read is what was written, and a half one is none."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ps_protocol.convert import job_spec_data, job_spec_from_data, job_spec_message
from ps_protocol.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, NoCheckpoints, TryLater
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import ELEMENTWISE
from ps_protocol.v1 import jobs_pb2
from ps_server.config import parse_every
from ps_server.coordinator.timing import Timing
from ps_server.core.commands import RestoreSnapshot
from ps_server.core.consistency import Live
from ps_server.core.dense import Gradient
from ps_server.core.partition import JobPartition
from ps_server.core.snapshot import BucketSnapshot, CheckpointFile, VersionRange, union
from ps_server.core.unit import Bucket
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import export, optimizer_state_dict
from ps_server.storage.manifest import Manifest
from tests.tools.cases import cases
from tests.tools.checkpoint_files import read_buckets, write_checkpoint
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.forkserver import Nursery, address_in
from tests.tools.launching import END_SECONDS, Command
from tests.tools.optimizers import UNUSUAL, make
from tests.tools.raw_worker import RawWorker, joined, vector_job
from tests.tools.rollbacks import LEASE

MakeCluster = Callable[..., Cluster]
ROSTER: dict[int, Live] = {}


def spec_of(optimizer: str = "AdamW", values: HyperParameters | None = None) -> JobSpec:
    """Two parameters, and a buffer, in buckets of 32 elements."""
    parameters = (
        ParameterSpec("first", (40,), "float32", 0),
        ParameterSpec("second", (3, 8), "float32", 0),
        ParameterSpec("count", (2,), "int64", None),
    )
    groups = (values or {"lr": 0.1},)
    return JobSpec("job", parameters, optimizer, groups, Consistency(0, aggregate=True), 128, 1)


def buckets_of(spec: JobSpec) -> list[Bucket]:
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    job = JobPartition(spec, range(len(layout.buckets)))
    job.roster.update(ROSTER)
    return list(job.buckets.values())


def train(buckets: list[Bucket], steps: int, seed: int = 0) -> None:
    """Steps every bucket; as many steps from the same seed are the same steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for bucket in buckets:
            if not bucket.spec.frozen:
                bucket.weights.add(Gradient(torch.randn(bucket.spec.numel, generator=generator)))
                bucket.weights.step()
                bucket.rule.version += 1
                bucket.rule.applied[0] = bucket.rule.staged[0] = bucket.rule.version


def write(store: CheckpointStore, images: list[BucketSnapshot], spec: JobSpec, name: str = "000001") -> Manifest:
    """A complete checkpoint of one shard and one worker."""
    return write_checkpoint(store, spec, images, name, {0: b"state"})


def test_a_manifest_of_the_format_before_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "000001"
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("manifest_of_format_1.json"), folder / "manifest.json")
    manifest = CheckpointStore(tmp_path).manifest("job", "000001")
    spec = job_spec_from_data(manifest.job)
    assert (spec.optimizers, spec.param_group_optimizers) == (("SGD", "Adam"), (0, 1))
    optimizers = [(parameter.name, parameter.param_group, parameter.optimizer) for parameter in spec.parameters]
    assert optimizers == [("w", 0, 0), ("v", 1, 1), ("count", None, 0)]
    assert job_spec_from_data(job_spec_data(spec)) == spec


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_a_bucket_goes_on_from_its_file_as_if_it_had_never_stopped(optimizer: str, tmp_path: Path) -> None:
    spec = spec_of(optimizer, UNUSUAL[optimizer])
    there = buckets_of(spec)
    train(there, 3)
    store = CheckpointStore(tmp_path)
    manifest = write(store, [bucket.snapshot() for bucket in there], spec)
    images = read_buckets(store, manifest, [bucket.spec for bucket in there])
    back = buckets_of(spec)
    for bucket in back:
        bucket.restore(images[bucket.spec.index])
    train(there, 3, seed=1)
    train(back, 3, seed=1)
    for one, other in zip(there, back, strict=True):
        assert torch.equal(one.weights.flat, other.weights.flat)
        assert one.rule.version == other.rule.version
        assert one.rule.applied == other.rule.applied
        assert one.weights.optimizer_bytes == other.weights.optimizer_bytes


def test_an_image_stays_what_it_was_while_training_goes_on() -> None:
    there = buckets_of(spec_of())
    train(there, 2)
    before = [bucket.snapshot() for bucket in there]
    kept = [(image.weights.clone(), image.state[0]["exp_avg"].clone()) for image in before if image.state]
    train(there, 2)
    for image, (weights, average) in zip((i for i in before if i.state), kept, strict=True):
        assert torch.equal(image.weights, weights)
        assert torch.equal(image.state[0]["exp_avg"], average)
        assert image.clocks == {0: 2}


def test_a_job_takes_no_image_for_another_and_changes_nothing() -> None:
    spec = spec_of()
    there = buckets_of(spec)
    train(there, 1)
    job = JobPartition(spec, range(len(there)))
    images = {bucket.spec.index: bucket.snapshot() for bucket in there[:-1]}
    with pytest.raises(InvalidRequest, match="a snapshot of each bucket and table, got none of"):
        job.execute(RestoreSnapshot(images, 7))
    assert not any(bucket.rule.initialised for bucket in job.buckets.values())


def test_extents_say_the_least_of_what_every_bucket_has() -> None:
    found = union([VersionRange(4, 4, {0: 4, 1: 3}), VersionRange(6, 6, {0: 5})])
    assert found == VersionRange(4, 6, {0: 4, 1: 3})
    assert union([]) == VersionRange()


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_its_manifest_is_none(tmp_path: Path) -> None:
    store, spec = CheckpointStore(tmp_path), spec_of()
    images = [bucket.snapshot() for bucket in buckets_of(spec)]
    store.begin("job", "000001")
    store.write_shard("job", "000001", 0, images)
    assert store.names("job") == []
    assert store.jobs() == []
    assert store.next_name("job") == "000002", "its name is not used again"
    write(store, images, spec, "000002")
    assert store.names("job") == ["000002"]
    assert store.jobs() == ["job"]


def test_as_many_are_kept_as_was_said_and_what_never_came_to_an_end_goes_too(tmp_path: Path) -> None:
    store, spec = CheckpointStore(tmp_path), spec_of()
    images = [bucket.snapshot() for bucket in buckets_of(spec)]
    for number in range(1, 6):
        if number == 2:
            store.begin("job", "000002")
            store.write_shard("job", "000002", 0, images)
        else:
            write(store, images, spec, f"{number:06d}")
    store.begin("job", "000006")
    store.write_shard("job", "000006", 0, images)  # one that is being written
    store.prune("job", 2)
    assert sorted(entry.name for entry in (tmp_path / "job").iterdir()) == ["000004", "000005", "000006"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_manifest(directory: Path, **values: object) -> None:
    data = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**data, **values}))


def put_a_link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


SHARD, MANIFEST = "shard-0.safetensors", "manifest.json"
AWAY = {"0": {"file": "../x", "bytes": 1, "sha256": ""}}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda d: flip_a_bit(d / SHARD),
    "a short file": lambda d: os.truncate(d / SHARD, 100),
    "a long file": lambda d: os.truncate(d / SHARD, 100_000),
    "a missing file": lambda d: (d / SHARD).unlink(),
    "a link": lambda d: put_a_link(d / SHARD),
    "a flipped bit in the manifest": lambda d: flip_a_bit(d / MANIFEST),
    "no manifest": lambda d: (d / MANIFEST).unlink(),
    "an empty manifest": lambda d: (d / MANIFEST).write_text(""),
    "half a manifest": lambda d: (d / MANIFEST).write_text("{"),
    "a manifest of another kind": lambda d: (d / MANIFEST).write_text("[1]"),
    "a changed clock": lambda d: change_manifest(d, clock=4),
    "a path that leads away": lambda d: change_manifest(d, shards=AWAY),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_what_was_written_is_not_read(damage: str, tmp_path: Path) -> None:
    store, spec = CheckpointStore(tmp_path), spec_of()
    there = buckets_of(spec)
    write(store, [bucket.snapshot() for bucket in there], spec)
    DAMAGES[damage](tmp_path / "job" / "000001")
    with pytest.raises(CheckpointDamaged, match=str(tmp_path)):
        read_buckets(store, store.manifest("job", "000001"), [bucket.spec for bucket in there])


def test_a_part_of_another_name_is_refused_even_if_the_manifest_says_so(tmp_path: Path) -> None:
    store, spec = CheckpointStore(tmp_path), spec_of()
    write(store, [bucket.snapshot() for bucket in buckets_of(spec)], spec)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    with pytest.raises(CheckpointDamaged, match="no name of a part"):
        store.read_worker("job", "000001", CheckpointFile("../../secret", 1, ""))


def test_no_name_leads_out_of_the_directory(tmp_path: Path) -> None:
    for job in (".", "..", ".hidden", "a/b", ""):
        with pytest.raises(InvalidRequest, match="does not start with a dot"):
            CheckpointStore(tmp_path).path(job)
    for name in ("", "..", "1", "00000a", "000001/..", "0" * 13):
        with pytest.raises(InvalidRequest, match="6 to 12 digits"):
            CheckpointStore(tmp_path).path("job", name)


def test_a_checkpoint_of_other_shapes_is_damaged(tmp_path: Path) -> None:
    store, spec = CheckpointStore(tmp_path), spec_of()
    manifest = write(store, [bucket.snapshot() for bucket in buckets_of(spec)], spec)
    other = JobSpec(**{**spec.__dict__, "bucket_bytes": 64})
    layout = bucket_layout(other.parameters, other.bucket_bytes)
    with pytest.raises(CheckpointDamaged, match=r"expected 16 x float32, found \(32,\)"):
        read_buckets(store, manifest, [layout.buckets[0]])


def test_a_full_disk_leaves_nothing_behind_and_the_one_before_as_it_was(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: writes fail in the same place, with another number."""
    store, there = CheckpointStore(tmp_path), buckets_of(spec_of())
    write(store, [bucket.snapshot() for bucket in there], spec_of())
    train(there, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        store.begin("job", "000002")
        with pytest.raises(CheckpointFailed, match=r"shard-0\.safetensors cannot be written: "):
            store.write_shard("job", "000002", 0, [bucket.snapshot() for bucket in there])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "job" / "000002").iterdir()) == []
    assert store.names("job") == ["000001"]


def test_a_directory_that_cannot_be_written_to_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be made"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


def test_how_often_is_said_in_steps_or_seconds() -> None:
    assert [parse_every(text) for text in ("100steps", "60s", "0.5s")] == [(100, None), (None, 60.0), (None, 0.5)]
    for text in ("", "100", "steps", "-1s", "0steps", "1.5steps", "nans", "infs", "1 h"):
        with pytest.raises(InvalidRequest, match="100steps or 60s"):
            parse_every(text)


# -- beside training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", cases(["sync"], ["ssp:1", "async"]))
def test_a_checkpoint_beside_training_is_of_one_version_in_sync_and_whole_in_every_mode(
    make_cluster: MakeCluster, tmp_path: Path, mode: str
) -> None:
    """Each step adds one to every cell: a bucket that was copied in the middle of an update would show it."""
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="5steps", keep=100, lease=LEASE)
    store, cells = CheckpointStore(tmp_path), 256
    workers = [RawWorker(cluster.address, vector_job("job", mode, cells, 2), rank) for rank in range(2)]
    workers[0].initialise()

    def run(rank: int) -> None:
        worker = workers[rank]
        while len(store.names("job")) < 3 or worker.clock < 15:
            worker.step(torch.full((cells,), -1.0))
            worker.pull()
            if worker.clock in worker.flagged:
                worker.save_state(worker.clock, b"state of %d" % worker.clock)
        worker.leave()

    in_parallel(2, run)
    both = min(worker.clock for worker in workers)  # after that one was alone
    spec = vector_job("job", mode, cells, 2)
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    for name in store.names("job"):
        manifest = store.manifest("job", name)
        images = read_buckets(store, manifest, layout.buckets)
        for image in images.values():
            assert torch.equal(image.weights, torch.full_like(image.weights, float(image.version)))
            assert image.version == (max if mode == "sync" else sum)(image.clocks.values())
        if mode == "sync":
            assert {image.version for image in images.values()} == {manifest.clock}
            assert all(worker.clock == manifest.clock for worker in manifest.workers.values())
    regular = [store.manifest("job", name) for name in store.names("job")][1:-1]
    if mode == "sync":
        assert all(manifest.clock % 5 == 0 for manifest in regular)
        assert all(sorted(manifest.workers) == [0, 1] for manifest in regular if manifest.clock < both)


def test_what_checkpoints_do_is_in_the_metrics(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path, lease=LEASE, timing=Timing(any_state=0.1))
    with joined(cluster.address, vector_job("job", "async", 64, 1)) as [worker]:
        worker.step(torch.zeros(64))
        worker.pull()
        cluster.coordinator.jobs()["job"].checkpoints.request(30)  # type: ignore[union-attr]
        samples = scrape(cluster.servers[0].metrics_address)
        assert samples['ps_checkpoints_total{job="job"}'] == 1
        assert samples['ps_checkpoint_clock{job="job"}'] == 1
        assert samples['ps_checkpoints_failed_total{job="job"}'] == 0
        shutil.rmtree(tmp_path / "job")
        (tmp_path / "job").write_text("in the way")
        with pytest.raises(CheckpointFailed, match="cannot be written"):
            cluster.coordinator.jobs()["job"].checkpoints.request(30)  # type: ignore[union-attr]
        samples = scrape(cluster.servers[0].metrics_address)
        assert samples['ps_checkpoints_failed_total{job="job"}'] == 1
        worker.step(torch.zeros(64))
        worker.pull()


# -- the way out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_what_is_exported_goes_on_in_plain_pytorch(make_cluster: MakeCluster, tmp_path: Path, optimizer: str) -> None:
    values: HyperParameters = {"lr": 0.1, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.1}
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints")

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3))

    def step(net: nn.Module, number: int) -> None:
        net(torch.sin(torch.arange(28.0).reshape(4, 7) + number)).pow(2).sum().backward()

    served, plain = model(), model()
    alone = make(optimizer, list(plain.parameters()), values)
    session = cluster.connect("sync", job="job")
    net, steps = session.prepare(served, make(optimizer, list(served.parameters()), values), bucket_bytes=256)
    for number in range(3):
        for each, each_steps in ((net, steps), (plain, alone)):
            step(each, number)
            each_steps.step()
            each_steps.zero_grad()
    session.close()

    said = export(tmp_path / "checkpoints", "job", None, tmp_path / "out")
    assert "at clock 3" in said
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
    back = model()
    back.load_state_dict(found)
    on = make(optimizer, list(back.parameters()), values)
    on.load_state_dict(optimizer_state_dict(tmp_path / "out"))
    for each, each_steps in ((back, on), (plain, alone)):
        step(each, 4)
        each_steps.step()
    for mine, theirs in zip(back.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_training_changes_besides_the_weights_is_exported_too(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(checkpoint_dir=tmp_path / "checkpoints")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    session = cluster.connect("sync", job="job")
    net, steps = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made: list[Manifest] = []
    asked = threading.Thread(target=lambda: made.append(cluster.coordinator.job("job").checkpoint()))
    asked.start()
    while asked.is_alive():
        net(torch.randn(8, 4)).pow(2).sum().backward()
        steps.step()
        steps.zero_grad()
    [manifest] = made
    buffers = {name: tensor.clone() for name, tensor in net.state_dict().items() if "running" in name}
    export(tmp_path / "checkpoints", "job", manifest.name, tmp_path / "out")
    session.close()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["1.num_batches_tracked"] == manifest.clock
    assert all(not torch.equal(found[name], torch.zeros(4)) for name in buffers if "mean" in name)


def test_there_is_nothing_to_export_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoints, match="no checkpoint of job 'job' can be used: there is none"):
        export(tmp_path, "job", None, tmp_path / "out")
    with pytest.raises(InvalidRequest, match="is no directory"):
        export(tmp_path / "missing", "job", None, tmp_path / "out")


# -- SIGTERM ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_server_that_is_told_to_stop_makes_a_last_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    flags = ["--with-coordinator", "--shards=1", "--index=0", "--port=0", "--metrics-port=0"]
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    server = nursery.serve(["shard", *flags, f"--checkpoint-dir={checkpoints}"], log)
    address = address_in(log)
    with RawWorker(address, vector_job("job", "sync", 64, 1), 0) as worker:
        worker.initialise()
        worker.step(torch.full((64,), -1.0))
        worker.pull()
        server.send_signal(signal.SIGTERM)
        assert server.wait(END_SECONDS) == 0
    store = CheckpointStore(checkpoints)
    assert store.manifest("job", store.names("job")[-1]).clock == 1


@pytest.fixture
def up(tmp_path: Path) -> Iterator[tuple[Command, str]]:
    """`ps-server up` with a directory for checkpoints: the command, and its address."""
    flags = ["--shards=2", "--port=0", "--metrics-port=0", f"--checkpoint-dir={tmp_path}/checkpoints"]
    command = Command(tmp_path, "-m", "ps_server", "up", *flags)
    [address] = command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
    yield command, address
    command.clean_up()


def test_servers_that_are_told_twice_end_at_once(up: tuple[Command, str]) -> None:
    """With a worker that takes no step, a checkpoint at a clock to come is waited for: long enough to be told again."""
    command, address = up
    with RawWorker(address, vector_job("job", "sync", 64, 1), 0) as worker:
        worker.initialise()
        family = command.family()
        command.process.send_signal(signal.SIGTERM)

        def draining() -> bool:
            try:
                RawWorker.register(address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(worker.spec)))
            except TryLater as error:
                return "stopping" in str(error)
            return False

        until(draining, "the refusal of newcomers")
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(END_SECONDS) == 128 + signal.SIGINT
    until(lambda: not any(process.is_running() for process in family), "the shards' end")


def test_a_signal_to_all_processes_of_a_cluster_ends_them_in_order(tmp_path: Path) -> None:
    """As of Slurm, systemd or `kill -TERM -1` in a container. The last checkpoint needs all shards, and takes a second,
    as a checkpoint at a clock to come is waited for."""
    flags = ["--shards=2", "--port=0", "--metrics-port=0", "--drain-seconds=1"]
    command = Command(tmp_path, "-m", "ps_server", "up", *flags, f"--checkpoint-dir={tmp_path}/checkpoints")
    try:
        [address] = command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
        with RawWorker(address, vector_job("job", "sync", 64, 1), 0) as worker:
            worker.initialise()
            worker.step(torch.full((64,), -1.0))
            worker.pull()
            family = command.family()
            for process in (*family, command.process):
                os.kill(process.pid, signal.SIGTERM)
            assert command.process.wait(END_SECONDS) == 0, command.err
            until(lambda: not any(process.is_running() for process in family), "the shards' end")
    finally:
        command.clean_up()
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.manifest("job", store.names("job")[-1]).clock == 1
    assert "shard 1 ended" not in command.err
