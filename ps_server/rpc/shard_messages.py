"""Requests of a coordinator to a shard, and the answers: conversion of values to protobuf messages and back."""

from __future__ import annotations

import math

from ps_protocol.convert import (
    duration,
    job_spec,
    job_spec_message,
    seconds,
)
from ps_protocol.errors import Fenced
from ps_protocol.figures import PHASES, LoggedValue, WorkerFigures
from ps_protocol.messages.workers import ShardPushed, pushed_message, shard_pushed
from ps_protocol.v1 import figures_pb2, shard_pb2, types_pb2
from ps_server.core.agreement import Agreement
from ps_server.core.data_commits import Committed
from ps_server.core.membership import Arrival, ShardProgress
from ps_server.core.server_figures import RowCounts, ShardFigures, ShardJobFigures, TableFigures, check_worker_figures
from ps_server.core.snapshot import (
    CheckpointFile,
    RestoreProgress,
    RestoreRequest,
    ShardSnapshot,
    SnapshotRequest,
    StoredFile,
    VersionRange,
)
from ps_server.core.statistics import ShardJobStatistics, ShardStatistics, Wait
from ps_server.rpc.feed_status import feed_figures, feed_message


def arrival(request: shard_pb2.AddWorkerRequest) -> Arrival:
    """Returns the worker in a message, which a shard shall count."""
    worker, clock = request.worker, request.clock if request.HasField("clock") else None
    return Arrival(worker.rank, worker.incarnation, worker.lease_key, clock)


def add_worker_response(counted: ShardProgress) -> shard_pb2.AddWorkerResponse:
    """Returns the message of a shard's state when it counted a worker."""
    pushes = pushed_message(0, ShardPushed(counted.pushed or 0, counted.further or {}))
    return shard_pb2.AddWorkerResponse(frontier=counted.frontier, pushed_clock=counted.pushed, pushes=pushes)


def added_worker(added: ShardProgress | Fenced) -> shard_pb2.AddedWorker:
    """Returns the message for one of several workers: the shard's state, or why the worker is fenced."""
    if isinstance(added, Fenced):
        return shard_pb2.AddedWorker(fenced=str(added))
    return shard_pb2.AddedWorker(counted=add_worker_response(added))


def added(worker: shard_pb2.AddedWorker) -> ShardProgress | Fenced:
    """Returns a shard's answer for one of several workers: its state, or why the worker is fenced."""
    return Fenced(worker.fenced) if worker.fenced else counted(worker.counted)


def counted(response: shard_pb2.AddWorkerResponse) -> ShardProgress:
    """Returns the shard's state in an answer to AddWorker."""
    pushed = response.pushed_clock if response.HasField("pushed_clock") else None
    further = shard_pushed(response.pushes).further if response.HasField("pushes") else None
    return ShardProgress(response.frontier, pushed, further)


def committed_response(committed: Committed, has_say: bool) -> shard_pb2.GetCommittedDataResponse:
    """Returns the message that lists the leased data committed on a shard, by loader.

    has_say: an optimizer steps a bucket on this shard; without one its answer does not count
    """
    loaders = [
        shard_pb2.CommittedData(
            loader=loader,
            pass_number=number,
            ranges=[types_pb2.DataRange(loader=loader, pass_number=number, start=a, stop=b) for a, b in spans],
        )
        for loader, (number, spans) in committed.items()
    ]
    return shard_pb2.GetCommittedDataResponse(loaders=loaders, trains_buckets=has_say)


def committed(response: shard_pb2.GetCommittedDataResponse) -> Committed | None:
    """Returns a shard's committed data; None if it trains no bucket."""
    if not response.trains_buckets:
        return None
    return {data.loader: (data.pass_number, [(r.start, r.stop) for r in data.ranges]) for data in response.loaders}


