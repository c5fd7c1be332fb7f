"""One shard and one coordinator to throw bytes at, without a network; and what they hold, as a hash.

The shard has a job in sync mode with two live workers. The bytes may speak for rank 1, whose lease key they know: what
it pushes is staged and, since rank 0 never pushes, changes no weight, whenever the hash is taken.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from ps_protocol.convert import job_spec_message
from ps_protocol.errors import PSError
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, bucket_layout
from ps_protocol.modes import Consistency
from ps_protocol.v1 import (
    cluster_pb2,
    data_pb2,
    jobs_pb2,
    leases_pb2,
    membership_pb2,
    rounds_pb2,
    shard_pb2,
    types_pb2,
)
from ps_server.coordinator.coordinator import Coordinator
from ps_server.core.requests import PushCall, PushedBucket, PushKind
from ps_server.rpc import convert
from ps_server.rpc.cluster_service import ClusterService
from ps_server.rpc.data_messages import Answers
from ps_server.rpc.data_service import DataService
from ps_server.rpc.job_service import JobService
from ps_server.rpc.lease_service import DataLeaseService
from ps_server.rpc.membership_service import MembershipService
from ps_server.rpc.round_service import RoundService
from ps_server.rpc.shard_client import ShardClient
from ps_server.rpc.shard_service import ShardService
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.shard import Shard
from ps_server.shard.threads import NoThreads
from ps_server.storage.checkpoints import CheckpointStore, Manifest

JOB, KEY = "job", b"sixteen bytes 01"
KEPT, CHECKPOINT = "kept", "000001"
SPEC = JobSpec(
    JOB,
    (ParameterSpec("w", (24,), "float32", 0), ParameterSpec("buffer", (3,), "int64", None)),
    "AdamW",
    ({"lr": 0.1},),
    Consistency(0, True),
    64,
    2,
)
WORKER = types_pb2.WorkerIdentity(job=JOB, rank=1, incarnation=2, lease_key=KEY)


class Finding(AssertionError):
    """Something came of bytes that should not."""


class _Context:
    """A call that is never over."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def set_code(self, code: Any) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: Any) -> None: ...


class _Inline:
    """Does at once what a pool would do later."""

    def submit(self, task: Callable[..., None], *arguments: Any) -> None:
        task(*arguments)

    def lend(self, tasks: Any) -> None:
        for task in tasks:
            task()

    def stop(self) -> None: ...

    def shutdown(self, wait: bool = True) -> None: ...

    def map(self, task: Callable[..., Any], items: Any) -> Any:
        return map(task, items)


