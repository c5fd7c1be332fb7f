"""What the messages of the data path have in common: a payload apart, the header of an answer, a notice of a wait."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import InvalidRequest
from ps_protocol.framing import Buffer, Parts, split_head, split_message
from ps_protocol.v1 import types_pb2

M = TypeVar("M", bound=Message)

Request = bytes | Parts  # as gRPC brings it, and as a data connection does


def read(kind: type[M], data: Request) -> tuple[M, Buffer | None]:
    """Returns a message without its payload, and the payload; None where it has none."""
    if not isinstance(data, Parts):
        fields, payload = split_message(data)
        return parse(kind, fields), payload
    if data.payload is None:
        return read(kind, data.head)
    return parse(kind, split_head(data.head, len(data.payload))), data.payload


def whole(data: Request) -> bytes:
    """Returns the bytes of a request that has no payload. Raises InvalidRequest for one that has."""
    if not isinstance(data, Parts):
        return data
    if data.payload is not None:
        raise InvalidRequest(f"this request has no payload, and {len(data.payload)} bytes of one came")
    return data.head


def parse(kind: type[M], data: bytes) -> M:
    """Returns a message. Raises InvalidRequest for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from error


class Origin(NamedTuple):
    """Which shard an answer comes from.

    process: the number that the process chose when it started
    run:     of the job that the answer belongs to
    """

    shard_index: int
    process: int
    run: str = ""

    def of(self, run: str) -> Origin:
        """Returns the origin of answers that belong to a run of a job."""
        return self._replace(run=run)

    def header(self, version: int) -> types_pb2.ResponseHeader:
        """Returns the header of an answer that has this version."""
        return types_pb2.ResponseHeader(
            shard_index=self.shard_index, process=self.process, run=self.run, version=version
        )


class Awaited(NamedTuple):
    """The ranks that a pull waits for (none: for the shard), and why in words."""

    ranks: tuple[int, ...]
    reason: str