def await_snapshot_response(snapshot: ShardSnapshot) -> shard_pb2.AwaitSnapshotResponse:
    """Returns the answer to AwaitSnapshot: the file that a shard has written for a checkpoint."""
    part = snapshot.part
    return shard_pb2.AwaitSnapshotResponse(
        file=part.file,
        size_bytes=part.bytes,
        sha256=bytes.fromhex(part.sha256),
        versions=versions_message(snapshot.extent),
        stall_duration=duration(snapshot.held_up),
        disk=part.disk,
        changes_only=snapshot.changes_only,
    )


def shard_snapshot(response: shard_pb2.AwaitSnapshotResponse) -> ShardSnapshot:
    """Reads the description of a shard's snapshot on disk from a message."""
    held_up = seconds(response.stall_duration)
    return ShardSnapshot(part(response), versions(response.versions), held_up, response.changes_only)


def part(message: shard_pb2.AwaitSnapshotResponse | shard_pb2.ShardFile) -> CheckpointFile:
    """Returns the file of a shard that a message describes."""
    return CheckpointFile(message.file, message.size_bytes, message.sha256.hex(), message.disk)


def snapshot_message(request: SnapshotRequest) -> shard_pb2.BeginSnapshotRequest:
    """Returns the message that asks a shard for its part of a checkpoint."""
    return shard_pb2.BeginSnapshotRequest(
        job=request.job,
        checkpoint=request.checkpoint,
        clock=request.clock,
        run=request.run,
        refusal_duration=duration(request.refusal) if request.refusal else None,
        last_incarnation=request.last_incarnation,
        kept_checkpoints=request.kept,
        base_sha256=bytes.fromhex(request.built_on),
    )


def snapshot_request(message: shard_pb2.BeginSnapshotRequest) -> SnapshotRequest:
    """Returns the snapshot that a message requests."""
    return SnapshotRequest(
        message.job,
        message.checkpoint,
        message.clock if message.HasField("clock") else None,
        message.run,
        seconds(message.refusal_duration),
        message.last_incarnation,
        tuple(message.kept_checkpoints),
        message.base_sha256.hex(),
    )


def restore_message(request: RestoreRequest) -> shard_pb2.RestoreJobRequest:
    """Returns the message that asks a shard to continue a job as of a checkpoint."""
    own = [_file_message(stored) for stored in request.own]
    return shard_pb2.RestoreJobRequest(
        spec=job_spec_message(request.spec),
        buckets=request.buckets,
        checkpoint=request.checkpoint,
        last_incarnation=request.last_incarnation,
        run=request.run,
        own_file=own[-1] if own else None,
        shard_count=request.shards,
        base_files=own[:-1],
    )


def restore_request(message: shard_pb2.RestoreJobRequest) -> RestoreRequest:
    """Returns the restore that a message requests. Raises InvalidRequest as job_spec."""
    files = [*message.base_files, message.own_file] if message.HasField("own_file") else []
    own = tuple(StoredFile(file.checkpoint or message.checkpoint, part(file)) for file in files)
    at = message.checkpoint, message.last_incarnation, message.run
    return RestoreRequest(job_spec(message.spec), tuple(message.buckets), *at, own, message.shard_count or 1)


def _file_message(stored: StoredFile) -> shard_pb2.ShardFile:
    """Returns the message of a file on a shard's own disk."""
    return shard_pb2.ShardFile(
        file=stored.part.file,
        size_bytes=stored.part.bytes,
        sha256=bytes.fromhex(stored.part.sha256),
        disk=stored.part.disk,
        checkpoint=stored.checkpoint,
    )


def versions_message(versions: VersionRange) -> shard_pb2.VersionRange:
    """Returns the message of the versions and clocks of buckets."""
    return shard_pb2.VersionRange(
        min_version=versions.version_min, max_version=versions.version_max, clocks=versions.clocks
    )


def versions(message: shard_pb2.VersionRange) -> VersionRange:
    """Reads the versions and clocks of buckets from a message."""
    return VersionRange(message.min_version, message.max_version, dict(message.clocks))


