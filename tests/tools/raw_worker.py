"""A worker without a session: every message by hand, so that a test can send what no session would."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import grpc
import torch

from ps_protocol.convert import hyper_messages, job_spec_message
from ps_protocol.errors import Backlogged, TryLater
from ps_protocol.job import JobSpec, NonFinite
from ps_protocol.layout import Layout, ParameterSpec, bucket_layout
from ps_protocol.v1 import data_pb2, job_pb2, jobs_pb2, leases_pb2, membership_pb2, types_pb2
from ps_protocol.v1.data_pb2_grpc import DataServiceStub
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.leases_pb2_grpc import DataLeaseServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_protocol.v1.rounds_pb2_grpc import RoundServiceStub
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import error_from
from tests.tools.modes import consistency

CALL_SECONDS = 20.0


def vector_job(
    name: str, mode: str, cells: int, world_size: int, frozen: int = 0, non_finite: NonFinite = NonFinite.REFUSE
) -> JobSpec:
    """A job with one vector of `cells` float32 zeros in buckets of 16 cells, stepped by SGD with lr 1.

    frozen: cells of a second vector, which no optimizer steps.
    """
    parameters = [ParameterSpec("cells", (cells,), "float32", 0)]
    if frozen:
        parameters.append(ParameterSpec("frozen", (frozen,), "float32", None))
    return JobSpec(name, tuple(parameters), "SGD", ({"lr": 1.0},), consistency(mode), 64, world_size, non_finite)


class RawWorker:
    """Registers and joins a job; then sends what it is told to, with generated classes. Never sends a heartbeat.

    Methods raise the PSError that the server answered with.
    """

    def __init__(self, server: str, spec: JobSpec, rank: int, access: Access = PLAINTEXT) -> None:
        self.spec = spec
        self.rank = rank
        self.layout: Layout = bucket_layout(spec.parameters, spec.bucket_bytes)
        self._channels = [open_channel(server, access)]
        self.members = MembershipServiceStub(self._channels[0])
        self.leases = DataLeaseServiceStub(self._channels[0])
        self.rounds = RoundServiceStub(self._channels[0])
        found = self._call_again(
            JobServiceStub(self._channels[0]).RegisterJob, jobs_pb2.RegisterJobRequest(spec=job_spec_message(spec))
        )
        self.shard_of = list(found.shard_map.bucket_shards)
        self._data: list[DataServiceStub] = []
        for shard in found.shard_map.shards:
            self._channels.append(open_channel(shard.address, access))
            self._data.append(DataServiceStub(self._channels[-1]))
        self.flagged: set[int] = set()  # clocks whose pulls said that they are in a checkpoint
        self.incarnation = 0
        self.clock = 0
        self.join()

    def __enter__(self) -> RawWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()

    @staticmethod
    def register(server: str, request: jobs_pb2.RegisterJobRequest) -> jobs_pb2.RegisterJobResponse:
        """Registers a job and joins nothing."""
        with open_channel(server) as channel:
            return RawWorker._call(JobServiceStub(channel).RegisterJob, request)

    def join(self) -> membership_pb2.JoinResponse:
        """Joins; again, if this worker was live before. Waits for a job that is being rolled back."""
        request = membership_pb2.JoinRequest(
            job=self.spec.name, rank=self.rank, previous_incarnation=self.incarnation, clock=self.clock, host="raw"
        )
        place = self._call_again(self.members.Join, request)
        self.incarnation = place.worker.incarnation
        self.lease_key: bytes = place.worker.lease_key
        self.clock = place.clock
        return place  # type: ignore[no-any-return]

    def save_state(self, clock: int, content: bytes, **other: Any) -> None:
        """Sends this worker's own part of a checkpoint; `other` as for `identity`."""
        state = membership_pb2.WorkerState(clock=clock, content=content)
        request = membership_pb2.SaveWorkerStateRequest(worker=self.identity(**other), state=state)
        self._call(self.members.SaveWorkerState, request)

    def heartbeat(self) -> None:
        """A sign of life."""
        request = membership_pb2.HeartbeatRequest(worker=self.identity(), clock=self.clock)
        self._call(self.members.Heartbeat, request)

    def leave(self) -> None:
        """Takes this worker off the job."""
        self._call(self.members.Leave, membership_pb2.LeaveRequest(worker=self.identity()))

    def lease_batches(self, **fields: Any) -> leases_pb2.LeaseDataResponse:
        """Asks for batches of 4 out of 12 samples; `fields` sets fields of the request and of what is in it."""
        worker, loader = _taken(types_pb2.WorkerIdentity, fields), _taken(leases_pb2.LoaderSpec, fields)
        request = leases_pb2.LeaseDataRequest(
            worker=self.identity(**worker),
            loader=leases_pb2.LoaderSpec(**{"sample_count": 12, "batch_size": 4, **loader}),
            **{"batch_count": 1, **fields},
        )
        found: leases_pb2.LeaseDataResponse = self._call(self.leases.LeaseData, request)
        return found

    @property
    def trained(self) -> list[int]:
        """The buckets that an optimizer steps."""
        return [bucket.index for bucket in self.layout.buckets if not bucket.frozen]

    def message(self, bucket: int, clock: int, payload: bytes | None = None, **header: Any) -> data_pb2.PushRequest:
        """A push of one bucket, of zeros if no payload is given; `header` sets or replaces fields of its header and of
        what that says of the bucket."""
        pushed = {"bucket": bucket, "kind": data_pb2.PUSH_KIND_GRADIENT, **_taken(data_pb2.BucketPush, header)}
        fields: dict[str, Any] = {
            "worker": self.identity(),
            "clock": clock,
            "buckets": [data_pb2.BucketPush(**pushed)],
            "groups": [job_pb2.GroupUpdate(group=0, hyper_parameters=hyper_messages(self.spec.param_groups[0]))],
        }
        size = self.layout.buckets[bucket].nbytes if bucket < len(self.layout.buckets) else 64
        return data_pb2.PushRequest(
            header=data_pb2.PushHeader(**{**fields, **header}), payload=bytes(size) if payload is None else payload
        )

    def identity(self, **other: Any) -> types_pb2.WorkerIdentity:
        """Who this worker is, or says it is."""
        return types_pb2.WorkerIdentity(
            **{
                "job": self.spec.name,
                "rank": self.rank,
                "incarnation": self.incarnation,
                "lease_key": self.lease_key,
                **other,
            }
        )

    def send(self, message: data_pb2.PushRequest, shard: int | None = None) -> data_pb2.PushResponse:
        """Sends a push to its bucket's shard, or to another."""
        bucket = message.header.buckets[0].bucket
        where = shard if shard is not None else self.shard_of[bucket] if bucket < len(self.shard_of) else 0
        return self._call(self._data[where].Push, message)

    def initialise(self) -> None:
        """Sends zeros as the initial value of every bucket."""
        for bucket in self.layout.buckets:
            self.send(self.message(bucket.index, 0, kind=data_pb2.PUSH_KIND_INITIAL_VALUE))

    def step(self, gradient: torch.Tensor) -> None:
        """Pushes the next clock's gradient of the one trained vector: [cells]."""
        self.clock += 1
        for index in self.trained:
            bucket = self.layout.buckets[index]
            padded = torch.zeros(bucket.numel)
            mine = gradient[bucket.start : bucket.start + bucket.numel]
            padded[: len(mine)] = mine
            self._send_until_taken(self.message(index, self.clock, padded.numpy().tobytes()))

    def _send_until_taken(self, message: data_pb2.PushRequest) -> None:
        """As a session does: where a shard has no room for now, it is asked again."""
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                self.send(message)
                return
            except Backlogged:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(0.01)

    def ask(self, clock: int, buckets: list[int], shard: int | None = None, whole: Sequence[int] = ()) -> Any:
        """Starts a Pull call and returns it; iterating over it waits for the answers. whole: of which buckets"""
        request = data_pb2.PullRequest(worker=self.identity(), clock=clock, buckets=buckets, whole_buckets=whole)
        where = shard if shard is not None else self.shard_of[buckets[0]]
        return self._data[where].Pull(request, timeout=CALL_SECONDS)

    def answers(self, call: Any) -> Iterator[data_pb2.PullResponse]:
        """What a Pull call answers with, notices of waiting left out."""
        try:
            for response in call:
                if not response.HasField("waiting"):
                    yield response
        except grpc.RpcError as error:
            raise error_from(error, "shard") from None

    def pull(self) -> torch.Tensor:
        """The trained vector at this worker's clock: [cells]."""
        found = torch.zeros(self.layout.space_sizes["float32"])
        for shard in set(self.shard_of):
            mine = [index for index in self.trained if self.shard_of[index] == shard]
            if mine:
                for response in self.answers(self.ask(self.clock, mine)):
                    [pulled] = response.buckets
                    if pulled.state_wanted:
                        self.flagged.add(self.clock)
                    bucket = self.layout.buckets[pulled.bucket]
                    values = torch.frombuffer(bytearray(response.payload), dtype=torch.float32)
                    found[bucket.start : bucket.start + bucket.numel] = values
        return found[: self.spec.parameters[0].numel]

    @classmethod
    def _call_again(cls, method: Any, request: Any) -> Any:
        """Calls until the answer is another one than to try later, as every worker does; a busy machine may be slow."""
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return cls._call(method, request)
            except TryLater:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(0.05)

    @staticmethod
    def _call(method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise error_from(error, "server") from None


@contextmanager
def joined(server: str, spec: JobSpec, access: Access = PLAINTEXT) -> Iterator[list[RawWorker]]:
    """All declared workers of a job, with the initial values sent."""
    with ExitStack() as stack:
        workers = [stack.enter_context(RawWorker(server, spec, rank, access)) for rank in range(spec.world_size)]
        workers[0].initialise()
        yield workers


def _taken(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that a class of messages has, taken from others."""
    return {field.name: fields.pop(field.name) for field in kind.DESCRIPTOR.fields if field.name in fields}
