from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Checkpoint(_message.Message):
    __slots__ = ("name", "clock", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    clock: int
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., clock: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class RegisterJobRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _job_pb2.JobSpec
    def __init__(self, spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ...) -> None: ...

class RegisterJobResponse(_message.Message):
    __slots__ = ("shard_map", "created", "bucket_bytes")
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard_map: _types_pb2.ShardMap
    created: bool
    bucket_bytes: int
    def __init__(self, shard_map: _Optional[_Union[_types_pb2.ShardMap, _Mapping]] = ..., created: _Optional[bool] = ..., bucket_bytes: _Optional[int] = ...) -> None: ...

class CheckpointJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

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
