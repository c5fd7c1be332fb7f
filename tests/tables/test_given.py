"""A table takes vectors that a script gives it: from tensors, arrays and files, before training and during it."""

from __future__ import annotations

import builtins
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_worker.tables import given_rows as given

DIM = 4
IDS = torch.tensor([7, -1, 2**40, 0, 3])
VECTORS = torch.arange(5 * DIM, dtype=torch.float32).view(5, DIM) / 8  # exact in every type below


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are read two at a time."""
    monkeypatch.setattr(given, "PIECE_BYTES", 2 * 4 * DIM)


def safetensors_file(folder: Path, dtype: torch.dtype = torch.float32) -> ps_worker.RowFile:
    save_file({"ids": IDS, "weights": VECTORS.to(dtype)}, folder / "rows.safetensors")
    return ps_worker.RowFile(folder / "rows.safetensors")


def npy_files(folder: Path, dtype: Any = np.float32) -> ps_worker.RowFile:
    np.save(folder / "ids.npy", IDS.numpy())
    np.save(folder / "vectors.npy", VECTORS.numpy().astype(dtype))
    return ps_worker.RowFile(folder / "vectors.npy", ids=folder / "ids.npy")


def parquet_file(folder: Path, fixed: bool = True, half: bool = False, **columns: Any) -> ps_worker.RowFile:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    flat = arrow.array(VECTORS.numpy().reshape(-1).astype(np.float64 if half else np.float32))
    lists = (
        arrow.FixedSizeListArray.from_arrays(flat, DIM)
        if fixed
        else arrow.ListArray.from_arrays(arrow.array(range(0, 5 * DIM + 1, DIM), arrow.int32()), flat)
    )
    found = {"item": arrow.array(IDS.numpy()), "vector": lists, **columns}
    parquet.write_table(arrow.table(found), folder / "rows.parquet", row_group_size=3)
    return ps_worker.RowFile(folder / "rows.parquet", ids="item", vectors="vector")


SOURCES: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "tensors": lambda folder: (IDS, VECTORS),
    "doubles": lambda folder: (IDS, VECTORS.double()),
    "ids of 32 bits": lambda folder: (torch.where(IDS == 2**40, 5, IDS).int(), VECTORS.half()),
    "arrays": lambda folder: (IDS.numpy(), VECTORS.numpy()),
    "safetensors": lambda folder: (safetensors_file(folder),),
    "bfloat16": lambda folder: (safetensors_file(folder, torch.bfloat16),),
    "npy": lambda folder: (npy_files(folder),),
    "npy of float16": lambda folder: (npy_files(folder, np.float16),),
    "Parquet": lambda folder: (parquet_file(folder),),
    "Parquet, lists": lambda folder: (parquet_file(folder, fixed=False, half=True),),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_table_begins_with_pretrained_rows(source: str, tmp_path: Path) -> None:
    ids = torch.where(IDS == 2**40, 5, IDS) if source == "ids of 32 bits" else IDS
    table = ps_worker.Embedding.from_pretrained(*SOURCES[source](tmp_path), seed=1)
    assert not table.weight.requires_grad
    assert torch.equal(table.rows(ids), VECTORS)
    assert len(table) == 5
    other = ps_worker.Embedding(DIM, seed=1)
    assert torch.equal(table.rows(torch.tensor([99])), other.rows(torch.tensor([99]))), "others begin as ever"
    other.assign(*SOURCES[source](tmp_path))
    assert torch.equal(other.rows(ids.flip(0)), VECTORS.flip(0))
    for each in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(each.rows(ids), VECTORS)
    frozen = ps_worker.freeze(table)
    assert torch.equal(frozen(ids), VECTORS)


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_is_read_when_a_state_is_saved(source: str, tmp_path: Path) -> None:
    state = ps_worker.Embedding.from_pretrained(*SOURCES[source](tmp_path)).state_dict()
    table = ps_worker.EmbeddingBag(DIM)
    table.load_state_dict(state)
    assert len(table) == 5


def test_rows_are_trained_as_those_of_torch(tmp_path: Path) -> None:
    ids = torch.arange(5)
    ours = ps_worker.Embedding.from_pretrained(ids, VECTORS, freeze=False)
    theirs = nn.Embedding.from_pretrained(VECTORS.clone(), freeze=False)
    for optimizer in (torch.optim.Adagrad, torch.optim.SGD):
        both = [optimizer(each.parameters(), lr=0.1) for each in (ours, theirs)]
        for _ in range(3):
            for each, stepper in zip((ours, theirs), both, strict=True):
                stepper.zero_grad()
                (each(torch.tensor([0, 1, 1])) ** 2).sum().backward()
                stepper.step()
        assert torch.allclose(ours.rows(ids), theirs.weight.detach(), atol=1e-6)


def test_a_bag_begins_with_pretrained_rows() -> None:
    bag = ps_worker.EmbeddingBag.from_pretrained(IDS, VECTORS, mode="sum", padding_idx=0)
    assert torch.equal(bag(torch.tensor([[7, -1, 0]]))[0], VECTORS[0] + VECTORS[1])
    assert len(bag) == 4, "the vector of the padding is left out"


def test_rows_that_are_assigned_between_steps_begin_without_a_state() -> None:
    table = ps_worker.Embedding(1, initial="constant", scale=0.0, admit_after=3)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=1.0)
    for _ in range(4):
        optimizer.zero_grad()
        table(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    assert float(table.rows(torch.tensor([1]))) != -1.0, "with a state steps become smaller"
    table.assign(torch.tensor([1, 5]), torch.tensor([[8.0], [9.0]]))
    assert table.rows(torch.tensor([1, 5])).flatten().tolist() == [8.0, 9.0]
    optimizer.zero_grad()
    table(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    assert table.rows(torch.tensor([1, 5])).flatten().tolist() == pytest.approx([7.0, 8.0])
    assert len(table) == 3, "whatever admit_after says"


def test_the_later_vector_of_an_id_counts(tmp_path: Path) -> None:
    table = ps_worker.Embedding(DIM)
    for add, factor in ((0, 1), (1, 2), (0, 3)):
        folder = tmp_path / str(factor)
        folder.mkdir()
        save_file(
            {"ids": torch.arange(4) + add, "weights": torch.full((4, DIM), float(factor))}, folder / "a.safetensors"
        )
        table.assign(ps_worker.RowFile(folder / "a.safetensors"))
    assert table.rows(torch.arange(5))[:, 0].tolist() == [3.0, 3.0, 3.0, 3.0, 2.0]


def test_a_tensor_may_be_written_after_it_was_assigned() -> None:
    table, vectors, ids = ps_worker.Embedding(DIM), VECTORS.clone(), IDS.clone()
    table.assign(ids, vectors)
    vectors.zero_()
    ids.zero_()
    assert torch.equal(table.rows(IDS), VECTORS)


@pytest.mark.parametrize("optimizer", [None, ps_worker.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5)])
def test_rows_that_were_loaded_keep_their_state_beside_assigned_ones(
    optimizer: ps_worker.RowWiseAdagrad | None,  # type: ignore[valid-type]
) -> None:
    def made() -> tuple[ps_worker.Embedding, torch.optim.Optimizer]:
        table = ps_worker.Embedding(DIM, seed=1, optimizer=optimizer)
        return table, torch.optim.Adagrad(table.parameters(), lr=0.1)

    def step(table: ps_worker.Embedding, stepper: torch.optim.Optimizer) -> None:
        stepper.zero_grad()
        (table(torch.arange(6)) ** 2).sum().backward()
        stepper.step()

    table, stepper = made()
    for _ in range(3):
        step(table, stepper)
    again, its_stepper = made()
    again.load_state_dict(table.state_dict())
    for each in (table, again):
        each.assign(torch.tensor([1, 9]), VECTORS[:2])
    third, third_stepper = made()
    third.load_state_dict(again.state_dict())
    for each, of in ((table, stepper), (again, its_stepper), (third, third_stepper)):
        step(each, of)
    for each in (again, third):
        assert torch.equal(each.rows(torch.arange(10)), table.rows(torch.arange(10)))


def test_a_state_that_is_made_by_hand_as_documented_is_loaded() -> None:
    version, last = torch.tensor([3]), torch.tensor([1, 2, 3, 1, 3])
    rows = {"seed": torch.tensor([8]), "version": version, "ids": IDS, "last": last, "weights": VECTORS}
    rows["state.Adagrad.sum"] = torch.full((5, DIM), 3.0)
    state = {"weight": torch.empty(0, DIM)}
    state["_extra_state"] = torch.frombuffer(bytearray(safetensors.torch.save(rows)), dtype=torch.uint8)
    table = ps_worker.Embedding(DIM)
    table.load_state_dict(state)
    assert torch.equal(table.rows(IDS), VECTORS)
    assert torch.equal(table.rows(torch.tensor([99])), ps_worker.Embedding(DIM, seed=8).rows(torch.tensor([99])))
    saved = safetensors.torch.load(table.state_dict()["_extra_state"].numpy().tobytes())
    assert saved.keys() == rows.keys()
    assert all((saved[name].dtype, saved[name].shape) == (each.dtype, each.shape) for name, each in rows.items())
    optimizer = torch.optim.Adagrad(table.parameters(), lr=1.0)
    table(IDS[:1]).sum().backward()
    optimizer.step()
    assert torch.allclose(table.rows(IDS[:1]), VECTORS[:1] - 0.5), "with a sum of 4 after it"


def broken_parquet(folder: Path, **columns: Any) -> tuple[Any, ...]:
    return (parquet_file(folder, **columns),)


def text_file(folder: Path, name: str) -> tuple[Any, ...]:
    (folder / name).write_text("nothing of the kind")
    return (ps_worker.RowFile(folder / name, ids=folder / name),)


BAD: dict[str, tuple[Callable[[Path], tuple[Any, ...]], str]] = {
    "no vectors": (lambda _: (IDS,), r"expected ids and vectors, or a ps_torch.RowFile, got Tensor"),
    "too many vectors": (lambda f: (npy_files(f), VECTORS), "a ps_torch.RowFile has ids and vectors"),
    "lists": (lambda _: ([1, 2], VECTORS[:2]), r"expected ids of shape \[n\], of int64 or int32, got list"),
    "a list of vectors": (lambda _: (IDS, [[1.0]]), "expected vectors as a tensor or an array, got list"),
    "ids of a float type": (lambda _: (IDS.float(), VECTORS), r"of int64 or int32, got \[5\] of float32"),
    "ids in two dimensions": (lambda _: (IDS[None], VECTORS), r"ids of shape \[n\], .* got \[1, 5\] of int64"),
    "a number short": (lambda _: (IDS[:4], VECTORS), "a vector for each id, got 4 ids and 5 vectors"),
    "whole numbers": (lambda _: (IDS, VECTORS.long()), "vectors of a floating type, got torch.int64"),
    "another shape": (lambda _: (IDS, VECTORS[0]), r"vectors of shape \[n, dim\], got \[4\]"),
    "another dimension": (lambda _: (IDS, VECTORS[:, :3]), "vectors of 4 elements, got 3"),
    "an id twice": (lambda _: (torch.tensor([1, 2, 3, 2, 4]), VECTORS), "ids once each, got 2 twice"),
    "not finite": (
        lambda _: (IDS, VECTORS / VECTORS[3, 2].sub(VECTORS)),
        "finite vectors .* that of id 0",
    ),
    "beyond float32": (lambda _: (IDS, VECTORS.double() * 1e300), "finite vectors of float32, and that of id 7"),
    "no file": (lambda f: (ps_worker.RowFile(f / "a.safetensors"),), r"a.safetensors cannot be read: "),
    "no npy": (lambda f: (ps_worker.RowFile(f / "a.npy"),), r"a.npy cannot be read: "),
    "no Parquet": (lambda f: (ps_worker.RowFile(f / "a.parquet"),), r"a.parquet cannot be read: "),
    "text": (lambda f: text_file(f, "a.safetensors"), r"a.safetensors cannot be read: "),
    "text as npy": (lambda f: text_file(f, "a.npy"), r"a.npy cannot be read: "),
    "text as Parquet": (lambda f: text_file(f, "a.parquet"), r"a.parquet cannot be read: "),
    "another suffix": (lambda f: text_file(f, "a.csv"), "expected a file NAME.safetensors, NAME.parquet or NAME.npy"),
    "another name": (
        lambda f: (ps_worker.RowFile(safetensors_file(f).path, vectors="vectors"),),
        "rows.safetensors cannot be read: .*vectors",
    ),
    "no column": (
        lambda f: (ps_worker.RowFile(parquet_file(f).path, ids="id"),),
        r"expected a column 'id', got \['item', 'vector'\]",
    ),
    "ragged lists": (
        lambda f: broken_parquet(f, vector=[[0.0] * 4, [0.0] * 3, [0.0] * 5, [0.0] * 4, [0.0] * 4]),
        "expected vector to be lists that are all as long",
    ),
    "gaps": (
        lambda f: broken_parquet(f, vector=[[0.0] * 4, None, [0.0] * 4, [0.0] * 4, [0.0] * 4]),
        "expected vector to be lists that are all as long",
    ),
    "no lists": (lambda f: broken_parquet(f, vector=[0.0] * 5), "expected vector to be lists of numbers, got double"),
    "no id": (lambda f: broken_parquet(f, item=[1, None, 2, 3, 4]), "an id in each row, got 1 rows without"),
    "text as ids": (lambda f: broken_parquet(f, item=list("abcde")), "expected ids of shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_vectors_is_refused_and_changes_nothing(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    table = ps_worker.Embedding(DIM, seed=1)
    table.assign(torch.tensor([7]), VECTORS[:1])
    with pytest.raises(InvalidRequest, match=message):
        table.assign(*make(tmp_path))
    assert len(table) == 1
    assert torch.equal(table.rows(torch.tensor([7])), VECTORS[:1])


def test_more_vectors_than_rows_are_refused() -> None:
    table = ps_worker.Embedding(DIM, max_rows=3)
    with pytest.raises(LimitExceeded, match="has room for 3 rows, by max_rows or by memory, and 5 are to be set"):
        table.assign(IDS, VECTORS)
    assert len(table) == 0


def test_parquet_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = parquet_file(tmp_path), builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match="Parquet needs the package pyarrow: pip install pyarrow"):
        ps_worker.Embedding.from_pretrained(file)
