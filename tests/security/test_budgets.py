"""No principal takes all that there is for all: with every budget half used up by one, another finds its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import LimitExceeded
from ps_protocol.v1 import cluster_pb2, feed_pb2, jobs_pb2, rounds_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access
from ps_runtime.grpc_status import error_from
from ps_server.core.limits import Limits, share
from ps_server.server import _feed_bytes, _with_memory
from ps_server.shard.pulls import MESSAGE_BYTES
from tests.tools.cluster import Cluster, until
from tests.tools.raw_worker import RawWorker, vector_job
from tests.tools.table_worker import table_job

SECONDS = 20.0
ONE, TWO, READER, ADMIN = (letter * 32 for letter in "otra")
LIMITS = Limits(jobs=6, views=4, feeds=4, state_bytes=100, all_state_bytes=400, round_bytes=400, all_round_bytes=400)


def with_tokens(make_cluster: Callable[..., Cluster], tmp_path: Path, limits: Limits) -> Cluster:
    """A shard with a principal for each role, two of them workers."""
    tokens = tmp_path / "tokens"
    lines = (
        f"worker {ONE} name=one",
        f"worker {TWO} name=two",
        f"reader {READER} name=reader",
        f"admin {ADMIN}",
        f"cluster {'c' * 32}",
    )
    tokens.write_text("\n".join(lines))
    tokens.chmod(0o600)
    kept = tmp_path / "kept"
    return make_cluster(shards=1, tokens=tokens, limits=limits, checkpoint_dir=kept, lease=120.0)  # without heartbeats


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster], tmp_path: Path) -> Cluster:
    return with_tokens(make_cluster, tmp_path, LIMITS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def shown(token: str) -> Access:
    return Access(token=lambda: token)


def register(cluster: Cluster, token: str, name: str) -> None:
    """Raises the error that the coordinator answers with."""
    spec = job_spec_message(vector_job(name, "sync", cells=16, world_size=1))
    with open_channel(cluster.address, shown(token)) as channel:
        try:
            JobServiceStub(channel).RegisterJob(jobs_pb2.RegisterJobRequest(spec=spec), timeout=SECONDS)
        except grpc.RpcError as error:
            raise error_from(error, "it") from None


def opens(call: grpc.Call) -> bool:
    """Whether a stream has a first answer. Raises the error that there is in its place."""
    try:
        return bool(next(call))
    except grpc.RpcError as error:
        raise error_from(error, "it") from None


def test_jobs(cluster: Cluster) -> None:
    register(cluster, ONE, "a")
    register(cluster, ONE, "b")
    register(cluster, ONE, "c")
    with pytest.raises(LimitExceeded, match="token:one has 3 jobs: that is its share, half of max-jobs, which is 6"):
        register(cluster, ONE, "d")
    register(cluster, ONE, "a")  # it is there
    register(cluster, TWO, "d")


def test_views(cluster: Cluster, stack: ExitStack) -> None:
    channels = [stack.enter_context(open_channel(cluster.address, shown(token))) for token in (READER, ADMIN)]
    watch = [ClusterServiceStub(channel).WatchStatus for channel in channels]
    request = cluster_pb2.WatchStatusRequest()
    kept = [watch[0](request, timeout=SECONDS) for _ in range(2)]
    assert all(map(opens, kept))
    with pytest.raises(LimitExceeded, match="token:reader watches this cluster 2 times: its share is half"):
        opens(watch[0](request, timeout=SECONDS))
    assert opens(watch[1](request, timeout=SECONDS))


def test_feeds(cluster: Cluster, stack: ExitStack) -> None:
    spec = table_job()
    stack.enter_context(RawWorker(cluster.address, spec, 0, shown(ONE)))
    request = feed_pb2.WatchRowsRequest(job=spec.name, table=spec.tables[0].rows.name)

    def watch(token: str) -> grpc.Call:
        channel = stack.enter_context(open_channel(cluster.address, shown(token)))
        method = channel.unary_stream(
            "/ps_protocol.v1.FeedService/WatchRows", feed_pb2.WatchRowsRequest.SerializeToString
        )
        return method(request, timeout=SECONDS)

    feeds = cluster.shards[0].feeds
    kept = [watch(ONE) for _ in range(2)]
    until(lambda: len(feeds._open) == 2, "both feeds")
    with pytest.raises(LimitExceeded, match=r"token:one has 2 feeds of job .* here: its share is half of max-feeds"):
        opens(watch(ONE))
    kept.append(watch(TWO))
    until(lambda: len(feeds._open) == 3, "another's feed")


def test_the_memory_of_feeds(make_cluster: Callable[..., Cluster], tmp_path: Path, stack: ExitStack) -> None:
    """Of all jobs that a principal follows: each feed counts as the largest message that may lie unread."""
    cluster = with_tokens(make_cluster, tmp_path, replace(LIMITS, feeds=64, feed_bytes=3 * MESSAGE_BYTES))
    feeds = cluster.shards[0].feeds
    for token, name in ((ONE, "a"), (ONE, "b"), (TWO, "c")):
        stack.enter_context(RawWorker(cluster.address, replace(table_job(), name=name), 0, shown(token)))

    def watch(token: str, job: str) -> grpc.Call:
        channel = stack.enter_context(open_channel(cluster.address, shown(token)))
        method = channel.unary_stream(
            "/ps_protocol.v1.FeedService/WatchRows", feed_pb2.WatchRowsRequest.SerializeToString
        )
        return method(feed_pb2.WatchRowsRequest(job=job, table=table_job().tables[0].rows.name), timeout=SECONDS)

    kept = [watch(ONE, "a"), watch(ONE, "a"), watch(ONE, "b")]
    until(lambda: len(feeds._open) == 3, "its feeds")
    with pytest.raises(LimitExceeded, match=f"token:one has feeds .* max-feed-bytes is {3 * MESSAGE_BYTES}"):
        opens(watch(ONE, "b"))
    kept.append(watch(TWO, "c"))
    until(lambda: len(feeds._open) == 4, "another's feed")
    kept[0].cancel()
    until(lambda: len(feeds._open) == 3, "the end of one")
    kept.append(watch(ONE, "b"))
    until(lambda: len(feeds._open) == 4, "another one in its place")


def test_what_feeds_may_take_is_a_part_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _feed_bytes(replace(LIMITS, feed_bytes=1)) == 1
    for free, most in ((None, 2**28), (2**28, 2**28), (2**34, 2**32)):
        monkeypatch.setattr("ps_server.server.free_bytes", lambda free=free: free)
        assert _feed_bytes(LIMITS) == most


def test_states_of_workers(cluster: Cluster, stack: ExitStack) -> None:
    """Of all jobs that a principal began, whichever worker sends them."""
    workers = []
    for token, name in ((ONE, "a"), (ONE, "b"), (TWO, "c")):
        spec = vector_job(name, "sync", cells=16, world_size=2)
        workers.append([stack.enter_context(RawWorker(cluster.address, spec, rank, shown(token))) for rank in range(2)])
    first, second, other = workers
    first[0].save_state(0, bytes(100))
    second[0].save_state(0, bytes(100))
    for worker in (first[1], second[1]):
        with pytest.raises(LimitExceeded, match="token:one has 200 bytes of workers' states, and sent 1 more"):
            worker.save_state(0, bytes(1))
    other[0].save_state(0, bytes(100))
    other[1].save_state(0, bytes(100))


def test_values_of_rounds(cluster: Cluster, stack: ExitStack) -> None:
    def gather(worker: RawWorker, size: int) -> bool:
        request = rounds_pb2.GatherValuesRequest(worker=worker.identity(), round=1, value=bytes(size))
        return opens(worker.rounds.GatherValues(request, timeout=SECONDS))

    one, more, other, again = (
        stack.enter_context(RawWorker(cluster.address, vector_job(name, "sync", 16, 2), 0, shown(token)))
        for token, name in ((ONE, "a"), (ONE, "b"), (TWO, "c"), (ONE, "d"))
    )
    assert gather(one, 150)
    with pytest.raises(LimitExceeded, match="token:one has 150 bytes of values that workers exchange, and sent 51"):
        gather(more, 51)
    assert gather(more, 50)
    assert gather(more, 50), "a repeat"
    assert gather(other, 200)
    cluster.coordinator.job("a").end()
    assert gather(again, 150), "what ends gives its room back"


def test_past_rounds_take_no_room_of_new_ones(cluster: Cluster, stack: ExitStack) -> None:
    """They are kept for workers that start late, in jobs that gather for days."""
    workers = [
        stack.enter_context(RawWorker(cluster.address, vector_job(name, "sync", 16, 1), 0, shown(ONE)))
        for name in ("a", "b")
    ]
    for number in range(1, 8):
        for worker in workers:
            request = rounds_pb2.GatherValuesRequest(worker=worker.identity(), round=number, value=bytes(60))
            assert opens(worker.rounds.GatherValues(request, timeout=SECONDS))
    _, kept = cluster.coordinator.job("a").rounds.done()
    assert [each.number for each in kept] == [5, 6, 7], "an equal part of 400 bytes"


def test_what_workers_may_leave_with_a_coordinator_is_a_part_of_the_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.server.free_bytes", lambda: 800 * 2**20)
    alone, with_shard = _with_memory(Limits(), is_shard=False), _with_memory(Limits(), is_shard=True)
    assert (alone.all_state_bytes, alone.all_round_bytes) == (400 * 2**20, 100 * 2**20)
    assert (with_shard.all_state_bytes, with_shard.all_round_bytes) == (100 * 2**20, 64 * 2**20), "a whole round"
    assert _with_memory(LIMITS, is_shard=True) == LIMITS, "what is given holds"
    assert [share(limit) for limit in (1, 2, 3, 64, math.inf)] == [1, 1, 1, 32, math.inf]
