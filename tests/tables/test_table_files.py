"""The rows of a table as files for other programs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ps_protocol.errors import CheckpointFailed, InvalidRequest
from ps_server import cli
from ps_server.storage import table_files
from ps_server.storage.export import export
from tests.tools.cluster import Cluster
from tests.tools.table_model import TableModel, train

DIM = 3


def some_rows(count: int) -> dict[str, torch.Tensor]:
    """A table as a snapshot has it: with two tensors of an optimizer, and ids that are no rows yet."""
    random = torch.Generator().manual_seed(count)
    return {
        "ids": torch.randint(-(2**63), 2**63 - 1, (count,), generator=random),
        "weights": torch.randn(count, DIM, generator=random),
        "state.Adagrad.sum": torch.rand(count, DIM, generator=random),
        "state.RowWiseAdagrad.sum": torch.rand(count, 1, generator=random),
        "last": torch.randint(0, 9, (count,), generator=random),
        "version": torch.tensor([9]),
        "waiting.ids": torch.tensor([5]),
        "waiting.counts": torch.tensor([1]),
        "waiting.last": torch.tensor([4]),
    }


def without_waiting(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in rows.items() if name != "version" and not name.startswith("waiting.")}


def from_npy(folder: Path) -> dict[str, torch.Tensor]:
    """What programs with numpy find."""
    return {path.stem: torch.from_numpy(np.load(path, allow_pickle=False)) for path in folder.glob("*.npy")}


def from_parquet(path: Path) -> dict[str, torch.Tensor]:
    """What programs with Arrow find."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pip install pyarrow")
    table = parquet.read_table(path)
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    found = {}
    for name, column in columns.items():
        listed = "list" in str(column.type)
        numbers = (column.flatten() if listed else column).to_numpy(zero_copy_only=False)
        found[name] = torch.from_numpy(numbers.copy()).view((len(column), column.type.list_size) if listed else (-1,))
    assert table.schema.metadata[b"version"] == b"9"
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_each_format_has_all_rows(count: int, tmp_path: Path) -> None:
    rows = some_rows(count)
    for form in ("safetensors", "npy"):
        table_files.write_rows(rows, tmp_path / "tables", "0.item", form)
    assert_same(load_file(tmp_path / "tables" / "0.item.safetensors"), rows)
    assert_same(from_npy(tmp_path / "tables" / "0.item"), rows)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_parquet_file_has_a_line_for_each_row(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pip install pyarrow")
    monkeypatch.setattr(table_files, "ROW_GROUP_BYTES", 2**14)
    rows = some_rows(count)
    table_files.write_rows(rows, tmp_path, "0.item", "parquet")
    path = tmp_path / "0.item.parquet"
    assert_same(from_parquet(path), without_waiting(rows))
    file = parquet.ParquetFile(path)
    assert file.num_row_groups == max(1, -(-count // (2**14 // (8 + 8 + 4 * (2 * DIM + 1)))))
    assert str(file.schema_arrow.field("weights").type) == f"fixed_size_list<element: float>[{DIM}]"


def test_arrays_of_an_export_before_are_gone_and_other_files_are_not(tmp_path: Path) -> None:
    table_files.write_rows(some_rows(7), tmp_path, "item", "npy")
    (tmp_path / "item" / "note.txt").write_text("mine")
    rows = without_waiting(some_rows(3))
    table_files.write_rows(rows, tmp_path, "item", "npy")
    assert_same(from_npy(tmp_path / "item"), rows)
    assert (tmp_path / "item" / "note.txt").read_text() == "mine"


def test_a_format_that_does_not_exist_or_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequest, match="the format of tables is one of safetensors, parquet, npy, got 'csv'"):
        export(tmp_path / "missing", "job", None, tmp_path / "out", "csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # an import of it raises ImportError
    with pytest.raises(InvalidRequest, match="Parquet needs the package pyarrow: pip install pyarrow"):
        export(tmp_path / "missing", "job", None, tmp_path / "out", "parquet")
    words = ["export", f"--checkpoint-dir={tmp_path}", "--job=x"]
    for form in table_files.WRITERS:
        assert cli.parser().read([*words, f"--format={form}", "out"]).format == form
    assert cli.parser().read([*words, "out"]).format == "safetensors"
    with pytest.raises(SystemExit):
        cli.parser().read([*words, "--format=csv", "out"])
    assert "invalid choice: 'csv'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def trained(make_cluster: Callable[..., Cluster], tmp_path: Path) -> Path:
    """A directory with a checkpoint of two tables, on two shards."""
    cluster = make_cluster(shards=2, checkpoint_dir=tmp_path / "checkpoints")
    with cluster.connect("sync") as session:
        train(session, TableModel())
    cluster.stop()
    return tmp_path / "checkpoints"


def test_an_export_has_tables_in_the_format_that_was_asked_for(trained: Path, tmp_path: Path) -> None:
    for form in ("safetensors", "npy"):
        export(trained, "default", None, tmp_path / form, form)
    one, other = (load_file(tmp_path / form / "model.safetensors") for form in ("safetensors", "npy"))
    assert_same(one, other)
    for name in ("item", "tags"):
        rows = load_file(tmp_path / "safetensors" / "tables" / f"{name}.safetensors")
        assert len(rows["ids"]) > 40
        assert_same(from_npy(tmp_path / "npy" / "tables" / name), rows)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointFailed, match="file cannot be written: "):
        export(trained, "default", None, tmp_path / "file", "npy")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_every_file_of_an_export_has_the_mode_that_the_umask_gives(trained: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        for form in ("safetensors", "npy"):
            export(trained, "default", None, tmp_path / "out" / form, form)
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "out").rglob("*.*")}
    assert {"model.safetensors", "optimizer.safetensors", "optimizer.json", "item.safetensors", "ids.npy"} <= set(modes)
    assert set(modes.values()) == {oct(0o666 & ~mask)}, modes


def test_the_command_writes_parquet(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pip install pyarrow")
    export(trained, "default", None, tmp_path / "other")
    words = ["export", f"--checkpoint-dir={trained}", "--job=default", "--format=parquet", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["ps-server", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "is in" in capsys.readouterr().out
    for name in ("item", "tags"):
        found = parquet.read_table(tmp_path / "out" / "tables" / f"{name}.parquet").to_pydict()
        rows = load_file(tmp_path / "other" / "tables" / f"{name}.safetensors")
        assert found["ids"] == rows["ids"].tolist()
        assert found["weights"] == rows["weights"].tolist()
        assert found["last"] == rows["last"].tolist()
