"""All files of checkpoints, and the coordinator's own, go through one object; tensors lie as safetensors has them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ps_protocol.errors import CheckpointFailed, TryLater
from ps_protocol.framing import Buffer
from ps_protocol.layout import bucket_layout
from ps_server.coordinator.state_file import FILE, StateFile
from ps_server.core.snapshot import BucketSnapshot
from ps_server.storage.checkpoints import MANIFEST, CheckpointStore
from ps_server.storage.disk import MAX_READ_BYTES, Disk
from ps_server.storage.tensor_file import TensorEntry, TensorReader, file_chunks
from tests.tools.checkpoint_files import filled, read_buckets, write_checkpoint
from tests.tools.raw_worker import vector_job

TENSORS = {
    "weights": torch.arange(7, dtype=torch.float32),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "wide": torch.full((2,), 0.1, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(5, dtype=torch.int64),
    "nothing": torch.zeros(0),
}


class FullDisk(Disk):
    """Takes `room` more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, path: Path, chunks: Iterable[Buffer]) -> None:
        def limited() -> Iterable[Buffer]:
            for chunk in chunks:
                self.room -= len(chunk)
                if self.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield chunk

        super().write(path, limited())


def all_but_wide(entry: TensorEntry) -> torch.Tensor | None:
    return entry.empty() if entry.name != "wide" else None


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    Disk().write(path, file_chunks(tensors, {"format": "2"}))


def test_the_library_reads_what_is_written_here_and_the_other_way_round(tmp_path: Path) -> None:
    write_file(tmp_path / "here", TENSORS)
    safetensors.torch.save_file(TENSORS, tmp_path / "library", {"format": "2"})
    read = safetensors.torch.load_file(tmp_path / "here")
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    for name in ("here", "library"):
        path = tmp_path / name
        with Disk().open(path) as file:
            reader = TensorReader(file, path.stat().st_size)
            read = {entry.name: tensor for entry, tensor in reader.tensors(all_but_wide)}
        assert reader.metadata == {"format": "2"}
        assert read.keys() == TENSORS.keys() - {"wide"}
        assert all(torch.equal(read[name], TENSORS[name]) for name in read)
        assert all(read[name].dtype == TENSORS[name].dtype for name in read)


HEADERS = {
    "a list": [],
    "no offsets": {"w": {"dtype": "F32", "shape": [1]}},
    "a gap": {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    "too long": {"w": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}},
    "of another size": {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
    "over another": {
        "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    },
    "a negative size": {"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
    "an unknown type": {"w": {"dtype": "X", "shape": [2], "data_offsets": [0, 8]}},
    "a text for a size": {"w": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}},
}


@pytest.mark.parametrize("header", [*HEADERS, "nested", "short", "no JSON"])
def test_a_file_of_other_content_is_refused_in_words(header: str, tmp_path: Path) -> None:
    texts = {"nested": b"[" * 100_000, "short": b"{", "no JSON": b"\0\1"}
    text = texts.get(header) or json.dumps(HEADERS[header]).encode()
    length = 2**60 if header == "short" else len(text)
    content = length.to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "file").write_bytes(content)
    with (
        Disk().open(tmp_path / "file") as file,
        pytest.raises((ValueError, KeyError, TypeError)),  # what the store makes CheckpointDamaged of
    ):
        TensorReader(file, len(content))


def test_directories_and_files_are_open_to_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Disk().make_directory(tmp_path / "checkpoints" / "job" / "000001")
        write_file(tmp_path / "checkpoints" / "job" / "000001" / "shard", TENSORS)
    finally:
        os.umask(before)
    made = list((tmp_path / "checkpoints").rglob("*"))
    assert len(made) == 3
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "checkpoints", *made)} == {0}


def test_a_store_on_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    disk = FullDisk(10_000)
    store = CheckpointStore(tmp_path, disk)
    snapshot = BucketSnapshot(0, 1, {0: 1}, torch.zeros(1000))
    store.begin("job", "000001")
    store.write_shard("job", "000001", 0, [snapshot])
    store.begin("job", "000002")
    with pytest.raises(CheckpointFailed, match=r"000002.*No space left on device"):
        store.write_shard("job", "000002", 0, [snapshot, replace(snapshot, index=1)])
    assert list((tmp_path / "job" / "000002").iterdir()) == []


def test_a_coordinator_on_a_full_disk_keeps_the_file_that_it_has(tmp_path: Path) -> None:
    disk = FullDisk(200)
    StateFile(tmp_path, disk).save(dict)
    before = (tmp_path / FILE).read_bytes()
    disk.room = 0
    with pytest.raises(TryLater, match="No space left on device"):
        StateFile(tmp_path, disk).save(dict)
    assert (tmp_path / FILE).read_bytes() == before


class KeepsManifests(Disk):
    """Removes no manifest while `keeps` is set."""

    keeps = True

    def remove(self, path: Path) -> None:
        if self.keeps and path.name == MANIFEST:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        super().remove(path)


def test_a_checkpoint_whose_manifest_cannot_be_removed_stays_whole(tmp_path: Path) -> None:
    disk = KeepsManifests()
    store = CheckpointStore(tmp_path, disk)
    spec = vector_job("job", "sync", 64, 1)
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    for name in ("000001", "000002"):
        write_checkpoint(store, spec, filled(spec), name)
    store.prune("job", 1)
    for name in ("000001", "000002"):
        read_buckets(store, store.manifest("job", name), layout.buckets)
    disk.keeps = False
    store.prune("job", 1)
    assert store.names("job") == ["000002"]
    assert not (tmp_path / "job" / "000001").exists()


def test_a_checkpoint_that_another_thread_removes_is_not_unfinished(tmp_path: Path) -> None:
    """A coordinator looks for those that a restore makes void, while the thread that makes them discards one."""

    class Removing(Disk):
        def is_empty(self, path: Path) -> bool:
            store.discard("job", path.name)
            return super().is_empty(path)

    store = CheckpointStore(tmp_path, Removing())
    assert store.begin("job", "000001")
    (tmp_path / "job" / "000001" / "part").touch()
    assert store.unfinished("job", "") == []


class PassingDisk(Disk):
    """Fails once with an error that says nothing about the file."""

    def __init__(self) -> None:
        self.fails_with: int | None = None

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        number, self.fails_with = self.fails_with, None
        if number is not None:
            raise OSError(number, os.strerror(number))
        return super().read(path, most)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT])
def test_an_error_that_passes_is_no_damage(tmp_path: Path, number: int) -> None:
    disk, spec = PassingDisk(), vector_job("job", "sync", 64, 1)
    store = CheckpointStore(tmp_path, disk)
    write_checkpoint(store, spec, filled(spec, 1.0), "000001")
    disk.fails_with = number
    with pytest.raises(TryLater, match=MANIFEST):
        store.manifest("job", "000001")
    assert store.manifest("job", "000001").name == "000001"
