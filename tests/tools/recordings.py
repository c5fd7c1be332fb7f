"""Plays what tests.tools.record_worker has recorded of an earlier release: its requests, as bytes, and its answers."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

from ps_runtime.grpc_status import error_from

IDENTITY = "ps_protocol.v1.WorkerIdentity"
SECONDS = 30.0


@dataclass(frozen=True)
class Recorded:
    """One call of the earlier release.

    method:  in the contract of that release
    request: the bytes that its worker sent
    answers: what its servers answered
    """

    method: MethodDescriptor
    request: bytes
    answers: tuple[bytes, ...]

    @property
    def name(self) -> str:
        """The name of the method."""
        return str(self.method.name)

    def message(self, name: str, **fields: Any) -> Any:
        """Returns another message of that release's contract."""
        kind = self.method.containing_service.file.pool.FindMessageTypeByName(f"ps_protocol.v1.{name}")
        return message_factory.GetMessageClass(kind)(**fields)

    def new_request(self) -> Any:
        """Returns the request as that release's classes read it: a new message each time."""
        message = self._classes[0].FromString(self.request)
        assert message.SerializeToString(deterministic=True) == self.request
        return message

    def read(self, answer: bytes) -> Any:
        """Returns an answer as that release's classes read it."""
        return self._classes[1].FromString(answer)

    @functools.cached_property
    def _classes(self) -> tuple[Any, Any]:
        """The classes of request and answer. A request is made before its answer is read in another thread, so they are
        there by then: protobuf may crash where several threads make classes of one pool."""
        of = self.method.input_type, self.method.output_type
        return message_factory.GetMessageClass(of[0]), message_factory.GetMessageClass(of[1])

    def recorded(self) -> list[Any]:
        """Returns what that release's servers answered."""
        return [self.read(answer) for answer in self.answers]


def recording(folder: Path) -> list[Recorded]:
    """Returns the calls that a folder has, in the order in which they began."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString((folder / "contract.binpb").read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    calls = []
    for entry in json.loads((folder / "index.json").read_text()):
        service, name = entry["method"].strip("/").split("/")
        method = pool.FindServiceByName(service).methods_by_name[name]
        answers = [(folder / f"{entry['file']}.answer-{number}").read_bytes() for number in range(entry["answers"])]
        calls.append(Recorded(method, (folder / f"{entry['file']}.request").read_bytes(), tuple(answers)))
    return calls


class Player:
    """Sends recorded requests to servers of today, under the identity that these have given.

    identity: the WorkerIdentity that the last Join was answered with
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._pool = ThreadPoolExecutor(8)
        self.identity: Any = None

    def close(self) -> None:
        """Ends all calls."""
        self._channel.close()
        self._pool.shutdown()

    def begin(self, call: Recorded, change: Callable[[Any], object] = lambda request: None) -> Future[list[Any]]:
        """Sends a request; returns its answers to come. change: changes the request before it is sent"""
        request = call.new_request()
        change(request)
        if self.identity is not None:
            for worker in _identities(request):
                worker.incarnation, worker.lease_key = self.identity.incarnation, self.identity.lease_key
        data = request.SerializeToString()
        path = f"/{call.method.containing_service.full_name}/{call.name}"
        if call.method.server_streaming:
            answers = self._channel.unary_stream(path)(data, timeout=SECONDS)
            return self._pool.submit(lambda: [call.read(answer) for answer in answers])
        return self._pool.submit(lambda: [call.read(self._answer(path, data))])

    def call(self, service: str, name: str, request: Any) -> bytes:
        """Sends a request that was not recorded; returns the bytes of its answer."""
        return self._answer(f"/ps_protocol.v1.{service}/{name}", request.SerializeToString())

    def _answer(self, path: str, data: bytes) -> bytes:
        """Returns the answer of a method; as workers do, it repeats a call that a server has no room for yet."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return bytes(self._channel.unary_unary(path)(data, timeout=SECONDS))
            except grpc.RpcError as error:
                if not error_from(error, "").retryable or time.monotonic() > deadline:
                    raise
                threading.Event().wait(0.01)

    def send(self, call: Recorded, change: Callable[[Any], object] = lambda request: None) -> list[Any]:
        """Sends a request, and returns its answers."""
        return self.begin(call, change).result()


def _identities(message: Message) -> Iterator[Any]:
    """Yields every WorkerIdentity in a message."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for each in [value] if isinstance(value, Message) else value:
            if each.DESCRIPTOR.full_name == IDENTITY:
                yield each
            else:
                yield from _identities(each)
