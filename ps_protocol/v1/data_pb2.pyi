import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import rows_pb2 as _rows_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_KIND_UNSPECIFIED: _ClassVar[PushKind]
    PUSH_KIND_GRADIENT: _ClassVar[PushKind]
    PUSH_KIND_INITIAL_VALUE: _ClassVar[PushKind]
    PUSH_KIND_SKIP: _ClassVar[PushKind]
    PUSH_KIND_DRAFT: _ClassVar[PushKind]
    PUSH_KIND_COMMIT: _ClassVar[PushKind]
    PUSH_KIND_ASSIGN: _ClassVar[PushKind]
    PUSH_KIND_ASSIGN_STATE: _ClassVar[PushKind]
    PUSH_KIND_NEXT_OPTIMIZER: _ClassVar[PushKind]
PUSH_KIND_UNSPECIFIED: PushKind
PUSH_KIND_GRADIENT: PushKind
PUSH_KIND_INITIAL_VALUE: PushKind
PUSH_KIND_SKIP: PushKind
PUSH_KIND_DRAFT: PushKind
PUSH_KIND_COMMIT: PushKind
PUSH_KIND_ASSIGN: PushKind
PUSH_KIND_ASSIGN_STATE: PushKind
PUSH_KIND_NEXT_OPTIMIZER: PushKind

class InSegment(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NextOptimizer(_message.Message):
    __slots__ = ("stage", "optimizer", "groups", "slice_groups", "kept_slices")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SLICE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    KEPT_SLICES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    optimizer: str
    groups: _containers.RepeatedCompositeFieldContainer[_job_pb2.GroupUpdate]
    slice_groups: _containers.RepeatedScalarFieldContainer[int]
    kept_slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage: _Optional[int] = ..., optimizer: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[_job_pb2.GroupUpdate, _Mapping]]] = ..., slice_groups: _Optional[_Iterable[int]] = ..., kept_slices: _Optional[_Iterable[int]] = ...) -> None: ...

