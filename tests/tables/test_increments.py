"""A copy of a table, taken while it is trained, is the table of one version; a full one and increments are it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ps_protocol.hyper_parameters import HyperParameters
from ps_server.storage.row_files import RowFiles
from ps_tables import entries
from ps_tables.contributions import RowValues
from ps_tables.copies import TableCopy
from ps_tables.increments import in_order, merged
from ps_tables.sizes import record_bytes
from ps_tables.table import Beyond, Table
from tests.tools.cases import cases, crossed
from tests.tools.one_thread import one_thread
from tests.tools.row_gradients import summed
from tests.tools.table_shards import DIM, SPEC

RULES = {
    "plain": {},
    "expiry": {"expire_after": 12},
    "full": {"max_rows": 90},
    "admission": {"admit_after": 4},
    "all": {"admit_after": 2, "expire_after": 20, "max_rows": 90},
}
OPTIMIZERS: dict[str, HyperParameters] = {"Adam": {"lr": 0.1}, "RowWiseAdagrad": {"lr": 0.1}, "SGD": {"lr": 0.1}}
STEPS, ROOM = 90, 400

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def made(rules: dict[str, int], optimizer: str = "Adam", directory: Path | None = None) -> Table:
    """A table. directory: of a file for all but a few of its rows"""
    spec, values = replace(SPEC, **rules), OPTIMIZERS[optimizer]  # type: ignore[arg-type]
    beyond = None
    if directory is not None:
        beyond = Beyond(RowFiles(directory).open(record_bytes(spec, optimizer, values) // 4, ROOM), 40)
    return Table(spec, optimizer, values, spec.max_rows or ROOM, 0, beyond)


def train(table: Table, seed: int, version: int) -> None:
    """Makes one update. Popular ids move on, so that rows expire, and some come back. A few rows are set."""
    random = np.random.default_rng((seed, version))
    if version % 4 == 0:
        ids = np.unique(random.integers(0, 120, 12)) * 7919 - 300
        table.assign(RowValues(ids, torch.from_numpy(random.random((len(ids), DIM), np.float32))), version)
    ids = (random.zipf(1.3, 30) % 120 + version * 3 % 97) * 7919 - 300
    gradients = torch.from_numpy(random.standard_normal((30, DIM)).astype(np.float32))
    table.apply(summed(ids.astype(np.int64), gradients), 1, version)


def taken(copy: TableCopy, between: Iterator[object], random: np.random.Generator) -> Tensors:
    """Takes a copy in pieces; between them the table is trained."""
    while not copy.is_over:
        if random.random() < 0.4:
            next(between)
        copy.take(int(random.integers(1, 12)))
    return copy.tensors()


def check_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("rules", "cold", "optimizer"), crossed(RULES.values(), [False, True], OPTIMIZERS))
@pytest.mark.parametrize("seed", cases([0], range(1, 4)))
def test_a_full_copy_and_increments_are_the_table_to_the_bit(
    rules: dict[str, int], optimizer: str, seed: int, cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is taken in pieces, between which the table goes on, and is of the version at which it began."""
    monkeypatch.setattr(entries, "BLOCK", 7)  # what expired is given back some updates later, as in a large table
    random, table = np.random.default_rng((seed, 1)), made(rules, optimizer, tmp_path if cold else None)

    def training() -> Iterator[int]:
        for version in range(1, STEPS + 1):
            train(table, seed, version)
            yield version

    steps, chain, increments = training(), list[Tensors](), 0
    for version in steps:
        if random.random() < 0.3 and version < STEPS - 30:
            since = int(chain[-1]["version"]) if chain and len(chain) < 6 else None
            then, copy = table.snapshot(), table.copy(since)
            assert (copy.since is None) is (since is None), "nothing was forgotten"
            part = taken(copy, steps, random)
            chain = [part] if since is None else [*chain, part]
            increments += since is not None
            check_equal(in_order(merged([dict(each) for each in chain])), then)
            check_goes_on_alike(merged([dict(each) for each in chain]), then, rules, optimizer)
    assert increments > 3
    assert len(table) > 20
    assert (table.in_file.rows > 0) is cold


def check_goes_on_alike(rows: Tensors, then: Tensors, rules: dict[str, int], optimizer: str) -> None:
    """A table that is put together from parts, in any order, is trained as the undisturbed one is."""
    ends = []
    for tensors in (rows, then):
        table = made(rules, optimizer)
        table.restore(tensors)
        for version in range(table.version + 1, table.version + 8):
            train(table, 99, version)
        ends.append(table.snapshot())
    check_equal(*ends)


def test_an_increment_has_what_changed_alone() -> None:
    table = made({})
    for version in range(1, 41):
        train(table, 0, version)
    table.copy().end()
    train(table, 0, 41)
    part = table.copy(40)
    assert 0 < part.changed <= 30 < len(table)
    while not part.is_over:
        part.take(5)
    tensors = part.tensors()
    assert set(tensors["last"].tolist()) == {41}
    assert len(tensors["ids"]) == part.changed


def test_the_next_copy_ends_one_that_is_under_way() -> None:
    table = made({})
    for version in range(1, 11):
        train(table, 0, version)
    first = table.copy()
    first.take(3)
    second = table.copy()
    assert first.is_ended
    train(table, 0, 11)
    while not second.is_over:
        second.take(7)
    assert len(second.tensors()["ids"]) == second.changed
    first.end()
    train(table, 0, 12)


def test_where_admitted_ids_are_forgotten_the_copy_is_of_all_rows() -> None:
    table = made({"admit_after": 2})
    for version in range(1, 11):
        train(table, 0, version)
    assert table.copy(9).since == 9
    assert table._candidates is not None
    table._candidates.removed.add(11, np.arange(1_025), 0)
    assert table.copy(9).since is None


def forgets_a_part(chain: list[Tensors]) -> None:
    del chain[1]


def has_no_base(chain: list[Tensors]) -> None:
    del chain[0]


def has_another_width(chain: list[Tensors]) -> None:
    chain[2]["weights"] = chain[2]["weights"][:, 1:]


def has_rows_too_few(chain: list[Tensors]) -> None:
    chain[1]["last"] = chain[1]["last"][1:]


@pytest.mark.parametrize("spoil", [forgets_a_part, has_no_base, has_another_width, has_rows_too_few])
def test_what_does_not_fit_together_is_refused(spoil: Callable[[list[Tensors]], None]) -> None:
    table, chain = made({}), list[Tensors]()
    for version in range(1, 4):
        train(table, 0, version)
        copy = table.copy(version - 1 or None)
        while not copy.is_over:
            copy.take(100)
        chain.append(copy.tensors())
    spoil(chain)
    with pytest.raises(ValueError, match="expected "):
        merged(chain)
