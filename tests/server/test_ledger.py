"""Bytes by caller: counted for as long as they are held, and never the reason why nobody gets on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import Backlogged
from ps_server.shard.ledger import Ledger
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from tests.simulation.simulator import initial, job_spec, push

BUCKET = 128  # bytes


def test_bytes_are_booked_for_as_long_as_their_ticket_is_held() -> None:
    ledger = Ledger(100)
    first = ledger.take("one", 60)
    second = ledger.take("one", 60)
    other = ledger.take("two", 1000)
    assert (first.within, second.within) == (True, False)
    assert other.within, "alone, what is larger than the limit still goes through"
    assert (ledger.held("one"), ledger.held("two")) == (120, 1000)
    del first, other
    assert (ledger.held("one"), ledger.held("two")) == (60, 0)
    assert ledger.take("one", 40).within
    del second
    assert ledger.held("one") == 0


class _Inline:
    """Applies at once, in the thread that pushed."""

    def submit(self, task: object, *arguments: object) -> None:
        task(*arguments)  # type: ignore[operator]

    def stop(self) -> None: ...


def shard_of(mode: str, workers: int, limit: int) -> Shard:
    """A shard with a job of three workers, of which no push waits for a thread."""
    made = Shard(ShardMetrics(CollectorRegistry()), caller_limit=limit)
    made._apply.stop()
    made._apply = _Inline()  # type: ignore[assignment]
    made.create_job(job_spec(mode), [0, 1, 2])
    for rank in range(workers):
        made.admit("sums", rank, rank + 1, 0)
    for index in range(3):
        made.push(initial(index))
    return made


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = shard_of("sync", 3, BUCKET)
    yield made
    made.stop()


def of(caller: str, bucket: int, rank: int, clock: int = 1) -> object:
    return replace(push(bucket, clock, rank, rank + 1), caller=caller)


def test_a_caller_past_its_bytes_is_told_to_come_back_whichever_worker_it_is(shard: Shard) -> None:
    shard.push(of("them", 0, 1))  # held back: worker 0 comes first
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        shard.push(of("them", 0, 2))
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        shard.push(of("them", 1, 1))
    assert shard.push(of("them", 0, 1)).duplicate, "a repeat is acknowledged all the same"
    assert shard.push(of("others", 1, 1)) is not None
    assert shard.push(of("them", 0, 2 - 2)).version == 0  # worker 0, for whom all of them wait
    assert shard._ledger.held("them") == 0 or shard.jobs()["sums"].state.buckets[0].protocol.version == 0
    shard.push(of("them", 0, 2))
    assert shard.jobs()["sums"].state.buckets[0].protocol.version == 1
    assert shard._ledger.held("them") == 0


def test_what_a_job_holds_is_given_back_when_it_ends(shard: Shard) -> None:
    shard.push(of("them", 0, 1))
    assert shard._ledger.held("them") == BUCKET
    shard.drop_job("sums")
    assert shard._ledger.held("them") == 0


def test_a_refused_push_is_not_counted(shard: Shard) -> None:
    shard.push(of("them", 0, 1))
    for _ in range(5):
        with pytest.raises(Backlogged):
            shard.push(of("them", 1, 2))
    assert shard._ledger.held("them") == BUCKET


def test_what_is_pushed_for_the_last_time_before_a_worker_leaves_stays_counted(shard: Shard) -> None:
    """Or whoever joins, pushes and leaves, again and again, could fill the shard."""
    shard.push(of("them", 0, 1))
    shard.retire("sums", 1, 2)
    assert shard._ledger.held("them") == BUCKET
    with pytest.raises(Backlogged):
        shard.push(of("them", 1, 2))


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
@pytest.mark.parametrize("seed", range(5))
def test_the_limit_keeps_nobody_from_getting_on(mode: str, seed: int) -> None:
    """Every worker is the same caller, which may stage one bucket. Whoever is refused tries again later."""
    shard = shard_of(mode, 3, BUCKET)
    order = random.Random(seed)
    left = {(bucket, rank): 1 for bucket in (0, 1) for rank in range(3)}  # the next clock of each
    for _ in range(1000):
        if not left:
            break
        bucket, rank = order.choice(sorted(left))
        clock = left[bucket, rank]
        try:
            shard.push(of("them", bucket, rank, clock))
        except Backlogged:
            continue
        left[bucket, rank] += 1
        if clock == 4:
            del left[bucket, rank]
    assert not left
    assert shard._ledger.held("them") == 0
    shard.stop()
