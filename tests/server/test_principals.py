"""Bytes by principal: counted for as long as they are held, and never the reason why nobody gets on."""

from __future__ import annotations

import math
import random

import pytest

from ps_protocol.errors import Backlogged
from ps_protocol.messages.data import PushCall
from ps_server.core.budget import PrincipalBudget, StagingBudget
from ps_server.shard.shard import Shard
from tests.tools.partitions import lone_shard, push

BUCKET = 128  # bytes


def test_bytes_count_for_their_principal_until_they_are_released_whichever_job_they_are_of() -> None:
    principals = PrincipalBudget(100)
    job, other_job = StagingBudget(principals), StagingBudget(principals)
    assert job.reserve(0, 1, 60, math.inf, principal="one", charge=60)
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        other_job.reserve(0, 1, 60, math.inf, principal="one", charge=60)
    assert other_job.reserve(0, 1, 60, math.inf, principal="one", charge=60, always=lambda: True)
    assert job.reserve(0, 2, 1000, math.inf, principal="two", charge=1000), "alone, what is larger goes through"
    assert (principals.bytes_of("one"), principals.bytes_of("two")) == (120, 1000)
    job.release_all()
    assert (principals.bytes_of("one"), principals.bytes_of("two"), job.bytes) == (60, 0, 0)
    assert job.reserve(1, 1, 40, math.inf, principal="one", charge=40)
    other_job.release(0, 1)
    other_job.release(0, 1)  # nothing is left
    assert principals.bytes_of("one") == 40


def test_what_takes_the_place_of_bytes_of_the_same_worker_and_bucket_counts_instead_of_them() -> None:
    principals = PrincipalBudget(100)
    job = StagingBudget(principals)
    assert job.reserve(0, 1, 90, 100, principal="one", charge=90)
    assert job.reserve(0, 1, 100, 100, principal="one", charge=100)
    assert not job.reserve(1, 1, 1, 100, principal="two", charge=1), "past the job's limit"
    assert (job.bytes, principals.bytes_of("one"), principals.bytes_of("two")) == (100, 100, 0)
    assert job.reserve(0, 1, 50, 100, principal="two", charge=50)
    assert (job.bytes, principals.bytes_of("one"), principals.bytes_of("two")) == (50, 0, 50)


@pytest.fixture
def shard() -> Shard:
    """Three workers in sync; a principal may have the bytes of one bucket staged."""
    return lone_shard("sync", 3, principal_limit=BUCKET)


def of(principal: str, bucket: int, rank: int, clock: int = 1) -> tuple[PushCall, str]:
    return push(bucket, clock, rank, rank + 1), principal


def test_a_caller_past_its_bytes_is_told_to_come_back_whichever_worker_it_is(shard: Shard) -> None:
    shard.push(*of("them", 0, 1))  # held back: worker 0 comes first
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        shard.push(*of("them", 0, 2))
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        shard.push(*of("them", 1, 1))
    [again] = shard.push(*of("them", 0, 1))
    assert again.duplicate, "a repeat is acknowledged all the same"
    assert shard.push(*of("others", 1, 1))
    shard.push(*of("them", 0, 0))  # all wait for it
    shard.push(*of("them", 0, 2))
    assert shard.jobs()["sums"].buckets[0].rule.version == 1
    assert shard.principals.bytes_of("them") == 0


def test_what_a_job_holds_is_given_back_when_it_ends(shard: Shard) -> None:
    shard.push(*of("them", 0, 1))
    assert shard.principals.bytes_of("them") == BUCKET
    shard.drop_job("sums")
    assert shard.principals.bytes_of("them") == 0


def test_what_is_pushed_for_the_last_time_before_a_worker_leaves_stays_counted(shard: Shard) -> None:
    """Or whoever joins, pushes and leaves, again and again, could fill the shard."""
    shard.push(*of("them", 0, 1))
    shard.remove_worker("sums", 1, 2)
    assert shard.principals.bytes_of("them") == BUCKET
    with pytest.raises(Backlogged):
        shard.push(*of("them", 1, 2))


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
@pytest.mark.parametrize("seed", range(5))
def test_the_limit_keeps_nobody_from_getting_on(mode: str, seed: int) -> None:
    """Every worker is the same caller, which may stage one bucket. Whoever is refused tries again later."""
    shard = lone_shard(mode, 3, principal_limit=BUCKET)
    order = random.Random(seed)
    left = {(bucket, rank): 1 for bucket in (0, 1) for rank in range(3)}  # the next clock of each
    for _ in range(1000):
        if not left:
            break
        bucket, rank = order.choice(sorted(left))
        clock = left[bucket, rank]
        try:
            shard.push(*of("them", bucket, rank, clock))
        except Backlogged:
            continue
        left[bucket, rank] += 1
        if clock == 4:
            del left[bucket, rank]
    assert not left
    assert shard.principals.bytes_of("them") == 0
