"""What messages of the data path have in common: a separate payload, the header of an answer, the notice of a wait."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, split_head, split_message
from ps_protocol.v1 import types_pb2

M = TypeVar("M", bound=Message)

Request = bytes | Parts  # as gRPC brings it, and as a data connection does


def read(kind: type[M], data: Request) -> tuple[M, Buffer | None]:
    """Returns a message without its payload, and the payload; None: it has no payload."""
    if not isinstance(data, Parts):
        fields, payload = split_message(data)
        return parse(kind, fields), payload
    if data.payload is None:
        return read(kind, data.head)
    return parse(kind, split_head(data.head, len(data.payload))), data.payload


def whole(data: Request) -> bytes:
    """Returns the bytes of a request of a kind without a payload. Raises InvalidRequest if it has one."""
    if not isinstance(data, Parts):
        return data
    if data.payload is not None:
        raise InvalidRequest(f"this request has no payload, and {len(data.payload)} bytes of one came")
    return data.head


def parse(kind: type[M], data: bytes) -> M:
    """Parses a message. Raises InvalidRequest for bytes that are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from error


class Origin(NamedTuple):
    """The shard that an answer comes from.

    process: the number of its process, which the process chose when it started
    run:     the run of the job to which the answer belongs
    """

    shard_index: int
    process: int
    run: str = ""

    def of(self, run: str) -> Origin:
        """Returns the origin of answers that belong to a run of a job."""
        return self._replace(run=run)

    def header(self, version: int) -> types_pb2.ResponseHeader:
        """Returns the header of an answer. version: that of the bucket or table that the answer is about"""
        return types_pb2.ResponseHeader(
            shard_index=self.shard_index, process=self.process, run=self.run, version=version
        )


class Awaited(NamedTuple):
    """What a pull waits for. ranks: empty: it waits for the shard; reason: in words"""

    ranks: tuple[int, ...]
    reason: str
