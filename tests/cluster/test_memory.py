"""A server's memory stays what it is, however many calls are made and cancelled; and holds no compiler."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from ps_protocol.v1 import data_pb2
from ps_protocol.v1.data_pb2_grpc import DataServiceStub
from ps_server.ops.requests import fetch
from tests.tools.cluster import until
from tests.tools.launching import python, resident
from tests.tools.raw_worker import RawWorker, vector_job

KIB = 1024
AT_ONCE = 24  # pulls, and as many pushes: a connection may have STREAMS_OF_A_CONNECTION calls at a time
ROUNDS = 10  # a leak grows in each of them


def cancel(address: str, worker: RawWorker, calls: int) -> None:
    """Makes so many calls and cancels each: pulls that wait at the server, and pushes wherever they are by then.

    Each batch has a connection of its own: on one that cancels much, gRPC refuses calls.
    """
    push = worker.message(0, 1, bytes(64))
    pull = data_pb2.PullRequest(worker=worker.identity(), clock=1, buckets=[0])
    for _ in range(calls // (2 * AT_ONCE)):
        with grpc.insecure_channel(address) as channel:
            stub = DataServiceStub(channel)
            made = [stub.Pull(pull, timeout=60) for _ in range(AT_ONCE)]
            until(lambda made=made: all_wait(address, made), "all pulls wait")
            made += [stub.Push.future(push, timeout=60) for _ in range(AT_ONCE)]
            for call in made:
                call.cancel()
            until(lambda: waiting(address) == 0, "all cancelled pulls are forgotten")


def all_wait(address: str, calls: list[Any]) -> bool:
    """Whether all pulls wait; says why if one was refused."""
    refused = [call.details() for call in calls if call.done()]
    assert not refused, refused[:3]
    return waiting(address) == len(calls)


def waiting(address: str) -> int:
    """How many pulls of one bucket wait at the server."""
    jobs = [job for shard in fetch(address)["shards"] for job in shard["jobs"]]
    return sum(wait["bucket_count"] for job in jobs for wait in job["waits"])


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(5_000, marks=pytest.mark.long),
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_memory_stays_flat_over_cancelled_calls(server: tuple[str, int], calls: int) -> None:
    address, pid = server
    spec = vector_job("cancelled", "sync", cells=16, world_size=2)
    with RawWorker(address, spec, 0) as worker, RawWorker(address, spec, 1):
        worker.initialise()
        grown = []
        # Pools of threads, arenas and caches grow to what they need: the more of it runs at one time, the later.
        for _ in range(ROUNDS):
            before = resident(pid)
            cancel(address, worker, calls)
            grown.append(resident(pid) - before)
            if len(grown) > 1 and grown[-1] < calls * KIB:  # what a leak of 1 KiB a call would be, each time
                return
        pytest.fail(f"by {grown} bytes, each time over {calls} calls")


EVERY_OPTIMIZER = """
import sys, torch
from ps_server.ops.compiler import leave_out_compiler
from ps_server.server import Server
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.optimizers import ELEMENTWISE
from ps_server.core.dense import DenseBucket, Gradient
from ps_server.core.sums import Scratch

leave_out_compiler()
for name in ELEMENTWISE:
    spec = JobSpec("job", (ParameterSpec("x", (4,), "float32", 0),), name, ({"lr": 0.1},), Consistency(0), 64, 1)
    [described] = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    bucket = DenseBucket(spec, described, Scratch())
    bucket.add(Gradient(torch.ones(described.numel)))
    bucket.step()
    assert bucket.flat[:4].ne(0).all(), name
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.long
def test_a_server_steps_every_optimizer_without_torchs_compiler() -> None:
    """Its import was two fifths of a server's start, and 70 MiB."""
    done = python("-c", EVERY_OPTIMIZER)
    assert done.returncode == 0, done.stderr
