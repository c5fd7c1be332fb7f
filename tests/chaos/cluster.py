"""What a cluster under chaos stands on, and how its weights are read by a process that takes no part."""

from __future__ import annotations

import random
import socket

import torch

from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec, bucket_layout
from ps_protocol.messages import data
from ps_protocol.messages.data import PulledBucket
from ps_protocol.tensors import tensor_from
from ps_runtime.pools import DaemonPool
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.cluster.landing import PullPlan
from ps_worker.model.job_spec import describe
from ps_worker.values import PrepareOptions
from tests.chaos.oracle import Cells
from tests.chaos.worker import Task
from tests.tools.modes import consistency

START_SECONDS = 60.0
READER = 0  # the incarnation of a reader that takes no part


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free now.

    Below those that systems give to outgoing connections: one of these could take a server's port while it is down.
    """
    while True:
        first = random.randrange(15_000, 32_000)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def read_weights(task: Task) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The weights on the shards as they are, read by one who takes no part: [buckets, rows, 1 + columns]; and for each
    of these buckets, the shard that holds it."""
    model, rule = Cells(task.shape), consistency(task.mode)
    options = PrepareOptions(task.shape.bucket_bytes)
    spec, _ = describe(
        [model],
        [model.optimizer(signs=rule.quorum is not None)],
        options,
        name=task.job,
        consistency=rule,
        world_size=0 if task.elastic else task.workers,
    )
    coordinator = CoordinatorClient(task.server, START_SECONDS)
    found = coordinator.register(spec).shard_map
    coordinator.close()
    buckets = bucket_layout(spec.parameters, spec.bucket_bytes).buckets
    view = torch.zeros(task.shape.buckets, task.shape.rows, 1 + task.shape.columns)

    def land(bucket: BucketSpec, pulled: PulledBucket) -> int:
        values = tensor_from(pulled.payload, "float32")
        view[parameter_of(bucket)] = values[: view[0].numel()].view(view[0].shape)
        return len(pulled.payload)

    def ask(left: list[int]) -> bytes:
        return data.write_pull(data.PullCall(Identity(task.job, 0, READER), 0, tuple(left)))

    def read(fields: bytes, payload: memoryview | None) -> list[PulledBucket]:
        return data.read_pulled(fields, payload, lambda index, _: buckets[index].nbytes)

    pool = DaemonPool(1, "read")
    for shard, address in found.addresses.items():
        mine = [bucket for bucket in buckets if found.bucket_shards[bucket.index] == shard]
        if mine:
            calls = ShardCalls(shard, address, START_SECONDS)
            calls.pull("Pull", PullPlan(ask, read, land), 0, mine, pool).result()
            calls.close()
    shards = {parameter_of(bucket): found.bucket_shards[bucket.index] for bucket in buckets}
    return view, tuple(shard for _, shard in sorted(shards.items()))


def parameter_of(bucket: BucketSpec) -> int:
    """Which of the model's tensors a bucket is: they are laid out in another order."""
    return bucket.slices[0].parameter
