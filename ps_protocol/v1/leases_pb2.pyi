from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoaderSpec(_message.Message):
    __slots__ = ("loader", "sample_count", "batch_size", "drop_last", "seed")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    loader: int
    sample_count: int
    batch_size: int
    drop_last: bool
    seed: int
    def __init__(self, loader: _Optional[int] = ..., sample_count: _Optional[int] = ..., batch_size: _Optional[int] = ..., drop_last: _Optional[bool] = ..., seed: _Optional[int] = ...) -> None: ...

class LeaseDataRequest(_message.Message):
    __slots__ = ("worker", "loader", "pass_number", "batch_count", "leased", "committed", "returned")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    loader: LoaderSpec
    pass_number: int
    batch_count: int
    leased: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    committed: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    returned: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., loader: _Optional[_Union[LoaderSpec, _Mapping]] = ..., pass_number: _Optional[int] = ..., batch_count: _Optional[int] = ..., leased: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ..., committed: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class LeaseDataResponse(_message.Message):
    __slots__ = ("ranges", "complete")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    complete: bool
    def __init__(self, ranges: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ..., complete: _Optional[bool] = ...) -> None: ...
