"""Buckets are placed by bytes, largest first."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_server.core.placement import imbalance, place

SIZES = st.lists(st.integers(0, 1000), max_size=40)


def loads(sizes: list[int], placement: list[int], shards: int) -> list[int]:
    return [sum(s for s, shard in zip(sizes, placement, strict=True) if shard == index) for index in range(shards)]


def test_one_large_bucket_weighs_as_much_as_many_small_ones() -> None:
    """By count, each shard would get three of these: 93 against 7."""
    sizes = [90, 5, 1, 1, 2, 1]
    assert sorted(loads(sizes, place(sizes, 2), 2)) == [10, 90]


@given(SIZES, st.integers(1, 6))
def test_every_bucket_is_on_a_shard_and_no_shard_is_further_ahead_than_one_bucket(
    sizes: list[int], shards: int
) -> None:
    placement = place(sizes, shards)
    assert placement == place(sizes, shards), "the same on every run"
    assert all(0 <= shard < shards for shard in placement)
    found = loads(sizes, placement, shards)
    assert sum(found) == sum(sizes)
    assert max(found) - min(found) <= max(sizes, default=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_the_fullest_shard_is_within_grahams_bound_of_the_best_possible(sizes: list[int], shards: int) -> None:
    best = min(max(loads(sizes, list(p), shards)) for p in product(range(shards), repeat=len(sizes)))
    assert 3 * shards * max(loads(sizes, place(sizes, shards), shards)) <= (4 * shards - 1) * best


@pytest.mark.parametrize(
    ("sizes", "placement", "shards", "ratio"),
    [
        ([6, 2], [0, 1], 2, 1.5),
        ([5, 5], [0, 1], 2, 1.0),
        ([5], [0], 4, 4.0),
        ([], [], 3, 1.0),
        ([0, 0], [0, 0], 3, 1.0),
    ],
)
def test_imbalance_is_the_fullest_shard_over_the_mean(
    sizes: list[int], placement: list[int], shards: int, ratio: float
) -> None:
    assert imbalance(sizes, placement, shards) == ratio
