"""Pushes of several buckets at once: what is staged is applied, also where another of the same call is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.errors import Backlogged, PSError
from ps_protocol.layout import bucket_layout
from ps_protocol.segment_layout import SegmentMap, segment_plan
from ps_server.core.requests import PullCall, PushCall, PushedBucket, PushKind
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.shard.waiting import Answer, Notice
from ps_worker.cluster.shared_memory import LocalSegment
from tests.simulation.simulator import call_of, initial, job_spec, push

BUCKET = 128  # bytes
CALLER = "them"


class Answers:
    """An outbox that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Answer] = []
        self.error: PSError | None = None
        self.finished = False

    def tell(self, answer: Answer) -> None:
        self.told.append(answer)

    def lend(self, lent: Callable[[], AbstractContextManager[Answer]]) -> None:
        with lent() as answer:
            self.told.append(answer)

    def finish(self) -> None:
        self.finished = True

    def fail(self, error: PSError) -> None:
        self.error = error

    def on_close(self, callback: Callable[[], None]) -> None: ...


@pytest.fixture
def shard() -> Iterator[Shard]:
    """Two workers in sync, of which one principal may stage one bucket; worker 1 has a segment."""
    shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), principal_limit=BUCKET)
    shard.create_job(job_spec("sync"), [0, 1, 2])
    for rank in (0, 1):
        shard.add_worker("sums", rank, rank + 1, 0)
    for index in range(3):
        shard.push(call_of(initial(index)))
    yield shard
    shard.stop()


def lend_segment(shard: Shard) -> None:
    """Worker 1 attaches a segment with gradients of 3."""
    spec = job_spec("sync")
    plan = segment_plan(spec, bucket_layout(spec.parameters, spec.bucket_bytes))
    segment = LocalSegment(plan.size, None)
    SegmentMap(segment.memory, plan).gradients["float32"][:] = 3.0
    shard.attach("sums", 1, 2, segment.location, segment.nonce)
    segment.hide()


def push_shared(shard: Shard) -> list[Answer]:
    shard.push(SHARED, CALLER)
    return []


def push_and_pull(shard: Shard) -> list[Answer]:
    outbox = Answers()
    shard.exchange(SHARED, PullCall("sums", 1, 2, 1, (0, 1), in_segment=True), outbox, CALLER)
    return outbox.told


GRADIENTS = tuple(PushedBucket(index, PushKind.GRADIENT) for index in (0, 1))
SHARED = PushCall("sums", 1, 2, 1, GRADIENTS, None)


@pytest.mark.parametrize("call", [push_shared, push_and_pull])
def test_a_push_that_is_refused_half_way_is_applied_so_far_and_whole_when_it_is_sent_again(
    shard: Shard, call: Callable[[Shard], list[Answer]]
) -> None:
    lend_segment(shard)
    buckets = shard.jobs()["sums"].buckets
    shard.push(call_of(push(0)))  # worker 0's: the update of bucket 0 waits for worker 1, that of bucket 1 for both
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        call(shard)
    assert [buckets[index].rule.version for index in (0, 1)] == [1, 0], "what completed an update is not left lying"
    assert buckets[0].weights.flat.tolist() == [-2.0] * 32
    told = call(shard)  # bucket 0 is a repeat, and there is room for bucket 1 now
    shard.push(call_of(push(1)))
    assert [buckets[index].rule.version for index in (0, 1)] == [1, 1]
    assert buckets[1].weights.flat.tolist() == [-2.0] * 32
    if call is push_and_pull:
        [notice] = told
        assert isinstance(notice, Notice)
        assert sorted((bucket.bucket, bucket.version) for bucket in notice.buckets) == [(0, 1), (1, 1)]
        assert notice.staged_seconds is not None
