"""What a shard keeps beside its rules while it runs."""

from __future__ import annotations

import torch

from ps_server.running import NARROWED_BUCKETS, Narrowed


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
