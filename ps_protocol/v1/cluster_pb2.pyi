import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from ps_protocol.v1 import figures_pb2 as _figures_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import jobs_pb2 as _jobs_pb2
from ps_protocol.v1 import shard_pb2 as _shard_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CoordinatorStatus(_message.Message):
    __slots__ = ("address", "metrics_address", "pid", "shard_count", "software_version", "upstream")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    address: str
    metrics_address: str
    pid: int
    shard_count: int
    software_version: str
    upstream: str
    def __init__(self, address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., shard_count: _Optional[int] = ..., software_version: _Optional[str] = ..., upstream: _Optional[str] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("index", "address", "metrics_address", "pid", "reachable", "jobs", "restart_count", "figures")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    metrics_address: str
    pid: int
    reachable: bool
    jobs: _containers.RepeatedCompositeFieldContainer[_shard_pb2.ShardJobStatus]
    restart_count: int
    figures: _figures_pb2.ShardFigures
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., reachable: _Optional[bool] = ..., jobs: _Optional[_Iterable[_Union[_shard_pb2.ShardJobStatus, _Mapping]]] = ..., restart_count: _Optional[int] = ..., figures: _Optional[_Union[_figures_pb2.ShardFigures, _Mapping]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("name", "consistency", "world_size", "started", "parameter_bytes", "bucket_count", "imbalance", "workers", "restore_count", "lost_step_count", "redone_step_count", "last_checkpoint", "rejoining_ranks", "loaders", "run", "local_steps", "trained_bytes", "round_duration", "local_fragments", "absent_ranks", "group_size", "mode")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REDONE_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REJOINING_RANKS_FIELD_NUMBER: _ClassVar[int]
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_DURATION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_RANKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    consistency: _job_pb2.Consistency
    world_size: int
    started: bool
    parameter_bytes: int
    bucket_count: int
    imbalance: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    restore_count: int
    lost_step_count: int
    redone_step_count: int
    last_checkpoint: _jobs_pb2.Checkpoint
    rejoining_ranks: _containers.RepeatedScalarFieldContainer[int]
    loaders: _containers.RepeatedCompositeFieldContainer[LoaderStatus]
    run: str
    local_steps: int
    trained_bytes: int
    round_duration: _duration_pb2.Duration
    local_fragments: int
    absent_ranks: _containers.RepeatedScalarFieldContainer[int]
    group_size: int
    mode: str
    def __init__(self, name: _Optional[str] = ..., consistency: _Optional[_Union[_job_pb2.Consistency, _Mapping]] = ..., world_size: _Optional[int] = ..., started: _Optional[bool] = ..., parameter_bytes: _Optional[int] = ..., bucket_count: _Optional[int] = ..., imbalance: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., restore_count: _Optional[int] = ..., lost_step_count: _Optional[int] = ..., redone_step_count: _Optional[int] = ..., last_checkpoint: _Optional[_Union[_jobs_pb2.Checkpoint, _Mapping]] = ..., rejoining_ranks: _Optional[_Iterable[int]] = ..., loaders: _Optional[_Iterable[_Union[LoaderStatus, _Mapping]]] = ..., run: _Optional[str] = ..., local_steps: _Optional[int] = ..., trained_bytes: _Optional[int] = ..., round_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., local_fragments: _Optional[int] = ..., absent_ranks: _Optional[_Iterable[int]] = ..., group_size: _Optional[int] = ..., mode: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("rank", "incarnation", "clock", "pid", "host", "metrics_address", "lease_duration", "launch", "join_time", "figures")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIME_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    clock: int
    pid: int
    host: str
    metrics_address: str
    lease_duration: _duration_pb2.Duration
    launch: str
    join_time: _timestamp_pb2.Timestamp
    figures: _figures_pb2.WorkerFigures
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., metrics_address: _Optional[str] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., launch: _Optional[str] = ..., join_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., figures: _Optional[_Union[_figures_pb2.WorkerFigures, _Mapping]] = ...) -> None: ...

class LoaderStatus(_message.Message):
    __slots__ = ("loader", "pass_number", "sample_count", "committed_count", "leased_count", "returned_count")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_COUNT_FIELD_NUMBER: _ClassVar[int]
    loader: int
    pass_number: int
    sample_count: int
    committed_count: int
    leased_count: int
    returned_count: int
    def __init__(self, loader: _Optional[int] = ..., pass_number: _Optional[int] = ..., sample_count: _Optional[int] = ..., committed_count: _Optional[int] = ..., leased_count: _Optional[int] = ..., returned_count: _Optional[int] = ...) -> None: ...

class RegisterShardRequest(_message.Message):
    __slots__ = ("index", "address", "metrics_address", "pid", "process", "protocol_version", "restart_count", "memory_place")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLACE_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    metrics_address: str
    pid: int
    process: int
    protocol_version: int
    restart_count: int
    memory_place: str
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., process: _Optional[int] = ..., protocol_version: _Optional[int] = ..., restart_count: _Optional[int] = ..., memory_place: _Optional[str] = ...) -> None: ...

class RegisterShardResponse(_message.Message):
    __slots__ = ("shard_count", "stopping")
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    shard_count: int
    stopping: bool
    def __init__(self, shard_count: _Optional[int] = ..., stopping: _Optional[bool] = ...) -> None: ...

class ReportShardEndRequest(_message.Message):
    __slots__ = ("index", "process")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    process: int
    def __init__(self, index: _Optional[int] = ..., process: _Optional[int] = ...) -> None: ...

class ReportShardEndResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("coordinator", "shards", "jobs")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    coordinator: CoordinatorStatus
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, coordinator: _Optional[_Union[CoordinatorStatus, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("period_duration", "history_wanted", "process", "last_event", "next_sample")
    PERIOD_DURATION_FIELD_NUMBER: _ClassVar[int]
    HISTORY_WANTED_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_FIELD_NUMBER: _ClassVar[int]
    NEXT_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    period_duration: _duration_pb2.Duration
    history_wanted: bool
    process: int
    last_event: int
    next_sample: int
    def __init__(self, period_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., history_wanted: _Optional[bool] = ..., process: _Optional[int] = ..., last_event: _Optional[int] = ..., next_sample: _Optional[int] = ...) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status", "view_time", "lease_duration", "jobs", "shards", "events", "history", "process", "finished_jobs")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VIEW_TIME_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_JOBS_FIELD_NUMBER: _ClassVar[int]
    status: GetStatusResponse
    view_time: _timestamp_pb2.Timestamp
    lease_duration: _duration_pb2.Duration
    jobs: _containers.RepeatedCompositeFieldContainer[JobView]
    shards: _containers.RepeatedCompositeFieldContainer[ShardView]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    history: History
    process: int
    finished_jobs: _containers.RepeatedCompositeFieldContainer[FinishedJob]
    def __init__(self, status: _Optional[_Union[GetStatusResponse, _Mapping]] = ..., view_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[JobView, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardView, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., history: _Optional[_Union[History, _Mapping]] = ..., process: _Optional[int] = ..., finished_jobs: _Optional[_Iterable[_Union[FinishedJob, _Mapping]]] = ...) -> None: ...

class JobView(_message.Message):
    __slots__ = ("job", "state", "diagnosis", "workers", "steps_per_second", "checkpoint_age_duration", "age_duration", "done_fraction", "left_duration")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSIS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    DONE_FRACTION_FIELD_NUMBER: _ClassVar[int]
    LEFT_DURATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    state: str
    diagnosis: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    steps_per_second: float
    checkpoint_age_duration: _duration_pb2.Duration
    age_duration: _duration_pb2.Duration
    done_fraction: float
    left_duration: _duration_pb2.Duration
    def __init__(self, job: _Optional[str] = ..., state: _Optional[str] = ..., diagnosis: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., steps_per_second: _Optional[float] = ..., checkpoint_age_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., age_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., done_fraction: _Optional[float] = ..., left_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FinishedJob(_message.Message):
    __slots__ = ("job", "run", "end_time", "text", "age_duration", "min_clock", "max_clock", "last_checkpoint", "values", "history")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    MIN_CLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_CLOCK_FIELD_NUMBER: _ClassVar[int]
    LAST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    end_time: _timestamp_pb2.Timestamp
    text: str
    age_duration: _duration_pb2.Duration
    min_clock: int
    max_clock: int
    last_checkpoint: _jobs_pb2.Checkpoint
    values: _containers.RepeatedCompositeFieldContainer[_figures_pb2.LoggedValue]
    history: History
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., text: _Optional[str] = ..., age_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., min_clock: _Optional[int] = ..., max_clock: _Optional[int] = ..., last_checkpoint: _Optional[_Union[_jobs_pb2.Checkpoint, _Mapping]] = ..., values: _Optional[_Iterable[_Union[_figures_pb2.LoggedValue, _Mapping]]] = ..., history: _Optional[_Union[History, _Mapping]] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("rank", "activity", "awaited_ranks", "steps_per_second", "phase_fractions", "awaited_fraction")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    AWAITED_RANKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FRACTIONS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    activity: str
    awaited_ranks: _containers.RepeatedScalarFieldContainer[int]
    steps_per_second: float
    phase_fractions: _containers.RepeatedScalarFieldContainer[float]
    awaited_fraction: float
    def __init__(self, rank: _Optional[int] = ..., activity: _Optional[str] = ..., awaited_ranks: _Optional[_Iterable[int]] = ..., steps_per_second: _Optional[float] = ..., phase_fractions: _Optional[_Iterable[float]] = ..., awaited_fraction: _Optional[float] = ...) -> None: ...

class ShardView(_message.Message):
    __slots__ = ("index", "silent_duration", "applies_per_second", "apply_duration", "received_bytes_per_second", "sent_bytes_per_second")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SILENT_DURATION_FIELD_NUMBER: _ClassVar[int]
    APPLIES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    APPLY_DURATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    index: int
    silent_duration: _duration_pb2.Duration
    applies_per_second: float
    apply_duration: _duration_pb2.Duration
    received_bytes_per_second: float
    sent_bytes_per_second: float
    def __init__(self, index: _Optional[int] = ..., silent_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., applies_per_second: _Optional[float] = ..., apply_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., received_bytes_per_second: _Optional[float] = ..., sent_bytes_per_second: _Optional[float] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "event_time", "kind", "job", "text", "count", "first_number")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    event_time: _timestamp_pb2.Timestamp
    kind: str
    job: str
    text: str
    count: int
    first_number: int
    def __init__(self, number: _Optional[int] = ..., event_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., kind: _Optional[str] = ..., job: _Optional[str] = ..., text: _Optional[str] = ..., count: _Optional[int] = ..., first_number: _Optional[int] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("first_sample", "times", "series")
    FIRST_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    first_sample: int
    times: _containers.RepeatedScalarFieldContainer[float]
    series: _containers.RepeatedCompositeFieldContainer[Series]
    def __init__(self, first_sample: _Optional[int] = ..., times: _Optional[_Iterable[float]] = ..., series: _Optional[_Iterable[_Union[Series, _Mapping]]] = ...) -> None: ...

class Series(_message.Message):
    __slots__ = ("job", "name", "rank", "values")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    rank: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...
