"""A data connection without a session: every frame by hand, so that a test can send what no session would."""

from __future__ import annotations

import socket
import time
from typing import Any

import grpc
import pytest

from ps_frames.frames import HEADER_BYTES, Header, Kind, read_header, receive_exactly, write_header
from ps_protocol.convert import Request
from ps_protocol.errors import PSError
from ps_protocol.framing import Parts, split_head
from ps_protocol.messages import data
from ps_protocol.messages.data import PullCall, PushCall
from ps_protocol.v1 import data_pb2
from ps_runtime.channel import open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import error_from, failure_in
from tests.tools.raw_worker import RawWorker

SECONDS = 20.0
ANSWERS = {Kind.PUSH: data_pb2.PushResponse, Kind.PULL: data_pb2.PullResponse, Kind.EXCHANGE: data_pb2.ExchangeResponse}


def ticket(
    address: str, worker: RawWorker, access: Access = PLAINTEXT, **other: Any
) -> data_pb2.OpenDataConnectionResponse:
    """What a shard at an address says of data connections to this worker, or to one that it claims to be."""
    call = open_channel(address, access).unary_unary(
        "/ps_protocol.v1.DataService/OpenDataConnection",
        request_serializer=data_pb2.OpenDataConnectionRequest.SerializeToString,
        response_deserializer=data_pb2.OpenDataConnectionResponse.FromString,
    )
    try:
        found: data_pb2.OpenDataConnectionResponse = call(
            data_pb2.OpenDataConnectionRequest(worker=worker.identity(**other)), timeout=SECONDS
        )
        return found
    except grpc.RpcError as error:
        raise error_from(error, "shard") from None


class FrameClient:
    """A TCP connection to a shard's data port. Methods raise ConnectionError where the shard has closed it.

    shown: the ticket; None: nothing is sent
    """

    def __init__(self, port: int, shown: bytes | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._next = 0
        if shown is not None:
            self.socket.sendall(write_header(0, Kind.OPEN, len(shown)) + shown)

    def __enter__(self) -> FrameClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, kind: Kind, request: Parts, call: int | None = None) -> int:
        """Sends a request; returns the number of its call."""
        if call is None:
            self._next += 1
            call = self._next
        payload = b"" if request.payload is None else bytes(request.payload)
        self.socket.sendall(write_header(call, kind, len(request.head), len(payload)) + request.head + payload)
        return call

    def read(self) -> tuple[Header, bytes]:
        """The next frame."""
        header = read_header(self._exactly(HEADER_BYTES), 2**30)
        return header, self._exactly(header.size)

    def is_open(self) -> bool:
        """Whether the shard has taken the ticket."""
        try:
            return self.read()[0].kind is Kind.OPENED
        except ConnectionError:
            return False

    def is_closed(self) -> bool:
        """Whether the shard closes the connection, whatever it sends before."""
        try:
            while True:
                self.read()
        except ConnectionError:
            return True

    def answers(self, kind: Kind) -> list[Any]:
        """The answers to the one call that is under way, each as (message, payload). Raises the PSError of its end."""
        found: list[Any] = []
        while True:
            header, content = self.read()
            if header.kind is Kind.ERROR:
                raise error_of(content)
            if header.kind is not Kind.END:
                fields = split_head(content[: header.head], header.payload_bytes)
                found.append((ANSWERS[kind].FromString(fields), content[header.head :]))
            if header.kind is not Kind.ANSWER:
                return found

    def ask(self, kind: Kind, request: Parts) -> list[Any]:
        """Makes a call; returns its answers."""
        self.send(kind, request)
        return self.answers(kind)

    def _exactly(self, count: int) -> bytes:
        return receive_exactly(self.socket, count, time.monotonic() + SECONDS)


def clocks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that takes the clocks of the exchanges that shards of this process read from now on. Those that
    they know by their bytes are not among them."""
    clocks, read = [], data.read_exchange

    def noting(request: Request) -> tuple[PushCall, PullCall]:
        push, pull = read(request)
        clocks.append(push.clock)
        return push, pull

    monkeypatch.setattr(data, "read_exchange", noting)
    return clocks


def error_of(status: bytes) -> PSError:
    """The error that a frame carries."""
    return error_from(failure_in(status), "shard")


def push_parts(message: data_pb2.PushRequest) -> Parts:
    """A push as its two parts."""
    whole = message.SerializeToString()
    return Parts(whole[: len(whole) - len(message.payload)], message.payload) if message.payload else Parts(whole)
