from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    shard_map: _job_pb2.ShardMap
    created: bool
    bucket_bytes: int
    def __init__(self, shard_map: _Optional[_Union[_job_pb2.ShardMap, _Mapping]] = ..., created: bool = ..., bucket_bytes: _Optional[int] = ...) -> None: ...

class JoinJobRequest(_message.Message):
    __slots__ = ("job", "rank", "metrics_address", "pid", "host", "previous_incarnation", "clock", "attempt", "launch", "take_over", "waited", "launch_first_rank", "launch_rank_count")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    metrics_address: str
    pid: int
    host: str
    previous_incarnation: int
    clock: int
    attempt: int
    launch: str
    take_over: bool
    waited: _duration_pb2.Duration
    launch_first_rank: int
    launch_rank_count: int
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., previous_incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., attempt: _Optional[int] = ..., launch: _Optional[str] = ..., take_over: bool = ..., waited: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., launch_first_rank: _Optional[int] = ..., launch_rank_count: _Optional[int] = ...) -> None: ...

class JoinJobResponse(_message.Message):
    __slots__ = ("rank", "incarnation", "clock", "lease", "lease_key", "shard_map", "restore_count", "worker_state", "worker_state_clock")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    RESTORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKER_STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_STATE_CLOCK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    clock: int
    lease: _duration_pb2.Duration
    lease_key: bytes
    shard_map: _job_pb2.ShardMap
    restore_count: int
    worker_state: bytes
    worker_state_clock: int
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., lease: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lease_key: _Optional[bytes] = ..., shard_map: _Optional[_Union[_job_pb2.ShardMap, _Mapping]] = ..., restore_count: _Optional[int] = ..., worker_state: _Optional[bytes] = ..., worker_state_clock: _Optional[int] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("ranks", "world_size", "started")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    world_size: int
    started: bool
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., world_size: _Optional[int] = ..., started: bool = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "clock", "lease_key")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    clock: int
    lease_key: bytes
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., lease_key: _Optional[bytes] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("live_count",)
    LIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    live_count: int
    def __init__(self, live_count: _Optional[int] = ...) -> None: ...

class LeaveJobRequest(_message.Message):
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

class LeaveJobResponse(_message.Message):
    __slots__ = ("ended",)
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ended: bool
    def __init__(self, ended: bool = ...) -> None: ...

class EndJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class EndJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveWorkerStateRequest(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "lease_key", "clock", "state")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    lease_key: bytes
    clock: int
    state: bytes
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease_key: _Optional[bytes] = ..., clock: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...

class SaveWorkerStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CheckpointJobResponse(_message.Message):
    __slots__ = ("name", "clock", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    clock: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., clock: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class LeaseDataRequest(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "lease_key", "loader", "sample_count", "batch_size", "drop_last", "seed", "pass_number", "batch_count", "held", "committed", "returned")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    lease_key: bytes
    loader: int
    sample_count: int
    batch_size: int
    drop_last: bool
    seed: int
    pass_number: int
    batch_count: int
    held: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    committed: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    returned: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease_key: _Optional[bytes] = ..., loader: _Optional[int] = ..., sample_count: _Optional[int] = ..., batch_size: _Optional[int] = ..., drop_last: bool = ..., seed: _Optional[int] = ..., pass_number: _Optional[int] = ..., batch_count: _Optional[int] = ..., held: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ..., committed: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class LeaseDataResponse(_message.Message):
    __slots__ = ("ranges", "complete")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    complete: bool
    def __init__(self, ranges: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ..., complete: bool = ...) -> None: ...

class ExchangeValuesRequest(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "lease_key", "number", "clock", "value")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    lease_key: bytes
    number: int
    clock: int
    value: bytes
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease_key: _Optional[bytes] = ..., number: _Optional[int] = ..., clock: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class WorkerValue(_message.Message):
    __slots__ = ("rank", "value")
    RANK_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    value: bytes
    def __init__(self, rank: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class ExchangeValuesResponse(_message.Message):
    __slots__ = ("number", "complete", "values", "refused", "waiting_for", "step_wanted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    STEP_WANTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    complete: bool
    values: _containers.RepeatedCompositeFieldContainer[WorkerValue]
    refused: str
    waiting_for: _containers.RepeatedScalarFieldContainer[int]
    step_wanted: bool
    def __init__(self, number: _Optional[int] = ..., complete: bool = ..., values: _Optional[_Iterable[_Union[WorkerValue, _Mapping]]] = ..., refused: _Optional[str] = ..., waiting_for: _Optional[_Iterable[int]] = ..., step_wanted: bool = ...) -> None: ...

class RegisterShardRequest(_message.Message):
    __slots__ = ("index", "address", "metrics_address", "pid", "process")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    metrics_address: str
    pid: int
    process: int
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., process: _Optional[int] = ...) -> None: ...

class RegisterShardResponse(_message.Message):
    __slots__ = ("shard_count", "stopping")
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    shard_count: int
    stopping: bool
    def __init__(self, shard_count: _Optional[int] = ..., stopping: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("name", "mode", "world_size", "started", "parameter_bytes", "bucket_count", "imbalance", "workers", "restore_count", "lost_steps", "redone_steps", "checkpoint", "checkpoint_clock", "awaited", "loaders")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    REDONE_STEPS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_CLOCK_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    mode: str
    world_size: int
    started: bool
    parameter_bytes: int
    bucket_count: int
    imbalance: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    restore_count: int
    lost_steps: int
    redone_steps: int
    checkpoint: str
    checkpoint_clock: int
    awaited: _containers.RepeatedScalarFieldContainer[int]
    loaders: _containers.RepeatedCompositeFieldContainer[LoaderStatus]
    def __init__(self, name: _Optional[str] = ..., mode: _Optional[str] = ..., world_size: _Optional[int] = ..., started: bool = ..., parameter_bytes: _Optional[int] = ..., bucket_count: _Optional[int] = ..., imbalance: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., restore_count: _Optional[int] = ..., lost_steps: _Optional[int] = ..., redone_steps: _Optional[int] = ..., checkpoint: _Optional[str] = ..., checkpoint_clock: _Optional[int] = ..., awaited: _Optional[_Iterable[int]] = ..., loaders: _Optional[_Iterable[_Union[LoaderStatus, _Mapping]]] = ...) -> None: ...

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

class WorkerStatus(_message.Message):
    __slots__ = ("rank", "incarnation", "clock", "pid", "host", "metrics_address", "lease_left", "launch", "since")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    clock: int
    pid: int
    host: str
    metrics_address: str
    lease_left: _duration_pb2.Duration
    launch: str
    since: _timestamp_pb2.Timestamp
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., metrics_address: _Optional[str] = ..., lease_left: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., launch: _Optional[str] = ..., since: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("index", "address", "metrics_address", "pid", "reachable", "jobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    metrics_address: str
    pid: int
    reachable: bool
    jobs: _containers.RepeatedCompositeFieldContainer[ShardJobStatus]
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., reachable: bool = ..., jobs: _Optional[_Iterable[_Union[ShardJobStatus, _Mapping]]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("address", "metrics_address", "pid", "shard_count", "shards", "jobs")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    address: str
    metrics_address: str
    pid: int
    shard_count: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., shard_count: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("spec", "buckets")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    spec: _job_pb2.JobSpec
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class DropJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdmitWorkerRequest(_message.Message):
    __slots__ = ("job", "rank", "incarnation", "clock", "lease_key")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    clock: int
    lease_key: bytes
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., clock: _Optional[int] = ..., lease_key: _Optional[bytes] = ...) -> None: ...

class AdmitWorkerResponse(_message.Message):
    __slots__ = ("frontier",)
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    frontier: int
    def __init__(self, frontier: _Optional[int] = ...) -> None: ...

class RetireWorkerRequest(_message.Message):
    __slots__ = ("job", "rank", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RetireWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginCheckpointRequest(_message.Message):
    __slots__ = ("job", "name", "clock")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    clock: int
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ..., clock: _Optional[int] = ...) -> None: ...

class BeginCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AwaitCheckpointRequest(_message.Message):
    __slots__ = ("job", "name")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class AwaitCheckpointResponse(_message.Message):
    __slots__ = ("file", "bytes", "sha256", "version_min", "version_max", "clocks", "held_up")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    FILE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_UP_FIELD_NUMBER: _ClassVar[int]
    file: str
    bytes: int
    sha256: bytes
    version_min: int
    version_max: int
    clocks: _containers.ScalarMap[int, int]
    held_up: _duration_pb2.Duration
    def __init__(self, file: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., clocks: _Optional[_Mapping[int, int]] = ..., held_up: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RestoreJobRequest(_message.Message):
    __slots__ = ("spec", "buckets", "name", "last_incarnation")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    spec: _job_pb2.JobSpec
    buckets: _containers.RepeatedScalarFieldContainer[int]
    name: str
    last_incarnation: int
    def __init__(self, spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ..., last_incarnation: _Optional[int] = ...) -> None: ...

class RestoreJobResponse(_message.Message):
    __slots__ = ("version_min", "version_max", "clocks")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    version_min: int
    version_max: int
    clocks: _containers.ScalarMap[int, int]
    def __init__(self, version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., clocks: _Optional[_Mapping[int, int]] = ...) -> None: ...

class GetCommittedDataRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CommittedData(_message.Message):
    __slots__ = ("loader", "pass_number", "ranges")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    loader: int
    pass_number: int
    ranges: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    def __init__(self, loader: _Optional[int] = ..., pass_number: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class GetCommittedDataResponse(_message.Message):
    __slots__ = ("loaders", "no_say")
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    NO_SAY_FIELD_NUMBER: _ClassVar[int]
    loaders: _containers.RepeatedCompositeFieldContainer[CommittedData]
    no_say: bool
    def __init__(self, loaders: _Optional[_Iterable[_Union[CommittedData, _Mapping]]] = ..., no_say: bool = ...) -> None: ...

class GetShardStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitStatus(_message.Message):
    __slots__ = ("rank", "clock", "bucket_count", "waiting_for", "reason", "waited")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    clock: int
    bucket_count: int
    waiting_for: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    waited: _duration_pb2.Duration
    def __init__(self, rank: _Optional[int] = ..., clock: _Optional[int] = ..., bucket_count: _Optional[int] = ..., waiting_for: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., waited: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ShardJobStatus(_message.Message):
    __slots__ = ("job", "bucket_count", "parameter_bytes", "optimizer_bytes", "staged_bytes", "version_min", "version_max", "clocks", "waits")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    job: str
    bucket_count: int
    parameter_bytes: int
    optimizer_bytes: int
    staged_bytes: int
    version_min: int
    version_max: int
    clocks: _containers.ScalarMap[int, int]
    waits: _containers.RepeatedCompositeFieldContainer[WaitStatus]
    def __init__(self, job: _Optional[str] = ..., bucket_count: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., optimizer_bytes: _Optional[int] = ..., staged_bytes: _Optional[int] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., clocks: _Optional[_Mapping[int, int]] = ..., waits: _Optional[_Iterable[_Union[WaitStatus, _Mapping]]] = ...) -> None: ...

class GetShardStatusResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[ShardJobStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[ShardJobStatus, _Mapping]]] = ...) -> None: ...
