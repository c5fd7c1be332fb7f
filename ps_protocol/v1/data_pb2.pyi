from ps_protocol.v1 import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_KIND_UNSPECIFIED: _ClassVar[PushKind]
    PUSH_KIND_GRADIENT: _ClassVar[PushKind]
    PUSH_KIND_INITIAL_VALUE: _ClassVar[PushKind]
    PUSH_KIND_SKIP: _ClassVar[PushKind]
    PUSH_KIND_ASSIGN: _ClassVar[PushKind]
    PUSH_KIND_ASSIGN_STATE: _ClassVar[PushKind]
PUSH_KIND_UNSPECIFIED: PushKind
PUSH_KIND_GRADIENT: PushKind
PUSH_KIND_INITIAL_VALUE: PushKind
PUSH_KIND_SKIP: PushKind
PUSH_KIND_ASSIGN: PushKind
PUSH_KIND_ASSIGN_STATE: PushKind

class AttachSegmentRequest(_message.Message):
    __slots__ = ("worker", "location", "nonce")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerIdentity
    location: str
    nonce: bytes
    def __init__(self, worker: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., location: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class AttachSegmentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SharedBucket(_message.Message):
    __slots__ = ("bucket", "skip", "absent_segments", "finite")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    ABSENT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    skip: bool
    absent_segments: _containers.RepeatedScalarFieldContainer[int]
    finite: bool
    def __init__(self, bucket: _Optional[int] = ..., skip: bool = ..., absent_segments: _Optional[_Iterable[int]] = ..., finite: bool = ...) -> None: ...

class PushSharedRequest(_message.Message):
    __slots__ = ("worker", "clock", "buckets", "groups", "ranges")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerIdentity
    clock: int
    buckets: _containers.RepeatedCompositeFieldContainer[SharedBucket]
    groups: _containers.RepeatedCompositeFieldContainer[GroupUpdate]
    ranges: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    def __init__(self, worker: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[SharedBucket, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupUpdate, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class PushSharedResponse(_message.Message):
    __slots__ = ("duplicate_count",)
    DUPLICATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    duplicate_count: int
    def __init__(self, duplicate_count: _Optional[int] = ...) -> None: ...

class PushPullSharedRequest(_message.Message):
    __slots__ = ("push", "buckets", "word_bytes")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    push: PushSharedRequest
    buckets: _containers.RepeatedScalarFieldContainer[int]
    word_bytes: int
    def __init__(self, push: _Optional[_Union[PushSharedRequest, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ..., word_bytes: _Optional[int] = ...) -> None: ...

class PullSharedResponse(_message.Message):
    __slots__ = ("headers", "staged_seconds")
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    STAGED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.RepeatedCompositeFieldContainer[PullHeader]
    staged_seconds: float
    def __init__(self, headers: _Optional[_Iterable[_Union[PullHeader, _Mapping]]] = ..., staged_seconds: _Optional[float] = ...) -> None: ...

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

class GroupUpdate(_message.Message):
    __slots__ = ("group", "hyper_parameters")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    group: int
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[_job_pb2.HyperParameter]
    def __init__(self, group: _Optional[int] = ..., hyper_parameters: _Optional[_Iterable[_Union[_job_pb2.HyperParameter, _Mapping]]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("worker", "bucket", "clock", "kind", "absent_segments", "groups", "ranges", "draft", "state")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ABSENT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerIdentity
    bucket: int
    clock: int
    kind: PushKind
    absent_segments: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupUpdate]
    ranges: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    draft: bool
    state: str
    def __init__(self, worker: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., bucket: _Optional[int] = ..., clock: _Optional[int] = ..., kind: _Optional[_Union[PushKind, str]] = ..., absent_segments: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[_Union[GroupUpdate, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ..., draft: bool = ..., state: _Optional[str] = ...) -> None: ...

class StepCommit(_message.Message):
    __slots__ = ("buckets", "groups", "ranges")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[SharedBucket]
    groups: _containers.RepeatedCompositeFieldContainer[GroupUpdate]
    ranges: _containers.RepeatedCompositeFieldContainer[_job_pb2.DataRange]
    def __init__(self, buckets: _Optional[_Iterable[_Union[SharedBucket, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupUpdate, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[_job_pb2.DataRange, _Mapping]]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("version", "duplicate")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    duplicate: bool
    def __init__(self, version: _Optional[int] = ..., duplicate: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("worker", "clock", "buckets", "word_bytes", "commit")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerIdentity
    clock: int
    buckets: _containers.RepeatedScalarFieldContainer[int]
    word_bytes: int
    commit: StepCommit
    def __init__(self, worker: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., clock: _Optional[int] = ..., buckets: _Optional[_Iterable[int]] = ..., word_bytes: _Optional[int] = ..., commit: _Optional[_Union[StepCommit, _Mapping]] = ...) -> None: ...

class PullStateRequest(_message.Message):
    __slots__ = ("worker", "buckets")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerIdentity
    buckets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., buckets: _Optional[_Iterable[int]] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("bucket", "version", "state", "absent_segments")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    version: int
    state: str
    absent_segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bucket: _Optional[int] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., absent_segments: _Optional[_Iterable[int]] = ...) -> None: ...

class PullStateResponse(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: StateHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[StateHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WaitNotice(_message.Message):
    __slots__ = ("ranks", "reason")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("bucket", "version", "waited_seconds", "waiting", "checkpoint")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    version: int
    waited_seconds: float
    waiting: WaitNotice
    checkpoint: bool
    def __init__(self, bucket: _Optional[int] = ..., version: _Optional[int] = ..., waited_seconds: _Optional[float] = ..., waiting: _Optional[_Union[WaitNotice, _Mapping]] = ..., checkpoint: bool = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...
