"""A worker written from the contract alone: gRPC, the `.proto` files, and its own arithmetic. It knows no file of ours.

Tensors are lists of numbers, row by row; a model is a dictionary of them, by name.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped,unused-ignore]

PACKAGE = "ps_protocol.v1"
SECONDS = 60.0  # so that a busy machine is no refusal
SIZES = [("grpc.max_receive_message_length", 17 * 2**20), ("grpc.max_send_message_length", 17 * 2**20)]
ELEMENTS = {"FLOAT32": "f", "FLOAT16": "e", "FLOAT64": "d", "INT64": "q", "INT32": "i", "BOOL": "?", "UINT8": "B"}

Model = dict[str, list[float]]


class Contract:
    """Messages, enums and methods out of files of the contract, in a pool of their own.

    image: a FileDescriptorSet with everything that the files import, as protoc and buf write it
    """

    def __init__(self, image: bytes) -> None:
        self._pool = DescriptorPool()
        # All classes are made here, and stay: protobuf makes them when they are first used, and may crash where several
        # threads use them then.
        self._classes: list[Any] = []
        for file in FileDescriptorSet.FromString(image).file:
            self._pool.AddSerializedFile(file.SerializeToString())
            self._make(self._pool.FindFileByName(file.name).message_types_by_name.values())

    def _make(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._classes.append(message_factory.GetMessageClass(message))
            self._make(message.nested_types)

    def message(self, name: str) -> Any:
        """Returns the class of a message."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    def number(self, enum: str, value: str) -> int:
        """Returns the number of an enum's value."""
        return int(self._pool.FindEnumTypeByName(f"{PACKAGE}.{enum}").values_by_name[value].number)

    def name(self, enum: str, number: int) -> str:
        """Returns the name of an enum's value."""
        return str(self._pool.FindEnumTypeByName(f"{PACKAGE}.{enum}").values_by_number[number].name)

    def method(self, channel: grpc.Channel, service: str, name: str) -> Any:
        """Returns a method of a service as a function from a request to an answer, or to an iterator over answers."""
        method = self._pool.FindServiceByName(f"{PACKAGE}.{service}").methods_by_name[name]
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer = message_factory.GetMessageClass(method.output_type).FromString
        return make(f"/{PACKAGE}.{service}/{name}", lambda request: request.SerializeToString(), answer)


class Refused(Exception):
    """A call was refused.

    code:        gRPC's
    reason:      a value of ErrorReason, without its prefix
    retry_after: the seconds that a RetryInfo says; None: there is none
    """

    def __init__(self, contract: Contract, error: grpc.RpcError) -> None:
        super().__init__(error.details())
        self.code, self.reason, self.retry_after = error.code(), "", None
        status = status_pb2.Status()
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status.ParseFromString(value)
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                assert info.domain == "ps_protocol"
                assert contract.number("ErrorReason", f"ERROR_REASON_{info.reason}") > 0
                self.reason = info.reason
            elif detail.Unpack(retry):
                self.retry_after = retry.retry_delay.ToNanoseconds() / 1e9


