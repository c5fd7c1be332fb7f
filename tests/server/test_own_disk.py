"""The name of a shard's own disk: written once, and never in place of one that cannot be read now."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ps_protocol.errors import InvalidRequest, TryLater
from ps_server.core.snapshot import CheckpointFile
from ps_server.storage.disk import MAX_READ_BYTES, Disk
from ps_server.storage.own_disk import FILE, check_disk, own_directory, take_own_disk


class SickDisk(Disk):
    """Does not give the disk's name."""

    def read(self, path: Path, most: int = MAX_READ_BYTES) -> bytes:
        if path.name == FILE:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(path, most)


def taken(directory: Path, disk: Disk) -> str:
    name, release = take_own_disk(directory, 0, "127.0.0.1:1", 0.0, disk)
    release()
    return name


def test_a_disk_whose_name_cannot_be_read_keeps_it(tmp_path: Path) -> None:
    name = taken(tmp_path, Disk())
    with pytest.raises(InvalidRequest, match=r"\.disk cannot be read: Input/output error"):
        taken(tmp_path, SickDisk())
    assert taken(tmp_path, Disk()) == name
    with pytest.raises(TryLater, match=rf"is on disk {name}, and .*\.disk cannot be read: Input/output error"):
        check_disk(tmp_path, 0, CheckpointFile("shard-0.safetensors", 1, "", name), "000001", SickDisk())


@pytest.mark.parametrize("content", [b"", b"{}", b'{"disk": 1}', b'{"disk": "../other"}'])
def test_a_damaged_name_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    taken(tmp_path, Disk())
    file = own_directory(tmp_path, 0) / FILE
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match="does not hold the name of a disk"):
        taken(tmp_path, Disk())
    assert file.read_bytes() == content