class Target:
    """What bytes are thrown at: every handler of every service by name, as the boundary calls them."""

    def __init__(self) -> None:
        self._level = logging.getLogger("ps_server").level
        logging.getLogger("ps_server").setLevel(logging.CRITICAL)
        # In memory where there is such a place: what is flushed to a disk would be most of the time.
        self._files = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.store = CheckpointStore(Path(self._files.name))
        # Without threads: nothing changes between two inputs.
        self.shard = Shard(ShardMetrics(CollectorRegistry()), NoThreads(), checkpoints=self.store)
        self.coordinator = Coordinator(1, ShardClient)
        self._fill()
        data = DataService(self.shard, Answers(0, 1))
        data.senders = _Inline()  # type: ignore[assignment]
        pool: Any = _Inline()
        self.handlers: dict[str, Callable[[bytes], Any]] = {
            "Push": lambda raw: data._push(raw, _Context()),  # type: ignore[arg-type]
            "AttachSegment": lambda raw: data._attach(raw, _Context()),  # type: ignore[arg-type]
            "Pull": lambda raw: data._pull(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "Exchange": lambda raw: data._exchange(raw, _Context(), _ignore),  # type: ignore[arg-type]
            "PullState": lambda raw: data._pull_state(raw, _Context(), _ignore),  # type: ignore[arg-type]
        }
        services = [
            JobService(self.coordinator),
            MembershipService(self.coordinator, pool),
            DataLeaseService(self.coordinator),
            RoundService(self.coordinator, pool),
            ClusterService(self.coordinator, "127.0.0.1:1", ""),
            ShardService(self.shard),
        ]
        for service in services:
            for method in descriptor_pool.Default().FindServiceByName(service.NAME).methods:
                self.handlers[method.name] = _handler(service, method)
        self.handlers["AwaitSnapshot"] = self._await_snapshot  # as the service does, but for the waiting

    def _await_snapshot(self, raw: bytes) -> None:
        try:
            request = shard_pb2.AwaitSnapshotRequest.FromString(raw)
        except DecodeError:
            return
        convert.await_snapshot_response(self.shard.await_snapshot(request.job, request.checkpoint, 0.0))

    def _fill(self) -> None:
        shard = self.shard
        shard.create_job(SPEC, [0, 1, 2])
        shard.add_worker(JOB, 0, 1, 0, b"another key of 1")
        shard.add_worker(JOB, 1, 2, 0, KEY)
        for index, bucket in shard.jobs()[JOB].buckets.items():
            layout = bucket.spec
            payload = torch.arange(layout.nbytes, dtype=torch.uint8).numpy().tobytes()
            if layout.dtype == "float32":
                payload = torch.arange(layout.numel, dtype=torch.float32).numpy().tobytes()
            initial = PushKind.INITIAL_VALUE
            buckets = (PushedBucket(index, initial),)
            shard.push(PushCall(JOB, 0, 1, 0, buckets, payload, key=b"another key of 1"))

        self._keep(shard)

    def _keep(self, shard: Shard) -> None:
        """A checkpoint on disk, of a job that is not there any more."""
        spec = replace(SPEC, name=KEPT)
        shard.create_job(spec, [0, 1, 2])
        shard.add_worker(KEPT, 0, 1, 0, KEY)
        for bucket in bucket_layout(spec.parameters, spec.bucket_bytes).buckets:
            pushed = (PushedBucket(bucket.index, PushKind.INITIAL_VALUE),)
            shard.push(PushCall(KEPT, 0, 1, 0, pushed, bytes(bucket.nbytes), key=KEY))
        shard.begin_snapshot(KEPT, CHECKPOINT, None)
        part = shard.await_snapshot(KEPT, CHECKPOINT, 0.0).part
        shard.drop_job(KEPT)
        manifest = Manifest(
            name=CHECKPOINT,
            job={},
            run="run",
            mode="sync",
            clock=0,
            placement=(0, 0, 0),
            shards={0: part},
            workers={},
            versions=(0, 0),
            clocks={0: 0},
            last_incarnation=1,
            restore_count=0,
        )
        self.store.commit(KEPT, manifest)

    def throw(self, name: str, raw: bytes) -> PSError | None:
        """Has a handler answer these bytes; the error that it refuses them with, None if it takes them.

        Raises Finding for any other error, and for a refusal that left something changed.
        """
        before = self.fingerprint()
        try:
            self.handlers[name](raw)
        except PSError as error:
            if self.fingerprint() != before:
                raise Finding(f"{name} refused bytes ({error}) and changed something") from error
            return error
        except Exception as error:
            raise Finding(f"{name} failed with {type(error).__name__}: {error}") from error
        return None

    def fingerprint(self) -> bytes:
        """A hash of all that a shard and a coordinator remember."""
        found = hashlib.sha256(repr(sorted(self.coordinator.jobs())).encode())
        found.update(repr(sorted(self.coordinator.shards())).encode())
        for name, job in sorted(self.shard.jobs().items()):
            state = job.state
            found.update(repr(job.snapshot_task and (job.snapshot_task.name, job.snapshot_task.clock)).encode())
            found.update(repr((name, state.spec, sorted(state.roster.items()), sorted(job.segments))).encode())
            for index, bucket in sorted(job.buckets.items()):
                rule = bucket.rule
                numbers = rule.initialised, rule.version, rule.staged, rule.applied, rule.added
                found.update(repr((index, numbers, sorted(rule.waiting), bucket.busy)).encode())
                found.update(bucket.weights.flat.view(torch.uint8).numpy().tobytes())
        return found.digest()

    def stop(self) -> None:
        """Ends the threads."""
        self.shard.stop()
        self._files.cleanup()
        self.coordinator.stop()
        logging.getLogger("ps_server").setLevel(self._level)


def _ignore(message: Any) -> None:
    """Where answers go."""


def _handler(service: Any, method: Any) -> Callable[[bytes], Any]:
    behaviour = getattr(service, method.name)
    parse = message_factory.GetMessageClass(method.input_type).FromString

    def handle(raw: bytes) -> None:
        try:
            request = parse(raw)
        except DecodeError:
            return  # the boundary refuses these
        if method.server_streaming:
            behaviour(request, _Context(), _ignore)
        else:
            behaviour(request, _Context())

    return handle


def seeds() -> dict[str, list[bytes]]:
    """Well-formed requests by method: what a fuzzer starts from."""
    gradient, skip = data_pb2.PUSH_KIND_GRADIENT, data_pb2.PUSH_KIND_SKIP

    def header(*buckets: tuple[int, data_pb2.PushKind]) -> data_pb2.PushHeader:
        pushed = [data_pb2.BucketPush(bucket=bucket, kind=kind) for bucket, kind in buckets]
        return data_pb2.PushHeader(worker=WORKER, clock=1, buckets=pushed)

    full = header((0, gradient))
    group = full.groups.add(group=0).hyper_parameters
    group.add(name="lr", number=0.5)
    group.add(name="betas").numbers.values.extend([0.9, 0.99])
    full.ranges.add(start=4, stop=8)
    in_segment = data_pb2.InSegment()
    spec = job_spec_message(SPEC)
    spec.name = "new"
    lease = leases_pb2.LeaseDataRequest(worker=WORKER, batch_count=2)
    lease.loader.CopyFrom(leases_pb2.LoaderSpec(sample_count=12, batch_size=4, seed=1))
    lease.leased.add(stop=4)
    lease.committed.add(start=4, stop=8)
    newcomer = types_pb2.WorkerIdentity(job="new", rank=1, incarnation=3)
    launch = membership_pb2.Launch(name="launch", rank_count=2)
    state = membership_pb2.WorkerState(clock=1, content=b"state")
    found: dict[str, list[Any]] = {
        "Push": [
            data_pb2.PushRequest(header=full, payload=bytes(64)),
            data_pb2.PushRequest(header=header((0, data_pb2.PUSH_KIND_DRAFT)), payload=bytes(64)),
            data_pb2.PushRequest(header=header((0, gradient), (1, gradient)), payload=bytes(128)),
            data_pb2.PushRequest(header=header((1, skip))),
            data_pb2.PushRequest(header=header((0, skip)), in_segment=in_segment),
        ],
        "Pull": [
            data_pb2.PullRequest(worker=WORKER, clock=0, buckets=[0, 1, 2]),
            data_pb2.PullRequest(worker=WORKER, clock=0, buckets=[0, 1], in_segment=in_segment, notify_bytes=64),
        ],
        "Exchange": [
            data_pb2.ExchangeRequest(push=header((0, data_pb2.PUSH_KIND_COMMIT), (1, skip)), buckets=[0]),
            data_pb2.ExchangeRequest(push=header((0, skip)), buckets=[0], in_segment=in_segment),
            data_pb2.ExchangeRequest(push=header((0, gradient), (1, gradient)), buckets=[0, 1], payload=bytes(128)),
        ],
        "PullState": [data_pb2.PullStateRequest(worker=WORKER, buckets=[0, 1])],
        "AttachSegment": [data_pb2.AttachSegmentRequest(worker=WORKER, location="1/2", nonce=bytes(32))],
        "RegisterJob": [jobs_pb2.RegisterJobRequest(spec=spec)],
        "CreateJob": [shard_pb2.CreateJobRequest(spec=spec, buckets=[0, 1])],
        "Join": [membership_pb2.JoinRequest(job=JOB, rank=1, metrics_address="h:1", pid=1, host="h", launch=launch)],
        "Watch": [membership_pb2.WatchRequest(job=JOB)],
        "Heartbeat": [membership_pb2.HeartbeatRequest(worker=WORKER, clock=1)],
        "Leave": [membership_pb2.LeaveRequest(worker=WORKER)],
        "LeaseData": [lease],
        "GatherValues": [
            rounds_pb2.GatherValuesRequest(worker=WORKER, round=number, clock=1, value=b"value") for number in (0, 1)
        ],
        "GetCommittedData": [shard_pb2.GetCommittedDataRequest(job=JOB)],
        "EndJob": [jobs_pb2.EndJobRequest(job=JOB)],
        "RegisterShard": [cluster_pb2.RegisterShardRequest(index=1, address="h:1", process=1)],
        "DropJob": [shard_pb2.DropJobRequest(job="new")],
        "AddWorker": [shard_pb2.AddWorkerRequest(worker=newcomer)],
        "RemoveWorker": [shard_pb2.RemoveWorkerRequest(worker=newcomer)],
        "SaveWorkerState": [membership_pb2.SaveWorkerStateRequest(worker=WORKER, state=state)],
        "CheckpointJob": [jobs_pb2.CheckpointJobRequest(job=JOB)],
        "BeginSnapshot": [
            shard_pb2.BeginSnapshotRequest(job=JOB, checkpoint="000002", clock=1),
            shard_pb2.BeginSnapshotRequest(job=JOB, checkpoint="000003"),
        ],
        "AwaitSnapshot": [shard_pb2.AwaitSnapshotRequest(job=JOB, checkpoint="000003")],
        "RestoreJob": [
            shard_pb2.RestoreJobRequest(
                spec=job_spec_message(replace(SPEC, name=KEPT)),
                buckets=[0, 1, 2],
                checkpoint=CHECKPOINT,
                last_incarnation=2,
            )
        ],
        "GetStatus": [cluster_pb2.GetStatusRequest()],
        "GetShardStatus": [shard_pb2.GetShardStatusRequest()],
    }
    return {name: [message.SerializeToString() for message in messages] for name, messages in found.items()}
