"""`--max-push-norm`: what bounds how far one push of a malicious worker can go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import LimitExceeded, NonFiniteGradient
from ps_protocol.framing import Buffer
from ps_protocol.job import NonFinite
from ps_protocol.messages.data import PushCall, PushKind
from ps_protocol.tensors import TORCH_DTYPES, bytes_of
from ps_server.core.commands import Initialise, StageGradient
from ps_server.core.dense import Gradient
from ps_server.core.limits import Limits
from ps_server.core.partition import JobPartition
from tests.tools.cluster import Cluster
from tests.tools.partitions import check, job_spec, push, running


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_a_gradient_beyond_the_norm_is_refused_by_name_and_changes_nothing_and_one_within_it_trains(
    make_cluster: Callable[..., Cluster], transport: str
) -> None:
    cluster = make_cluster(shards=1, limits=Limits(push_norm=2.0))

    def stepped(value: float) -> torch.Tensor:
        with cluster.connect("sync", job="job", transport=transport) as session:
            model = nn.Linear(4, 1, bias=False)
            model.weight.data.fill_(5.0)
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            shard = cluster.shards[0].jobs()["job"].partition
            model.weight.grad = torch.full_like(model.weight, value)
            try:
                optimizer.step()
            finally:
                assert torch.equal(shard.bucket(0).weights.flat[:4], model.weight.detach().flatten())
                assert (shard.reached.versions(), shard.staged_bytes) == ((0, 0) if value > 1.0 else (1, 1), 0)
            return model.weight.detach()

    with pytest.raises(LimitExceeded, match=r"worker 0: .* bucket 0 has norm 3, and max-push-norm is 2"):
        stepped(1.5)
    assert torch.equal(stepped(1.0), torch.full((1, 4), 4.0)), "a norm of 2: the limit itself"


# -- one shard, no network -------------------------------------------------------------------------------------------


def limited(norm: float, **other: Any) -> JobPartition:
    """A job on one shard with worker 0, whose pushes may have this norm; `other` fields of the job."""
    return running(spec=replace(job_spec("sync"), **other), norm_limit=norm)


def checked(job: JobPartition, one: PushCall, lent: Buffer = b"") -> Gradient:
    """What a push contributes."""
    command = check(job, one, lent)
    assert isinstance(command, StageGradient)
    return command.gradient


def gradient(job: JobPartition, bucket: int, value: float, dtype: str = "float32") -> memoryview:
    return bytes_of(torch.full((job.bucket(bucket).spec.numel,), value, dtype=TORCH_DTYPES[dtype]))


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_the_norm_of_half_types_is_taken_in_float32(wire: str) -> None:
    job = limited(100_000.0, gradient_wire=wire)
    size = job.bucket(0).spec.numel
    value = 2.0**14  # that times the root of 32 is beyond float16
    assert checked(job, push(payload=gradient(job, 0, value, wire), wire_format=wire)).values is not None
    with pytest.raises(LimitExceeded, match=rf"bucket 0 has norm {1.5 * value * math.sqrt(size):g}, and"):
        check(job, push(payload=gradient(job, 0, 1.5 * value, wire), wire_format=wire))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_past_every_limit_even_where_the_job_allows_it(value: float) -> None:
    job = limited(1e30, non_finite=NonFinite.ALLOW)
    with pytest.raises(LimitExceeded, match="max-push-norm"):
        check(job, push(payload=gradient(job, 0, value)))
    with pytest.raises(NonFiniteGradient):
        check(limited(1e30), push(payload=gradient(job, 0, value)))


def test_what_is_left_out_of_a_gradient_counts_for_nothing() -> None:
    job = limited(1.0)
    assert checked(job, push(payload=gradient(job, 0, 1e9), absent=frozenset({0}))).absent == {0}


def test_initial_values_and_steps_without_a_gradient_have_no_norm() -> None:
    job = limited(1.0)
    initial_value = push(clock=0, kind=PushKind.INITIAL_VALUE, payload=gradient(job, 0, 1e9))
    command = check(job, initial_value)
    assert isinstance(command, Initialise)
    assert isinstance(command.value, torch.Tensor)
    assert checked(job, push(kind=PushKind.SKIP, payload=b"")).values is None


def test_a_gradient_in_the_workers_own_memory_is_copied_before_it_is_checked() -> None:
    """Or its worker could write another after this one was found small."""
    job = limited(10.0)
    memory = torch.ones(job.bucket(0).spec.numel)
    found = checked(job, push(payload=None), bytes_of(memory))
    memory.fill_(1e9)
    assert found.values is not None
    assert torch.equal(found.values, torch.ones_like(memory))
    assert not found.borrowed
