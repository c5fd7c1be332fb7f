"""When pushes were staged and applied: noted for those that ask, and forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from ps_protocol.identity import Identity
from ps_protocol.messages.data import BucketTimes, Notice, PullCall, PulledBucket
from ps_server.shard.outbox import Outbox
from ps_server.shard.shard import Shard
from tests.tools.partitions import lone_shard, push


class Stream(Outbox):
    """Where the answers to one pull go."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def tell(self, answer: Any) -> None:
        self.answers.append(answer)

    def lend(self, lent: Any, is_small: bool = False) -> None:
        with lent() as (answer, _):
            self.answers.append(answer)

    def finish(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise error

    def on_close(self, callback: Any) -> None:
        self.over = callback


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


def shard_with(clock: Hand, mode: str = "sync") -> Shard:
    made = lone_shard(mode)
    made._pulls._clock, made._pulls._began = clock, 1000.0
    return made


def pull(shard: Shard, rank: int, at: int, *buckets: int, times: bool = True) -> Stream:
    stream = Stream()
    shard.pull(PullCall(Identity("sums", rank, rank + 1), at, buckets, times_wanted=times), stream, "them")  # type: ignore[arg-type]
    return stream


def test_a_pull_of_no_bucket_reads_the_clock_which_begins_with_the_shard(clock: Hand) -> None:
    shard = shard_with(clock)
    clock.now = 1002.5
    assert pull(shard, 0, 0).answers == [Notice(clock=2.5)]
    assert pull(shard, 0, 0, times=False).answers == []


@pytest.mark.parametrize(("mode", "times"), [("sync", (1.0, 3.0, 3.0)), ("ssp:0", (1.0, 1.0, 3.0))])
def test_each_moment_is_where_it_happens(clock: Hand, mode: str, times: tuple[float, float, float]) -> None:
    shard = shard_with(clock, mode)
    pull(shard, 0, 0)
    clock.now = 1001.0
    shard.push(push(0, 1, 0))
    clock.now = 1002.0
    waiting = pull(shard, 0, 1, 0)
    assert waiting.answers == []
    clock.now = 1003.0
    shard.push(push(0, 1, 1, 2))
    [bucket] = waiting.answers
    assert isinstance(bucket, PulledBucket)
    assert bucket.times == BucketTimes(*times)
    repeat = pull(shard, 0, 1, 0)
    assert repeat.answers[0].times == BucketTimes(*times[:2], 3.0), "a pull that is repeated has them again"


def test_a_push_that_is_repeated_was_staged_the_first_time(clock: Hand) -> None:
    shard = shard_with(clock)
    pull(shard, 0, 0)
    for now in (1001.0, 1002.0):
        clock.now = now
        shard.push(push(0, 1, 0))
    shard.push(push(0, 1, 1, 2))
    assert pull(shard, 0, 1, 0).answers[0].times[0] == 1.0


def test_of_those_who_do_not_ask_nothing_is_noted(clock: Hand) -> None:
    shard = shard_with(clock)
    job = shard.jobs()["sums"]
    pull(shard, 0, 0)
    for rank in (0, 1):
        shard.push(push(0, 1, rank, rank + 1))
    assert list(job.times._pushes) == [0]
    assert pull(shard, 1, 1, 0).answers[0].times is None, "what was pushed before it asked has no times"
    assert pull(shard, 0, 1, 0, times=False).answers[0].times is None
    assert list(job.times._pushes) == [1]
    shard.remove_worker("sums", 1, 2)
    assert not job.times._pushes


def test_a_reader_is_told_no_times(clock: Hand) -> None:
    shard = shard_with(clock)
    stream = Stream()
    call = PullCall(Identity("sums", 0, 0), 0, (0,), times_wanted=True)
    shard.pull(call, stream, "them")  # type: ignore[arg-type]
    assert [answer.times for answer in stream.answers] == [None]
    assert not shard.jobs()["sums"].times._pushes
