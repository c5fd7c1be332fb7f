"""Where protobuf messages become the server's values, and back, but for the data path (ps_protocol/messages).

A message of a few plain fields is made and read where it is sent and served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ps_protocol.convert import (
    consistency_message,
    data_ranges,
    duration,
    seconds,
    timestamp,
    worker_figures_message,
)
from ps_protocol.data import LeaseReport, LeaseRequest, LoaderSpec
from ps_protocol.errors import Fenced, InvalidRequest
from ps_protocol.figures import WorkerFigures
from ps_protocol.v1 import cluster_pb2, leases_pb2, membership_pb2, rounds_pb2, shard_pb2, types_pb2
from ps_server.coordinator.rounds import GatherRequest, Standing
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.agreement import Agreement
from ps_server.core.data_commits import Committed
from ps_server.core.membership import Arrival, Counted, JoinRequest, JoinResult, Member, WorkerProcess
from ps_server.core.snapshot import Part, RestoreProgress, ShardSnapshot, StoredPart, VersionRange
from ps_server.core.statistics import JobStatistics, ShardJobStatistics, ShardStatistics, Wait
from ps_server.core.validation import check_host, check_launch
from ps_server.rpc import figure_messages

Sees = Callable[[str], bool]  # whether a caller may be told of a job
VALUES_BYTES = 8 * 2**20  # of values in one message: what several workers gave may be more than a message may have

# -- workers: membership, rounds, leases -----------------------------------------------------------------------------


def shard_map(shards: Mapping[int, RegisteredShard], placement: Sequence[int]) -> types_pb2.ShardMap:
    """Returns where the shards are, and which bucket is on which."""
    return types_pb2.ShardMap(
        shards=[types_pb2.ShardInfo(index=index, address=shard.address) for index, shard in sorted(shards.items())],
        bucket_shards=placement,
    )


def join_request(request: membership_pb2.JoinRequest) -> JoinRequest:
    """Returns what a process asks for that wants to join."""
    where, launch = (request.pid, request.host, request.metrics_address), request.launch
    return JoinRequest(
        *(*where, request.previous_incarnation or None, request.clock, request.request_id),
        launch=launch.name,
        take_over=launch.takeover,
        waited=max(0.0, seconds(request.wait_duration)),
        launch_ranks=range(launch.first_rank, launch.first_rank + launch.rank_count),
        run=request.run,
    )


def worker_process(request: membership_pb2.ReportWorkerEndRequest) -> WorkerProcess:
    """Returns the process that a launcher has seen end. Raises InvalidRequest unless it is named as a worker names
    itself."""
    check_host(request.host)
    check_launch(request.launch)
    if not request.launch or not request.pid:
        raise InvalidRequest(f"a process is named by its launch and pid, got {request.launch!r} and {request.pid}")
    return WorkerProcess(request.launch, request.host, request.pid, request.incarnation)


def told(request: membership_pb2.SaveWorkerStateRequest | membership_pb2.LeaveRequest) -> tuple[int, bytes] | None:
    """Returns what a worker tells of its script: its clock then, and the content."""
    return (request.script.clock, request.script.content) if request.HasField("script") else None


def join_response(job: str, result: JoinResult, lease: float, where: types_pb2.ShardMap) -> membership_pb2.JoinResponse:
    """Returns a worker's place in a job."""
    member, state = result.member, None
    if result.state is not None:
        clock, content = result.state
        state = membership_pb2.WorkerState(clock=clock, content=content)
    continued = None
    if result.continued is not None:
        continued = membership_pb2.ContinuedJob(
            begin_time=timestamp(result.continued.began), live_count=result.continued.live
        )
        if result.continued.trained is not None:
            continued.train_time.CopyFrom(timestamp(result.continued.trained))
    return membership_pb2.JoinResponse(
        worker=types_pb2.WorkerIdentity(
            job=job, rank=member.rank, incarnation=member.incarnation, lease_key=member.key, run=result.run
        ),
        clock=result.clock,
        lease_duration=duration(lease),
        shard_map=where,
        restore_count=result.restore_count,
        worker_state=state,
        pushed_clock=member.pushed,
        shard_pushes=_all_pushes(member.on_shards),
        continued=continued,
    )


def _all_pushes(on_shards: Mapping[int, Counted]) -> list[types_pb2.ShardPushes]:
    """Returns how far a rank had pushed on each shard; nothing, if one of them does not say."""
    if any(counted.further is None for counted in on_shards.values()):
        return []
    return [shard_pushes(shard, counted) for shard, counted in on_shards.items() if counted.pushed is not None]


def shard_pushes(shard: int, counted: Counted) -> types_pb2.ShardPushes:
    """Returns how far a rank had pushed on one shard."""
    of_clock: dict[int, list[int]] = {}
    for part, clock in (counted.further or {}).items():
        of_clock.setdefault(clock, []).append(part)
    further = [types_pb2.FurtherPush(clock=clock, parts=parts) for clock, parts in of_clock.items()]
    return types_pb2.ShardPushes(shard=shard, pushed_clock=counted.pushed or 0, further=further)


