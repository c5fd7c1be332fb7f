"""Tables whose rows do not all fit into memory: those in a file are as good as the others."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ps_protocol.errors import LimitExceeded
from ps_protocol.row_ids import Ids
from ps_protocol.tables import Initializer, TableSpec
from ps_server.storage import row_files
from ps_server.storage.row_files import DiskRows, RowFiles
from ps_tables import cold
from ps_tables.contributions import RowGradients, RowValues
from ps_tables.sizes import record_bytes
from ps_tables.table import Applied, Beyond, Table
from tests.tools.cases import crossed

IN_MEMORY, CAPACITY = 200, 3_000
SPEC = TableSpec("item", 5, Initializer("normal", 1.0, 7))
OPTIMIZERS = {"SGD": {"lr": 0.1}, "Adam": {"lr": 0.1}, "RowWiseAdagrad": {"lr": 0.1}}
ROW = record_bytes(SPEC, "Adam", OPTIMIZERS["Adam"])


def in_memory(spec: TableSpec = SPEC, optimizer: str = "Adam", capacity: int = CAPACITY) -> Table:
    return Table(spec, optimizer, OPTIMIZERS[optimizer], capacity)


def with_file(
    directory: Path, spec: TableSpec = SPEC, optimizer: str = "Adam", capacity: int = CAPACITY, places: int = CAPACITY
) -> Table:
    values = OPTIMIZERS[optimizer]
    file = RowFiles(directory).open(record_bytes(spec, optimizer, values) // 4, places)
    return Table(spec, optimizer, values, capacity, 0, Beyond(file, IN_MEMORY))


def limit_disk(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Has the disk give a file room for so many rows, some at a time."""

    def give(file: int, first: int, count: int) -> None:
        if first + count > rows * ROW:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(row_files, "PIECE_BYTES", 10 * ROW)
    monkeypatch.setattr(cold, "_COPIED", 40)
    monkeypatch.setattr(os, "posix_fallocate", give)


def update(random: np.random.Generator, ids: int = 2_000, most: int = 120) -> RowGradients:
    """Gradients of some ids: of early ones more often than of late ones."""
    some = np.unique((ids * random.random(random.integers(1, most)) ** 2).astype(np.int64)) - 3
    gradients = torch.from_numpy(random.standard_normal((len(some), SPEC.dim), dtype=np.float32))
    return RowGradients(some, random.integers(1, 4, len(some)), gradients)


def same(one: Table, other: Table) -> None:
    ours, theirs = one.snapshot(), other.snapshot()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.int32), theirs[name].view(torch.int32)), name


def pulled(table: Table, ids: Ids) -> tuple[int, bytes]:
    out = torch.empty(len(ids), SPEC.dim)
    return table.pull(ids, out), out.numpy().tobytes()


def followed(table: Table, copy: dict[int, bytes], since: int | None) -> int:
    """Brings a copy of the rows up to date; returns as of which version."""
    walk = table.changes(since)
    if walk.full:
        copy.clear()
    while walk.has_removed:
        for gone in walk.take_removed(50).tolist():
            copy.pop(gone, None)
    while not walk.is_over:
        ids, rows = walk.take(50)
        copy |= {each: row.tobytes() for each, row in zip(ids.tolist(), rows.numpy(), strict=True)}
    return walk.version


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    crossed([{}, {"expire_after": 30}, {"admit_after": 3, "expire_after": 40}, {"capacity": 500}], OPTIMIZERS),
)
def test_rows_in_a_file_change_no_result(tmp_path: Path, optimizer: str, rule: dict[str, int]) -> None:
    capacity = rule.get("capacity", CAPACITY)
    spec = replace(SPEC, **{name: value for name, value in rule.items() if name != "capacity"})  # type: ignore[arg-type]
    one, other = in_memory(spec, optimizer, capacity), with_file(tmp_path, spec, optimizer, capacity)
    random = np.random.default_rng(3)
    copies: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}
    since: int | None = None
    moved = 0
    for version in range(1, 100):
        step = update(random)
        if version % 7 == 0:
            ids = np.unique(random.integers(-5, 2_100, 90))
            set_rows = RowValues(ids, torch.from_numpy(random.random((len(ids), SPEC.dim), np.float32)))
            assert one.assign(set_rows, version) == other.assign(set_rows, version)
        assert one.apply(step, 2, version) == other.apply(step, 2, version)
        asked = random.integers(-5, 2_100, 300)
        assert pulled(one, asked) == pulled(other, asked)
        moved = max(moved, other.in_file.rows)
        if version % 20 == 0:
            same(one, other)
            reached = [followed(table, copy, since) for table, copy in zip((one, other), copies, strict=True)]
            assert copies[0] == copies[1]
            assert reached == [version, version]
            since = version
    assert moved > 200
    assert other.in_file.read > 1_000
    assert other.in_file.rows + IN_MEMORY >= len(other)


