"""Buckets are placed by bytes, largest first."""

from __future__ import annotations

from itertools import product

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


def test_placement_is_the_same_on_every_run() -> None:
    assert place([4, 4, 4, 2, 2], 2) == [0, 1, 0, 1, 1]


@given(SIZES, st.integers(1, 6))
def test_every_bucket_is_on_one_of_the_shards(sizes: list[int], shards: int) -> None:
    placement = place(sizes, shards)
    assert len(placement) == len(sizes)
    assert all(0 <= shard < shards for shard in placement)
    assert sum(loads(sizes, placement, shards)) == sum(sizes)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_the_fullest_shard_is_within_grahams_bound_of_the_best_possible(sizes: list[int], shards: int) -> None:
    best = min(max(loads(sizes, list(p), shards)) for p in product(range(shards), repeat=len(sizes)))
    assert 3 * shards * max(loads(sizes, place(sizes, shards), shards)) <= (4 * shards - 1) * best


@given(SIZES, st.integers(1, 6))
def test_no_shard_is_further_ahead_than_one_bucket(sizes: list[int], shards: int) -> None:
    found = loads(sizes, place(sizes, shards), shards)
    assert max(found) - min(found) <= max(sizes, default=0)


def test_imbalance_is_the_fullest_shard_over_the_mean() -> None:
    assert imbalance([6, 2], [0, 1], 2) == 1.5
    assert imbalance([5, 5], [0, 1], 2) == 1.0
    assert imbalance([5], [0], 4) == 4.0


def test_a_job_without_bytes_is_balanced() -> None:
    assert place([], 3) == []
    assert imbalance([], [], 3) == 1.0
    assert imbalance([0, 0], [0, 0], 3) == 1.0
