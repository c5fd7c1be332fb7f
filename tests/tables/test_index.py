"""An index knows exactly the rows that it was told, however it has grown meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ps_protocol.row_ids import mix
from ps_tables.index import Index

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


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rng: rng.integers(-(2**63), 2**63 - 1, 40_000), id="any"),
        pytest.param(lambda rng: np.arange(40_000), id="in a row"),
        pytest.param(lambda rng: np.arange(40_000) << 40, id="alike in their low bits"),
        pytest.param(lambda rng: crowded(3_000), id="of one slot"),
    ],
)
def test_an_index_is_a_dictionary(make: Callable[[np.random.Generator], np.ndarray]) -> None:
    rng = np.random.default_rng(3)
    every = np.unique(np.concatenate([make(rng), EDGES]))
    rng.shuffle(every)
    index, model, first = Index(), dict[int, int](), 0
    while first < len(every):
        new = every[first : first + int(rng.integers(1, 4_000))]
        rows = rng.permutation(len(new)) + first
        index.insert(new, rows)
        model |= dict(zip(new.tolist(), rows.tolist(), strict=True))
        gone = rng.choice(np.array(list(model)), size=len(model) // 4, replace=False)
        index.remove(gone)
        for number in gone.tolist():
            del model[number]
        index.insert(
            gone[: len(gone) // 2], np.arange(len(gone) // 2)
        )  # the slots of those that are gone are used again
        model |= dict(zip(gone[: len(gone) // 2].tolist(), range(len(gone) // 2), strict=True))
        check(index, model, rng.choice(every, size=1_000))
        first += len(new)


def test_an_index_grows_a_little_with_each_insertion() -> None:
    index, batch = Index(), 1_000
    found = []
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
    index = Index()
    for turn in range(300):
        ids = np.arange(turn * 500, turn * 500 + 500)
        index.insert(ids, np.arange(500))
        index.remove(ids)
    assert len(index) == 0
    assert index.nbytes < 100_000


def test_slots_depend_on_the_salt() -> None:
    def order(salt: int) -> list[int]:
        index = Index(salt)
        index.insert(np.arange(100), np.arange(100))
        return [number for number in index._slots.keys.tolist() if number]

    assert order(1) == order(1) != order(2)
