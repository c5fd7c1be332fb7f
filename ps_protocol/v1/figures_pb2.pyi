import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerFigures(_message.Message):
    __slots__ = ("measured_duration", "step_count", "data_duration", "forward_duration", "backward_duration", "push_duration", "pull_duration", "wait_duration", "sent_bytes", "received_bytes", "values", "looked_up_id_count", "distinct_id_count", "residual_ratio", "total_step_count", "done_step_count")
    MEASURED_DURATION_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_DURATION_FIELD_NUMBER: _ClassVar[int]
    FORWARD_DURATION_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_DURATION_FIELD_NUMBER: _ClassVar[int]
    PUSH_DURATION_FIELD_NUMBER: _ClassVar[int]
    PULL_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_ID_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_ID_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_RATIO_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    DONE_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    measured_duration: _duration_pb2.Duration
    step_count: int
    data_duration: _duration_pb2.Duration
    forward_duration: _duration_pb2.Duration
    backward_duration: _duration_pb2.Duration
    push_duration: _duration_pb2.Duration
    pull_duration: _duration_pb2.Duration
    wait_duration: _duration_pb2.Duration
    sent_bytes: int
    received_bytes: int
    values: _containers.RepeatedCompositeFieldContainer[LoggedValue]
    looked_up_id_count: int
    distinct_id_count: int
    residual_ratio: float
    total_step_count: int
    done_step_count: int
    def __init__(self, measured_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_count: _Optional[int] = ..., data_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., forward_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., backward_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., push_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pull_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., values: _Optional[_Iterable[_Union[LoggedValue, _Mapping]]] = ..., looked_up_id_count: _Optional[int] = ..., distinct_id_count: _Optional[int] = ..., residual_ratio: _Optional[float] = ..., total_step_count: _Optional[int] = ..., done_step_count: _Optional[int] = ...) -> None: ...

class LoggedValue(_message.Message):
    __slots__ = ("name", "last", "mean")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    last: float
    mean: float
    def __init__(self, name: _Optional[str] = ..., last: _Optional[float] = ..., mean: _Optional[float] = ...) -> None: ...

class ShardFigures(_message.Message):
    __slots__ = ("measured_duration", "resident_bytes", "memory_limit_bytes", "table_library")
    MEASURED_DURATION_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_LIBRARY_FIELD_NUMBER: _ClassVar[int]
    measured_duration: _duration_pb2.Duration
    resident_bytes: int
    memory_limit_bytes: int
    table_library: str
    def __init__(self, measured_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resident_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., table_library: _Optional[str] = ...) -> None: ...

class ShardJobFigures(_message.Message):
    __slots__ = ("apply_count", "apply_duration", "received_bytes", "sent_bytes", "staleness", "awaited_durations")
    class AwaitedDurationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _duration_pb2.Duration
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
    APPLY_COUNT_FIELD_NUMBER: _ClassVar[int]
    APPLY_DURATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_DURATIONS_FIELD_NUMBER: _ClassVar[int]
    apply_count: int
    apply_duration: _duration_pb2.Duration
    received_bytes: int
    sent_bytes: int
    staleness: _containers.RepeatedCompositeFieldContainer[StalenessCount]
    awaited_durations: _containers.MessageMap[int, _duration_pb2.Duration]
    def __init__(self, apply_count: _Optional[int] = ..., apply_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., staleness: _Optional[_Iterable[_Union[StalenessCount, _Mapping]]] = ..., awaited_durations: _Optional[_Mapping[int, _duration_pb2.Duration]] = ...) -> None: ...

class TableFigures(_message.Message):
    __slots__ = ("table", "row_count", "size_bytes", "found_id_count", "missing_id_count", "pushed_row_count", "admitted_row_count", "expired_row_count", "evicted_row_count", "waiting_gradient_count", "no_room_gradient_count", "file_row_count", "file_size_bytes", "cold_id_count", "consistency")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOUND_ID_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_ID_COUNT_FIELD_NUMBER: _ClassVar[int]
    PUSHED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_GRADIENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_GRADIENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILE_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLD_ID_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    table: str
    row_count: int
    size_bytes: int
    found_id_count: int
    missing_id_count: int
    pushed_row_count: int
    admitted_row_count: int
    expired_row_count: int
    evicted_row_count: int
    waiting_gradient_count: int
    no_room_gradient_count: int
    file_row_count: int
    file_size_bytes: int
    cold_id_count: int
    consistency: _job_pb2.Consistency
    def __init__(self, table: _Optional[str] = ..., row_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., found_id_count: _Optional[int] = ..., missing_id_count: _Optional[int] = ..., pushed_row_count: _Optional[int] = ..., admitted_row_count: _Optional[int] = ..., expired_row_count: _Optional[int] = ..., evicted_row_count: _Optional[int] = ..., waiting_gradient_count: _Optional[int] = ..., no_room_gradient_count: _Optional[int] = ..., file_row_count: _Optional[int] = ..., file_size_bytes: _Optional[int] = ..., cold_id_count: _Optional[int] = ..., consistency: _Optional[_Union[_job_pb2.Consistency, _Mapping]] = ...) -> None: ...

class StalenessCount(_message.Message):
    __slots__ = ("max_clocks", "gradient_count")
    MAX_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    max_clocks: int
    gradient_count: int
    def __init__(self, max_clocks: _Optional[int] = ..., gradient_count: _Optional[int] = ...) -> None: ...
