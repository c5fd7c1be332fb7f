"""A reader that has an older version gets what changed since, to the bit, or the whole where that is less."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.changes import BucketDelta, apply_change, encode_change
from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import DATA_TYPES
from ps_server.shard import shared_changes
from ps_server.shard.shared_changes import MOST_KEPT, SKIPPED, WORKING_COPIES, BucketChanges
from tests.tools.cases import crossed

NUMEL = 4096
BASES = {False: "from a copy", True: "from a version that changes lead to"}


class Copy:
    """A copy of a bucket of bfloat16 elements; each version has changed a few of them."""

    def __init__(self, version: int, payload: bytes) -> None:
        self.version, self.payload = version, memoryview(payload)


def copies(count: int, changed: int = 20) -> list[Copy]:
    draw = np.random.default_rng(1)
    elements, made = draw.integers(0, 2**16, NUMEL, np.uint16), []
    for version in range(count):
        made.append(Copy(version, elements.tobytes()))
        elements = elements.copy()
        elements[draw.integers(0, NUMEL, changed)] ^= draw.integers(0, 8, changed, np.uint16)
    return made


def apply(change: BucketDelta | None, base: Copy, new: Copy) -> None:
    assert change is not None
    assert apply_change(change.payload, base.payload, 2, sparse=change.is_sparse).tobytes() == new.payload


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was encoded."""
    calls: list[object] = []

    def encode(base: bytes, new: bytes, *more: Any) -> BucketDelta | None:
        calls.append(new)
        return encode_change(base, new, *more)

    monkeypatch.setattr(shared_changes, "encode_change", encode)
    return calls


@pytest.mark.parametrize(("itemsize", "sparse"), crossed([1, 2, 4, 8], [False, True]))
@given(pairs=st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.booleans()), min_size=1, max_size=40))
def test_any_bits_come_back(itemsize: int, pairs: list[tuple[bytes, bool]], sparse: bool) -> None:
    new = b"".join(each + bytes(8 * index % 3000) for index, (each, _) in enumerate(pairs)) + bytes(800)
    base = b"".join(
        (bytes(8) if changed else each) + bytes(8 * index % 3000) for index, (each, changed) in enumerate(pairs)
    )
    base += bytes(800)
    change = encode_change(base, new, itemsize, sparse)
    assert change is not None
    assert change.is_sparse == sparse, "there are few"
    assert len(change.payload) < len(new)
    assert apply_change(change.payload, base, itemsize, sparse=sparse).tobytes() == new
    assert apply_change(change.payload, new, itemsize, sparse=sparse).tobytes() == base


