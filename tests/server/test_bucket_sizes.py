"""How large buckets are where nobody says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import JobMismatch
from ps_protocol.job import JobSpec
from ps_protocol.layout import DEFAULT_BUCKET_BYTES, ParameterSpec
from ps_protocol.modes import Consistency, parse_mode
from ps_protocol.optimizers import hyper_parameters
from ps_protocol.v1 import control_pb2
from ps_server.coordinator.shards import Shards
from ps_server.core.bucket_sizes import LEAST_BYTES, MOST_BUCKETS, sized
from ps_server.core.limits import Limits
from ps_server.core.validation import check_job_spec
from ps_server.rpc.shard_client import ShardClient
from tests.tools.cluster import Cluster
from tests.tools.raw_worker import RawWorker, vector_job

MIB = 2**20
ONE_MACHINE, HOSTS = True, False
LIMIT = Limits().buckets


def rule(mode: str) -> Consistency:
    found = parse_mode(mode)
    assert found is not None
    return found


def job(numel: int, wire: str = "float32", held: int = 2**20) -> JobSpec:
    parameters = (ParameterSpec("p", (numel,), "float32", 0), ParameterSpec("held", (held,), "float32", None))
    return JobSpec("job", parameters, "SGD", ({"lr": 1.0},), rule("sync"), 0, 2, gradient_wire=wire, weight_wire=wire)


def test_a_size_that_was_said_stays() -> None:
    said = replace(job(2**24), bucket_bytes=128)
    assert sized(said, HOSTS, LIMIT) is said


@pytest.mark.parametrize("numel", [1, 2**20, 2**30])
def test_on_one_machine_a_bucket_is_as_large_as_a_message_should_be(numel: int) -> None:
    assert sized(job(numel), ONE_MACHINE, LIMIT).bucket_bytes == DEFAULT_BUCKET_BYTES
    assert sized(job(numel, "bfloat16"), ONE_MACHINE, LIMIT).bucket_bytes == 2 * DEFAULT_BUCKET_BYTES, "in the model"


@pytest.mark.parametrize(
    ("numel", "wire", "size"),
    [
        (1, "float32", LEAST_BYTES),
        (8_000_000, "float32", LEAST_BYTES),
        (16_000_000, "float32", 2 * LEAST_BYTES),
        (2**26, "float32", 2 * MIB),
        (2**27, "float32", 4 * MIB),
        (2**30, "float32", DEFAULT_BUCKET_BYTES),
        (8_000_000, "bfloat16", 2 * LEAST_BYTES),
        (2**30, "bfloat16", 2 * DEFAULT_BUCKET_BYTES),
    ],
)
def test_between_hosts_there_are_many_buckets_but_none_too_small(numel: int, wire: str, size: int) -> None:
    assert sized(job(numel, wire), HOSTS, LIMIT).bucket_bytes == size


@pytest.mark.parametrize("held", [2**30, 7 * 10**9, 60 * 10**9])
def test_much_that_is_not_trained_is_not_cut_into_crumbs(held: int) -> None:
    found = sized(job(4_000_000, held=held), HOSTS, LIMIT)
    check_job_spec(found, Limits())
    assert found.bucket_bytes == DEFAULT_BUCKET_BYTES or 4 * held // found.bucket_bytes <= MOST_BUCKETS


def test_a_servers_limit_of_buckets_is_kept() -> None:
    limits = Limits(buckets=64)
    check_job_spec(sized(job(25_000_000), HOSTS, limits.buckets), limits)


def test_a_job_of_half_types_that_fits_with_buckets_twice_as_large_is_not_refused() -> None:
    check_job_spec(sized(job(70 * 10**9, "bfloat16"), ONE_MACHINE, LIMIT), Limits())


def test_a_shape_beyond_all_bounds_does_no_harm() -> None:
    huge = replace(job(1), parameters=(ParameterSpec("p", (2**63,) * 20, "float32", 0),))
    assert sized(huge, HOSTS, LIMIT).bucket_bytes == DEFAULT_BUCKET_BYTES


@pytest.mark.parametrize(
    ("addresses", "one_machine"),
    [
        (["127.0.0.1:5001", "[::1]:5002", "localhost:5003"], True),
        (["10.0.0.1:5001", "10.0.0.2:5001"], False),
        (["127.0.0.1:5001", "10.0.0.2:5001"], False),
        (["shard-0.shards:5001"], False),
    ],
)
def test_shards_are_on_one_machine_if_nobody_else_can_reach_any(addresses: list[str], one_machine: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        shards = Shards(len(addresses), ShardClient, pool)
        for index, address in enumerate(addresses):
            shards.register(index, address, "", 1, 1)
        assert shards.on_one_machine() is one_machine
        shards.close()


def open_job(server: str, spec: JobSpec) -> int:
    """Registers a job that leaves the size of its buckets open; what the server answers."""
    spec = replace(spec, bucket_bytes=0)
    return RawWorker.register(server, control_pb2.RegisterJobRequest(spec=job_spec_message(spec))).bucket_bytes


def test_who_does_not_say_is_told_what_the_server_chose(cluster: Cluster) -> None:
    assert open_job(cluster.address, vector_job("open", "sync", 64, 1)) == DEFAULT_BUCKET_BYTES


def test_who_does_not_say_takes_what_the_job_has(cluster: Cluster) -> None:
    spec = vector_job("said", "sync", 64, 1)
    RawWorker.register(cluster.address, control_pb2.RegisterJobRequest(spec=job_spec_message(spec)))
    assert open_job(cluster.address, spec) == spec.bucket_bytes == 64


def test_who_says_another_size_is_refused(cluster: Cluster) -> None:
    spec = vector_job("refused", "sync", 64, 1)
    open_job(cluster.address, spec)
    with pytest.raises(JobMismatch, match="the bucket_bytes is 4194304 in the registered job and 64 in this one"):
        RawWorker.register(cluster.address, control_pb2.RegisterJobRequest(spec=job_spec_message(spec)))


def test_a_job_that_goes_on_from_a_checkpoint_keeps_the_size_of_its_buckets(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    spec = vector_job("job", "sync", 64, 1)
    first = make_cluster(checkpoint_dir=tmp_path)
    with RawWorker(first.address, spec, 0) as worker:
        worker.initialise()
        worker.step(torch.full((64,), -1.0))
        worker.pull()
        worker.leave()  # with which the job is kept, and ends
    first.stop()
    second = make_cluster(checkpoint_dir=tmp_path, restore=True)
    assert open_job(second.address, spec) == 64
    with RawWorker(second.address, spec, 0) as worker:
        assert torch.equal(worker.pull(), torch.ones(64))


def test_a_session_cuts_its_model_as_the_job_has_it(cluster: Cluster) -> None:
    model = nn.Linear(32, 32, bias=False)
    spec = JobSpec(
        "cut",
        (ParameterSpec("weight", (32, 32), "float32", 0),),
        "SGD",
        (hyper_parameters("SGD", torch.optim.SGD(model.parameters(), lr=0.5).param_groups[0]),),
        rule("sync"),
        1024,
        1,
    )
    RawWorker.register(cluster.address, control_pb2.RegisterJobRequest(spec=job_spec_message(spec)))
    with cluster.connect("sync", job="cut") as session:
        before = model.weight.detach().clone()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        assert cluster.coordinator.jobs()["cut"].spec.bucket_bytes == 1024
        model(torch.eye(32)).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before - 0.5)
