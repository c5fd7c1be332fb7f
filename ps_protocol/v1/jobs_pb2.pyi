from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Checkpoint(_message.Message):
    __slots__ = ("name", "clock", "size_bytes", "missing_ranks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    clock: int
    size_bytes: int
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., clock: _Optional[int] = ..., size_bytes: _Optional[int] = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterJobRequest(_message.Message):
    __slots__ = ("spec", "protocol_version", "layout_wanted", "launch", "memory_place")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_WANTED_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLACE_FIELD_NUMBER: _ClassVar[int]
    spec: _job_pb2.JobSpec
    protocol_version: int
    layout_wanted: bool
    launch: str
    memory_place: str
    def __init__(self, spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., protocol_version: _Optional[int] = ..., layout_wanted: _Optional[bool] = ..., launch: _Optional[str] = ..., memory_place: _Optional[str] = ...) -> None: ...

class RegisterJobResponse(_message.Message):
    __slots__ = ("shard_map", "created", "bucket_bytes", "run", "protocol_version", "layout", "segment_bytes", "stage_limit")
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    shard_map: _types_pb2.ShardMap
    created: bool
    bucket_bytes: int
    run: str
    protocol_version: int
    layout: _containers.RepeatedCompositeFieldContainer[BucketLayout]
    segment_bytes: int
    stage_limit: int
    def __init__(self, shard_map: _Optional[_Union[_types_pb2.ShardMap, _Mapping]] = ..., created: _Optional[bool] = ..., bucket_bytes: _Optional[int] = ..., run: _Optional[str] = ..., protocol_version: _Optional[int] = ..., layout: _Optional[_Iterable[_Union[BucketLayout, _Mapping]]] = ..., segment_bytes: _Optional[int] = ..., stage_limit: _Optional[int] = ...) -> None: ...

class BucketLayout(_message.Message):
    __slots__ = ("data_type", "element_count", "frozen", "slices", "gradient_offset", "weights_offset", "member")
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    data_type: _types_pb2.DataType
    element_count: int
    frozen: bool
    slices: _containers.RepeatedCompositeFieldContainer[SliceLayout]
    gradient_offset: int
    weights_offset: int
    member: int
    def __init__(self, data_type: _Optional[_Union[_types_pb2.DataType, str]] = ..., element_count: _Optional[int] = ..., frozen: _Optional[bool] = ..., slices: _Optional[_Iterable[_Union[SliceLayout, _Mapping]]] = ..., gradient_offset: _Optional[int] = ..., weights_offset: _Optional[int] = ..., member: _Optional[int] = ...) -> None: ...

class SliceLayout(_message.Message):
    __slots__ = ("parameter", "parameter_start", "bucket_start", "length")
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_START_FIELD_NUMBER: _ClassVar[int]
    BUCKET_START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    parameter: int
    parameter_start: int
    bucket_start: int
    length: int
    def __init__(self, parameter: _Optional[int] = ..., parameter_start: _Optional[int] = ..., bucket_start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class CheckpointJobRequest(_message.Message):
    __slots__ = ("job", "caller_ends")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CALLER_ENDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    caller_ends: bool
    def __init__(self, job: _Optional[str] = ..., caller_ends: _Optional[bool] = ...) -> None: ...

class CheckpointJobResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class EndJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class EndJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
