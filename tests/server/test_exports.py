"""An export takes the checkpoint that a restore would take, and says which it has passed over, and why."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from ps_protocol.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest
from ps_protocol.optimizers import with_defaults
from ps_server.cli import main
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.storage import export as storage_export
from ps_server.storage.checkpoints import CheckpointStore
from ps_server.storage.export import MARK, export
from tests.tools.checkpoint_files import filled, write_checkpoint
from tests.tools.one_process import DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job

SPEC = with_defaults(vector_job("job", "sync", 64, 1))


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


SHARD, STATES, MANIFEST = "shard-0.safetensors", ("worker-0.state", "worker-1.state"), "manifest.json"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit of the header": lambda at: flip(at / SHARD, 0.05),
    "a bit of the weights": lambda at: flip(at / SHARD, 0.9),
    "a byte less": lambda at: cut(at / SHARD),
    "nothing left": lambda at: (at / SHARD).write_bytes(b""),
    "no file": lambda at: (at / SHARD).unlink(),
    "an older file": lambda at: (at / SHARD).write_bytes((at.parent / "000001" / SHARD).read_bytes()),
    "a bit of the manifest": lambda at: flip(at / MANIFEST, 0.3),
    "an older manifest": lambda at: (at / MANIFEST).write_bytes((at.parent / "000001" / MANIFEST).read_bytes()),
    "a bit of a worker's state": lambda at: flip(at / STATES[0]),
    "a bit of another worker's state": lambda at: flip(at / STATES[1]),
    "a worker's state less": lambda at: (at / STATES[1]).unlink(),
    "states of workers swapped": lambda at: swap(at / STATES[0], at / STATES[1]),
}


@pytest.fixture
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory with two checkpoints, of which the second is damaged."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for number in (1, 2):
        states = {rank: save({"seen": torch.tensor([rank, number])}) for rank in range(2)}
        write_checkpoint(store, SPEC, filled(SPEC, float(number)), f"{number:06d}", states)
    DAMAGE[request.param](store.path(SPEC.name, "000002"))
    return store.directory


def weights_in(output: Path) -> set[float]:
    return {float(each) for tensor in load_file(output / "model.safetensors").values() for each in tensor.flatten()}


@pytest.mark.parametrize("damaged", DAMAGE, indirect=True)
def test_an_export_takes_what_a_restore_takes_and_says_why(
    damaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    said = export(damaged, "job", None, tmp_path / "out", on_skipped=told.append)
    assert "checkpoint 000001 at clock 3" in said
    assert weights_in(tmp_path / "out") == {1.0}

    cluster = OneProcess(damaged, 1)
    cluster.start_coordinator(CheckpointPolicy(damaged, restore=True))
    DirectWorker(cluster, SPEC, 0)
    buckets = cluster.shards[0].jobs()["job"].buckets.values()
    restored = {float(each) for bucket in buckets for each in bucket.unit.weights.flat}
    for job in cluster.coordinator.jobs().values():
        job.end()
    cluster.stop()
    assert restored == {1.0}
    [line] = told
    assert line.startswith("job job: checkpoint 000002 cannot be used, trying the one before: ")
    assert line in caplog.text


@pytest.mark.parametrize("damaged", ["a bit of the weights", "a worker's state less"], indirect=True)
def test_an_export_without_fallback_is_an_error(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match=r"000002/(shard-0|worker-1)"):
        export(damaged, "job", None, tmp_path / "out", fallback=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointDamaged):
        export(damaged, "job", "000002", tmp_path / "out")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with two checkpoints of a job, whose weights are 1 and 2."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for number in (1, 2):
        write_checkpoint(store, SPEC, filled(SPEC, float(number)), f"{number:06d}", {})
    return store.directory


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def renaming_but(wanted: int, error: BaseException) -> Callable[[Path, Path], Path]:
    """Path.rename, which raises an error at one of its calls, from 0."""
    rename, renames = Path.rename, itertools.count()

    def renamed(path: Path, to: Path) -> Path:
        if next(renames) == wanted:
            raise error
        return rename(path, to)

    return renamed


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


UNDER_WAY = f"{MARK}-under-way"


def test_an_export_replaces_all_files_of_an_earlier_one_and_no_other(two: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    export(two, "job", "000001", output, dcp="nested")
    (output / "tables").mkdir()  # of the user: the job has none
    (output / UNDER_WAY / "made").mkdir(parents=True)  # of one that was killed
    for name in ("tables/own.csv", "config.json", f"{UNDER_WAY}/made/model.safetensors"):
        (output / name).touch()
    (output / "model.safetensors").chmod(0o640)
    export(two, "job", "000002", output)
    assert {path.relative_to(output).as_posix() for path in output.rglob("*")} == {
        *("model.safetensors", "optimizer.safetensors", "optimizer.json", "config.json", "tables", "tables/own.csv")
    }
    assert weights_in(output) == {2.0}
    assert (output / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["dcp", "model.safetensors"])
@pytest.mark.parametrize("is_beside_an_export", [False, True])
def test_an_export_refuses_to_replace_a_folder_that_no_export_has_made(
    two: Path, tmp_path: Path, name: str, is_beside_an_export: bool
) -> None:
    output = tmp_path / "out"
    if is_beside_an_export:
        export(two, "job", "000001", output)
        (output / name).unlink(missing_ok=True)
    (output / name).mkdir(parents=True)
    (output / name / "own").touch()
    before = files_in(output)
    with pytest.raises(InvalidRequest, match=f"out/{name} has no {MARK}, so no export has made it: move it"):
        export(two, "job", "000002", output, dcp="nested")
    assert files_in(output) == before


def test_an_export_refuses_to_replace_a_file_that_has_the_name_of_its_folder(two: Path, tmp_path: Path) -> None:
    (tmp_path / "dcp").touch()
    with pytest.raises(InvalidRequest, match="dcp has no"):
        export(two, "job", "000002", tmp_path, dcp="nested")
    export(two, "job", "000002", tmp_path)
    assert (tmp_path / "dcp").is_file()


@pytest.mark.parametrize("error", [OSError(errno.EACCES, os.strerror(errno.EACCES)), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("wanted", range(7))  # of the renames: one for the folder that goes, and two for each file
def test_an_export_that_fails_while_it_replaces_an_earlier_one_puts_that_back(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, wanted: int
) -> None:
    output = tmp_path / "out"
    export(two, "job", "000001", output, dcp="nested")
    before = files_in(output)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renaming_but(wanted, error))
        with pytest.raises((CheckpointFailed, KeyboardInterrupt)):
            export(two, "job", "000002", output)
    assert files_in(output) == before
    export(two, "job", "000002", output)
    assert weights_in(output) == {2.0}


@pytest.mark.parametrize("wanted", range(8))
def test_an_export_puts_back_what_one_that_was_killed_has_moved_away(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    output = tmp_path / "out"
    export(two, "job", "000001", output, dcp="nested")
    before = files_in(output)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renaming_but(wanted, KeyboardInterrupt()))
        patch.setattr(storage_export, "_put_back", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            export(two, "job", "000002", output)
    monkeypatch.setattr(storage_export, "save_any", full_disk)
    with pytest.raises(CheckpointFailed):
        export(two, "job", "000002", output)
    assert files_in(output) == before


def test_an_export_that_is_killed_while_it_removes_an_earlier_one_brings_none_of_that_back(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    export(two, "job", "000001", output, dcp="nested")
    rmtree = shutil.rmtree

    def is_killed(path: Path, ignore_errors: bool) -> None:
        if weights_in(output) == {2.0}:
            for mark in path.rglob(MARK):
                mark.unlink()
            raise KeyboardInterrupt
        rmtree(path, ignore_errors=ignore_errors)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", is_killed)
        with pytest.raises(KeyboardInterrupt):
            export(two, "job", "000002", output)
    export(two, "job", "000002", output)
    assert weights_in(output) == {2.0}
    assert not (output / "dcp").exists()


def test_an_export_that_fails_leaves_an_earlier_one_as_it_was(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    export(two, "job", "000001", output, dcp="nested")
    before = files_in(output)
    save_any = storage_export.save_any

    def full(tensors: Any, path: Path) -> None:
        if path.name == "optimizer.safetensors":
            full_disk()
        save_any(tensors, path)

    monkeypatch.setattr(storage_export, "save_any", full)
    with pytest.raises(CheckpointFailed, match=r"cannot be written: .*No space left"):
        export(two, "job", "000002", output)
    assert files_in(output) == before


@pytest.mark.parametrize("damaged", ["a bit of the weights"], indirect=True)
def test_the_command_says_it_on_stderr(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["ps-server", "export", "--checkpoint-dir", str(damaged), "--job", "job", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert "checkpoint 000001" in out
    assert err.startswith("ps-server: job job: checkpoint 000002 cannot be used, trying the one before: ")
    monkeypatch.setattr("sys.argv", [*command, "--no-fallback"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "000002/shard-0.safetensors: its SHA-256 is not the one in the manifest" in str(ended.value.code)