class BucketPush(_message.Message):
    __slots__ = ("bucket", "kind", "absent_slices", "finite", "state", "wire_format", "next_optimizer")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ABSENT_SLICES_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NEXT_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    kind: PushKind
    absent_slices: _containers.RepeatedScalarFieldContainer[int]
    finite: bool
    state: str
    wire_format: _types_pb2.WireFormat
    next_optimizer: NextOptimizer
    def __init__(self, bucket: _Optional[int] = ..., kind: _Optional[_Union[PushKind, str]] = ..., absent_slices: _Optional[_Iterable[int]] = ..., finite: _Optional[bool] = ..., state: _Optional[str] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., next_optimizer: _Optional[_Union[NextOptimizer, _Mapping]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("worker", "clock", "buckets", "groups", "ranges", "weight", "stage")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    clock: int
    buckets: _containers.RepeatedCompositeFieldContainer[BucketPush]
    groups: _containers.RepeatedCompositeFieldContainer[_job_pb2.GroupUpdate]
    ranges: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    weight: float
    stage: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketPush, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[_job_pb2.GroupUpdate, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ..., weight: _Optional[float] = ..., stage: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "in_segment", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    in_segment: InSegment
    payload: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., in_segment: _Optional[_Union[InSegment, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("header", "duplicate_count")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    duplicate_count: int
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., duplicate_count: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("worker", "clock", "buckets", "in_segment", "notify_bytes", "times_wanted", "whole_buckets", "all_staged")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMES_WANTED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    ALL_STAGED_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    clock: int
    buckets: _containers.RepeatedScalarFieldContainer[int]
    in_segment: InSegment
    notify_bytes: int
    times_wanted: bool
    whole_buckets: _containers.RepeatedScalarFieldContainer[int]
    all_staged: bool
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., buckets: _Optional[_Iterable[int]] = ..., in_segment: _Optional[_Union[InSegment, _Mapping]] = ..., notify_bytes: _Optional[int] = ..., times_wanted: _Optional[bool] = ..., whole_buckets: _Optional[_Iterable[int]] = ..., all_staged: _Optional[bool] = ...) -> None: ...

class BucketTimes(_message.Message):
    __slots__ = ("staged_microseconds", "applied_microseconds", "admitted_microseconds")
    STAGED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    staged_microseconds: int
    applied_microseconds: int
    admitted_microseconds: int
    def __init__(self, staged_microseconds: _Optional[int] = ..., applied_microseconds: _Optional[int] = ..., admitted_microseconds: _Optional[int] = ...) -> None: ...

class PulledBucket(_message.Message):
    __slots__ = ("bucket", "version", "wait_duration", "state_wanted", "wire_format", "times")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    STATE_WANTED_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    version: int
    wait_duration: _duration_pb2.Duration
    state_wanted: bool
    wire_format: _types_pb2.WireFormat
    times: BucketTimes
    def __init__(self, bucket: _Optional[int] = ..., version: _Optional[int] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state_wanted: _Optional[bool] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., times: _Optional[_Union[BucketTimes, _Mapping]] = ...) -> None: ...

class WaitNotice(_message.Message):
    __slots__ = ("bucket", "awaited_ranks", "reason")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    AWAITED_RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    awaited_ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, bucket: _Optional[int] = ..., awaited_ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "buckets", "waiting", "in_segment", "payload", "clock_microseconds")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    buckets: _containers.RepeatedCompositeFieldContainer[PulledBucket]
    waiting: WaitNotice
    in_segment: InSegment
    payload: bytes
    clock_microseconds: int
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., buckets: _Optional[_Iterable[_Union[PulledBucket, _Mapping]]] = ..., waiting: _Optional[_Union[WaitNotice, _Mapping]] = ..., in_segment: _Optional[_Union[InSegment, _Mapping]] = ..., payload: _Optional[bytes] = ..., clock_microseconds: _Optional[int] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("push", "buckets", "notify_bytes", "in_segment", "payload", "times_wanted", "whole_buckets")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    NOTIFY_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TIMES_WANTED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    push: PushHeader
    buckets: _containers.RepeatedScalarFieldContainer[int]
    notify_bytes: int
    in_segment: InSegment
    payload: bytes
    times_wanted: bool
    whole_buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, push: _Optional[_Union[PushHeader, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ..., notify_bytes: _Optional[int] = ..., in_segment: _Optional[_Union[InSegment, _Mapping]] = ..., payload: _Optional[bytes] = ..., times_wanted: _Optional[bool] = ..., whole_buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("header", "buckets", "waiting", "in_segment", "payload", "staged_duration", "clock_microseconds")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IN_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    STAGED_DURATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    buckets: _containers.RepeatedCompositeFieldContainer[PulledBucket]
    waiting: WaitNotice
    in_segment: InSegment
    payload: bytes
    staged_duration: _duration_pb2.Duration
    clock_microseconds: int
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., buckets: _Optional[_Iterable[_Union[PulledBucket, _Mapping]]] = ..., waiting: _Optional[_Union[WaitNotice, _Mapping]] = ..., in_segment: _Optional[_Union[InSegment, _Mapping]] = ..., payload: _Optional[bytes] = ..., staged_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., clock_microseconds: _Optional[int] = ...) -> None: ...

class PullStateRequest(_message.Message):
    __slots__ = ("worker", "buckets")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class PulledState(_message.Message):
    __slots__ = ("bucket", "version", "state", "absent_slices", "stage")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_SLICES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    version: int
    state: str
    absent_slices: _containers.RepeatedScalarFieldContainer[int]
    stage: int
    def __init__(self, bucket: _Optional[int] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., absent_slices: _Optional[_Iterable[int]] = ..., stage: _Optional[int] = ...) -> None: ...

class PullStateResponse(_message.Message):
    __slots__ = ("header", "state", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    state: PulledState
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., state: _Optional[_Union[PulledState, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class AttachSegmentRequest(_message.Message):
    __slots__ = ("worker", "location", "nonce", "socket_inode", "row_bytes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_INODE_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    location: str
    nonce: bytes
    socket_inode: int
    row_bytes: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., location: _Optional[str] = ..., nonce: _Optional[bytes] = ..., socket_inode: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class AttachSegmentResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ...) -> None: ...

class OpenDataConnectionRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ...) -> None: ...

class OpenDataConnectionResponse(_message.Message):
    __slots__ = ("header", "ticket", "port", "location", "socket_inode", "row_payloads")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    SOCKET_INODE_FIELD_NUMBER: _ClassVar[int]
    ROW_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    ticket: bytes
    port: int
    location: str
    socket_inode: int
    row_payloads: bool
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., ticket: _Optional[bytes] = ..., port: _Optional[int] = ..., location: _Optional[str] = ..., socket_inode: _Optional[int] = ..., row_payloads: _Optional[bool] = ...) -> None: ...
