"""How large buckets are where no worker gives a size."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import InvalidRequest, JobMismatch, LimitExceeded
from ps_protocol.job import MAX_BUCKET_BYTES, JobSpec
from ps_protocol.layout import DEFAULT_BUCKET_BYTES, ParameterSpec
from ps_protocol.optimizers import hyper_parameters
from ps_protocol.v1 import jobs_pb2
from ps_runtime.memory_place import memory_place
from ps_server.coordinator.shards import Shards
from ps_server.core.limits import Limits
from ps_server.core.placement import MOST_BUCKETS, sized
from ps_server.core.validation import check_job_spec
from tests.tools.cluster import Cluster
from tests.tools.raw_worker import RawWorker, vector_job

KIB, MIB = 2**10, 2**20
ONE_MACHINE, HOSTS = True, False
LIMIT = Limits().buckets


def job(numel: int, wire: str = "float32", frozen: int = 2**20) -> JobSpec:
    parameters = (ParameterSpec("p", (numel,), "float32", 0), ParameterSpec("frozen", (frozen,), "float32", None))
    return replace(
        vector_job("job", "sync", 0, 2), parameters=parameters, bucket_bytes=0, gradient_wire=wire, weight_wire=wire
    )


@pytest.mark.parametrize(
    ("spec", "one_machine", "size"),
    [
        (replace(job(2**24), bucket_bytes=128), HOSTS, 128),  # a size that a worker gives stays
        # On one machine there are at least 8 buckets, or they are small; with half types twice as large in the model.
        (job(1), ONE_MACHINE, 4 * MIB),
        (job(2**24 - 1), ONE_MACHINE, 4 * MIB),
        (job(2**24), ONE_MACHINE, 8 * MIB),
        (job(2**25), ONE_MACHINE, 16 * MIB),
        (job(2**30), ONE_MACHINE, 16 * MIB),
        (job(1, "bfloat16"), ONE_MACHINE, 8 * MIB),
        (job(2**26, "bfloat16"), ONE_MACHINE, 16 * MIB),
        (job(70 * 10**9, "bfloat16"), ONE_MACHINE, 16 * MIB),
        # Between hosts there are about 128 buckets of what is trained, and none is too small.
        (job(1), HOSTS, 256 * KIB),
        (job(8_000_000), HOSTS, 256 * KIB),
        (job(16_000_000), HOSTS, 512 * KIB),
        (job(2**26), HOSTS, 2 * MIB),
        (job(2**27), HOSTS, 4 * MIB),
        (job(2**30), HOSTS, 4 * MIB),
        (job(8_000_000, "bfloat16"), HOSTS, 512 * KIB),
        (job(2**30, "bfloat16"), HOSTS, 8 * MIB),
        # Much that is not trained is not cut into small buckets, and a shape beyond all bounds does no harm.
        (job(4_000_000, frozen=2**29), HOSTS, 2 * MIB),
        (job(4_000_000, frozen=60 * 10**9), HOSTS, 4 * MIB),
        (replace(job(1), parameters=(ParameterSpec("p", (2**63,) * 20, "float32", 0),)), HOSTS, 4 * MIB),
    ],
)
def test_the_size_of_buckets_follows_from_model_wire_format_and_place(
    spec: JobSpec, one_machine: bool, size: int
) -> None:
    assert sized(spec, one_machine, LIMIT).bucket_bytes == size


def fits(spec: JobSpec, limit: int) -> bool:
    try:
        check_job_spec(spec, Limits(buckets=limit))
    except LimitExceeded:
        return False
    return True


@given(st.integers(1, 10**11), st.integers(1, 10**11), st.sampled_from(["float32", "bfloat16"]), st.integers(2, LIMIT))
def test_what_large_buckets_would_fit_into_a_servers_limit_is_never_refused(
    numel: int, frozen: int, wire: str, limit: int
) -> None:
    """And neither the model nor what is frozen in it is cut into more buckets than `sized` allows."""
    spec = job(numel, wire, frozen)
    chosen = sized(spec, HOSTS, limit)
    largest = replace(spec, bucket_bytes=DEFAULT_BUCKET_BYTES * (1 if wire == "float32" else 2))
    assert chosen.bucket_bytes <= sized(spec, ONE_MACHINE, limit).bucket_bytes <= MAX_BUCKET_BYTES
    assert 256 * KIB <= chosen.bucket_bytes <= largest.bucket_bytes
    assert chosen == largest or 4 * (numel + frozen) // chosen.bucket_bytes <= min(MOST_BUCKETS, limit)
    assert fits(chosen, limit) or not fits(largest, limit)


class AnsweringShard:
    """A shard at any address, which says which process it is."""

    def __init__(self, index: int, address: str) -> None:
        pass

    def process(self) -> int:
        return 1

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("addresses", "one_machine"),
    [
        (["127.0.0.1:5001", "[::1]:5002", "localhost:5003"], True),
        (["10.0.0.1:5001", "10.0.0.2:5001"], False),
        (["127.0.0.1:5001", "10.0.0.2:5001"], False),
        (["shard-0.shards:5001"], False),
    ],
)
def test_shards_are_on_one_machine_if_all_their_addresses_are_loopback(addresses: list[str], one_machine: bool) -> None:
    shards = Shards(len(addresses), AnsweringShard, ThreadPoolExecutor)  # type: ignore[arg-type]
    for index, address in enumerate(addresses):
        shards.register(index, address, "", 1, 1)
    assert shards.on_one_machine() is one_machine
    shards.close()


@pytest.mark.parametrize(
    ("places", "of_worker", "one_machine"),
    [
        (["here", "here"], "here", True),
        (["here", "there"], "here", False),
        (["here", ""], "here", False),  # a shard of an earlier version says nothing
        (["", ""], "", False),
        (["there", "there"], "here", False),
    ],
)
def test_a_worker_is_on_the_shards_machine_if_all_of_them_can_share_memory_with_it(
    places: list[str], of_worker: str, one_machine: bool
) -> None:
    shards = Shards(len(places), AnsweringShard, ThreadPoolExecutor)  # type: ignore[arg-type]
    for index, place in enumerate(places):
        shards.register(index, f"10.0.0.{index + 1}:5001", "", 1, 1, memory_place=place)
    assert shards.on_one_machine(of_worker) is one_machine
    shards.close()


def test_a_memory_place_is_that_of_one_directory(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    assert memory_place(tmp_path) == memory_place(tmp_path / "link") != memory_place(tmp_path / "other")
    assert memory_place(tmp_path / "missing") == ""


@pytest.mark.parametrize(("transport", "size"), [("auto", 4 * MIB), ("tcp", 256 * KIB)])
def test_where_shards_have_addresses_of_a_network_sessions_that_share_memory_get_the_buckets_of_one_machine(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, transport: str, size: int
) -> None:
    """As it is between containers of one machine: there no address is loopback."""
    monkeypatch.setattr("ps_server.coordinator.shards.is_loopback", lambda host: False)
    cluster = make_cluster()
    model = nn.Linear(32, 32)
    with cluster.connect("sync", transport=transport) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        [job] = cluster.coordinator.jobs().values()
        assert job.spec.bucket_bytes == size


@pytest.mark.parametrize("place", ["x" * 129, "line\nbreak", "ä"])
def test_a_memory_place_that_cannot_be_one_is_refused(shared: Cluster, place: str) -> None:
    message = jobs_pb2.RegisterJobRequest(spec=job_spec_message(vector_job("bad", "sync", 64, 1)), memory_place=place)
    with pytest.raises(InvalidRequest, match="memory_place has up to 128 printable ASCII characters"):
        RawWorker.register(shared.address, message)


def open_job(server: str, spec: JobSpec) -> int:
    """Registers a job that leaves the size of its buckets open; what the server answers."""
    spec = replace(spec, bucket_bytes=0)
    return RawWorker.register(server, jobs_pb2.RegisterJobRequest(spec=job_spec_message(spec))).bucket_bytes


def test_a_worker_that_leaves_the_size_open_takes_that_of_the_job_or_the_servers_choice(shared: Cluster) -> None:
    own = vector_job("given", "sync", 64, 1)
    RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(own)))
    assert open_job(shared.address, own) == own.bucket_bytes == 64
    chosen = vector_job("chosen", "sync", 64, 1)
    assert open_job(shared.address, chosen) == DEFAULT_BUCKET_BYTES
    with pytest.raises(JobMismatch, match="the bucket_bytes is 4194304 in the registered job and 64 in this one"):
        RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(chosen)))


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


def test_a_session_cuts_its_model_as_the_job_has_it(shared: Cluster) -> None:
    model = nn.Linear(32, 32, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    parameters = (ParameterSpec("weight", (32, 32), "float32", 0),)
    groups = (hyper_parameters("SGD", plain.param_groups[0]),)
    spec = replace(vector_job("cut", "sync", 0, 1), parameters=parameters, param_groups=groups, bucket_bytes=1024)
    RawWorker.register(shared.address, jobs_pb2.RegisterJobRequest(spec=job_spec_message(spec)))
    with shared.connect("sync", job="cut") as session:
        before = model.weight.detach().clone()
        model, optimizer = session.prepare(model, plain)
        assert shared.coordinator.jobs()["cut"].spec.bucket_bytes == 1024
        model(torch.eye(32)).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before - 0.5)