def restore_response(progress: RestoreProgress) -> shard_pb2.RestoreJobResponse:
    """Returns the message of a restore's progress."""
    response = shard_pb2.RestoreJobResponse(done_bytes=progress.done, total_bytes=progress.total)
    if progress.extent is not None:
        response.versions.CopyFrom(versions_message(progress.extent))
    return response


def restore_progress(message: shard_pb2.RestoreJobResponse) -> RestoreProgress:
    """Reads the progress of a restore from a message."""
    extent = versions(message.versions) if message.HasField("versions") else None
    return RestoreProgress(message.done_bytes, message.total_bytes, extent)


def shard_job_status(name: str, job: ShardJobStatistics) -> shard_pb2.ShardJobStatus:
    """Returns the status of a job on a shard."""
    return shard_pb2.ShardJobStatus(
        job=name,
        bucket_count=job.bucket_count,
        parameter_bytes=job.parameter_bytes,
        optimizer_bytes=job.optimizer_bytes,
        staged_bytes=job.staged_bytes,
        versions=versions_message(VersionRange(job.version_min, job.version_max, dict(job.clocks))),
        waits=[
            shard_pb2.WaitStatus(
                rank=wait.rank,
                clock=wait.clock,
                bucket_count=wait.bucket_count,
                awaited_ranks=sorted(wait.waiting_for),
                reason=wait.reason,
                wait_duration=duration(wait.seconds),
            )
            for wait in job.waits
        ],
        run=job.run,
        figures=shard_job_message(job.figures) if job.figures is not None else None,
        departed_clocks=job.departed_clocks,
        sharing_ranks=job.sharing,
        connected_ranks=job.connected,
        tables=[table_message(table) for table in job.tables],
        agreement=None
        if job.agreement is None
        else shard_pb2.RoundAgreement(mean_square=job.agreement.mean_square, square_mean=job.agreement.square_mean),
        feed=None if job.feed is None else feed_message(job.feed),
    )


def shard_statistics(response: shard_pb2.GetShardStatusResponse) -> ShardStatistics:
    """Returns the statistics of a shard in its answer."""
    figures = shard_figures(response.figures) if response.HasField("figures") else None
    return ShardStatistics({job.job: _shard_job(job) for job in response.jobs}, figures)


def _shard_job(status: shard_pb2.ShardJobStatus) -> ShardJobStatistics:
    waits = tuple(
        Wait(
            wait.rank,
            wait.clock,
            wait.bucket_count,
            frozenset(wait.awaited_ranks),
            wait.reason,
            seconds(wait.wait_duration),
        )
        for wait in status.waits
    )
    return ShardJobStatistics(
        bucket_count=status.bucket_count,
        parameter_bytes=status.parameter_bytes,
        optimizer_bytes=status.optimizer_bytes,
        staged_bytes=status.staged_bytes,
        version_min=status.versions.min_version,
        version_max=status.versions.max_version,
        clocks=dict(status.versions.clocks),
        waits=waits,
        waiting_pulls=sum(wait.bucket_count for wait in waits),
        run=status.run,
        figures=shard_job_figures(status.figures) if status.HasField("figures") else None,
        departed_clocks=dict(status.departed_clocks),
        sharing=tuple(status.sharing_ranks),
        connected=tuple(status.connected_ranks),
        tables=tuple(table_figures(table) for table in status.tables),
        agreement=Agreement(status.agreement.mean_square, status.agreement.square_mean)
        if status.HasField("agreement")
        else None,
        feed=feed_figures(status.feed) if status.HasField("feed") else None,
    )


# -- figures -----------------------------------------------------------------------------------------------------------


