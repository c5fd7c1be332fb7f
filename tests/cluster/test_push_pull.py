"""Pushes and the pull of a step in one call, by way of a segment: the same rules as for calls of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ps_protocol.errors import InvalidRequest, NotFound, NotShared, OutOfOrder, PSError, UnknownWorker
from tests.tools.cluster import Cluster, until
from tests.tools.sharing_worker import SharingWorker

CELLS = 48  # three buckets, on one shard


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One shard, on which each test has a job of its own. Its workers send no heartbeats."""
    running = Cluster(shards=1, lease=600.0)
    yield running
    running.stop()


@pytest.fixture
def alone(cluster: Cluster, job: str) -> Iterator[SharingWorker]:
    with SharingWorker(cluster.address, job, CELLS) as sharer:
        yield sharer


@pytest.fixture
def both(cluster: Cluster, job: str) -> Iterator[list[SharingWorker]]:
    with (
        SharingWorker(cluster.address, job, CELLS, 0, 2) as first,
        SharingWorker(cluster.address, job, CELLS, 1, 2) as second,
    ):
        yield [first, second]


def test_weights_come_with_the_update_of_the_same_call(alone: SharingWorker) -> None:
    alone.memory.gradients["float32"][:CELLS] = torch.arange(CELLS).float()
    found = alone.headers(alone.exchange(1, [0, 1, 2], [0, 1, 2]))
    assert [(header.bucket, header.version) for header in found] == [(0, 1), (1, 1), (2, 1)]
    assert torch.equal(alone.memory.weights["float32"][:CELLS], -torch.arange(CELLS).float())


def test_a_repeat_is_not_applied_and_brings_the_weights_all_the_same(alone: SharingWorker) -> None:
    alone.memory.gradients["float32"][:CELLS] = 1.0
    for pushed in ([0, 1], [0, 1, 2], [0, 1, 2]):  # as if the answer to the first were lost
        alone.headers(alone.exchange(1, pushed, pushed))
    assert torch.equal(alone.memory.weights["float32"][:CELLS], torch.full((CELLS,), -1.0))


def test_who_waits_for_others_is_told_that_its_pushes_are_staged_and_since_when(both: list[SharingWorker]) -> None:
    first, second = both
    call = first.exchange(1, [0, 1, 2], [0, 1, 2])
    told = next(call)
    assert not told.buckets
    assert told.staged_duration.ToNanoseconds() >= 1e8
    other = second.exchange(1, [0, 1, 2], [0, 1, 2])
    told = next(other)
    assert told.HasField("staged_duration"), "in the first message, whatever else it brings"
    assert len(told.buckets) + len(second.headers(other)) == 3
    found = list(call)
    assert sum(len(message.buckets) for message in found) == 3
    assert not any(message.HasField("staged_duration") for message in found), "it is said once"


@pytest.mark.parametrize(
    ("clock", "pushed", "pulled", "other", "error"),
    [
        (1, [0, 1], [0, 9], {}, NotFound),
        (1, [0, 1], [0, 0], {}, InvalidRequest),
        (1, [0, 0], [0], {}, InvalidRequest),
        (1, [0, 9], [0], {}, NotFound),
        (3, [0, 1], [0], {}, OutOfOrder),
        (1, [0, 1], [0], {"incarnation": 7}, UnknownWorker),
        (1, [0, 1], [0], {"incarnation": 0}, PSError),
    ],
)
def test_what_is_wrong_changes_nothing(
    alone: SharingWorker, clock: int, pushed: list[int], pulled: list[int], other: dict[str, int], error: type[PSError]
) -> None:
    alone.memory.gradients["float32"][:CELLS] = 1.0
    with pytest.raises(error):
        alone.headers(alone.exchange(clock, pushed, pulled, **other))
    alone.headers(alone.exchange(1, [0, 1, 2], [0, 1, 2]))
    assert torch.equal(alone.memory.weights["float32"][:CELLS], torch.full((CELLS,), -1.0))


def test_without_a_segment_it_is_refused(alone: SharingWorker) -> None:
    alone.raw.join()  # as a new incarnation, which has attached none
    with pytest.raises(NotShared):
        alone.headers(alone.exchange(1, [0], []))


def test_a_worker_that_is_cut_off_while_it_waits_leaves_what_it_pushed(
    cluster: Cluster, job: str, both: list[SharingWorker]
) -> None:
    first, second = both
    first.memory.gradients["float32"][:CELLS] = 3.0
    second.memory.gradients["float32"][:CELLS] = 1.0
    call = first.exchange(1, [0, 1, 2], [0, 1, 2])
    next(call)
    call.cancel()
    [shard] = cluster.shards
    until(lambda: not any(bucket.waiters for bucket in shard.jobs()[job].buckets.values()))
    second.headers(second.exchange(1, [0, 1, 2], [0, 1, 2]))
    assert torch.equal(second.memory.weights["float32"][:CELLS], torch.full((CELLS,), -2.0))