class Connection:
    """Channels to the servers of one cluster.

    token: what every call shows; empty: nothing
    """

    def __init__(self, contract: Contract, coordinator: str, token: str = "") -> None:
        self.contract, self.coordinator = contract, coordinator
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._channels: dict[str, grpc.Channel] = {}

    def call(self, service: str, method: str, request: Any, address: str = "") -> Any:
        """Returns the answer to a call. address: empty: the coordinator's

        Raises Refused.
        """
        function = self.contract.method(self._channel(address or self.coordinator), service, method)
        try:
            return function(request, timeout=SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            raise Refused(self.contract, error) from None

    def stream(self, service: str, method: str, request: Any, address: str = "") -> Iterator[Any]:
        """Yields the answers to a call as they come; otherwise as `call`."""
        function = self.contract.method(self._channel(address or self.coordinator), service, method)
        try:
            yield from function(request, timeout=SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            raise Refused(self.contract, error) from None

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, options=SIZES)
        return self._channels[address]

    def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            channel.close()


@dataclass
class Worker:
    """One rank of a job, in the order of calls that membership.proto gives.

    spec:  the job, as the fields of a JobSpec
    member: which member of the worker's group this is; 0 for a worker of one process
    clock: steps finished
    saved: the clocks of which this worker has saved a state of its own
    """

    connection: Connection
    spec: Mapping[str, Any]
    rank: int
    member: int = 0
    clock: int = 0
    saved: list[int] = field(default_factory=list)

    # -- messages ----------------------------------------------------------------------------------------------------

    def make(self, message: str, **fields: Any) -> Any:
        """Returns a message; names of enum values stand for their numbers."""
        return self.connection.contract.message(message)(**fields)

    def coordinator(self, service: str, method: str, request: Any) -> Any:
        """Returns the coordinator's answer."""
        return self.connection.call(service, method, request)

    def stream(self, bucket: int, method: str, request: Any) -> Iterator[Any]:
        """Yields the answers of the shard that holds a bucket."""
        shard = self.bucket_shards[bucket]
        for answer in self.connection.stream("DataService", method, request, self.addresses[shard]):
            assert (answer.header.shard_index, answer.header.run) == (shard, self.run)
            yield answer

    # -- the life of a worker ----------------------------------------------------------------------------------------

    def register(self, version: int = 2, **other: Any) -> bool:
        """Registers the job and keeps what the answer says of its layout. Returns whether this call made it."""
        spec = self.make("JobSpec", **{**self.spec, **other})
        request = self.make("RegisterJobRequest", spec=spec, protocol_version=version, layout_wanted=True)
        answer = self.coordinator("JobService", "RegisterJob", request)
        assert answer.protocol_version >= version
        self.parameters = list(spec.parameters)
        self.layout = list(answer.layout)
        self.run: str = answer.run
        self._place(answer.shard_map)
        return bool(answer.created)

    def _place(self, shard_map: Any) -> None:
        self.addresses = {shard.index: shard.address for shard in shard_map.shards}
        self.bucket_shards = list(shard_map.bucket_shards)

    def join(self) -> None:
        """Takes the rank."""
        request = self.make(
            "JoinRequest", job=self.spec["name"], rank=self.rank, run=self.run, request_id=secrets.randbits(63)
        )
        answer = self.coordinator("MembershipService", "Join", request)
        self.identity, self.clock = answer.worker, answer.clock
        self.lease = answer.lease_duration.ToNanoseconds() / 1e9
        self._place(answer.shard_map)

    def take_place(self, first: Worker) -> None:
        """Takes the place of its group, which the first member has got."""
        self.identity, self.clock, self.lease = self.make("WorkerIdentity"), first.clock, first.lease
        self.identity.CopyFrom(first.identity)
        self.identity.member = self.member

    def await_started(self) -> None:
        """Waits until all declared workers have joined."""
        watch = self.connection.stream("MembershipService", "Watch", self.make("WatchRequest", job=self.spec["name"]))
        next(answer for answer in watch if answer.started)

    def heartbeat(self) -> int:
        """Renews the lease; returns how many workers are live."""
        request = self.make("HeartbeatRequest", worker=self.identity, clock=self.clock)
        return int(self.coordinator("MembershipService", "Heartbeat", request).live_count)

    def leave(self, done: bool = False) -> bool:
        """Leaves the job; returns whether it ended with that. done: the script has come to its end"""
        request = self.make("LeaveRequest", worker=self.identity, done=done)
        return bool(self.coordinator("MembershipService", "Leave", request).ended)

    # -- tensors -----------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[int]:
        """The buckets that an optimizer steps, of this member."""
        return [index for index in self.own if not self.layout[index].frozen]

    @property
    def own(self) -> list[int]:
        """The buckets of this member."""
        return [index for index, bucket in enumerate(self.layout) if bucket.member == self.member]

    def _begin(self, part: Any) -> int:
        """Returns where a slice begins in its flattened parameter; of a piece, which is some rows, in the whole one."""
        piece = self.parameters[part.parameter].piece
        row = math.prod(piece.whole_shape[1:])
        return int(part.parameter_start + (piece.offsets[0] * row if piece.offsets else 0))

    def _element(self, bucket: int, wire: int) -> str:
        """Returns struct's letter for an element of a bucket in a wire format; 0: as the bucket has it."""
        contract, data_type = self.connection.contract, self.layout[bucket].data_type
        name = contract.name("WireFormat", wire) if wire else contract.name("DataType", data_type)
        return ELEMENTS[name.removeprefix("WIRE_FORMAT_").removeprefix("DATA_TYPE_")]

    def _wire(self, bucket: int) -> int:
        """Returns the wire format of a bucket's gradients; 0 for elements that are not float32."""
        is_float32 = self.layout[bucket].data_type == self.connection.contract.number("DataType", "DATA_TYPE_FLOAT32")
        return int(self.make("JobSpec", **self.spec).gradient_wire) if is_float32 else 0

    def encoded(self, bucket: int, model: Model, wire: int = 0) -> bytes:
        """Returns a bucket's elements, padding included, out of a model or of gradients like it."""
        elements: list[float] = [0] * self.layout[bucket].element_count
        for part in self.layout[bucket].slices:
            values, begin = model[self.parameters[part.parameter].name], self._begin(part)
            there = values[begin : begin + part.length]
            elements[part.bucket_start : part.bucket_start + part.length] = there
        return struct.pack(f"<{len(elements)}{self._element(bucket, wire)}", *elements)

    def decode(self, bucket: int, payload: bytes, model: Model, wire: int = 0) -> None:
        """Writes a bucket's elements into a model."""
        elements = struct.unpack(f"<{self.layout[bucket].element_count}{self._element(bucket, wire)}", payload)
        for part in self.layout[bucket].slices:
            values, begin = model[self.parameters[part.parameter].name], self._begin(part)
            values[begin : begin + part.length] = elements[part.bucket_start : part.bucket_start + part.length]

    def push(self, bucket: int, clock: int, kind: str, payload: bytes = b"", **header: Any) -> int:
        """Pushes one bucket; returns how many of it had been staged before. header: fields of the PushHeader"""
        pushed = self.make("BucketPush", bucket=bucket, kind=f"PUSH_KIND_{kind}", wire_format=self._wire(bucket))
        fields = {"worker": self.identity, "clock": clock, "buckets": [pushed], **header}
        content = {"payload": payload} if payload else {}
        request = self.make("PushRequest", header=self.make("PushHeader", **fields), **content)
        address = self.addresses[self.bucket_shards[bucket]]
        return int(self.connection.call("DataService", "Push", request, address).duplicate_count)

    def initialise(self, model: Model) -> None:
        """Sends the initial value of every bucket of this member, which the worker of rank 0 does."""
        for bucket in self.own:
            self.push(bucket, 0, "INITIAL_VALUE", self.encoded(bucket, model))

    def push_step(self, gradients: Model) -> None:
        """Pushes the next step to every bucket that an optimizer steps."""
        self.clock += 1
        for bucket in self.trained:
            self.push(bucket, self.clock, "GRADIENT", self.encoded(bucket, gradients, self._wire(bucket)))

    def pull(
        self, model: Model, buckets: Iterable[int] | None = None, waits: Callable[[Any], object] = lambda notice: None
    ) -> None:
        """Writes buckets, by default all that an optimizer steps, into a model. waits: is told each WaitNotice"""
        wanted = list(self.trained if buckets is None else buckets)
        for shard in sorted({self.bucket_shards[bucket] for bucket in wanted}):
            here = [bucket for bucket in wanted if self.bucket_shards[bucket] == shard]
            request = self.make("PullRequest", worker=self.identity, clock=self.clock, buckets=here)
            for answer in self.stream(here[0], "Pull", request):
                if answer.HasField("waiting"):
                    waits(answer.waiting)
                    continue
                [pulled] = answer.buckets
                self.decode(pulled.bucket, answer.payload, model, pulled.wire_format)
                if pulled.state_wanted and self.clock not in self.saved:
                    self.save_state()

    def exchange(self, gradients: Model, model: Model) -> None:
        """Makes a step in one call to each shard: pushes gradients, pulls weights."""
        self.clock += 1
        for shard in sorted({self.bucket_shards[bucket] for bucket in self.trained}):
            here = [bucket for bucket in self.trained if self.bucket_shards[bucket] == shard]
            kind = "PUSH_KIND_GRADIENT"
            pushed = [self.make("BucketPush", bucket=b, kind=kind, wire_format=self._wire(b)) for b in here]
            header = self.make("PushHeader", worker=self.identity, clock=self.clock, buckets=pushed)
            payload = b"".join(self.encoded(bucket, gradients, self._wire(bucket)) for bucket in here)
            request = self.make("ExchangeRequest", push=header, buckets=here, payload=payload)
            for answer in self.stream(here[0], "Exchange", request):
                for pulled in answer.buckets:
                    self.decode(pulled.bucket, answer.payload, model, pulled.wire_format)

    def save_state(self) -> None:
        """Saves a state of its own for a checkpoint: a safetensors file without tensors."""
        header = b"{}"
        state = self.make("WorkerState", clock=self.clock, content=struct.pack("<Q", len(header)) + header)
        request = self.make("SaveWorkerStateRequest", worker=self.identity, state=state)
        self.coordinator("MembershipService", "SaveWorkerState", request)
        self.saved.append(self.clock)