def test_a_restored_table_is_as_it_was(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    spec = replace(SPEC, admit_after=2, expire_after=90)
    one, before = in_memory(spec), with_file(tmp_path, spec)
    for version in range(1, 80):
        step = update(random)
        one.apply(step, 1, version)
        before.apply(step, 1, version)
    other = with_file(tmp_path, spec)
    other.restore(before.snapshot())
    assert other.in_file.rows >= len(other) - IN_MEMORY > 0
    for version in range(80, 140):
        step = update(random)
        assert one.apply(step, 1, version) == other.apply(step, 1, version)
    same(one, other)


def test_memory_holds_as_many_rows_as_it_is_to(tmp_path: Path) -> None:
    table, random = with_file(tmp_path), np.random.default_rng(5)
    for version in range(1, 100):
        table.apply(update(random), 1, version)
    row = 4 * 3 * SPEC.dim
    of_others = table.nbytes - in_memory().nbytes
    assert len(table) > 3 * IN_MEMORY
    assert of_others < (IN_MEMORY + 2 * 120) * row + 200 * len(table)
    assert table.in_file.rows >= len(table) - IN_MEMORY


def test_a_table_whose_disk_is_full_has_room_for_fewer_rows(tmp_path: Path) -> None:
    """As a table has that memory holds: the rows trained longest ago make room, and no other row changes."""
    table, random = with_file(tmp_path, places=300), np.random.default_rng(6)
    weights: dict[int, bytes] = {}
    for version in range(1, 120):
        done: Applied = table.apply(update(random), 1, version)
        assert len(table) <= IN_MEMORY + 300
        weights = {}
        followed(table, weights, None)
        assert len(weights) == len(table)
        assert done.stepped
    assert table.in_file.rows > 200


def test_a_table_as_full_as_memory_and_file_together_is_restored(tmp_path: Path) -> None:
    before, random = with_file(tmp_path, capacity=IN_MEMORY + 300, places=300), np.random.default_rng(7)
    version = 0
    while len(before) < IN_MEMORY + 290:  # more than the file holds beside what memory keeps free
        version += 1
        before.apply(update(random), 1, version)
    other = with_file(tmp_path, capacity=IN_MEMORY + 300, places=300)
    other.restore(before.snapshot())
    same(before, other)
    step = update(random)
    assert before.apply(step, 1, version + 1) == other.apply(step, 1, version + 1)
    same(before, other)


def test_a_disk_that_is_full_keeps_taking_rows_where_others_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds as many rows as it is to, and the file as many as the disk takes."""
    limit_disk(monkeypatch, 300)
    table, random = with_file(tmp_path), np.random.default_rng(8)
    held = 0
    for version in range(1, 200):
        table.apply(update(random), 1, version)
        held = max(held, table.in_file.rows) if version > 100 else 0
        assert len(table) - table.in_file.rows <= IN_MEMORY + 120
    assert table.in_file.nbytes <= 300 * ROW
    assert held * ROW == table.in_file.nbytes, "all that the disk gave is used again and again"
    assert len(table) <= IN_MEMORY + 300


def test_rows_that_the_disk_takes_no_more_are_restored_as_far_as_memory_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, random = with_file(tmp_path, capacity=470), np.random.default_rng(9)
    version = 0
    while len(before) < 465:
        version += 1
        before.apply(update(random), 1, version)
    rows = before.snapshot()
    limit_disk(monkeypatch, 300)
    other = with_file(tmp_path)
    other.restore(rows)
    same(before, other)
    limit_disk(monkeypatch, 200)
    with pytest.raises(LimitExceeded, match="rows do not fit: memory for tables holds 200 of them"):
        with_file(tmp_path).restore(rows)


UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
FULL = """
import sys
from pathlib import Path
import numpy as np
from ps_server.storage import row_files
row_files.PIECE_BYTES = 4096
files = row_files.RowFiles(Path(sys.argv[1]))
file = files.open(64, 4096)
records = np.arange(64 * 1024, dtype=np.float32).reshape(1024, 64)
taken = [file.write(np.arange(first, first + 64), records[first : first + 64]) for first in range(0, 1024, 64)]
assert taken == [True] * 4 + [False] * 12, taken
assert file.room == 256 and file.nbytes == 64 * 1024, (file.room, file.nbytes)
assert np.array_equal(file.read(np.arange(256)), records[:256])
assert file.write(np.array([3, 7, 8]), records[100:103])
assert np.array_equal(file.read(np.array([3, 4, 7, 8])), records[[100, 4, 101, 102]])
print("whole")
"""


@pytest.mark.skipif(subprocess.run([*UNSHARE, "true"], check=False).returncode != 0, reason="needs a mount of its own")
def test_a_disk_that_is_full_keeps_what_it_has(tmp_path: Path) -> None:
    command = f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec "$@"'
    words = [*UNSHARE, "sh", "-c", command, "sh", sys.executable, "-c", FULL, tmp_path]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "whole\n", run.stderr
    assert run.stderr.count("takes no more of them: No space left on device") == 12


def test_a_disk_that_fails_is_written_to_no_more(tmp_path: Path) -> None:
    file = RowFiles(tmp_path).open(64, 4_096)
    records = np.ones((100, 64), np.float32)
    assert file.write(np.arange(100), records)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        assert not file.write(np.arange(100, 200), records)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.room == 0
    assert np.array_equal(file.read(np.arange(100)), records)


def test_a_file_has_no_name_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = RowFiles(tmp_path).open(4, 100)
    file.write(np.arange(10), np.ones((10, 4), np.float32))
    assert list(tmp_path.iterdir()) == []
    held = [path.stat() for path in Path("/proc/self/fd").iterdir() if str(path.resolve()).startswith(str(tmp_path))]
    assert held
    assert all(each.st_mode & 0o777 == 0o600 and each.st_nlink == 0 for each in held)
    del file
    assert not [path for path in Path("/proc/self/fd").iterdir() if str(path.resolve()).startswith(str(tmp_path))]


def test_files_share_a_limit(tmp_path: Path) -> None:
    files = RowFiles(tmp_path, 10_000)
    one: DiskRows | None = files.open(5, 100)
    assert one is not None
    assert files.free_bytes() == 8_000
    del one
    assert files.free_bytes() == 10_000


def test_a_file_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    files = RowFiles(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(LimitExceeded, match=r"2000 bytes for rows cannot be made in .*: File too large"):
            files.open(5, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
