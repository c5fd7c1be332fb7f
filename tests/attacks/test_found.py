"""What was found by fuzzing and by reading, one test each: the sentence says what it did before it was closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import Backlogged, Forbidden, InvalidRequest, LimitExceeded, NotFound, PSError
from ps_protocol.framing import split_message
from ps_protocol.v1 import cluster_pb2, data_pb2, job_pb2, jobs_pb2, membership_pb2, shard_pb2, types_pb2
from ps_protocol.v1.cluster_pb2_grpc import ClusterServiceStub
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_protocol.v1.shard_pb2_grpc import ShardServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import Access
from ps_runtime.status import error_from
from ps_server.config import ServerConfig
from ps_server.core.commands import AddWorker
from ps_server.core.limits import Limits
from ps_server.core.partition import JobPartition
from ps_server.core.requests import Push, PushKind
from ps_server.server import Server
from tests.tools.cluster import Cluster
from tests.tools.fuzzing import JOB, KEY, SPEC, WORKER, Target

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.stop()


def create(**changes: Any) -> bytes:
    spec = job_spec_message(SPEC)
    spec.name = "another"
    for name in changes:
        spec.ClearField(name)  # type: ignore[arg-type]
    spec.MergeFrom(job_pb2.JobSpec(**changes))
    return shard_pb2.CreateJobRequest(spec=spec, buckets=[0]).SerializeToString()


def refused(target: Target, method: str, raw: bytes) -> PSError:
    found = target.throw(method, raw)
    assert found is not None
    return found


def test_buckets_of_no_bytes_sent_straight_to_a_shard_divided_by_zero(target: Target) -> None:
    assert isinstance(refused(target, "CreateJob", create(bucket_bytes=0)), InvalidRequest)


def test_an_optimizer_that_does_not_exist_sent_straight_to_a_shard_was_looked_up_unchecked(target: Target) -> None:
    assert isinstance(refused(target, "CreateJob", create(optimizers=["__import__"])), InvalidRequest)


SKIP = data_pb2.BucketPush(kind=data_pb2.PUSH_KIND_SKIP)


def push_of(header: data_pb2.PushHeader, payload: bytes | None = None) -> bytes:
    return data_pb2.PushRequest(header=header, payload=payload).SerializeToString()


def test_a_bucket_beyond_the_layout_was_an_index_error_on_the_shard(target: Target) -> None:
    spec = job_spec_message(SPEC)
    spec.name = "another"
    for buckets in ([2**32 - 1], [0, 0]):
        raw = shard_pb2.CreateJobRequest(spec=spec, buckets=buckets).SerializeToString()
        assert isinstance(refused(target, "CreateJob", raw), InvalidRequest)


def test_a_job_larger_than_any_memory_was_laid_out_before_it_was_refused(target: Target) -> None:
    spec = job_spec_message(SPEC)
    spec.name = "another"
    spec.parameters[0].shape[:] = [2**25, 2**25]
    spec.bucket_bytes = 64
    raw = shard_pb2.CreateJobRequest(spec=spec, buckets=[0]).SerializeToString()
    assert isinstance(refused(target, "CreateJob", raw), LimitExceeded)


def test_one_beta_instead_of_two_was_an_index_error_inside_torch(target: Target) -> None:
    header = data_pb2.PushHeader(worker=WORKER, clock=1, buckets=[SKIP])
    header.groups.add(group=0).hyper_parameters.add(name="betas").numbers.values.append(0.9)
    assert isinstance(refused(target, "Push", push_of(header)), InvalidRequest)


def test_a_guessed_incarnation_let_one_worker_push_for_another(target: Target) -> None:
    victim = types_pb2.WorkerIdentity(job=JOB, rank=0, incarnation=1, lease_key=KEY)
    header = data_pb2.PushHeader(worker=victim, clock=1, buckets=[SKIP])
    assert isinstance(refused(target, "Push", push_of(header)), Forbidden)


def test_a_stranger_learnt_about_a_gradient_before_it_was_asked_who_it_is(target: Target) -> None:
    stranger = types_pb2.WorkerIdentity(job=JOB, rank=1, incarnation=2, lease_key=bytes(16))
    gradient = data_pb2.BucketPush(kind=data_pb2.PUSH_KIND_GRADIENT)
    header = data_pb2.PushHeader(worker=stranger, clock=1, buckets=[gradient])
    assert isinstance(refused(target, "Push", push_of(header, b"not 64 bytes")), Forbidden)


def test_a_pull_could_name_millions_of_buckets_and_have_each_looked_at(target: Target) -> None:
    raw = data_pb2.PullRequest(worker=WORKER, buckets=range(100_000)).SerializeToString()
    assert isinstance(refused(target, "Pull", raw), InvalidRequest)


@pytest.mark.parametrize("host", ["\x1b]0;owned\x07", "a" * 300, "name\nps-server: all is well"])
def test_a_host_name_with_control_characters_reached_the_terminal_of_who_asked_for_the_status(
    target: Target, host: str
) -> None:
    request = membership_pb2.JoinRequest(job=JOB, host=host)
    assert isinstance(refused(target, "Join", request.SerializeToString()), InvalidRequest)


@pytest.mark.parametrize("address", ["http://h:1/x", "h:1\nother:2", "\x1b[2Jh:1", "h", "h:123456", "a" * 300 + ":1"])
def test_a_worker_could_have_prometheus_scrape_what_is_no_address_and_terminals_show_it(
    target: Target, address: str
) -> None:
    request = membership_pb2.JoinRequest(job=JOB, host="h", metrics_address=address)
    assert isinstance(refused(target, "Join", request.SerializeToString()), InvalidRequest)


@pytest.mark.parametrize("address", ["http://169.254.0.1/x?", "h:1/../secrets", "h:1\nother:2", ":", "h:"])
def test_an_address_of_metrics_that_is_none_was_handed_to_prometheus(target: Target, address: str) -> None:
    request = cluster_pb2.RegisterShardRequest(index=0, address="127.0.0.1:1", metrics_address=address, process=1)
    assert isinstance(refused(target, "RegisterShard", request.SerializeToString()), InvalidRequest)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a\xff\xff\xff\xff\x0f",  # a header of 4 GiB
        b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",  # a length of more than 64 bits
        b"\x0a\x00\x7a\x01a\x7a\x01b",  # two payloads: which one was checked?
        b"\x0a\x00\x7a\x05abc",  # a payload that is cut off
        b"\x0b",  # a group, which nothing here sends
    ],
)
def test_lengths_that_lie_and_fields_that_come_twice_are_refused_by_the_decoder(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        split_message(raw)


def test_bytes_that_are_no_request_of_reflection_kept_a_server_from_ever_stopping() -> None:
    server = Server(ServerConfig(shard_count=1))
    with open_channel(server.address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for raw in (b"\xff", b"\x0a\x05ab", b"\x9a\x9a\x9a"):
            with pytest.raises(grpc.RpcError) as caught:
                next(call(iter([raw]), timeout=20.0))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    stopping.join(20.0)
    assert not stopping.is_alive()


def test_a_worker_could_stage_as_much_as_the_whole_model_whatever_the_shard_can_hold() -> None:
    job = JobPartition(SPEC, [0, 1], staged_limit=64)
    job.execute(AddWorker(0, 1, 0))
    job.execute(AddWorker(1, 2, 0))
    for index in (0, 1):
        job.bucket(index).rule.initialised = True

    def push(index: int, size: int) -> None:
        one = Push(JOB, 1, 2, index, 1, PushKind.GRADIENT, bytes(size))
        job.execute(job.checker.check(one))

    push(0, 64)
    with pytest.raises(Backlogged, match="max-staged-bytes is 64"):
        push(1, 32 if job.bucket(1).spec.nbytes == 32 else job.bucket(1).spec.nbytes)


@pytest.mark.parametrize("name", ["\x1b[2Jowned", "w\nps-server: all is well", "\u202eevil"])
def test_a_parameters_name_with_control_characters_reached_the_terminals_of_the_other_workers(
    target: Target, name: str
) -> None:
    spec = job_spec_message(SPEC)
    spec.name = "another"
    spec.parameters[0].name = name
    raw = shard_pb2.CreateJobRequest(spec=spec, buckets=[0]).SerializeToString()
    found = refused(target, "CreateJob", raw)
    assert isinstance(found, InvalidRequest)
    assert str(found).isprintable()


def test_joining_as_ever_new_ranks_grew_what_every_bucket_remembers_without_end(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, limits=Limits(workers=4))
    with open_channel(cluster.address) as channel:
        jobs, members = JobServiceStub(channel), MembershipServiceStub(channel)
        spec = job_spec_message(replace(SPEC, world_size=0))
        jobs.RegisterJob(jobs_pb2.RegisterJobRequest(spec=spec), timeout=20.0)
        members.Join(membership_pb2.JoinRequest(job=JOB, rank=3), timeout=20.0)
        for rank in (4, 2**32 - 1):
            with pytest.raises(grpc.RpcError) as caught:
                members.Join(membership_pb2.JoinRequest(job=JOB, rank=rank), timeout=20.0)
            found = error_from(caught.value, "it")
            assert isinstance(found, LimitExceeded)
            assert "max-workers" in str(found)


def test_a_reader_of_one_job_was_told_of_all(make_cluster: MakeCluster, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("reader:job a-reader-of-one-job\nworker a-worker-of-all-jobs\ncluster the-clusters-own-token\n")
    tokens.chmod(0o600)
    cluster = make_cluster(tokens=tokens)
    with open_channel(cluster.address, Access(token=lambda: "a-worker-of-all-jobs")) as channel:
        for name in (JOB, "secret"):
            spec = job_spec_message(replace(SPEC, name=name))
            JobServiceStub(channel).RegisterJob(jobs_pb2.RegisterJobRequest(spec=spec), timeout=20.0)
    with open_channel(cluster.address, Access(token=lambda: "a-reader-of-one-job")) as channel:
        found = ClusterServiceStub(channel).GetStatus(cluster_pb2.GetStatusRequest(), timeout=20.0)
        shard = ShardServiceStub(channel).GetShardStatus(shard_pb2.GetShardStatusRequest(), timeout=20.0)
    assert [job.name for job in found.jobs] == [JOB]
    assert all(one.reachable for one in found.shards)
    assert {job.job for one in found.shards for job in one.jobs} == {job.job for job in shard.jobs} == {JOB}


def test_a_state_without_end_could_be_saved_on_the_coordinator_by_anybody(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(shards=1, limits=Limits(state_bytes=100), checkpoint_dir=tmp_path)
    with open_channel(cluster.address) as channel:
        jobs, members = JobServiceStub(channel), MembershipServiceStub(channel)
        spec = job_spec_message(replace(SPEC, world_size=1))
        jobs.RegisterJob(jobs_pb2.RegisterJobRequest(spec=spec), timeout=20.0)
        place = members.Join(membership_pb2.JoinRequest(job=JOB, rank=0), timeout=20.0)
        who = {"job": JOB, "rank": 0, "incarnation": place.worker.incarnation, "lease_key": place.worker.lease_key}

        def save(size: int, **change: Any) -> None:
            worker = types_pb2.WorkerIdentity(**{**who, **change})
            state = membership_pb2.WorkerState(content=bytes(size))
            request = membership_pb2.SaveWorkerStateRequest(worker=worker, state=state)
            members.SaveWorkerState(request, timeout=20.0)

        for size, change, error in (
            (101, {}, LimitExceeded),
            (100, {"lease_key": bytes(16)}, Forbidden),
            (100, {"job": "../" + JOB}, NotFound),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                save(size, **change)
            assert isinstance(error_from(caught.value, "it"), error)
        save(100)
