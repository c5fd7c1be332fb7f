"""What a shard keeps beside its rules while it runs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from ps_server.shard.job import NARROWED_BUCKETS, Narrowed
from ps_server.shard.waiting import Pull, PulledBucket


def test_a_bucket_is_narrowed_once_for_all_who_wait_for_it() -> None:
    weights = torch.arange(8.0) + 1 / 3
    narrowed = Narrowed()
    first = narrowed.get(0, 1, weights, "bfloat16")
    weights += 1  # so that narrowing it again would show
    assert narrowed.get(0, 1, weights, "bfloat16") is first
    assert torch.equal(first, (weights - 1).bfloat16())


def test_the_weights_of_another_version_are_narrowed_anew() -> None:
    weights = torch.arange(8.0)
    narrowed = Narrowed()
    narrowed.get(0, 1, weights, "float16")
    weights += 1
    assert torch.equal(narrowed.get(0, 2, weights, "float16"), weights.half())
    assert torch.equal(narrowed.get(0, 1, weights, "float16"), weights.half())


def test_only_a_few_are_kept() -> None:
    narrowed = Narrowed()
    weights = torch.ones(8)
    kept = [narrowed.get(index, 1, weights, "bfloat16") for index in range(NARROWED_BUCKETS + 1)]
    assert narrowed.get(1, 1, weights, "bfloat16") is kept[1], "among the last"
    assert narrowed.get(0, 1, weights, "bfloat16") is not kept[0], "the oldest was let go"


@pytest.mark.parametrize(
    ("notice_bytes", "told"),
    [(0, [0, 0, 0, 4]), (2, [0, 2, 0, 2]), (3, [0, 0, 3, 1])],
)
def test_a_worker_is_told_of_buckets_by_so_many_bytes_or_of_all(notice_bytes: int, told: list[int]) -> None:
    pull = Pull(0, 1, 1, cast(Any, None), 4, 0.0, notice_bytes=notice_bytes)
    found: list[tuple[PulledBucket, ...]] = []
    for index in range(4):
        pull.left -= 1
        found.append(pull.landed(PulledBucket(index), 1))
    assert [len(buckets) for buckets in found] == told
    assert [bucket.bucket for buckets in found for bucket in buckets] == [0, 1, 2, 3]
