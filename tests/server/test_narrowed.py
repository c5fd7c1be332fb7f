"""Buckets in the wire format, which a shard narrows once for all workers, in memory that it uses again."""

from __future__ import annotations

import torch

from ps_protocol.tensors import PLAIN
from ps_server.shard.hosted_job import NARROWED_BUCKETS, Narrowed

CODEC = PLAIN["bfloat16"]


def of(number: float) -> torch.Tensor:
    return torch.full((1000,), number)


def test_a_version_is_narrowed_once_and_stays_as_it_is_while_somebody_sends_it() -> None:
    narrowed = Narrowed()
    first = narrowed.take(0, 1, of(1.0), CODEC)
    assert narrowed.take(0, 1, of(9.0), CODEC) is first
    second = narrowed.take(0, 2, of(2.0), CODEC)
    assert (first.values == 1).all()
    assert (second.values == 2).all()
    narrowed.give(first)
    third = narrowed.take(0, 3, of(3.0), CODEC)
    assert third.values.data_ptr() != first.values.data_ptr(), "one of two still sends it"
    narrowed.give(first)
    fourth = narrowed.take(0, 4, of(4.0), CODEC)
    assert fourth.values.data_ptr() == first.values.data_ptr(), "now the memory is used again"
    assert (second.values == 2).all()
    assert (third.values == 3).all()


def test_of_many_buckets_the_last_few_stay() -> None:
    narrowed = Narrowed()
    for index in range(NARROWED_BUCKETS + 1):
        narrowed.give(narrowed.take(index, 1, of(float(index)), CODEC))
    again = narrowed.take(1, 1, of(9.0), CODEC)
    assert (again.values == 1).all()
    assert (narrowed.take(0, 1, of(9.0), CODEC).values == 9).all()
