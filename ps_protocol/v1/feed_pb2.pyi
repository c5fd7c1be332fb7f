import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import job_pb2 as _job_pb2
from ps_protocol.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeWeightsRequest(_message.Message):
    __slots__ = ("job", "run", "with_spec", "wire_format", "follows", "buckets", "relay")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    WITH_SPEC_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    with_spec: bool
    wire_format: _types_pb2.WireFormat
    follows: bool
    buckets: _containers.RepeatedScalarFieldContainer[int]
    relay: RelayReport
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., with_spec: _Optional[bool] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., follows: _Optional[bool] = ..., buckets: _Optional[_Iterable[int]] = ..., relay: _Optional[_Union[RelayReport, _Mapping]] = ...) -> None: ...

class RelayReport(_message.Message):
    __slots__ = ("name", "reader_count", "edition_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READER_COUNT_FIELD_NUMBER: _ClassVar[int]
    EDITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    reader_count: int
    edition_version: int
    def __init__(self, name: _Optional[str] = ..., reader_count: _Optional[int] = ..., edition_version: _Optional[int] = ...) -> None: ...

class DescribeWeightsResponse(_message.Message):
    __slots__ = ("header", "highest_version", "timeline", "shard_count", "buckets", "has_one_version", "edition_versions", "spec", "ended", "relayed", "age_duration", "buffer_versions")
    class BufferVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    HAS_ONE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EDITION_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    highest_version: int
    timeline: int
    shard_count: int
    buckets: _containers.RepeatedScalarFieldContainer[int]
    has_one_version: bool
    edition_versions: _containers.RepeatedScalarFieldContainer[int]
    spec: _job_pb2.JobSpec
    ended: bool
    relayed: bool
    age_duration: _duration_pb2.Duration
    buffer_versions: _containers.ScalarMap[int, int]
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., highest_version: _Optional[int] = ..., timeline: _Optional[int] = ..., shard_count: _Optional[int] = ..., buckets: _Optional[_Iterable[int]] = ..., has_one_version: _Optional[bool] = ..., edition_versions: _Optional[_Iterable[int]] = ..., spec: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., ended: _Optional[bool] = ..., relayed: _Optional[bool] = ..., age_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., buffer_versions: _Optional[_Mapping[int, int]] = ...) -> None: ...

class PullEditionRequest(_message.Message):
    __slots__ = ("job", "run", "timeline", "version", "wire_format", "buckets", "base_versions", "part_bytes", "mapping", "sparse_changes")
    class BaseVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    SPARSE_CHANGES_FIELD_NUMBER: _ClassVar[int]
    job: str
    run: str
    timeline: int
    version: int
    wire_format: _types_pb2.WireFormat
    buckets: _containers.RepeatedScalarFieldContainer[int]
    base_versions: _containers.ScalarMap[int, int]
    part_bytes: int
    mapping: MappingOffer
    sparse_changes: bool
    def __init__(self, job: _Optional[str] = ..., run: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., buckets: _Optional[_Iterable[int]] = ..., base_versions: _Optional[_Mapping[int, int]] = ..., part_bytes: _Optional[int] = ..., mapping: _Optional[_Union[MappingOffer, _Mapping]] = ..., sparse_changes: _Optional[bool] = ...) -> None: ...

class MappingOffer(_message.Message):
    __slots__ = ("location", "nonce", "socket_inode", "reader")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_INODE_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    location: str
    nonce: bytes
    socket_inode: int
    reader: int
    def __init__(self, location: _Optional[str] = ..., nonce: _Optional[bytes] = ..., socket_inode: _Optional[int] = ..., reader: _Optional[int] = ...) -> None: ...

class PullEditionResponse(_message.Message):
    __slots__ = ("header", "begin", "bucket", "age_duration", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    begin: EditionBegin
    bucket: EditionBucket
    age_duration: _duration_pb2.Duration
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., begin: _Optional[_Union[EditionBegin, _Mapping]] = ..., bucket: _Optional[_Union[EditionBucket, _Mapping]] = ..., age_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class EditionBegin(_message.Message):
    __slots__ = ("version", "timeline", "bucket_count")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    version: int
    timeline: int
    bucket_count: int
    def __init__(self, version: _Optional[int] = ..., timeline: _Optional[int] = ..., bucket_count: _Optional[int] = ...) -> None: ...

class EditionBucket(_message.Message):
    __slots__ = ("bucket", "version", "wire_format", "checksum", "base_version", "payload_bytes", "file", "offset", "sparse")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    version: int
    wire_format: _types_pb2.WireFormat
    checksum: int
    base_version: int
    payload_bytes: int
    file: int
    offset: int
    sparse: bool
    def __init__(self, bucket: _Optional[int] = ..., version: _Optional[int] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., checksum: _Optional[int] = ..., base_version: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., file: _Optional[int] = ..., offset: _Optional[int] = ..., sparse: _Optional[bool] = ...) -> None: ...

class WatchRowsRequest(_message.Message):
    __slots__ = ("job", "table", "cursor", "period_duration")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PERIOD_DURATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    table: str
    cursor: bytes
    period_duration: _duration_pb2.Duration
    def __init__(self, job: _Optional[str] = ..., table: _Optional[str] = ..., cursor: _Optional[bytes] = ..., period_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RoundBegin(_message.Message):
    __slots__ = ("full", "version", "shard_count", "dim", "initializer")
    FULL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    full: bool
    version: int
    shard_count: int
    dim: int
    initializer: _job_pb2.RowInitializer
    def __init__(self, full: _Optional[bool] = ..., version: _Optional[int] = ..., shard_count: _Optional[int] = ..., dim: _Optional[int] = ..., initializer: _Optional[_Union[_job_pb2.RowInitializer, _Mapping]] = ...) -> None: ...

class WatchRowsResponse(_message.Message):
    __slots__ = ("header", "begin", "removed_count", "row_count", "wire_format", "cursor", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    REMOVED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WIRE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: _types_pb2.ResponseHeader
    begin: RoundBegin
    removed_count: int
    row_count: int
    wire_format: _types_pb2.WireFormat
    cursor: bytes
    payload: bytes
    def __init__(self, header: _Optional[_Union[_types_pb2.ResponseHeader, _Mapping]] = ..., begin: _Optional[_Union[RoundBegin, _Mapping]] = ..., removed_count: _Optional[int] = ..., row_count: _Optional[int] = ..., wire_format: _Optional[_Union[_types_pb2.WireFormat, str]] = ..., cursor: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
