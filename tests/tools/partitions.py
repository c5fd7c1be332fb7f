"""One job on one shard, without threads: a test does its work by hand, or the shard does it in the calls."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from prometheus_client import CollectorRegistry

from ps_protocol.framing import Buffer
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import ParameterSpec
from ps_protocol.messages.data import PushCall, PushedBucket, PushKind
from ps_protocol.tensors import bytes_of
from ps_server.core.commands import AddWorker, UnitCommand
from ps_server.core.consistency import Add
from ps_server.core.partition import JobPartition
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from tests.tools.modes import consistency

M = TypeVar("M")

# -- a small job and its pushes --------------------------------------------------------------------------------------

TRAINED, FROZEN = (0, 1), 2


def job_spec(mode: str = "sync", *, bucket_bytes: int = 128, non_finite: NonFinite = NonFinite.REFUSE) -> JobSpec:
    """Two trained tensors of 32 in a bucket each, and a buffer in a third; SGD with lr 1."""
    return JobSpec(
        name="sums",
        parameters=(
            ParameterSpec("first", (32,), "float32", 0),
            ParameterSpec("second", (4, 8), "float32", 0),
            ParameterSpec("buffer", (2,), "int64", None),
        ),
        optimizer="SGD",
        param_groups=({"lr": 1.0},),
        consistency=consistency(mode),
        bucket_bytes=bucket_bytes,
        world_size=0,
        non_finite=non_finite,
    )


def payload(values: torch.Tensor | float, size: int = 32) -> bytes:
    flat = values if isinstance(values, torch.Tensor) else torch.full((size,), values)
    return bytes(bytes_of(flat))


def push(bucket: int = 0, clock: int = 1, rank: int = 0, incarnation: int = 1, **more: Any) -> PushCall:
    """A gradient of ones for a bucket, but for what is said otherwise of the bucket or of the call."""
    of_call = {"payload": payload(1.0), **{name: more.pop(name) for name in _OF_CALL & more.keys()}}
    pushed = PushedBucket(bucket, **{"kind": PushKind.GRADIENT, **more})
    return PushCall(Identity("sums", rank, incarnation), clock, (pushed,), **of_call)


_OF_CALL = {each.name for each in fields(PushCall)}


def changed(message: M, **more: Any) -> M:
    """A message with other fields, its own or its worker's."""
    worker = {name: more.pop(name) for name in ("job", "rank", "incarnation", "key", "run") if name in more}
    return replace(message, worker=replace(message.worker, **worker), **more)  # type: ignore[attr-defined, type-var]


def check(job: JobPartition, one: PushCall, lent: Buffer = b"") -> UnitCommand:
    """The command that stages the only bucket of a call. lent: its gradient, if that lies in the worker's memory"""
    [pushed] = one.buckets
    return job.checker.check(one, pushed, lent if one.payload is None else one.payload)


def initial(bucket: int, rank: int = 0, incarnation: int = 1) -> PushCall:
    data = payload(torch.zeros(2, dtype=torch.int64)) if bucket == FROZEN else payload(0.0)
    # Held tensors start on a 64-byte boundary like all others, and the bucket ends with that.
    padded = data + bytes(-len(data) % 64)
    return push(bucket, 0, rank, incarnation, kind=PushKind.INITIAL_VALUE, payload=padded)


def stage(job: JobPartition, one: PushCall, lent: Buffer = b"") -> bool:
    """Checks and stages; True if it was a repeat. lent: as in `check`"""
    return job.execute(check(job, one, lent)).duplicate


def image(job: JobPartition) -> list[object]:
    """Everything a push could change."""
    found: list[object] = [dict(job.roster), job.staged_bytes, job.optimizer_bytes]
    for bucket in job.buckets.values():
        p = bucket.rule
        found += [p.version, p.initialised, dict(p.staged), dict(p.applied), list(p.waiting), list(p.added)]
        found.append(bucket.weights.flat.tolist())
    return found


# -- what is done with them --------------------------------------------------------------------------------------------


def work_once(job: JobPartition, index: int) -> bool:
    """Does what comes next on one bucket; False if there is nothing to do."""
    bucket = job.buckets[index]
    item = bucket.rule.next()
    if item is None:
        return False
    if isinstance(item, Add):
        bucket.weights.add(item.contribution)
    else:
        bucket.weights.step()
    job.done(index, item)
    return True


def work(job: JobPartition, index: int) -> None:
    """Does everything there is to do on one bucket."""
    while work_once(job, index):
        pass


def running(mode: str = "sync", workers: int = 1, *, spec: JobSpec | None = None, **limits: float) -> JobPartition:
    """A job on one shard, with its initial weights, and workers 0 .. workers - 1 with incarnations from 1.

    spec:   another job than `job_spec(mode)`, with the same buckets
    limits: staged_limit and norm_limit of the partition
    """
    job = JobPartition(spec or job_spec(mode), [0, 1, 2], **limits)  # type: ignore[arg-type]
    for rank in range(workers):
        job.execute(AddWorker(rank, rank + 1, 0))
    for index in job.buckets:
        stage(job, initial(index))
    return job


def lone_shard(
    mode: str = "sync",
    workers: int = 2,
    *,
    spec: JobSpec | None = None,
    principal_limit: float = math.inf,
    pulled_limit: float = math.inf,
    norm_limit: float = math.inf,
) -> Shard:
    """A shard that works without threads, with a job like that of `running`; `spec`: another job."""
    limits = {"principal_limit": principal_limit, "pulled_limit": pulled_limit, "norm_limit": norm_limit}
    made = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), **limits)  # type: ignore[arg-type]
    made.create_job(spec or job_spec(mode), [0, 1, 2])
    for rank in range(workers):
        made.add_worker("sums", rank, rank + 1, 0)
    for index in range(3):
        made.push(initial(index))
    return made
