"""Well-formed requests to a server with one job, by method: what fuzzers start from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from ps_protocol.convert import job_spec_message
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec
from ps_protocol.modes import Consistency
from ps_protocol.tables import JobTable, TableSpec
from ps_protocol.v1 import (
    cluster_pb2,
    data_pb2,
    feed_pb2,
    job_pb2,
    jobs_pb2,
    leases_pb2,
    membership_pb2,
    rounds_pb2,
    rows_pb2,
    shard_pb2,
    types_pb2,
)
from ps_server.shard.row_feeds import RowCursor

JOB, KEY = "job", b"sixteen bytes 01"
KEPT, CHECKPOINT = "kept", "000001"  # a job that is not there any more, and its checkpoint
SPEC = JobSpec(
    JOB,
    (ParameterSpec("w", (24,), "float32", 0), ParameterSpec("buffer", (3,), "int64", None)),
    "AdamW",
    ({"lr": 0.1},),
    Consistency(0, True),
    64,
    2,
    tables=(JobTable(TableSpec("table", 2, admit_after=2), "SGD", {"lr": 0.1}),),
)
WORKER = types_pb2.WorkerIdentity(job=JOB, rank=1, incarnation=2, lease_key=KEY)
BLOCKS_SPEC = replace(SPEC, name="blocks", gradient_wire="int4", tables=())

BEGINNING_SPEC = replace(
    SPEC, name="begins", tables=(JobTable(TableSpec("table", 2, admit_after=2, initial_rows=True), "SGD", {"lr": 0.1}),)
)

_NEW = job_spec_message(replace(SPEC, name="new"))
_NEWCOMER = types_pb2.WorkerIdentity(job="new", rank=1, incarnation=3)
_HERE = data_pb2.InSegment()
_RANGE = {"start": 4, "stop": 8}
_LOADER = leases_pb2.LoaderSpec(sample_count=12, batch_size=4, seed=1)
_GROUP = job_pb2.GroupUpdate(
    group=0,
    hyper_parameters=[
        job_pb2.HyperParameter(name="lr", number=0.5),
        job_pb2.HyperParameter(name="betas", numbers=job_pb2.NumberList(values=[0.9, 0.99])),
    ],
)


def _header(*kinds: str, wire: Any = None, **more: Any) -> data_pb2.PushHeader:
    """Of a push of as many buckets, from 0. wire: the format of their elements"""
    pushed = [
        data_pb2.BucketPush(bucket=bucket, kind=data_pb2.PushKind.Value(f"PUSH_KIND_{kind}"), wire_format=wire)
        for bucket, kind in enumerate(kinds)
    ]
    return data_pb2.PushHeader(**{"worker": WORKER, "clock": 1, "buckets": pushed, **more})


def _rows(kind: str, payload: bytes = b"", rows: int = 0, total: int = 0) -> rows_pb2.PushRowsRequest:
    return rows_pb2.PushRowsRequest(
        worker=WORKER,
        clock=1,
        kind=rows_pb2.RowPushKind.Value(f"ROW_PUSH_KIND_{kind}"),
        row_count=rows,
        total_row_count=total,
        assignment=int(kind == "ASSIGN"),
        hyper_parameters=_GROUP.hyper_parameters[:1],
        ranges=[types_pb2.DataRange(**_RANGE)],
        payload=payload,
    )


def _begins(payload: bytes = b"", **more: Any) -> rows_pb2.PushTableRequest:
    """A message of two rows and one id that waits, from the one who may send them."""
    worker = types_pb2.WorkerIdentity(job=BEGINNING_SPEC.name, rank=0, incarnation=1, lease_key=KEY)
    begins = rows_pb2.TableBeginning(version=9, seed=3, row_count=2, waiting_count=1)
    return rows_pb2.PushTableRequest(worker=worker, beginning=begins, payload=payload, **more)


def _places(ids: int, count: int, rows: int) -> rows_pb2.PullRowsRequest:
    return rows_pb2.PullRowsRequest(
        worker=WORKER,
        row_count=count,
        ids_in_segment=rows_pb2.RowPlace(offset=ids),
        rows_in_segment=rows_pb2.RowPlace(offset=rows),
    )


_PLACE = rows_pb2.RowPlace(offset=4096)
_IN_BLOCKS = types_pb2.WorkerIdentity(job=BLOCKS_SPEC.name, rank=1, incarnation=2, lease_key=KEY)
_BLOCK = b"\x80\x3f" + bytes(range(8))  # 16 elements as int4, with scale 1
_IDS = (7).to_bytes(8, "little") + (9).to_bytes(8, "little")
_ROWS = _IDS + (1).to_bytes(4, "little") * 2 + bytes(16)
_ASSIGNED = _IDS + bytes(16)  # rows that are set
_REQUESTS = [
    _rows("GRADIENT", _ROWS, 2, 2),
    _rows("GRADIENT", _ROWS, 2, 5),
    _rows("NO_GRADIENT"),
    _rows("SKIP"),
    _rows("ASSIGN", _ASSIGNED, 2, 2),
    _rows("ASSIGN", _ASSIGNED, 2, 5),
    rows_pb2.PullRowsRequest(worker=WORKER, payload=_IDS),
    rows_pb2.PullRowsRequest(worker=WORKER, clock=1, payload=_IDS),
    rows_pb2.PushRowsRequest(
        worker=WORKER,
        clock=1,
        kind="ROW_PUSH_KIND_GRADIENT",
        row_count=2,
        total_row_count=2,
        in_segment={"offset": 4096},
    ),
    _places(4096, 2, 4160),
    _places(4096, 2, 1 << 20),
    rows_pb2.ExchangeRowsRequest(push=_rows("NO_GRADIENT")),
    rows_pb2.ExchangeRowsRequest(push=_rows("GRADIENT", rows=2, total=2), row_count=2, payload=_IDS + _ROWS),
    rows_pb2.ExchangeRowsRequest(push=_rows("NO_GRADIENT"), row_count=2, payload=_IDS),
    rows_pb2.ExchangeRowsRequest(
        push=rows_pb2.PushRowsRequest(
            worker=WORKER, clock=1, kind="ROW_PUSH_KIND_GRADIENT", row_count=2, total_row_count=2, in_segment=_PLACE
        ),
        ids_in_segment=_PLACE,
        row_count=2,
        rows_in_segment=rows_pb2.RowPlace(offset=4160),
    ),
    _begins(),
    _begins(_IDS + (1).to_bytes(8, "little") * 2 + bytes(16), row_count=2),
    _begins((1).to_bytes(8, "little") * 3, first=2, waiting_count=1, last=True),
    rows_pb2.PullTableRequest(worker=WORKER),
    rows_pb2.PullTableRequest(worker=WORKER, clock=1, count_only=True),
    feed_pb2.WatchRowsRequest(job=JOB, table="table"),
    feed_pb2.WatchRowsRequest(
        job=JOB, table="table", cursor=RowCursor(0, 1, 0).to_bytes(), period_duration={"seconds": 2}
    ),
    feed_pb2.DescribeWeightsRequest(job=JOB, with_spec=True),
    feed_pb2.DescribeWeightsRequest(
        job=JOB, follows=True, relay=feed_pb2.RelayReport(name="near:1", reader_count=2**32 - 1, edition_version=2**63)
    ),
    feed_pb2.PullEditionRequest(job=JOB, wire_format=types_pb2.WIRE_FORMAT_BFLOAT16),
    feed_pb2.PullEditionRequest(job=JOB, version=2, buckets=[0]),
    feed_pb2.PullEditionRequest(job=JOB, base_versions={0: 0, 1: 2**63}, sparse_changes=True, part_bytes=1),
    feed_pb2.PullEditionRequest(
        job=JOB, mapping=feed_pb2.MappingOffer(location="ps-torch-" + "0" * 32, nonce=bytes(32))
    ),
    data_pb2.PushRequest(header=_header("GRADIENT", groups=[_GROUP], ranges=[_RANGE]), payload=bytes(64)),
    data_pb2.PushRequest(header=_header("DRAFT"), payload=bytes(64)),
    data_pb2.PushRequest(header=_header("GRADIENT", "GRADIENT"), payload=bytes(128)),
    data_pb2.PushRequest(header=_header("GRADIENT", wire="WIRE_FORMAT_INT4", worker=_IN_BLOCKS), payload=_BLOCK),
    data_pb2.PushRequest(header=_header("DRAFT", wire="WIRE_FORMAT_INT4", worker=_IN_BLOCKS), payload=_BLOCK),
    data_pb2.PushRequest(header=_header("SKIP", "SKIP")),
    data_pb2.PushRequest(header=_header("SKIP"), in_segment=_HERE),
    data_pb2.PullRequest(worker=WORKER, clock=0, buckets=[0, 1, 2]),
    data_pb2.PullRequest(worker=WORKER, clock=0, buckets=[0, 1], in_segment=_HERE, notify_bytes=64),
    data_pb2.ExchangeRequest(push=_header("COMMIT", "SKIP"), buckets=[0]),
    data_pb2.ExchangeRequest(push=_header("SKIP"), buckets=[0], in_segment=_HERE),
    data_pb2.ExchangeRequest(push=_header("GRADIENT", "GRADIENT"), buckets=[0, 1], payload=bytes(128)),
    data_pb2.PullStateRequest(worker=WORKER, buckets=[0, 1]),
    data_pb2.AttachSegmentRequest(worker=WORKER, location="ps-torch-" + "0" * 32, nonce=bytes(32), socket_inode=1),
    data_pb2.AttachSegmentRequest(
        worker=WORKER, location="ps-torch-" + "0" * 32, nonce=bytes(32), socket_inode=1, row_bytes=4096
    ),
    data_pb2.OpenDataConnectionRequest(worker=WORKER),
    jobs_pb2.RegisterJobRequest(spec=_NEW),
    jobs_pb2.EndJobRequest(job=JOB),
    jobs_pb2.CheckpointJobRequest(job=JOB),
    membership_pb2.JoinRequest(
        job=JOB, rank=1, metrics_address="h:1", pid=1, host="h", launch={"name": "launch", "rank_count": 2}
    ),
    membership_pb2.WatchRequest(job=JOB),
    membership_pb2.HeartbeatRequest(worker=WORKER, clock=1),
    membership_pb2.LeaveRequest(worker=WORKER),
    membership_pb2.ReportWorkerEndRequest(job=JOB, launch="launch", host="h", pid=1),
    membership_pb2.SaveWorkerStateRequest(worker=WORKER, state={"clock": 1, "content": b"state"}),
    leases_pb2.LeaseDataRequest(worker=WORKER, batch_count=2, loader=_LOADER, leased=[{"stop": 4}], committed=[_RANGE]),
    rounds_pb2.GatherValuesRequest(worker=WORKER, round=0, clock=1, value=b"value"),
    rounds_pb2.GatherValuesRequest(worker=WORKER, round=1, clock=1, value=b"value"),
    cluster_pb2.RegisterShardRequest(index=1, address="h:1", process=1, protocol_version=2),
    cluster_pb2.ReportShardEndRequest(index=1, process=1),
    cluster_pb2.GetStatusRequest(),
    cluster_pb2.WatchStatusRequest(history_wanted=True),
    cluster_pb2.WatchStatusRequest(period_duration={"nanos": 500_000_000}, process=1, last_event=1, next_sample=1),
    shard_pb2.CreateJobRequest(spec=_NEW, buckets=[0, 1], run="1" * 16),
    shard_pb2.DropJobRequest(job="new"),
    shard_pb2.AddWorkerRequest(worker=_NEWCOMER),
    shard_pb2.AddWorkersRequest(workers=[shard_pb2.AddWorkerRequest(worker=_NEWCOMER)]),
    shard_pb2.RemoveWorkersRequest(workers=[_NEWCOMER]),
    shard_pb2.RemoveWorkerRequest(worker=_NEWCOMER),
    shard_pb2.GetCommittedDataRequest(job=JOB),
    shard_pb2.BeginSnapshotRequest(job=JOB, checkpoint="000002", clock=1),
    shard_pb2.BeginSnapshotRequest(job=JOB, checkpoint="000003"),
    shard_pb2.AwaitSnapshotRequest(job=JOB, checkpoint="000003"),
    shard_pb2.RestoreJobRequest(
        spec=job_spec_message(replace(SPEC, name=KEPT)),
        buckets=[0, 1, 2],
        checkpoint=CHECKPOINT,
        last_incarnation=2,
        run="1" * 16,
    ),
    shard_pb2.GetShardStatusRequest(),
]
SEEDS: dict[str, list[bytes]] = defaultdict(list)
for _request in _REQUESTS:
    SEEDS[type(_request).__name__.removesuffix("Request")].append(_request.SerializeToString())
