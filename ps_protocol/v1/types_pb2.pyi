from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_NON_FINITE_GRADIENT: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED: _ClassVar[ErrorReason]
    ERROR_REASON_JOB_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_JOB_IN_USE: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_RUN_ENDED: _ClassVar[ErrorReason]
    ERROR_REASON_VERSION_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_WORKER: _ClassVar[ErrorReason]
    ERROR_REASON_FENCED: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_SHARED: _ClassVar[ErrorReason]
    ERROR_REASON_OUT_OF_ORDER: _ClassVar[ErrorReason]
    ERROR_REASON_TRY_LATER: _ClassVar[ErrorReason]
    ERROR_REASON_LIMIT_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_BACKLOGGED: _ClassVar[ErrorReason]
    ERROR_REASON_NO_CHECKPOINTS: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_DAMAGED: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_FORBIDDEN: _ClassVar[ErrorReason]
    ERROR_REASON_UNREACHABLE: _ClassVar[ErrorReason]
    ERROR_REASON_UNTRUSTED: _ClassVar[ErrorReason]
    ERROR_REASON_JOB_FINISHED: _ClassVar[ErrorReason]
    ERROR_REASON_FINISHED_WITHOUT: _ClassVar[ErrorReason]
    ERROR_REASON_DEPOSED: _ClassVar[ErrorReason]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]

class WireFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_FORMAT_UNSPECIFIED: _ClassVar[WireFormat]
    WIRE_FORMAT_FLOAT32: _ClassVar[WireFormat]
    WIRE_FORMAT_BFLOAT16: _ClassVar[WireFormat]
    WIRE_FORMAT_FLOAT16: _ClassVar[WireFormat]
    WIRE_FORMAT_INT8: _ClassVar[WireFormat]
    WIRE_FORMAT_INT4: _ClassVar[WireFormat]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_INVALID_REQUEST: ErrorReason
ERROR_REASON_NON_FINITE_GRADIENT: ErrorReason
ERROR_REASON_UNSUPPORTED: ErrorReason
ERROR_REASON_JOB_MISMATCH: ErrorReason
ERROR_REASON_JOB_IN_USE: ErrorReason
ERROR_REASON_NOT_FOUND: ErrorReason
ERROR_REASON_RUN_ENDED: ErrorReason
ERROR_REASON_VERSION_MISMATCH: ErrorReason
ERROR_REASON_UNKNOWN_WORKER: ErrorReason
ERROR_REASON_FENCED: ErrorReason
ERROR_REASON_NOT_SHARED: ErrorReason
ERROR_REASON_OUT_OF_ORDER: ErrorReason
ERROR_REASON_TRY_LATER: ErrorReason
ERROR_REASON_LIMIT_EXCEEDED: ErrorReason
ERROR_REASON_BACKLOGGED: ErrorReason
ERROR_REASON_NO_CHECKPOINTS: ErrorReason
ERROR_REASON_CHECKPOINT_FAILED: ErrorReason
ERROR_REASON_CHECKPOINT_DAMAGED: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_FORBIDDEN: ErrorReason
ERROR_REASON_UNREACHABLE: ErrorReason
ERROR_REASON_UNTRUSTED: ErrorReason
ERROR_REASON_JOB_FINISHED: ErrorReason
ERROR_REASON_FINISHED_WITHOUT: ErrorReason
ERROR_REASON_DEPOSED: ErrorReason
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_BOOL: DataType
DATA_TYPE_UINT8: DataType
WIRE_FORMAT_UNSPECIFIED: WireFormat
WIRE_FORMAT_FLOAT32: WireFormat
WIRE_FORMAT_BFLOAT16: WireFormat
WIRE_FORMAT_FLOAT16: WireFormat
WIRE_FORMAT_INT8: WireFormat
WIRE_FORMAT_INT4: WireFormat

class WorkerIdentity(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "lease_key", "run", "member")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    lease_key: bytes
    run: str
    member: int
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease_key: _Optional[bytes] = ..., run: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class ResponseHeader(_message.Message):
    __slots__ = ("shard_index", "process", "run", "version")
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    shard_index: int
    process: int
    run: str
    version: int
    def __init__(self, shard_index: _Optional[int] = ..., process: _Optional[int] = ..., run: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("index", "address")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ShardMap(_message.Message):
    __slots__ = ("shards", "bucket_shards")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    bucket_shards: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ..., bucket_shards: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardPushes(_message.Message):
    __slots__ = ("shard", "pushed_clock", "further")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PUSHED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    shard: int
    pushed_clock: int
    further: _containers.RepeatedCompositeFieldContainer[FurtherPush]
    def __init__(self, shard: _Optional[int] = ..., pushed_clock: _Optional[int] = ..., further: _Optional[_Iterable[_Union[FurtherPush, _Mapping]]] = ...) -> None: ...

class FurtherPush(_message.Message):
    __slots__ = ("clock", "parts")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    clock: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clock: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class DataRange(_message.Message):
    __slots__ = ("loader", "pass_number", "start", "stop")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    loader: int
    pass_number: int
    start: int
    stop: int
    def __init__(self, loader: _Optional[int] = ..., pass_number: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...
