from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class WorkerIdentity(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "lease_key")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    lease_key: bytes
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease_key: _Optional[bytes] = ...) -> None: ...

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