def worker_figures(message: figures_pb2.WorkerFigures) -> WorkerFigures:
    """Reads the measurements of a worker from a message. Raises InvalidRequest for impossible ones."""
    figures = WorkerFigures(
        measured=seconds(message.measured_duration),
        steps=message.step_count,
        phases={phase: seconds(getattr(message, f"{phase}_duration")) for phase in PHASES},
        sent=message.sent_bytes,
        received=message.received_bytes,
        values=tuple(LoggedValue(value.name, value.last, value.mean) for value in message.values),
        looked_up=message.looked_up_id_count,
        distinct=message.distinct_id_count,
        residual_ratio=message.residual_ratio if message.HasField("residual_ratio") else None,
        total=message.total_step_count,
        done=message.done_step_count,
    )
    check_worker_figures(figures)
    return figures


def shard_figures(message: figures_pb2.ShardFigures) -> ShardFigures:
    """Reads the measurements of a shard's process from a message."""
    return ShardFigures(
        seconds(message.measured_duration),
        message.resident_bytes,
        message.memory_limit_bytes,
        message.table_library,
    )


def shard_message(figures: ShardFigures) -> figures_pb2.ShardFigures:
    """Returns the message of the measurements of a shard's process."""
    return figures_pb2.ShardFigures(
        measured_duration=duration(figures.measured),
        resident_bytes=figures.resident,
        memory_limit_bytes=figures.limit,
        table_library=figures.library,
    )


def shard_job_figures(message: figures_pb2.ShardJobFigures) -> ShardJobFigures:
    """Reads a shard's measurements of a job from a message."""
    return ShardJobFigures(
        applies=message.apply_count,
        apply_seconds=seconds(message.apply_duration),
        received=message.received_bytes,
        sent=message.sent_bytes,
        staleness=tuple(
            (each.max_clocks if each.HasField("max_clocks") else math.inf, each.gradient_count)
            for each in message.staleness
        ),
        awaited={rank: seconds(waited) for rank, waited in message.awaited_durations.items()},
    )


def shard_job_message(figures: ShardJobFigures) -> figures_pb2.ShardJobFigures:
    """Returns the message of a shard's measurements of a job."""
    message = figures_pb2.ShardJobFigures(
        apply_count=figures.applies,
        apply_duration=duration(figures.apply_seconds),
        received_bytes=figures.received,
        sent_bytes=figures.sent,
        staleness=[
            figures_pb2.StalenessCount(max_clocks=None if most == math.inf else int(most), gradient_count=count)
            for most, count in figures.staleness
        ],
    )
    for rank, waited in figures.awaited.items():
        message.awaited_durations[rank].CopyFrom(duration(waited))
    return message


def table_figures(message: figures_pb2.TableFigures) -> TableFigures:
    """Reads the size and the counts of a table from a message."""
    counts = RowCounts(
        found=message.found_id_count,
        missing=message.missing_id_count,
        pushed=message.pushed_row_count,
        admitted=message.admitted_row_count,
        expired=message.expired_row_count,
        evicted=message.evicted_row_count,
        waiting=message.waiting_gradient_count,
        no_room=message.no_room_gradient_count,
        cold=message.cold_id_count,
    )
    in_file = message.file_row_count, message.file_size_bytes
    return TableFigures(message.table, message.row_count, message.size_bytes, counts, *in_file)


def table_message(figures: TableFigures) -> figures_pb2.TableFigures:
    """Returns the message of the size and the counts of a table."""
    counts = figures.counts
    return figures_pb2.TableFigures(
        table=figures.name,
        row_count=figures.rows,
        size_bytes=figures.nbytes,
        found_id_count=counts.found,
        missing_id_count=counts.missing,
        pushed_row_count=counts.pushed,
        admitted_row_count=counts.admitted,
        expired_row_count=counts.expired,
        evicted_row_count=counts.evicted,
        waiting_gradient_count=counts.waiting,
        no_room_gradient_count=counts.no_room,
        cold_id_count=counts.cold,
        file_row_count=figures.file_rows,
        file_size_bytes=figures.file_bytes,
    )
