"""Checkpoints on a file system and in an object store: the same promises, held by the same tests."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, NoCheckpoints, TryLater
from ps_protocol.layout import bucket_layout
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.state_file import StateFile
from ps_server.storage import objects
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.export import export
from ps_server.storage.files import RemotePath, files_of, parse_path
from ps_server.storage.objects import Objects
from tests.tools.checkpoint_files import filled, read_buckets, write_checkpoint
from tests.tools.launching import environment
from tests.tools.object_store import ObjectStore, keys, running
from tests.tools.one_process import CELLS, DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

SPEC = vector_job("job", "sync", CELLS, 1)
LEASE_SECONDS = 4.0
ONE_ATTEMPT = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}  # of a call that the store does not answer
REMOTE = pytest.param("s3", marks=pytest.mark.remote)


@pytest.fixture(scope="module")
def store_of_objects() -> Iterator[ObjectStore]:
    with running() as store:
        yield store


@pytest.fixture(params=["disk", REMOTE])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place for checkpoints, of each kind."""
    if request.param == "disk":
        return tmp_path / "checkpoints"
    store: ObjectStore = request.getfixturevalue("store_of_objects")
    return store.place()


@pytest.fixture
def bucket(store_of_objects: ObjectStore) -> Path:
    """A place in an object store."""
    return store_of_objects.place()


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_what_was_written(directory: Path) -> None:
    files = files_of(directory)
    files.make_directory(directory)
    assert files.is_writable(directory)
    assert files.kind(directory / "job") is None
    files.make_directory(directory / "job" / "000001", is_new=True)
    assert files.is_empty(directory / "job" / "000001")
    content = os.urandom(3 * 2**20)
    path = directory / "job" / "000001" / "file"
    files.write(path, [content[: 2**20], content[2**20 :]])
    assert (files.kind(path), files.kind(path.parent)) == ("a file", "a directory")
    assert files.size(path) == len(content)
    assert files.modified(path) > 1.7e9
    assert files.read(path) == content
    with files.open(path) as file:
        buffer = bytearray(2**20)
        assert file.readinto(buffer) > 0  # type: ignore[attr-defined]
        assert content.startswith(bytes(buffer[:1000]))
    assert not files.is_empty(path.parent)
    assert files.directories(directory) == ["job"]
    assert files.directories(directory / "job") == ["000001"]
    files.remove(path)
    assert files.kind(path) is None


def test_a_directory_is_made_by_one_caller_alone(directory: Path) -> None:
    first, second = files_of(directory), files_of(directory)
    first.make_directory(directory / "a", is_new=True)
    with pytest.raises(FileExistsError):
        second.make_directory(directory / "a", is_new=True)


def test_a_file_gets_new_content_at_once(directory: Path) -> None:
    files, seen = files_of(directory), list[tuple[str, bytes]]()
    files.make_directory(directory)
    files.replace(directory / "file", b"old", lambda where: None)
    files.replace(directory / "file", b"new", lambda where: seen.append((where, files.read(directory / "file"))))
    assert seen == [("half-written", b"old"), ("unnamed", b"old")]
    assert files.read(directory / "file") == b"new"


@pytest.mark.parametrize("size", [100, pytest.param(2**26, id="of several parts")])
@pytest.mark.remote
def test_nothing_is_there_of_a_file_whose_writing_failed(bucket: Path, size: int) -> None:
    files = files_of(bucket)
    files.make_directory(bucket / "a", is_new=True)

    def chunks() -> Iterator[bytes]:
        yield bytes(size)
        raise ValueError("the end")

    with pytest.raises(ValueError, match="the end"):
        files.write(bucket / "a" / "file", chunks())
    assert files.kind(bucket / "a" / "file") is None
    assert files.is_empty(bucket / "a")


def test_jobs_whose_names_mean_something_in_a_pattern_or_an_address_are_apart(directory: Path) -> None:
    """Where a store takes parts of a name for a version, or a pattern, a job would write into another's files."""
    store = CheckpointStore(directory)
    names = ["a", "a*", "a?versionId=1", "a#1", "a%20b", "a b", "[a]", "\u00e4"]
    for number, name in enumerate(names):
        write_checkpoint(store, vector_job(name, "sync", CELLS, 1), filled(SPEC), f"{number + 1:06d}")
    assert sorted(store.jobs()) == sorted(names)
    store.discard("a*", "000002")
    assert store.names("a*") == []
    for number, name in enumerate(names):
        assert store.names(name) == ([f"{number + 1:06d}"] if name != "a*" else [])


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_as_it_was_written(directory: Path) -> None:
    store = CheckpointStore(directory)
    manifest = write_checkpoint(store, SPEC, filled(SPEC, 3.0), states={0: b"state"})
    other = CheckpointStore(directory)
    assert (other.jobs(), other.names("job"), other.manifest("job", "000001")) == (["job"], ["000001"], manifest)
    assert other.read_worker("job", "000001", manifest.workers[0].part) == b"state"
    assert other.made_at("job", "000001") > 1.7e9


