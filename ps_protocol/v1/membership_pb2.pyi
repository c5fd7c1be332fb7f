import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from ps_protocol.v1 import figures_pb2 as _figures_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Launch(_message.Message):
    __slots__ = ("name", "first_rank", "rank_count", "takeover")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    first_rank: int
    rank_count: int
    takeover: bool
    def __init__(self, name: _Optional[str] = ..., first_rank: _Optional[int] = ..., rank_count: _Optional[int] = ..., takeover: _Optional[bool] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("clock", "content")
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    clock: int
    content: bytes
    def __init__(self, clock: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, members: _Optional[_Iterable[bytes]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("job", "rank", "host", "pid", "metrics_address", "previous_incarnation", "clock", "request_id", "launch", "wait_duration", "run")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    host: str
    pid: int
    metrics_address: str
    previous_incarnation: int
    clock: int
    request_id: int
    launch: Launch
    wait_duration: _duration_pb2.Duration
    run: str
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ..., previous_incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., request_id: _Optional[int] = ..., launch: _Optional[_Union[Launch, _Mapping]] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., run: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("worker", "clock", "lease_duration", "shard_map", "restore_count", "worker_state", "pushed_clock", "shard_pushes", "continued")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    RESTORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKER_STATE_FIELD_NUMBER: _ClassVar[int]
    PUSHED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    SHARD_PUSHES_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    clock: int
    lease_duration: _duration_pb2.Duration
    shard_map: _types_pb2.ShardMap
    restore_count: int
    worker_state: WorkerState
    pushed_clock: int
    shard_pushes: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardPushes]
    continued: ContinuedJob
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., shard_map: _Optional[_Union[_types_pb2.ShardMap, _Mapping]] = ..., restore_count: _Optional[int] = ..., worker_state: _Optional[_Union[WorkerState, _Mapping]] = ..., pushed_clock: _Optional[int] = ..., shard_pushes: _Optional[_Iterable[_Union[_types_pb2.ShardPushes, _Mapping]]] = ..., continued: _Optional[_Union[ContinuedJob, _Mapping]] = ...) -> None: ...

class ContinuedJob(_message.Message):
    __slots__ = ("begin_time", "train_time", "live_count")
    BEGIN_TIME_FIELD_NUMBER: _ClassVar[int]
    TRAIN_TIME_FIELD_NUMBER: _ClassVar[int]
    LIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    begin_time: _timestamp_pb2.Timestamp
    train_time: _timestamp_pb2.Timestamp
    live_count: int
    def __init__(self, begin_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., train_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., live_count: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("ranks", "world_size", "started", "script_rank", "script_request")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_RANK_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    world_size: int
    started: bool
    script_rank: int
    script_request: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., world_size: _Optional[int] = ..., started: _Optional[bool] = ..., script_rank: _Optional[int] = ..., script_request: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker", "clock", "figures", "script_wanted", "host", "pid")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_WANTED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    clock: int
    figures: _figures_pb2.WorkerFigures
    script_wanted: bool
    host: str
    pid: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., figures: _Optional[_Union[_figures_pb2.WorkerFigures, _Mapping]] = ..., script_wanted: _Optional[bool] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("live_count", "script_request", "script", "script_coming")
    LIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_COMING_FIELD_NUMBER: _ClassVar[int]
    live_count: int
    script_request: int
    script: WorkerState
    script_coming: bool
    def __init__(self, live_count: _Optional[int] = ..., script_request: _Optional[int] = ..., script: _Optional[_Union[WorkerState, _Mapping]] = ..., script_coming: _Optional[bool] = ...) -> None: ...

class SaveWorkerStateRequest(_message.Message):
    __slots__ = ("worker", "state", "script", "script_request")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    state: WorkerState
    script: WorkerState
    script_request: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., state: _Optional[_Union[WorkerState, _Mapping]] = ..., script: _Optional[_Union[WorkerState, _Mapping]] = ..., script_request: _Optional[int] = ...) -> None: ...

class SaveWorkerStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("worker", "state", "done", "script", "figures")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    state: WorkerState
    done: bool
    script: WorkerState
    figures: _figures_pb2.WorkerFigures
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., state: _Optional[_Union[WorkerState, _Mapping]] = ..., done: _Optional[bool] = ..., script: _Optional[_Union[WorkerState, _Mapping]] = ..., figures: _Optional[_Union[_figures_pb2.WorkerFigures, _Mapping]] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ("ended",)
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ended: bool
    def __init__(self, ended: _Optional[bool] = ...) -> None: ...

class ReportWorkerEndRequest(_message.Message):
    __slots__ = ("job", "launch", "host", "pid", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    launch: str
    host: str
    pid: int
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., launch: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ReportWorkerEndResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...
