import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRowsRequest(_message.Message):
    __slots__ = ("job", "table", "cursor", "period_duration")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PERIOD_DURATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: str
    cursor: bytes
    period_duration: _duration_pb2.Duration
    def __init__(self, job: _Optional[str] = ..., table: _Optional[str] = ..., cursor: _Optional[bytes] = ..., period_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RoundBegin(_message.Message):
    __slots__ = ("full", "version", "shard_count", "dim", "initializer")
    FULL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    full: bool
    version: int
    shard_count: int
    dim: int
    initializer: _job_pb2.RowInitializer
    def __init__(self, full: _Optional[bool] = ..., version: _Optional[int] = ..., shard_count: _Optional[int] = ..., dim: _Optional[int] = ..., initializer: _Optional[_Union[_job_pb2.RowInitializer, _Mapping]] = ...) -> None: ...

class WatchRowsResponse(_message.Message):
    __slots__ = ("header", "begin", "removed_count", "row_count", "wire_format", "cursor", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    REMOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    begin: RoundBegin
    removed_count: int
    row_count: int
    wire_format: _types_pb2.WireFormat
    cursor: bytes
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., begin: _Optional[_Union[RoundBegin, _Mapping]] = ..., removed_count: _Optional[int] = ..., row_count: _Optional[int] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., cursor: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
