"""Pushes of several buckets at once: what is staged is applied, also where another of the same call is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from ps_protocol.errors import Backlogged, InvalidRequest, NonFiniteGradient
from ps_protocol.identity import Identity
from ps_protocol.layout import bucket_layout
from ps_protocol.messages.data import Notice, PullCall, PushCall, PushedBucket, PushKind
from ps_protocol.segment_layout import SegmentMap, segment_plan
from ps_runtime.settings import DEFAULT_SHARED_DIRECTORY
from ps_server.shard.outbox import Answer
from ps_server.shard.shard import Shard
from ps_worker.cluster.local_segment import LocalSegment
from tests.tools.outbox import Answers
from tests.tools.partitions import job_spec, lone_shard, payload, push

BUCKET = 128  # bytes
CALLER = "them"


@pytest.fixture
def shard() -> Shard:
    """Two workers in sync; a principal may have the bytes of one bucket staged."""
    return lone_shard(principal_limit=BUCKET)


def lend_segment(shard: Shard) -> None:
    """Worker 1 attaches a segment with gradients of 3."""
    spec = job_spec("sync")
    plan = segment_plan(bucket_layout(spec.parameters, spec.bucket_bytes))
    segment = LocalSegment(plan.size, DEFAULT_SHARED_DIRECTORY)
    SegmentMap(segment.memory, plan).gradients["float32"][:] = 3.0
    shard.attach(Identity("sums", 1, 2), segment.offer)
    segment.hide()


def push_shared(shard: Shard) -> list[Answer]:
    shard.push(SHARED, CALLER)
    return []


def push_and_pull(shard: Shard) -> list[Answer]:
    outbox = Answers()
    shard.exchange(SHARED, PullCall(Identity("sums", 1, 2), 1, (0, 1), in_segment=True), outbox, CALLER)
    return outbox.told


GRADIENTS = tuple(PushedBucket(index, PushKind.GRADIENT) for index in (0, 1))
SHARED = PushCall(Identity("sums", 1, 2), 1, GRADIENTS, None)


def test_a_push_that_names_a_bucket_twice_is_refused_and_changes_nothing(shard: Shard) -> None:
    twice = replace(SHARED, buckets=GRADIENTS[:1] * 2, payload=bytes(256))
    with pytest.raises(InvalidRequest, match="a push names each bucket at most once, got 0 twice"):
        shard.push(twice, CALLER)
    assert shard.statistics().jobs["sums"].staged_bytes == 0


@pytest.mark.parametrize("call", [push_shared, push_and_pull])
def test_a_push_that_is_refused_half_way_is_applied_so_far_and_whole_when_it_is_sent_again(
    shard: Shard, call: Callable[[Shard], list[Answer]]
) -> None:
    lend_segment(shard)
    buckets = shard.jobs()["sums"].buckets
    shard.push(push(0))  # worker 0's: the update of bucket 0 waits for worker 1, that of bucket 1 for both
    with pytest.raises(Backlogged, match="max-caller-bytes"):
        call(shard)
    assert [buckets[index].rule.version for index in (0, 1)] == [1, 0], "what completed an update is not left lying"
    assert buckets[0].unit.weights.flat.tolist() == [-2.0] * 32
    told = call(shard)  # bucket 0 is a repeat, and there is room for bucket 1 now
    shard.push(push(1))
    assert [buckets[index].rule.version for index in (0, 1)] == [1, 1]
    assert buckets[1].unit.weights.flat.tolist() == [-2.0] * 32
    if call is push_and_pull:
        [notice] = told
        assert isinstance(notice, Notice)
        assert sorted((bucket.bucket, bucket.version) for bucket in notice.buckets) == [(0, 1), (1, 1)]
        assert notice.staged_seconds is not None


# -- several buckets in one payload ----------------------------------------------------------------------------------


def several(data: bytes, *buckets: PushedBucket, rank: int = 0) -> PushCall:
    return PushCall(Identity("sums", rank, rank + 1), 1, buckets, data)


def gradient(index: int, wire_format: str = "") -> PushedBucket:
    return PushedBucket(index, PushKind.GRADIENT, wire_format=wire_format)


def versions_of(shard: Shard) -> list[int]:
    return [shard.jobs()["sums"].buckets[index].rule.version for index in (0, 1)]


def test_buckets_in_one_payload_are_each_stepped_by_their_own_part_and_skips_have_none(shard: Shard) -> None:
    both = payload(1.0) + payload(3.0)
    assert [staged.duplicate for staged in shard.push(several(both, gradient(0), gradient(1)))] == [False, False]
    assert [staged.duplicate for staged in shard.push(several(both, gradient(0), gradient(1)))] == [True, True]
    shard.push(several(payload(1.0), PushedBucket(0, PushKind.SKIP, frozenset({0})), gradient(1), rank=1))
    buckets = shard.jobs()["sums"].buckets
    assert versions_of(shard) == [1, 1]
    assert [set(buckets[index].unit.weights.flat.tolist()) for index in (0, 1)] == [{-0.5}, {-2.0}]


@pytest.mark.parametrize("surplus", [-4, 4])
def test_a_payload_of_several_buckets_has_their_size_and_otherwise_stages_nothing(shard: Shard, surplus: int) -> None:
    data = bytes(2 * BUCKET + surplus)
    with pytest.raises(InvalidRequest, match="expected"):
        shard.push(several(data, gradient(0), gradient(1)))
    assert [staged.duplicate for staged in shard.push(several(payload(1.0), gradient(0)))] == [False]


@pytest.mark.parametrize(("wire_format", "job_format"), [("bfloat16", "float32"), ("", "float16")])
def test_a_gradient_in_another_format_than_the_jobs_is_refused(wire_format: str, job_format: str) -> None:
    shard = lone_shard(spec=replace(job_spec(), gradient_wire=job_format))
    with pytest.raises(InvalidRequest, match=f"bucket 0: expected elements as {job_format}"):
        shard.push(several(payload(1.0), gradient(0, wire_format)))


def test_elements_that_come_in_the_message_are_looked_at_whatever_its_sender_says_of_them(shard: Shard) -> None:
    pushed = PushedBucket(0, PushKind.GRADIENT, finite=True)
    with pytest.raises(NonFiniteGradient):
        shard.push(several(payload(math.nan), pushed))
    assert [staged.duplicate for staged in shard.push(several(payload(1.0), pushed))] == [False]
