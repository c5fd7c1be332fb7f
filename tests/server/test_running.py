"""What a shard keeps beside its rules while it runs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from ps_protocol.codecs import WIRE_FORMATS
from ps_server.shard.job import NARROWED_BUCKETS, Narrowed, Pull


def test_a_bucket_is_narrowed_once_for_all_who_wait_for_it() -> None:
    weights = torch.arange(8.0) + 1 / 3
    narrowed = Narrowed()
    first = narrowed.get(0, 1, weights, WIRE_FORMATS["bfloat16"])
    weights += 1  # so that narrowing it again would show
    assert narrowed.get(0, 1, weights, WIRE_FORMATS["bfloat16"]) is first
    assert torch.equal(first, (weights - 1).bfloat16())


def test_the_weights_of_another_version_are_narrowed_anew() -> None:
    weights = torch.arange(8.0)
    narrowed = Narrowed()
    narrowed.get(0, 1, weights, WIRE_FORMATS["float16"])
    weights += 1
    assert torch.equal(narrowed.get(0, 2, weights, WIRE_FORMATS["float16"]), weights.half())
    assert torch.equal(narrowed.get(0, 1, weights, WIRE_FORMATS["float16"]), weights.half())


def test_only_a_few_are_kept() -> None:
    narrowed = Narrowed()
    weights = torch.ones(8)
    kept = [narrowed.get(index, 1, weights, WIRE_FORMATS["bfloat16"]) for index in range(NARROWED_BUCKETS + 1)]
    assert narrowed.get(1, 1, weights, WIRE_FORMATS["bfloat16"]) is kept[1], "among the last"
    assert narrowed.get(0, 1, weights, WIRE_FORMATS["bfloat16"]) is not kept[0], "the oldest was let go"


@pytest.mark.parametrize(
    ("word_bytes", "said"),
    [(0, [b"", b"", b"", b"abcd"]), (2, [b"", b"ab", b"", b"cd"]), (3, [b"", b"", b"abc", b"d"])],
)
def test_a_worker_is_told_of_buckets_by_so_many_bytes_or_of_all(word_bytes: int, said: list[bytes]) -> None:
    pull = Pull(0, 1, 1, cast(Any, None), 4, 0.0, word_bytes=word_bytes)
    found = []
    for word in (b"a", b"b", b"c", b"d"):
        pull.left -= 1
        found.append(pull.said(word, 1))
    assert found == said