@pytest.mark.parametrize(("changed", "is_sparse"), [(NUMEL // 4, True), (NUMEL // 4 + 1, False)])
def test_a_change_is_sparse_where_a_quarter_of_the_elements_has_changed_at_most(changed: int, is_sparse: bool) -> None:
    base = np.zeros(NUMEL, np.uint16)
    new = base.copy()
    new[np.random.default_rng(1).permutation(NUMEL)[:changed]] = 1
    change = encode_change(base.data, new.data, 2, sparse=True)
    assert change is not None
    assert change.is_sparse == is_sparse
    assert apply_change(change.payload, base.data, 2, sparse=is_sparse).tobytes() == new.tobytes()


def test_a_sparse_change_of_few_elements_is_smaller_than_one_of_all() -> None:
    first, second = copies(2, changed=200)
    few, every = (encode_change(first.payload, second.payload, 2, sparse) for sparse in (True, False))
    assert few is not None
    assert every is not None
    assert len(few.payload) < 0.8 * len(every.payload)


def packed(*parts: tuple[str, list[int]]) -> bytes:
    return zlib.compress(b"".join(np.array(numbers, kind).tobytes() for kind, numbers in parts))


@pytest.mark.parametrize(
    "change",
    [
        b"",
        b"nonsense",
        packed(("<u4", [1]), ("<u1", [0]), ("<u1", [5, 6]))[:-1],
        packed(("<u4", [1]), ("<u1", [0]), ("<u1", [5, 6])) + b"x",
        packed(("<u1", [1, 0])),
        packed(("<u4", [1]), ("<u1", [0]), ("<u1", [5])),
        packed(("<u4", [1]), ("<u1", [0]), ("<u1", [5, 6, 7])),
        packed(("<u4", [1]), ("<u1", [255]), ("<u1", [5, 6])),
        packed(("<u4", [1]), ("<u1", [255]), ("<u4", [NUMEL]), ("<u1", [5, 6])),
        packed(("<u4", [2]), ("<u1", [255, 255]), ("<u4", [2**32 - 1] * 2), ("<u1", [5, 6, 7, 8])),
        packed(("<u4", [2**32 - 1])),
        packed(("<u4", [NUMEL // 4 + 1]), ("<u1", [0] * 3 * (NUMEL // 4 + 1))),
        zlib.compress(bytes(2**24)),
    ],
    ids=lambda change: f"{len(change)} bytes",
)
def test_what_is_no_sparse_change_is_refused(change: bytes) -> None:
    with pytest.raises(InvalidRequest, match="change"):
        apply_change(change, bytes(2 * NUMEL), 2, sparse=True)


def test_a_change_that_is_no_smaller_is_none() -> None:
    draw = np.random.default_rng(0)
    base, new = draw.bytes(4096), draw.bytes(4096)
    assert encode_change(base, new, 2) is None
    assert encode_change(base, new, 4) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda change: change[:-1],
        lambda change: change + b"x",
        lambda change: b"nonsense",
        lambda change: b"",
        lambda change: zlib.compress(bytes(2 * NUMEL - 2)),
        lambda change: zlib.compress(bytes(2 * NUMEL + 2)),
        lambda change: zlib.compress(bytes(2**24)),
    ],
    ids=["cut off", "too long", "nonsense", "nothing", "too few", "too many", "a bomb"],
)
def test_what_is_no_change_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    first, second = copies(2)
    change = encode_change(first.payload, second.payload, 2)
    assert change is not None
    assert change is not None
    with pytest.raises(InvalidRequest):
        apply_change(spoil(change.payload), first.payload, 2)


def test_a_change_is_computed_once_for_all_readers(encoded: list[object]) -> None:
    first, second = copies(2)
    store = BucketChanges("bfloat16", lambda size: True)
    for _ in range(3):
        apply(store.between(0, second, [first, second]), first, second)
    assert len(encoded) == 1


def test_a_reader_that_missed_some_gets_what_joins_its_version_to_the_newest() -> None:
    made = copies(4)
    store = BucketChanges("bfloat16", lambda size: True)
    for new in (1, 2):
        store.between(new - 1, made[new], made[new - 1 : new + 1])
    apply(store.between(0, made[3], made[2:]), made[0], made[3])
    assert store.between(0, Copy(9, bytes(2 * NUMEL)), []) is None, "what leads nowhere is sent whole"
    assert BucketChanges("bfloat16", lambda size: True).between(0, made[3], made[2:]) is None


def test_a_version_that_a_reader_has_already_leads_nowhere() -> None:
    made = copies(3)
    store = BucketChanges("bfloat16", lambda size: True)
    apply(store.between(1, made[1], [made[1]]), made[1], made[1])
    store.between(1, made[0], [made[0], made[1]])  # as where an edition is older than what a reader has
    assert store.between(1, made[2], [made[2]]) is None


def test_where_a_change_does_not_pay_none_is_computed_for_some_versions(encoded: list[object]) -> None:
    draw = np.random.default_rng(1)
    made = [Copy(version, draw.bytes(2 * NUMEL)) for version in range(SKIPPED + 3)]
    store = BucketChanges("bfloat16", lambda size: True)
    for new in range(1, SKIPPED + 2):
        for _ in range(3):
            assert store.between(new - 1, made[new], made[new - 1 : new]) is None
    assert len(encoded) == 1
    store.between(SKIPPED + 1, made[SKIPPED + 2], made[SKIPPED + 1 : SKIPPED + 2])
    assert len(encoded) == 2


def test_changes_take_no_more_memory_than_the_bucket() -> None:
    made = copies(200, changed=400)
    store = BucketChanges("bfloat16", lambda size: True)
    sizes = []
    for new in range(1, 200):
        store.between(new - 1, made[new], made[new - 1 : new])
        sizes.append(store.nbytes)
    assert 2 * NUMEL / 2 < max(sizes) <= 2 * NUMEL
    assert len(store._kept) <= MOST_KEPT


@pytest.mark.parametrize(
    ("dtype", "part", "is_way"),
    crossed(["uint8", "bfloat16", "float32", "float64"], [50, 4, 3, 1], [True, False]),
    ids=lambda value: BASES[value] if isinstance(value, bool) else None,
)
def test_to_compute_a_change_takes_no_more_memory_than_there_has_to_be(dtype: str, part: int, is_way: bool) -> None:
    """Only a part of the elements changes. is_way: earlier changes lead to the version from which it is computed"""
    itemsize, size, draw = DATA_TYPES[dtype].itemsize, 2**21, np.random.default_rng(1)
    elements = np.frombuffer(draw.bytes(size), f"<u{itemsize}").copy()
    made = [Copy(0, elements.tobytes())]
    for version in range(1, 4):
        where = draw.permutation(len(elements))[: len(elements) // (part if version == 3 else 4)]
        elements[where] ^= draw.integers(1, 2 if part == 1 else 8, len(where)).astype(elements.dtype)
        made.append(Copy(version, elements.tobytes()))
    store = BucketChanges(dtype, lambda size: True)
    for new in (1, 2) if is_way else ():
        assert store.between(new - 1, made[new], made[new - 1 : new + 1], True) is not None
    tracemalloc.start()
    try:
        store.between(0 if is_way else 2, made[3], made[2:], True)
        assert tracemalloc.get_traced_memory()[1] < WORKING_COPIES * size
    finally:
        tracemalloc.stop()


def test_without_memory_no_change_is_computed(encoded: list[object]) -> None:
    first, second = copies(2)
    asked: list[int] = []

    def has_room(size: int) -> bool:
        asked.append(size)
        return len(asked) > 1

    store = BucketChanges("bfloat16", has_room)
    assert store.between(0, second, [first]) is None
    assert not encoded
    assert asked == [4 * 2 * NUMEL]
    apply(store.between(0, second, [first]), first, second)
