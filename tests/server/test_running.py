"""What a shard keeps beside its rules while it runs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from ps_protocol.codecs import WIRE_FORMATS
from ps_server.shard.job import NARROWED_BUCKETS, Narrowed
from ps_server.shard.waiting import Pull, PulledBucket


def test_a_bucket_is_narrowed_once_a_version_and_only_a_few_are_kept() -> None:
    weights = torch.arange(8.0) + 1 / 3
    narrowed = Narrowed()
    first = narrowed.get(0, 1, weights, WIRE_FORMATS["bfloat16"])
    assert torch.equal(first, weights.bfloat16())
    assert narrowed.get(0, 1, weights, WIRE_FORMATS["bfloat16"]) is first
    assert torch.equal(narrowed.get(0, 2, weights + 1, WIRE_FORMATS["bfloat16"]), (weights + 1).bfloat16())
    kept = [narrowed.get(index, 2, weights, WIRE_FORMATS["bfloat16"]) for index in range(NARROWED_BUCKETS + 1)]
    assert narrowed.get(1, 2, weights, WIRE_FORMATS["bfloat16"]) is kept[1], "one of the last"
    assert narrowed.get(0, 2, weights, WIRE_FORMATS["bfloat16"]) is not kept[0], "the oldest, which is dropped"


@pytest.mark.parametrize(
    ("notify_bytes", "told"),
    [(0, [0, 0, 0, 4]), (2, [0, 2, 0, 2]), (3, [0, 0, 3, 1])],
)
def test_a_worker_is_notified_after_so_many_bytes_or_at_the_end(notify_bytes: int, told: list[int]) -> None:
    pull = Pull(0, 1, 1, cast(Any, None), 4, 0.0, notify_bytes=notify_bytes)
    found: list[tuple[PulledBucket, ...]] = []
    for index in range(4):
        pull.left -= 1
        found.append(pull.landed(PulledBucket(index), 1))
    assert [len(buckets) for buckets in found] == told
    assert [bucket.bucket for buckets in found for bucket in buckets] == [0, 1, 2, 3]