def test_a_half_written_one_counts_for_nothing_and_goes_with_the_next(directory: Path) -> None:
    store = CheckpointStore(directory)
    assert store.begin("job", "000001")
    store.write_shard("job", "000001", 0, filled(SPEC))
    assert store.begin("job", "000002")
    assert (store.jobs(), store.names("job"), store.next_name("job")) == ([], [], "000003")
    assert store.unfinished("job", "000000") == ["000001"]
    for number in (3, 4, 5):
        write_checkpoint(store, SPEC, filled(SPEC), f"{number:06d}")
    store.prune("job", 2)
    assert {key.split("/")[1] for key in keys(directory)} == {"000004", "000005"}


def test_no_checkpoint_is_begun_or_written_over_another(directory: Path) -> None:
    stores = CheckpointStore(directory), CheckpointStore(directory)
    assert stores[0].begin("job", "000001")
    assert not stores[1].begin("job", "000001")
    with pytest.raises(CheckpointFailed, match="000003"):
        stores[1].write_shard("job", "000003", 0, [])
    stores[0].discard("job", "000001")
    with pytest.raises(CheckpointFailed, match="000001"):
        stores[1].write_worker("job", "000001", 0, b"")
    assert keys(directory) == [], "a checkpoint that was removed is not begun anew by a shard"


def test_what_is_not_what_was_written_is_not_read(directory: Path) -> None:
    store, files = CheckpointStore(directory), files_of(directory)
    there = directory / "job" / "000001"
    manifest = write_checkpoint(store, SPEC, filled(SPEC), states={0: b"state"})
    files.write(there / "worker-0.state", [b"stale"])
    with pytest.raises(CheckpointDamaged, match=r"000001/worker-0\.state: its SHA-256"):
        store.read_worker("job", "000001", manifest.workers[0].part)
    files.remove(there / "worker-0.state")
    with pytest.raises(CheckpointDamaged, match=r"000001/worker-0\.state: "):
        store.read_worker("job", "000001", manifest.workers[0].part)
    files.write(there / "manifest.json", [b"{"])
    with pytest.raises(CheckpointDamaged, match=r"000001/manifest\.json: "):
        store.manifest("job", "000001")