def arrival(request: shard_pb2.AddWorkerRequest) -> Arrival:
    """Returns a worker that a shard is to count."""
    worker, clock = request.worker, request.clock if request.HasField("clock") else None
    return Arrival(worker.rank, worker.incarnation, worker.lease_key, clock)


def add_worker_response(counted: Counted) -> shard_pb2.AddWorkerResponse:
    """Returns how far a shard is that counts a worker."""
    pushes = shard_pushes(0, counted)
    return shard_pb2.AddWorkerResponse(frontier=counted.frontier, pushed_clock=counted.pushed, pushes=pushes)


def added_worker(added: Counted | Fenced) -> shard_pb2.AddedWorker:
    """Returns whether a shard counts one of several workers."""
    if isinstance(added, Fenced):
        return shard_pb2.AddedWorker(fenced=str(added))
    return shard_pb2.AddedWorker(counted=add_worker_response(added))


def added(worker: shard_pb2.AddedWorker) -> Counted | Fenced:
    """Returns whether a shard counts one of several workers, as it answers."""
    return Fenced(worker.fenced) if worker.fenced else counted(worker.counted)


def counted(response: shard_pb2.AddWorkerResponse) -> Counted:
    """Returns how far a shard is, as it answers."""
    pushed = response.pushed_clock if response.HasField("pushed_clock") else None
    further = {part: each.clock for each in response.pushes.further for part in each.parts}
    return Counted(response.frontier, pushed, further if response.HasField("pushes") else None)


def gather_request(request: rounds_pb2.GatherValuesRequest) -> GatherRequest:
    """Returns what a worker gives to a round."""
    worker = request.worker
    return GatherRequest(worker.rank, worker.incarnation, request.round, request.clock, request.value, worker.lease_key)


def gather_responses(standing: Standing) -> Iterator[rounds_pb2.GatherValuesResponse]:
    """Yields how a round stands: its values in as many messages as they need, of which the last one says so."""
    response = rounds_pb2.GatherValuesResponse(
        round=standing.number, awaited_ranks=standing.waiting_for, step_wanted=standing.step_wanted
    )
    size = 0
    for rank, value in standing.complete.values if standing.complete is not None else ():
        if response.values and size + len(value) > VALUES_BYTES:
            yield response
            response, size = rounds_pb2.GatherValuesResponse(round=standing.number), 0
        response.values.add(rank=rank, value=value)
        size += len(value)
    if standing.complete is not None:
        response.complete, response.refusal = True, standing.complete.refused
    yield response


def lease_request(request: leases_pb2.LeaseDataRequest) -> LeaseRequest:
    """Returns what a worker asks of a loader's data."""
    loader = request.loader
    seed = loader.seed if loader.HasField("seed") else None
    return LeaseRequest(
        loader=LoaderSpec(loader.loader, loader.sample_count, loader.batch_size, loader.drop_last, seed),
        pass_number=request.pass_number,
        count=request.batch_count,
        report=LeaseReport(data_ranges(request.leased), data_ranges(request.committed), data_ranges(request.returned)),
    )


# -- shards ----------------------------------------------------------------------------------------------------------


def committed_response(committed: Committed, has_say: bool) -> shard_pb2.GetCommittedDataResponse:
    """Returns what is committed on a shard."""
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
    """Returns what a shard has committed; None if no bucket trains there."""
    if not response.trains_buckets:
        return None
    return {data.loader: (data.pass_number, [(r.start, r.stop) for r in data.ranges]) for data in response.loaders}


def await_snapshot_response(snapshot: ShardSnapshot) -> shard_pb2.AwaitSnapshotResponse:
    """Returns the message of a shard's snapshot on disk."""
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
    """Returns a shard's snapshot on disk."""
    held_up = seconds(response.stall_duration)
    return ShardSnapshot(part(response), versions(response.versions), held_up, response.changes_only)


def part(message: shard_pb2.AwaitSnapshotResponse | shard_pb2.ShardFile) -> Part:
    """Returns what a message says of a shard's file."""
    return Part(message.file, message.size_bytes, message.sha256.hex(), message.disk)


def own_files(request: shard_pb2.RestoreJobRequest) -> tuple[StoredPart, ...]:
    """Returns the files on a shard's own disk that a restore reads, oldest first; none where all share one place."""
    if not request.HasField("own_file"):
        return ()
    files = [*request.base_files, request.own_file]
    return tuple(StoredPart(file.checkpoint or request.checkpoint, part(file)) for file in files)


def file_message(stored: StoredPart) -> shard_pb2.ShardFile:
    """Returns the message of a file on a shard's own disk."""
    return shard_pb2.ShardFile(
        file=stored.part.file,
        size_bytes=stored.part.bytes,
        sha256=bytes.fromhex(stored.part.sha256),
        disk=stored.part.disk,
        checkpoint=stored.checkpoint,
    )


def versions_message(versions: VersionRange) -> shard_pb2.VersionRange:
    """Returns the message that says how far buckets are."""
    return shard_pb2.VersionRange(
        min_version=versions.version_min, max_version=versions.version_max, clocks=versions.clocks
    )


