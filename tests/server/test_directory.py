"""A directory of checkpoints belongs to one cluster, and what a newer version wrote there is left as it is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    Fenced,
    InvalidRequest,
    UnknownWorker,
    VersionMismatch,
)
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.cluster import Checkpointing
from ps_server.coordinator.recovery import Recovery
from ps_server.coordinator.shards import Shards
from ps_server.coordinator.shared_room import SharedRoom
from ps_server.coordinator.state_file import FILE, StateFile
from ps_server.core.placement import place_job
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.disk import Disk
from ps_server.storage.export import export
from ps_server.storage.manifest import FORMAT, seal
from tests.tools.checkpoint_files import filled, write_checkpoint
from tests.tools.one_process import AtOnce, DirectWorker, OneProcess, train
from tests.tools.raw_worker import vector_job

HOLD = """
import sys, time
from pathlib import Path
from ps_server.storage.directory_lock import lock_directory
from ps_server.storage.disk import Disk
release = lock_directory(Path(sys.argv[1]), "there:1", Disk(), 0.0)
print("held", flush=True)
sys.stdin.read()
"""


def reseal(path: Path, **changed: object) -> None:
    """Changes what a sealed file holds, as a program would that writes such files."""
    data = {**json.loads(path.read_bytes()), **changed}
    del data["seal"]
    path.write_text(json.dumps({**data, "seal": seal(data)}))


SPEC = vector_job("job", "sync", 64, 1)


# -- one cluster -----------------------------------------------------------------------------------------------------


def test_a_second_coordinator_is_told_who_has_the_directory(tmp_path: Path) -> None:
    first = OneProcess(tmp_path)
    holder = f"pid {os.getpid()} on {re.escape(socket.gethostname())}"
    with pytest.raises(
        InvalidRequest, match=rf"{tmp_path} is in use by the coordinator with {holder}, since 1970-01-01"
    ):
        OneProcess(tmp_path)
    first.stop()
    OneProcess(tmp_path).stop()


def test_a_coordinator_that_was_killed_leaves_its_directory_to_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InvalidRequest, match=f"pid {process.pid} on .* for there:1, since 1970-01-01 00:00:00"):
        lock_directory(tmp_path, "", Disk(), 0.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    release = lock_directory(tmp_path, "", Disk(), 0.0)
    release()
    release()  # once more does no harm


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_directory(tmp_path, "", Disk(), 0.0)()
    assert "nothing keeps a second cluster out of this directory" in caplog.text


def test_a_lock_that_may_not_be_taken_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(InvalidRequest, match="cannot be locked: Is a directory"):
        lock_directory(tmp_path, "", Disk(), 0.0)


def test_no_checkpoint_is_begun_or_written_over_another(tmp_path: Path) -> None:
    """Two coordinators on a file system without locks."""
    stores = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    assert stores[0].begin("job", "000001")
    assert not stores[1].begin("job", "000001")
    assert stores[1].begin("job", "000002")
    with pytest.raises(CheckpointFailed, match=r"000003.*No such file"):
        stores[1].write_shard("job", "000003", 0, [])
    assert not (tmp_path / "job" / "000003").exists(), "a checkpoint that was removed is not begun anew by a shard"


def test_a_name_that_another_coordinator_took_is_passed_over(tmp_path: Path) -> None:
    cluster = OneProcess(tmp_path)
    worker = DirectWorker(cluster, SPEC, 0)
    assert CheckpointStore(tmp_path).begin("job", "000001")
    worker.initialise()
    assert worker.checkpoint().name > "000001"
    cluster.stop()


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_job_whose_directory_cannot_be_is_refused_when_it_is_registered(tmp_path: Path) -> None:
    cluster = OneProcess(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, why in {
        "file": f"belong into the directory {tmp_path}/file, and that is a file",
        "link": "is a link",
        "dangling": "is a link",
        "x" * 129: "a job's name is 1 to 128",
        ".lock": "does not start with a dot",
    }.items():
        with pytest.raises(InvalidRequest, match=why):
            cluster.coordinator.register_job(replace(SPEC, name=name))
    assert cluster.coordinator.jobs() == {}
    assert [shard.jobs() for shard in cluster.shards.values()] == [{}, {}]
    assert (tmp_path / "file").read_text() == "mine"
    cluster.coordinator.register_job(replace(SPEC, name="x" * 128))
    cluster.stop()


# -- versions --------------------------------------------------------------------------------------------------------

NEWER = rf"written by a newer version of ps-torch \(format {FORMAT + 1}\), this one reads up to {FORMAT}: upgrade"


def test_a_manifest_of_a_newer_version_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for name in ("000001", "000002"):
        write_checkpoint(store, SPEC, filled(SPEC), name)
    (tmp_path / "job" / "000002" / "manifest.json").write_text(f'{{"format": {FORMAT + 1}, "sealed": "otherwise"}}')
    with pytest.raises(VersionMismatch, match=NEWER):
        store.manifest("job", "000002")
    with pytest.raises(VersionMismatch, match=NEWER):
        export(tmp_path, "job", None, tmp_path / "out")
    checkpointing = Checkpointing(store, CheckpointPolicy(tmp_path, restore=True), lambda: None, SharedRoom(0))
    shards = Shards(1, lambda index, address: None, AtOnce)  # type: ignore[arg-type, return-value]
    with pytest.raises(VersionMismatch, match=NEWER):
        Recovery(checkpointing, shards).restore(place_job(SPEC, 1, "run"), [], 0, any_run=True)


def test_a_state_file_of_a_newer_version_is_neither_used_nor_written_over(tmp_path: Path) -> None:
    StateFile(tmp_path).save(dict)
    reseal(tmp_path / FILE, format=FORMAT + 1, jobs=["of another kind"])
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(InvalidRequest, match=NEWER):
        OneProcess(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    (tmp_path / FILE).unlink()
    OneProcess(tmp_path).stop()


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000])
def test_a_nested_file_is_damaged_and_ends_nothing(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path)
    write_checkpoint(store, SPEC, filled(SPEC))
    (tmp_path / "job" / "000001" / "manifest.json").write_text(content)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        store.manifest("job", "000001")
    (tmp_path / FILE).write_text(content)
    assert StateFile(tmp_path).load() == ({}, {})


@pytest.mark.parametrize("job", [{}, {"name": "job"}, [], None, {"parameters": "x"}], ids=str)
def test_a_manifest_without_a_job_is_refused(tmp_path: Path, job: object) -> None:
    store = CheckpointStore(tmp_path)
    write_checkpoint(store, SPEC, filled(SPEC))
    reseal(tmp_path / "job" / "000001" / "manifest.json", job=job)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        store.manifest("job", "000001")


# -- modes -----------------------------------------------------------------------------------------------------------


def test_only_their_owner_reads_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = CheckpointStore(tmp_path / "checkpoints")
        write_checkpoint(store, SPEC, filled(SPEC), states={0: b"state"})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "checkpoints").rglob("*")}
    assert modes == {
        "job": 0o700,
        "000001": 0o700,
        "manifest.json": 0o600,
        "shard-0.safetensors": 0o600,
        "worker-0.state": 0o600,
    }
    assert stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o700


def test_a_worker_of_after_the_copy_that_is_put_back_is_not_fenced_and_joins_again(tmp_path: Path) -> None:
    now, copy = tmp_path / "now", tmp_path / "copy"
    cluster = OneProcess(now, shards=1)
    worker = DirectWorker(cluster, SPEC, 0)
    worker.initialise()
    saved = worker.checkpoint()
    shutil.copytree(now, copy)
    worker.rejoin()  # it takes the place of the one that the copy has
    train([worker])
    cluster.stop()
    shutil.rmtree(now)
    shutil.copytree(copy, now)
    cluster.start_coordinator(CheckpointPolicy(now, resume=True), calling=())
    member = worker.place.worker
    with pytest.raises(UnknownWorker) as refused:
        cluster.coordinator.job("job", worker.run).workers.heartbeat(0, member.incarnation, worker.clock, member.key)
    assert not isinstance(refused.value, Fenced)
    cluster.start_shard(0)
    cluster.coordinator.recover_jobs()
    assert worker.rejoin().clock == saved.clock
    assert worker.place.worker.incarnation > member.incarnation, "no number is given out twice"
    assert train([worker]).tolist() == [saved.clock + 1.0] * 64
    cluster.stop()