def test_a_checkpoint_is_exported(directory: Path, tmp_path: Path) -> None:
    store = CheckpointStore(directory)
    with pytest.raises(NoCheckpoints):
        export(directory, "job", None, tmp_path / "out")
    write_checkpoint(store, SPEC, filled(SPEC, 5.0))
    assert "checkpoint 000001 at clock 3" in export(directory, "job", None, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


# -- a cluster -------------------------------------------------------------------------------------------------------


@contextmanager
def closing_cluster(directory: Path, shards: int = 2) -> Iterator[OneProcess]:
    cluster = OneProcess(directory, shards)
    yield cluster
    cluster.stop()


def trained(cluster: OneProcess, steps: int) -> DirectWorker:
    worker = DirectWorker(cluster, SPEC, 0)
    worker.initialise()
    for _ in range(steps):
        worker.push()
    return worker


def is_back_at(cluster: OneProcess, worker: DirectWorker, clock: int) -> bool:
    """Whether the worker of a job that has lost a shard finds it as it was at a clock."""
    cluster.coordinator.recover_jobs()
    worker.rejoin()
    return (worker.clock, worker.pull().tolist()) == (clock, [float(clock)] * CELLS)


def test_a_shard_that_died_and_a_coordinator_that_came_back_go_on_from_the_last_checkpoint(directory: Path) -> None:
    with closing_cluster(directory) as cluster:
        worker = trained(cluster, 3)
        made = worker.checkpoint()
        worker.push()
        cluster.start_shard(1)
        assert is_back_at(cluster, worker, made.clock)
        again = worker.checkpoint()
        assert again.clock > made.clock
        cluster.start_coordinator(CheckpointPolicy(directory, resume=True))
        assert cluster.coordinator.job("job").placed.run == worker.run
        cluster.start_shard(0)
        assert is_back_at(cluster, worker, again.clock)


def test_a_job_that_ended_is_restored_on_another_number_of_shards(directory: Path) -> None:
    with closing_cluster(directory) as cluster:
        worker = trained(cluster, 3)
        cluster.while_waiting()
        assert worker.leave()
    with closing_cluster(directory, shards=3) as cluster:
        cluster.start_coordinator(CheckpointPolicy(directory, restore=True))
        worker = DirectWorker(cluster, SPEC, 0)
        assert (worker.clock, worker.pull().tolist()) == (3, [3.0] * CELLS)


# -- the lock --------------------------------------------------------------------------------------------------------


def test_a_second_cluster_is_told_who_has_the_place_and_gets_it_when_that_ends(directory: Path) -> None:
    first = OneProcess(directory)
    with pytest.raises(InvalidRequest, match=rf"is in use by the coordinator with pid {os.getpid()} on .*, since 1970"):
        OneProcess(directory)
    first.stop()
    OneProcess(directory).stop()


HOLD = """
import sys
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.files import files_of, parse_path
directory = parse_path(sys.argv[1])
files = files_of(directory)
files.make_directory(directory)
release = lock_directory(directory, "there:1", files, 0.0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_coordinator_that_was_killed_leaves_its_place_to_the_next_on_its_machine(directory: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(InvalidRequest, match=f"pid {process.pid} on {socket.gethostname()} for there:1, since"):
            lock_directory(directory, "", files_of(directory), 0.0)
        process.send_signal(signal.SIGKILL)
        process.wait()
    lock_directory(directory, "", files_of(directory), 0.0)()


@pytest.fixture
def lease_of(bucket: Path) -> Callable[[], tuple[Objects, Callable[[], None]]]:
    """Takes the place for another process; returns its files, and what gives the place back."""

    def take() -> tuple[Objects, Callable[[], None]]:
        files = Objects("s3", LEASE_SECONDS)
        return files, lock_directory(bucket, "", files, 0.0)

    return take


@pytest.mark.remote
def test_a_holder_that_stands_still_for_a_lease_loses_it_and_writes_nothing_more(
    bucket: Path,
    lease_of: Callable[[], tuple[Objects, Callable[[], None]]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:  # its thread stands still, and another machine cannot look for its process
        patch.setattr("ps_server.storage.lock_lease.RENEWALS_PER_LEASE", 0.001)
        patch.setattr("ps_server.storage.lock_lease._machine", lambda: "another")
        first, release_first = lease_of()
    first.replace(bucket / "file", b"first", lambda where: None)
    second, release = lease_of()
    second.replace(bucket / "file", b"second", lambda where: None)
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match=r"another process has taken .*\.lock over"):
        first.replace(bucket / "file", b"first again", lambda where: None)
    assert "this one writes nothing there any more" in caplog.text
    for refused in (lambda: first.remove(bucket / "file"), lambda: first.write(bucket / "file", [b""])):
        with pytest.raises(OSError, match="another process has taken"):
            refused()
    first.remove_tree(bucket)
    release_first()
    assert second.read(bucket / "file") == b"second"
    with pytest.raises(InvalidRequest, match="is in use by"):
        lease_of()
    release()


@pytest.mark.remote
def test_of_several_that_find_a_lease_over_one_gets_it(
    bucket: Path, lease_of: Callable[[], tuple[Objects, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, release = lease_of()
    release()
    create, made = Objects.create, list[Path]()

    def late(self: Objects, path: Path, data: bytes) -> None:
        if not made:  # another one comes first
            made.append(path)
            create(self, path, json.dumps({**json.loads(data), "token": "another", "pid": 0}).encode())
        create(self, path, data)

    monkeypatch.setattr(Objects, "create", late)
    monkeypatch.setattr("ps_server.storage.lock_lease.LockLease._is_live", lambda *_: bool(made))
    with pytest.raises(InvalidRequest, match="is in use by"):
        lease_of()
    assert [path.name for path in made] == [".lock-000002"]


@pytest.mark.remote
def test_a_store_without_conditional_puts_is_refused(
    lease_of: Callable[[], tuple[Objects, Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Objects, "create", Objects.put)
    with pytest.raises(InvalidRequest, match="cannot be locked: this store overwrites"):
        lease_of()


# -- where ------------------------------------------------------------------------------------------------------------


def test_a_place_is_a_directory_or_in_a_store_that_is_known() -> None:
    assert parse_path("") is None
    assert parse_path("a/b") == Path("a/b")
    remote = parse_path("s3://bucket/a/b/")
    assert isinstance(remote, RemotePath)
    assert str(remote / "job" / "000001") == "s3://bucket/a/b/job/000001"
    assert str((remote / "x").parent.with_name("c")) == "s3://bucket/a/c"
    for wrong in ("memory://a", "file:///a", "s3://", "s3://bucket/a?b", "s3://bucket/../a b", "ftp://host/x", "://"):
        with pytest.raises(InvalidRequest, match="expected a directory, or s3://BUCKET/PATH or gs://BUCKET/PATH"):
            parse_path(wrong)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidRequest, match=r"s3:// needs the packages .*: pip install fsspec s3fs"):
        files_of(RemotePath("s3://bucket/a"))
    with pytest.raises(InvalidRequest, match=r"gs:// needs .* gcsfs: pip install fsspec gcsfs"):
        files_of(RemotePath("gs://bucket/a"))


@pytest.mark.remote
def test_a_store_that_does_not_answer_has_damaged_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rollback would pass over all checkpoints, and end the job."""
    monkeypatch.setattr(objects, "_OPTIONS", ONE_ATTEMPT)
    with running() as server:
        directory = server.place()
        store = CheckpointStore(directory)
        manifest = write_checkpoint(store, SPEC, filled(SPEC), states={0: b"state"})
        file = StateFile(directory)
    buckets = bucket_layout(SPEC.parameters, SPEC.bucket_bytes).buckets
    for read in (
        lambda: store.names("job"),
        lambda: store.jobs(),
        lambda: store.manifest("job", "000001"),
        lambda: store.made_at("job", "000001"),
        lambda: store.read_worker("job", "000001", manifest.workers[0].part),
        lambda: read_buckets(store, manifest, buckets),
        lambda: file.load(),
        lambda: file.save(dict),
    ):
        with pytest.raises(TryLater, match="s3://"):
            read()
    with pytest.raises(CheckpointFailed, match="s3://"):
        store.begin("job", "000002")
    with pytest.raises(CheckpointFailed, match="s3://"):
        store.write_shard("job", "000001", 0, filled(SPEC))


@pytest.mark.remote
def test_a_bucket_that_is_missing_and_a_store_that_is_away_are_named(
    store_of_objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="s3://none/a cannot be made: there is no s3://none"):
        CheckpointStore(RemotePath("s3://none/a"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "_OPTIONS", ONE_ATTEMPT)
    with pytest.raises(InvalidRequest, match="Could not connect to the endpoint"):
        CheckpointStore(RemotePath("s3://bucket/a"))


def test_a_long_file_arrives_whole(directory: Path) -> None:
    """Of several parts of an upload."""
    files = files_of(directory)
    files.make_directory(directory / "a", is_new=True)
    content = torch.arange(2**24, dtype=torch.int32).view(torch.uint8).numpy().tobytes()
    files.write(directory / "a" / "file", [content])
    assert files.read(directory / "a" / "file") == content


def test_a_control_file_larger_than_any_is_not_read_and_the_checkpoint_before_counts(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 10 GiB in a directory that others write to would end the coordinator."""
    store, files = CheckpointStore(directory), files_of(directory)
    for name in ("000001", "000002"):
        write_checkpoint(store, SPEC, filled(SPEC), name)
    longest = len(files.read(directory / "job" / "000001" / "manifest.json"))
    monkeypatch.setattr(f"{type(files).read.__module__}.MAX_READ_BYTES", longest, raising=True)
    monkeypatch.setattr(type(files).read, "__defaults__", (longest,))
    path = directory / "job" / "000002" / "manifest.json"
    files.write(path, [files.read(path) + b" "])
    with pytest.raises(CheckpointDamaged, match=f"it has {longest + 1} bytes, and at most {longest} are read"):
        store.manifest("job", "000002")
    said: list[str] = []
    assert "000001" in export(directory, "job", None, tmp_path / "out", on_skipped=lambda text: said.append(str(text)))
    assert "at most" in said[0]


def test_a_worker_s_state_larger_than_any_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(directory)
    part = write_checkpoint(store, SPEC, filled(SPEC), "000001", {0: b"state"}).workers[0].part
    monkeypatch.setattr("ps_server.storage.checkpoints.MAX_WORKER_BYTES", 4)
    with pytest.raises(CheckpointDamaged, match="it has 5 bytes, and at most 4 are read"):
        store.read_worker("job", "000001", part)


def test_a_manifest_that_would_not_be_read_is_not_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(directory)
    monkeypatch.setattr("ps_server.storage.checkpoints.MAX_READ_BYTES", 100)
    with pytest.raises(CheckpointFailed, match="at most 100 are read"):
        write_checkpoint(store, SPEC, filled(SPEC))
    assert store.names("job") == []


def test_a_coordinator_s_file_larger_than_any_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ps_server.coordinator.state_file.MAX_BYTES", 100)
    (tmp_path / ".coordinator.json").write_bytes(b" " * 101)
    assert StateFile(tmp_path).load() == ({}, {})
    assert "at most 100 are read" in caplog.text
