"""Both ends mix ids alike, and agree on which shard has a row."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.row_ids import by_shard, mix, shards_of
from ps_tables.distinct import distinct
from tests.tools.row_ids import mixed

IDS = np.array([0, 1, -1, 7919, 2**63 - 1, -(2**63), 1 << 32], np.int64)


def test_ids_are_mixed_as_the_contract_says_and_stay_as_they_were() -> None:
    before = IDS.copy()
    assert mix(IDS).tolist() == [mixed(number) for number in IDS.tolist()]
    assert np.array_equal(IDS, before)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 2**31])
def test_each_shard_has_a_range_of_mixed_ids_and_about_as_many_rows_as_any_other(shards: int) -> None:
    ids = np.arange(-10_000, 10_000) * 7919
    of = shards_of(ids, shards)
    assert of.tolist() == [(mixed(number) >> 32) * shards >> 32 for number in ids.tolist()]
    in_order = of[np.argsort(mix(ids))]
    assert (np.diff(in_order) >= 0).all(), "a checkpoint sorted by mixed ids can be cut"
    if shards < 10:
        counts = np.bincount(of, minlength=shards)
        assert counts.min() > 0.95 * len(ids) / shards


def test_ids_that_are_sorted_by_shard_are_cut_without_hashing_them_again() -> None:
    batch = distinct(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500), 0, 3)
    assert by_shard(batch.ids, 3, batch.ends) == by_shard(batch.ids, 3)
    assert by_shard(batch.ids, 1, batch.ends) == [slice(0, 500)]
    assert len(by_shard(batch.ids, 4, batch.ends)) == 4  # of another number of shards the ends say nothing
