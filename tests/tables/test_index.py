"""An index knows exactly the rows that it was told, however it has grown meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ps_protocol.row_ids import mix
from ps_tables.index import Index

pytestmark = pytest.mark.usefixtures("with_and_without_the_library")

EDGES = [0, 1, -1, 2**63 - 1, -(2**63)]


def check(index: Index, model: dict[int, int], others: np.ndarray) -> None:
    known = np.array(list(model), np.int64)
    assert index.find(known).tolist() == list(model.values())
    assert index.find(others).tolist() == [model.get(number, -1) for number in others.tolist()]
    assert len(index) == len(model)


def crowded(count: int) -> np.ndarray:
    """Ids that have the same slot in an index without a salt."""
    found = [np.zeros(0, np.int64)]
    first = 0
    while sum(map(len, found)) < count:
        ids = np.arange(first, first + 2**16)
        found.append(ids[mix(ids) & np.uint64(1023) == 5])
        first += 2**16
    return np.concatenate(found)[:count]


def alike(count: int) -> np.ndarray:
    """Ids that have the same mark, too, without a salt: the upper half of what they are mixed to."""
    hashes = (np.uint64(77) << np.uint64(32)) | (np.arange(count).astype(np.uint64) << np.uint64(10)) | np.uint64(5)
    back = np.uint64(pow(0xD6E8FEB86659FD93, -1, 2**64))
    for _ in range(2):
        hashes = (hashes ^ hashes >> np.uint64(32)) * back
    ids = (hashes ^ hashes >> np.uint64(32)).astype(np.int64)
    assert (mix(ids) >> np.uint64(32) == 77).all()
    return ids


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rng: rng.integers(-(2**63), 2**63 - 1, 40_000), id="any"),
        pytest.param(lambda rng: np.arange(40_000), id="in a row"),
        pytest.param(lambda rng: np.arange(40_000) << 40, id="alike in their low bits"),
        pytest.param(lambda rng: crowded(3_000), id="of one slot"),
        pytest.param(lambda rng: alike(300), id="of one slot and one mark"),
    ],
)
def test_an_index_is_a_dictionary(make: Callable[[np.random.Generator], np.ndarray]) -> None:
    rng = np.random.default_rng(3)
    every = np.unique(np.concatenate([make(rng), EDGES]))
    rng.shuffle(every)
    ids_of_rows = np.zeros(len(every), np.int64)
    index, model, first = Index(ids_of_rows), dict[int, int](), 0

    def insert(ids: np.ndarray, rows: np.ndarray) -> None:
        ids_of_rows[rows] = ids
        index.insert(ids, rows)
        model.update(zip(ids.tolist(), rows.tolist(), strict=True))

    while first < len(every):
        new = every[first : first + int(rng.integers(1, 4_000))]
        insert(new, rng.permutation(len(new)) + first)
        gone = rng.choice(np.array(list(model)), size=len(model) // 4, replace=False)
        rows = np.array([model.pop(number) for number in gone.tolist()], np.int64)
        index.remove(gone, rows)
        check(index, model, gone)
        ids_of_rows[rows] = 7  # the index reads no id of a row that was removed
        again = len(gone) // 2
        insert(gone[:again], rng.permutation(rows)[:again])  # slots and rows of those that are gone are used again
        check(index, model, rng.choice(every, size=1_000))
        first += len(new)


def test_an_index_grows_a_little_with_each_insertion() -> None:
    batch, found = 1_000, []
    index = Index(np.arange(600_000) * 7919)
    for first in range(0, 600_000, batch):
        ids = np.arange(first, first + batch) * 7919
        index.insert(ids, np.arange(first, first + batch))
        moving = index._old
        if moving is not None and len(moving) > 2**17:
            found.append(index._moved)
            assert np.array_equal(index.find(ids), np.arange(first, first + batch))
    assert len(found) > 3
    assert max(np.diff(found)) <= 2**16
    assert np.array_equal(index.find(np.arange(600_000) * 7919), np.arange(600_000))


def test_an_index_that_is_used_again_and_again_does_not_grow() -> None:
    ids_of_rows = np.zeros(500, np.int64)
    index = Index(ids_of_rows)
    for turn in range(300):
        ids_of_rows[:] = ids = np.arange(turn * 500, turn * 500 + 500)
        index.insert(ids, np.arange(500))
        index.remove(ids, np.arange(500))
    assert len(index) == 0
    assert index.nbytes < 100_000


def test_slots_depend_on_the_salt() -> None:
    def order(salt: int) -> list[int]:
        index = Index(np.arange(100), salt)
        index.insert(np.arange(100), np.arange(100))
        rows, _ = index._slots.entries(0, len(index._slots))
        return list(rows.tolist())

    assert order(1) == order(1) != order(2)
