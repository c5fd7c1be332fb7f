import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowPushKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_PUSH_KIND_UNSPECIFIED: _ClassVar[RowPushKind]
    ROW_PUSH_KIND_GRADIENT: _ClassVar[RowPushKind]
    ROW_PUSH_KIND_NO_GRADIENT: _ClassVar[RowPushKind]
    ROW_PUSH_KIND_SKIP: _ClassVar[RowPushKind]
    ROW_PUSH_KIND_ASSIGN: _ClassVar[RowPushKind]
ROW_PUSH_KIND_UNSPECIFIED: RowPushKind
ROW_PUSH_KIND_GRADIENT: RowPushKind
ROW_PUSH_KIND_NO_GRADIENT: RowPushKind
ROW_PUSH_KIND_SKIP: RowPushKind
ROW_PUSH_KIND_ASSIGN: RowPushKind

class RowPlace(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class PushRowsRequest(_message.Message):
    __slots__ = ("worker", "table", "clock", "kind", "first_row", "row_count", "total_row_count", "hyper_parameters", "ranges", "wire_format", "in_segment", "assignment", "payload")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    table: int
    clock: int
    kind: RowPushKind
    first_row: int
    row_count: int
    total_row_count: int
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[_job_pb2.HyperParameter]
    ranges: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    wire_format: _types_pb2.WireFormat
    in_segment: RowPlace
    assignment: int
    payload: bytes
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., table: _Optional[int] = ..., clock: _Optional[int] = ..., kind: _Optional[_Union[RowPushKind, str]] = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., total_row_count: _Optional[int] = ..., hyper_parameters: _Optional[_Iterable[_Union[_job_pb2.HyperParameter, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., in_segment: _Optional[_Union[RowPlace, _Mapping]] = ..., assignment: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushRowsResponse(_message.Message):
    __slots__ = ("header", "duplicate")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    duplicate: bool
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class PullRowsRequest(_message.Message):
    __slots__ = ("worker", "table", "clock", "ids_in_segment", "row_count", "rows_in_segment", "payload")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    IDS_IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    table: int
    clock: int
    ids_in_segment: RowPlace
    row_count: int
    rows_in_segment: RowPlace
    payload: bytes
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., table: _Optional[int] = ..., clock: _Optional[int] = ..., ids_in_segment: _Optional[_Union[RowPlace, _Mapping]] = ..., row_count: _Optional[int] = ..., rows_in_segment: _Optional[_Union[RowPlace, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PullRowsResponse(_message.Message):
    __slots__ = ("header", "first_row", "row_count", "trained_count", "wait_duration", "waiting", "wire_format", "state_wanted", "in_segment", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    STATE_WANTED_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    first_row: int
    row_count: int
    trained_count: int
    wait_duration: _duration_pb2.Duration
    waiting: RowWaitNotice
    wire_format: _types_pb2.WireFormat
    state_wanted: bool
    in_segment: bool
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., first_row: _Optional[int] = ..., row_count: _Optional[int] = ..., trained_count: _Optional[int] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waiting: _Optional[_Union[RowWaitNotice, _Mapping]] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., state_wanted: _Optional[bool] = ..., in_segment: _Optional[bool] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ExchangeRowsRequest(_message.Message):
    __slots__ = ("push", "ids_in_segment", "row_count", "rows_in_segment", "payload")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    IDS_IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROWS_IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    push: PushRowsRequest
    ids_in_segment: RowPlace
    row_count: int
    rows_in_segment: RowPlace
    payload: bytes
    def __init__(self, push: _Optional[_Union[PushRowsRequest, _Mapping]] = ..., ids_in_segment: _Optional[_Union[RowPlace, _Mapping]] = ..., row_count: _Optional[int] = ..., rows_in_segment: _Optional[_Union[RowPlace, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ExchangeRowsResponse(_message.Message):
    __slots__ = ("header", "pulled", "staged_duration", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    STAGED_DURATION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    pulled: PullRowsResponse
    staged_duration: _duration_pb2.Duration
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., pulled: _Optional[_Union[PullRowsResponse, _Mapping]] = ..., staged_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class RowWaitNotice(_message.Message):
    __slots__ = ("awaited_ranks", "reason")
    AWAITED_RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    awaited_ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, awaited_ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class PullTableRequest(_message.Message):
    __slots__ = ("worker", "table", "clock", "count_only")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNT_ONLY_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    table: int
    clock: int
    count_only: bool
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., table: _Optional[int] = ..., clock: _Optional[int] = ..., count_only: _Optional[bool] = ...) -> None: ...

class PullTableResponse(_message.Message):
    __slots__ = ("header", "row_count", "seed", "waiting", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    row_count: int
    seed: int
    waiting: RowWaitNotice
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., row_count: _Optional[int] = ..., seed: _Optional[int] = ..., waiting: _Optional[_Union[RowWaitNotice, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class TableBeginning(_message.Message):
    __slots__ = ("version", "seed", "row_count", "waiting_count", "with_state")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    seed: int
    row_count: int
    waiting_count: int
    with_state: bool
    def __init__(self, version: _Optional[int] = ..., seed: _Optional[int] = ..., row_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., with_state: _Optional[bool] = ...) -> None: ...

class PushTableRequest(_message.Message):
    __slots__ = ("worker", "table", "beginning", "first", "row_count", "waiting_count", "last", "payload")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    table: int
    beginning: TableBeginning
    first: int
    row_count: int
    waiting_count: int
    last: bool
    payload: bytes
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., table: _Optional[int] = ..., beginning: _Optional[_Union[TableBeginning, _Mapping]] = ..., first: _Optional[int] = ..., row_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., last: _Optional[bool] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushTableResponse(_message.Message):
    __slots__ = ("header", "duplicate", "begun", "seed")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    duplicate: bool
    begun: bool
    seed: int
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., duplicate: _Optional[bool] = ..., begun: _Optional[bool] = ..., seed: _Optional[int] = ...) -> None: ...
