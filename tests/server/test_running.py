"""What a shard keeps beside its rules while it runs."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from ps_protocol.codecs import WIRE_FORMATS
from ps_server.shard.job import NARROWED_BUCKETS, Narrowed, Pull


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
    ("word_bytes", "said"),
    [(0, [b"", b"", b"", b"abcd"]), (2, [b"", b"ab", b"", b"cd"]), (3, [b"", b"", b"abc", b"d"])],
)
def test_a_worker_is_notified_after_so_many_bytes_or_at_the_end(word_bytes: int, said: list[bytes]) -> None:
    pull = Pull(0, 1, 1, cast(Any, None), 4, 0.0, word_bytes=word_bytes)
    found = []
    for word in (b"a", b"b", b"c", b"d"):
        pull.left -= 1
        found.append(pull.said(word, 1))
    assert found == said
