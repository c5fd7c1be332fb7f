from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerValue(_message.Message):
    __slots__ = ("rank", "value")
    RANK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    value: bytes
    def __init__(self, rank: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class GatherValuesRequest(_message.Message):
    __slots__ = ("worker", "round", "clock", "value")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    round: int
    clock: int
    value: bytes
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., round: _Optional[int] = ..., clock: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class GatherValuesResponse(_message.Message):
    __slots__ = ("round", "complete", "values", "refusal", "awaited_ranks", "step_wanted")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    AWAITED_RANKS_FIELD_NUMBER: _ClassVar[int]
    STEP_WANTED_FIELD_NUMBER: _ClassVar[int]
    round: int
    complete: bool
    values: _containers.RepeatedCompositeFieldContainer[WorkerValue]
    refusal: str
    awaited_ranks: _containers.RepeatedScalarFieldContainer[int]
    step_wanted: bool
    def __init__(self, round: _Optional[int] = ..., complete: _Optional[bool] = ..., values: _Optional[_Iterable[_Union[WorkerValue, _Mapping]]] = ..., refusal: _Optional[str] = ..., awaited_ranks: _Optional[_Iterable[int]] = ..., step_wanted: _Optional[bool] = ...) -> None: ...
