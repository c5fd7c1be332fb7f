"""What was found by fuzzing and by reading: each sentence says what it did before it was closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import Backlogged, Forbidden, InvalidRequest, LimitExceeded, NotFound, PSError
from ps_protocol.identity import Identity
from ps_protocol.layout import ParameterSpec
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.v1 import cluster_pb2, data_pb2, job_pb2, jobs_pb2, membership_pb2, shard_pb2, types_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.shard_pb2_grpc import ShardServiceStub
from ps_protocol.versions import VERSION
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access
from ps_server.config import ServerConfig
from ps_server.core.commands import AddWorker
from ps_server.core.limits import Limits
from ps_server.core.partition import JobPartition
from ps_server.server import Server
from tests.tools.cluster import Cluster, until
from tests.tools.fuzz_requests import JOB, KEY, SPEC, WORKER
from tests.tools.fuzzing import Target
from tests.tools.raw_worker import RawWorker, vector_job

MakeCluster = Callable[..., Cluster]
SECONDS = 20.0
LEASE = 120.0  # of workers that send no heartbeats


def create(buckets: Iterable[int] = (0,), **changes: Any) -> shard_pb2.CreateJobRequest:
    """A job of the target's, under another name and with some fields changed, sent straight to a shard."""
    return shard_pb2.CreateJobRequest(
        spec=job_spec_message(replace(SPEC, name="another", **changes)), buckets=buckets, run="1" * 16
    )


def parameter(name: str = "w", shape: tuple[int, ...] = (24,)) -> tuple[ParameterSpec, ...]:
    return (ParameterSpec(name, shape, "float32", 0),)


def push(kind: str = "SKIP", payload: bytes | None = None, betas: tuple[float, ...] = (), **worker: Any) -> Any:
    """A push of the worker for which bytes may speak, or of one that says it is another."""
    identity = types_pb2.WorkerIdentity(**{"job": JOB, "rank": 1, "incarnation": 2, "lease_key": KEY, **worker})
    pushed = data_pb2.BucketPush(kind=data_pb2.PushKind.Value(f"PUSH_KIND_{kind}"))
    header = data_pb2.PushHeader(worker=identity, clock=1, buckets=[pushed])
    if betas:
        group = job_pb2.GroupUpdate(group=0)
        group.hyper_parameters.add(name="betas").numbers.values.extend(betas)
        header.groups.append(group)
    return data_pb2.PushRequest(header=header, payload=payload)


def joins(**fields: Any) -> membership_pb2.JoinRequest:
    return membership_pb2.JoinRequest(**{"job": JOB, "host": "h", **fields})


def registers(metrics_address: str) -> cluster_pb2.RegisterShardRequest:
    shard = {"index": 0, "address": "127.0.0.1:1", "process": 1, "protocol_version": VERSION}
    return cluster_pb2.RegisterShardRequest(metrics_address=metrics_address, **shard)


# By sentence: what its requests are refused with now.
REFUSED: dict[str, tuple[type[PSError], list[Any]]] = {
    "buckets of no bytes, sent straight to a shard, divided by zero": (InvalidRequest, [create(bucket_bytes=0)]),
    "an optimizer that does not exist was looked up unchecked": (InvalidRequest, [create(optimizer="__import__")]),
    "a bucket beyond the layout, or one named twice, was an index error on the shard": (
        InvalidRequest,
        [create([2**32 - 1]), create([0, 0])],
    ),
    "a job larger than any memory was laid out before it was refused": (
        LimitExceeded,
        [create(parameters=parameter(shape=(2**25, 2**25)), bucket_bytes=64)],
    ),
    "a parameter's name with control characters reached the terminals of the other workers": (
        InvalidRequest,
        [create(parameters=parameter(name)) for name in ("\x1b[2Jowned", "w\nps-server: all is well", "\u202eevil")],
    ),
    "one beta instead of two was an index error inside torch": (InvalidRequest, [push(betas=(0.9,))]),
    "a guessed incarnation let one worker push for another": (Forbidden, [push(rank=0, incarnation=1)]),
    "a stranger learnt about a gradient before it was asked who it is": (
        Forbidden,
        [push("GRADIENT", b"not 64 bytes", lease_key=bytes(16))],
    ),
    "a pull could name millions of buckets and have each looked at": (
        InvalidRequest,
        [data_pb2.PullRequest(worker=WORKER, buckets=range(100_000))],
    ),
    "a host's name with control characters reached the terminal of who asked for the status": (
        InvalidRequest,
        [joins(host=host) for host in ("\x1b]0;owned\x07", "a" * 300, "name\nps-server: all is well")],
    ),
    "a worker could have Prometheus scrape what is no address, and terminals show it": (
        InvalidRequest,
        [
            joins(metrics_address=address)
            for address in ("http://h:1/x", "h:1\nother:2", "\x1b[2Jh:1", "h", "h:123456", "a" * 300 + ":1")
        ],
    ),
    "a shard's address of metrics that is none was handed to Prometheus": (
        InvalidRequest,
        [registers(a) for a in ("http://169.254.0.1/x?", "h:1/../secrets", "h:1\nother:2", ":", "h:")],
    ),
}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.stop()


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_did_harm_is_refused_and_changes_nothing(target: Target, sentence: str) -> None:
    error, requests = REFUSED[sentence]
    for request in requests:
        refusal = target.throw(type(request).__name__.removesuffix("Request"), request.SerializeToString())
        assert isinstance(refusal, error)
        assert str(refusal).isprintable()


