import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import figures_pb2 as _figures_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionRange(_message.Message):
    __slots__ = ("min_version", "max_version", "clocks")
    class ClocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    max_version: int
    clocks: _containers.ScalarMap[int, int]
    def __init__(self, min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., clocks: _Optional[_Mapping[int, int]] = ...) -> None: ...

class CommittedData(_message.Message):
    __slots__ = ("loader", "pass_number", "ranges")
    LOADER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    loader: int
    pass_number: int
    ranges: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRange]
    def __init__(self, loader: _Optional[int] = ..., pass_number: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_types_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class WaitStatus(_message.Message):
    __slots__ = ("rank", "clock", "bucket_count", "awaited_ranks", "reason", "wait_duration")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    AWAITED_RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    clock: int
    bucket_count: int
    awaited_ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    wait_duration: _duration_pb2.Duration
    def __init__(self, rank: _Optional[int] = ..., clock: _Optional[int] = ..., bucket_count: _Optional[int] = ..., awaited_ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ShardJobStatus(_message.Message):
    __slots__ = ("job", "bucket_count", "parameter_bytes", "optimizer_bytes", "staged_bytes", "versions", "waits", "run", "figures", "departed_clocks", "sharing_ranks", "connected_ranks", "tables", "agreement", "feed")
    class DepartedClocksEntry(_message.Message):
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
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARING_RANKS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_RANKS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    job: str
    bucket_count: int
    parameter_bytes: int
    optimizer_bytes: int
    staged_bytes: int
    versions: VersionRange
    waits: _containers.RepeatedCompositeFieldContainer[WaitStatus]
    run: str
    figures: _figures_pb2.ShardJobFigures
    departed_clocks: _containers.ScalarMap[int, int]
    sharing_ranks: _containers.RepeatedScalarFieldContainer[int]
    connected_ranks: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[_figures_pb2.TableFigures]
    agreement: RoundAgreement
    feed: FeedStatus
    def __init__(self, job: _Optional[str] = ..., bucket_count: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., optimizer_bytes: _Optional[int] = ..., staged_bytes: _Optional[int] = ..., versions: _Optional[_Union[VersionRange, _Mapping]] = ..., waits: _Optional[_Iterable[_Union[WaitStatus, _Mapping]]] = ..., run: _Optional[str] = ..., figures: _Optional[_Union[_figures_pb2.ShardJobFigures, _Mapping]] = ..., departed_clocks: _Optional[_Mapping[int, int]] = ..., sharing_ranks: _Optional[_Iterable[int]] = ..., connected_ranks: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[_figures_pb2.TableFigures, _Mapping]]] = ..., agreement: _Optional[_Union[RoundAgreement, _Mapping]] = ..., feed: _Optional[_Union[FeedStatus, _Mapping]] = ...) -> None: ...

class FeedStatus(_message.Message):
    __slots__ = ("reader_count", "edition_version", "age_duration", "behind", "size_bytes", "sent_bytes", "trouble", "element_bytes", "mapped_reader_count", "held_bytes", "relays", "relay_count", "relayed_reader_count")
    READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EDITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    RELAY_COUNT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    reader_count: int
    edition_version: int
    age_duration: _duration_pb2.Duration
    behind: int
    size_bytes: int
    sent_bytes: int
    trouble: str
    element_bytes: int
    mapped_reader_count: int
    held_bytes: int
    relays: _containers.RepeatedCompositeFieldContainer[RelayStatus]
    relay_count: int
    relayed_reader_count: int
    def __init__(self, reader_count: _Optional[int] = ..., edition_version: _Optional[int] = ..., age_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., behind: _Optional[int] = ..., size_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., trouble: _Optional[str] = ..., element_bytes: _Optional[int] = ..., mapped_reader_count: _Optional[int] = ..., held_bytes: _Optional[int] = ..., relays: _Optional[_Iterable[_Union[RelayStatus, _Mapping]]] = ..., relay_count: _Optional[int] = ..., relayed_reader_count: _Optional[int] = ...) -> None: ...