def versions(message: shard_pb2.VersionRange) -> VersionRange:
    """Returns how far buckets are."""
    return VersionRange(message.min_version, message.max_version, dict(message.clocks))


def restore_response(progress: RestoreProgress) -> shard_pb2.RestoreJobResponse:
    """Returns the message that says how far a restore is."""
    response = shard_pb2.RestoreJobResponse(done_bytes=progress.done, total_bytes=progress.total)
    if progress.extent is not None:
        response.versions.CopyFrom(versions_message(progress.extent))
    return response


def restore_progress(message: shard_pb2.RestoreJobResponse) -> RestoreProgress:
    """Returns how far a restore is."""
    extent = versions(message.versions) if message.HasField("versions") else None
    return RestoreProgress(message.done_bytes, message.total_bytes, extent)


def shard_status(
    shard: RegisteredShard, statistics: ShardStatistics | None, silent: float, sees: Sees
) -> cluster_pb2.ShardStatus:
    """Returns a shard's status for a caller, which may not see all jobs that the shard tells the coordinator of.

    statistics: its last ones; None: it has not answered
    silent:     for so many seconds it has answered nothing
    """
    jobs, figures = (statistics.jobs, statistics.figures) if statistics is not None else ({}, None)
    return cluster_pb2.ShardStatus(
        index=shard.index,
        address=shard.address,
        metrics_address=shard.metrics_address,
        pid=shard.pid,
        reachable=statistics is not None and not silent,
        restart_count=shard.restart_count,
        figures=figure_messages.shard_message(figures) if figures is not None else None,
        jobs=[shard_job_status(name, job) for name, job in sorted(jobs.items()) if sees(name)],
    )


def shard_job_status(name: str, job: ShardJobStatistics) -> shard_pb2.ShardJobStatus:
    """Returns how a job is on a shard."""
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
        figures=figure_messages.shard_job_message(job.figures) if job.figures is not None else None,
        departed_clocks=job.departed_clocks,
        sharing_ranks=job.sharing,
        connected_ranks=job.connected,
        tables=[figure_messages.table_message(table) for table in job.tables],
        agreement=None
        if job.agreement is None
        else shard_pb2.RoundAgreement(mean_square=job.agreement.mean_square, square_mean=job.agreement.square_mean),
    )


def shard_statistics(response: shard_pb2.GetShardStatusResponse) -> ShardStatistics:
    """Returns what a shard holds."""
    figures = figure_messages.shard_figures(response.figures) if response.HasField("figures") else None
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
        figures=figure_messages.shard_job_figures(status.figures) if status.HasField("figures") else None,
        departed_clocks=dict(status.departed_clocks),
        sharing=tuple(status.sharing_ranks),
        connected=tuple(status.connected_ranks),
        tables=tuple(figure_messages.table_figures(table) for table in status.tables),
        agreement=Agreement(status.agreement.mean_square, status.agreement.square_mean)
        if status.HasField("agreement")
        else None,
    )


# -- status ----------------------------------------------------------------------------------------------------------


def job_status(job: JobStatistics) -> cluster_pb2.JobStatus:
    """Returns how a job is."""
    status = cluster_pb2.JobStatus(
        name=job.name,
        run=job.run,
        consistency=consistency_message(job.consistency),
        local_steps=job.local_steps,
        local_fragments=job.local_fragments,
        round_duration=duration(job.local_seconds) if job.local_seconds else None,
        trained_bytes=job.trained_bytes,
        world_size=job.world_size,
        started=job.started,
        parameter_bytes=job.parameter_bytes,
        bucket_count=job.buckets,
        imbalance=job.imbalance,
        restore_count=job.restore_count,
        lost_step_count=job.lost_steps,
        redone_step_count=job.redone_steps,
        rejoining_ranks=job.rejoining,
        absent_ranks=job.absent,
        workers=[
            _worker_status(worker, job.now, job.figures.get((worker.rank, worker.incarnation)))
            for worker in job.workers
        ],
        loaders=[
            cluster_pb2.LoaderStatus(
                loader=loader,
                pass_number=progress.pass_number,
                sample_count=progress.samples,
                committed_count=progress.committed,
                leased_count=progress.leased,
                returned_count=progress.returned,
            )
            for loader, progress in job.loaders.items()
        ],
    )
    if job.checkpoints is not None and job.checkpoints.name is not None:
        status.last_checkpoint.name, status.last_checkpoint.clock = job.checkpoints.name, job.checkpoints.clock
        status.last_checkpoint.missing_ranks.extend(job.checkpoints.without)
    return status


def _worker_status(worker: Member, now: float, figures: WorkerFigures | None) -> cluster_pb2.WorkerStatus:
    status = cluster_pb2.WorkerStatus(
        rank=worker.rank,
        incarnation=worker.incarnation,
        clock=worker.clock,
        pid=worker.pid,
        host=worker.host,
        metrics_address=worker.metrics_address,
        launch=worker.launch,
        lease_duration=duration(max(0.0, worker.expires - now)),
        figures=worker_figures_message(figures) if figures is not None else None,
    )
    if worker.since:
        status.join_time.FromMilliseconds(int(worker.since * 1e3))
    return status