def test_bytes_that_are_no_request_of_reflection_kept_a_server_from_ever_stopping() -> None:
    server = Server(ServerConfig(shard_count=1))
    with open_channel(server.address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for raw in (b"\xff", b"\x0a\x05ab", b"\x9a\x9a\x9a"):
            with pytest.raises(grpc.RpcError) as caught:
                next(call(iter([raw]), timeout=SECONDS))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    stopping.join(SECONDS)
    assert not stopping.is_alive()


def test_a_worker_could_stage_as_much_as_the_whole_model_whatever_the_shard_can_hold() -> None:
    job = JobPartition(SPEC, [0, 1], staged_limit=64)
    job.execute(AddWorker(0, 1, 0))
    job.execute(AddWorker(1, 2, 0))
    for index in (0, 1):
        job.bucket(index).rule.initialised = True

    def push(index: int, size: int) -> None:
        pushed = PushedBucket(index, PushKind.GRADIENT)
        call = PushCall(Identity(JOB, 1, 2), 1, (pushed,), bytes(size))
        job.execute(job.checker.check(call, pushed, bytes(size)))

    push(0, 64)
    with pytest.raises(Backlogged, match="max-staged-bytes is 64"):
        push(1, job.bucket(1).spec.nbytes)


def test_joining_as_ever_new_ranks_grew_what_every_bucket_remembers_without_end(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(workers=4))
    spec = vector_job(JOB, "sync", cells=16, world_size=0)
    with RawWorker(cluster.address, spec, 3):
        for rank in (4, 2**32 - 1):
            with pytest.raises(LimitExceeded, match="max-workers"):
                RawWorker(cluster.address, spec, rank)


def test_a_reader_of_one_job_was_told_of_all(make_cluster: MakeCluster, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("reader:job a-reader-of-one-job\nworker a-worker-of-all-jobs\ncluster the-clusters-own-token\n")
    tokens.chmod(0o600)
    cluster = make_cluster(tokens=tokens)
    with open_channel(cluster.address, Access(token=lambda: "a-worker-of-all-jobs")) as channel:
        for name in (JOB, "secret"):
            request = jobs_pb2.RegisterJobRequest(spec=job_spec_message(replace(SPEC, name=name)))
            JobServiceStub(channel).RegisterJob(request, timeout=SECONDS)
    with open_channel(cluster.address, Access(token=lambda: "a-reader-of-one-job")) as channel:

        def answered() -> cluster_pb2.GetStatusResponse | None:
            """A status for which no shard was too late, as one may be on a busy machine."""
            found = ClusterServiceStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), timeout=SECONDS)
            return found if all(shard.reachable for shard in found.shards) else None

        status = until(answered, "an answer of all shards")
        assert status is not None
        first = ShardServiceStub(channel).GetShardStatus(shard_pb2.GetShardStatusRequest(), timeout=SECONDS)
    assert [job.name for job in status.jobs] == [JOB]
    assert {job.job for shard in (*status.shards, first) for job in shard.jobs} == {JOB}


def test_a_state_without_end_could_be_saved_on_the_coordinator_by_anybody(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(shards=1, limits=Limits(state_bytes=100), checkpoint_dir=tmp_path, lease=LEASE)
    with RawWorker(cluster.address, vector_job(JOB, "sync", cells=16, world_size=1), 0) as worker:
        for size, other, error in (
            (101, {}, LimitExceeded),
            (100, {"lease_key": bytes(16)}, Forbidden),
            (100, {"job": "../" + JOB}, NotFound),
        ):
            with pytest.raises(error):
                worker.save_state(0, bytes(size), **other)
        worker.save_state(0, bytes(100))


def test_the_states_of_many_workers_had_no_bound_together(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Each of 4096 workers of 64 jobs could leave 16 MiB in the coordinator's memory."""
    limits = Limits(state_bytes=100, all_state_bytes=500)
    cluster = make_cluster(shards=1, limits=limits, checkpoint_dir=tmp_path, lease=LEASE)
    spec, other = vector_job(JOB, "sync", cells=16, world_size=2), vector_job("other", "sync", cells=16, world_size=1)
    with (
        RawWorker(cluster.address, spec, 0) as zero,
        RawWorker(cluster.address, spec, 1) as one,
        RawWorker(cluster.address, other, 0) as last,
    ):
        zero.save_state(0, bytes(100))
        one.save_state(0, bytes(100))
        with pytest.raises(LimitExceeded, match="has 200 bytes of workers' states, and sent 51 more"):
            last.save_state(0, bytes(51))
        last.save_state(0, bytes(50))
        zero.save_state(0, bytes(99))  # in place of what it sent before
        last.save_state(0, bytes(51))
        zero.leave()
        last.save_state(0, bytes(100))
        cluster.coordinator.job(JOB).end()
        checkpoints = cluster.coordinator.job("other").checkpoints
        assert checkpoints is not None
        room = checkpoints._states._room
        assert sum(part.held for part in room._room._jobs) == 100, "what ends gives its room back"