class RelayStatus(_message.Message):
    __slots__ = ("name", "reader_count", "edition_version", "behind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EDITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    reader_count: int
    edition_version: int
    behind: int
    def __init__(self, name: _Optional[str] = ..., reader_count: _Optional[int] = ..., edition_version: _Optional[int] = ..., behind: _Optional[int] = ...) -> None: ...

class RoundAgreement(_message.Message):
    __slots__ = ("mean_square", "square_mean")
    MEAN_SQUARE_FIELD_NUMBER: _ClassVar[int]
    SQUARE_MEAN_FIELD_NUMBER: _ClassVar[int]
    mean_square: float
    square_mean: float
    def __init__(self, mean_square: _Optional[float] = ..., square_mean: _Optional[float] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("spec", "buckets", "run", "shard_count", "coordinator_term")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    spec: _job_pb2.JobSpec
    buckets: _containers.RepeatedScalarFieldContainer[int]
    run: str
    shard_count: int
    coordinator_term: int
    def __init__(self, spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ..., run: _Optional[str] = ..., shard_count: _Optional[int] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class CreateJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropJobRequest(_message.Message):
    __slots__ = ("job", "run", "coordinator_term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    coordinator_term: int
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class DropJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddWorkerRequest(_message.Message):
    __slots__ = ("worker", "clock", "coordinator_term")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    clock: int
    coordinator_term: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class AddWorkerResponse(_message.Message):
    __slots__ = ("frontier", "pushed_clock", "pushes")
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    PUSHED_CLOCK_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    frontier: int
    pushed_clock: int
    pushes: _types_pb2.ShardPushes
    def __init__(self, frontier: _Optional[int] = ..., pushed_clock: _Optional[int] = ..., pushes: _Optional[_Union[_types_pb2.ShardPushes, _Mapping]] = ...) -> None: ...

class AddWorkersRequest(_message.Message):
    __slots__ = ("workers", "coordinator_term")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[AddWorkerRequest]
    coordinator_term: int
    def __init__(self, workers: _Optional[_Iterable[_Union[AddWorkerRequest, _Mapping]]] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class AddWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[AddedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[AddedWorker, _Mapping]]] = ...) -> None: ...

class AddedWorker(_message.Message):
    __slots__ = ("counted", "fenced")
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    counted: AddWorkerResponse
    fenced: str
    def __init__(self, counted: _Optional[_Union[AddWorkerResponse, _Mapping]] = ..., fenced: _Optional[str] = ...) -> None: ...

class RemoveWorkerRequest(_message.Message):
    __slots__ = ("worker", "coordinator_term")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    coordinator_term: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class RemoveWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveWorkersRequest(_message.Message):
    __slots__ = ("workers", "coordinator_term")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_types_pb2.WorkerIdentity]
    coordinator_term: int
    def __init__(self, workers: _Optional[_Iterable[_Union[_types_pb2.WorkerIdentity, _Mapping]]] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class RemoveWorkersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginSnapshotRequest(_message.Message):
    __slots__ = ("job", "checkpoint", "clock", "run", "refusal_duration", "last_incarnation", "kept_checkpoints", "base_sha256", "coordinator_term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_DURATION_FIELD_NUMBER: _ClassVar[int]
    LAST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEPT_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    BASE_SHA256_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    checkpoint: str
    clock: int
    run: str
    refusal_duration: _duration_pb2.Duration
    last_incarnation: int
    kept_checkpoints: _containers.RepeatedScalarFieldContainer[str]
    base_sha256: bytes
    coordinator_term: int
    def __init__(self, job: _Optional[str] = ..., checkpoint: _Optional[str] = ..., clock: _Optional[int] = ..., run: _Optional[str] = ..., refusal_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_incarnation: _Optional[int] = ..., kept_checkpoints: _Optional[_Iterable[str]] = ..., base_sha256: _Optional[bytes] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class BeginSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AwaitSnapshotRequest(_message.Message):
    __slots__ = ("job", "checkpoint", "run", "coordinator_term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    checkpoint: str
    run: str
    coordinator_term: int
    def __init__(self, job: _Optional[str] = ..., checkpoint: _Optional[str] = ..., run: _Optional[str] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class AwaitSnapshotResponse(_message.Message):
    __slots__ = ("file", "size_bytes", "sha256", "versions", "stall_duration", "disk", "changes_only")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    STALL_DURATION_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    CHANGES_ONLY_FIELD_NUMBER: _ClassVar[int]
    file: str
    size_bytes: int
    sha256: bytes
    versions: VersionRange
    stall_duration: _duration_pb2.Duration
    disk: str
    changes_only: bool
    def __init__(self, file: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., versions: _Optional[_Union[VersionRange, _Mapping]] = ..., stall_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., disk: _Optional[str] = ..., changes_only: _Optional[bool] = ...) -> None: ...

class RestoreJobRequest(_message.Message):
    __slots__ = ("spec", "buckets", "checkpoint", "last_incarnation", "run", "own_file", "shard_count", "base_files", "coordinator_term")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LAST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    OWN_FILE_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    BASE_FILES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    spec: _job_pb2.JobSpec
    buckets: _containers.RepeatedScalarFieldContainer[int]
    checkpoint: str
    last_incarnation: int
    run: str
    own_file: ShardFile
    shard_count: int
    base_files: _containers.RepeatedCompositeFieldContainer[ShardFile]
    coordinator_term: int
    def __init__(self, spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ..., checkpoint: _Optional[str] = ..., last_incarnation: _Optional[int] = ..., run: _Optional[str] = ..., own_file: _Optional[_Union[ShardFile, _Mapping]] = ..., shard_count: _Optional[int] = ..., base_files: _Optional[_Iterable[_Union[ShardFile, _Mapping]]] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class ShardFile(_message.Message):
    __slots__ = ("file", "size_bytes", "sha256", "disk", "checkpoint")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    file: str
    size_bytes: int
    sha256: bytes
    disk: str
    checkpoint: str
    def __init__(self, file: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., disk: _Optional[str] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class RestoreJobResponse(_message.Message):
    __slots__ = ("versions", "done_bytes", "total_bytes")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    versions: VersionRange
    done_bytes: int
    total_bytes: int
    def __init__(self, versions: _Optional[_Union[VersionRange, _Mapping]] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class GetCommittedDataRequest(_message.Message):
    __slots__ = ("job", "run", "coordinator_term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    coordinator_term: int
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., coordinator_term: _Optional[int] = ...) -> None: ...

class GetCommittedDataResponse(_message.Message):
    __slots__ = ("loaders", "trains_buckets")
    LOADERS_FIELD_NUMBER: _ClassVar[int]
    TRAINS_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    loaders: _containers.RepeatedCompositeFieldContainer[CommittedData]
    trains_buckets: bool
    def __init__(self, loaders: _Optional[_Iterable[_Union[CommittedData, _Mapping]]] = ..., trains_buckets: _Optional[bool] = ...) -> None: ...

class GetShardStatusRequest(_message.Message):
    __slots__ = ("coordinator_term",)
    COORDINATOR_TERM_FIELD_NUMBER: _ClassVar[int]
    coordinator_term: int
    def __init__(self, coordinator_term: _Optional[int] = ...) -> None: ...

class GetShardStatusResponse(_message.Message):
    __slots__ = ("jobs", "process", "figures")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[ShardJobStatus]
    process: int
    figures: _figures_pb2.ShardFigures
    def __init__(self, jobs: _Optional[_Iterable[_Union[ShardJobStatus, _Mapping]]] = ..., process: _Optional[int] = ..., figures: _Optional[_Union[_figures_pb2.ShardFigures, _Mapping]] = ...) -> None: ...
