"""The view of a cluster as messages, limited to the jobs that a caller may see."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from google.protobuf.duration_pb2 import Duration

from ps_protocol.convert import consistency_message, duration, timestamp, worker_figures_message
from ps_protocol.figures import PHASES, WorkerFigures
from ps_protocol.v1 import cluster_pb2, figures_pb2
from ps_server.coordinator.events import Event
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.membership import LiveWorker
from ps_server.core.statistics import JobStatistics, ShardStatistics
from ps_server.rpc import shard_messages
from ps_server.view.finished import EndedJobView
from ps_server.view.history import Samples
from ps_server.view.making import logged_means
from ps_server.view.view import JobView, ShardView, ShardWork, View, WorkerView

Sees = Callable[[str], bool]  # whether a caller may see a job


def view_response(
    coordinator: cluster_pb2.CoordinatorStatus, view: View, sees: Sees
) -> cluster_pb2.WatchStatusResponse:
    """Returns a view without events and history."""
    jobs = {name: job for name, job in view.jobs.items() if sees(name)}
    return cluster_pb2.WatchStatusResponse(
        status=cluster_pb2.GetStatusResponse(
            coordinator=coordinator,
            shards=[shard_status(shard.shard, shard.statistics, shard.silent, sees) for shard in view.shards],
            jobs=[job_status(job.statistics) for job in jobs.values()],
        ),
        view_time=timestamp(view.time),
        lease_duration=duration(view.lease),
        jobs=[_job(name, job) for name, job in jobs.items()],
        shards=[_shard(shard, sees) for shard in view.shards],
    )


def event_messages(events: Iterable[Event], sees: Sees) -> list[cluster_pb2.Event]:
    """Returns the events that the caller may see: those of the cluster, and those of its jobs."""
    return [
        cluster_pb2.Event(
            number=event.number,
            event_time=timestamp(event.time),
            kind=event.kind,
            job=event.job,
            text=event.text,
            count=event.count,
            first_number=event.first,
        )
        for event in events
        if not event.job or sees(event.job)
    ]


def finished_message(finished: EndedJobView, text: str, with_history: bool) -> cluster_pb2.FinishedJob:
    """Returns the message of a job that has ended. text: how it ended"""
    job, checkpoints = finished.job, finished.end.checkpoints
    figures = [*(finished.end.figures or job.statistics.figures).values()]
    last = {value.name: value.last for each in figures for value in each.values}
    message = cluster_pb2.FinishedJob(
        job=job.statistics.name,
        run=job.statistics.run,
        end_time=timestamp(finished.ended),
        text=text,
        age_duration=_known(job.age),
        min_clock=min(finished.steps, default=0),
        max_clock=max(finished.steps, default=0),
        values=[
            figures_pb2.LoggedValue(name=name, last=last[name], mean=mean)
            for name, mean in logged_means(figures).items()
        ],
        history=history_message(finished.samples) if with_history else None,
    )
    if checkpoints is not None and checkpoints.name is not None:
        message.last_checkpoint.name, message.last_checkpoint.clock = checkpoints.name, checkpoints.clock
        message.last_checkpoint.missing_ranks.extend(checkpoints.without)
    return message


def history_message(samples: Samples) -> cluster_pb2.History:
    """Returns samples as a message."""
    return cluster_pb2.History(
        first_sample=samples.first,
        times=samples.times,
        series=[
            cluster_pb2.Series(job=job, name=name, rank=rank, values=values)
            for job, series in samples.series.items()
            for (name, rank), values in series.items()
        ],
    )


def _known(seconds: float | None) -> Duration | None:
    return None if seconds is None else duration(seconds)


def _job(name: str, job: JobView) -> cluster_pb2.JobView:
    message = cluster_pb2.JobView(
        job=name,
        state=job.state,
        diagnosis=job.diagnosis,
        workers=[_worker(worker) for worker in job.workers],
        steps_per_second=job.steps_per_second,
        age_duration=_known(job.age),
        done_fraction=job.done,
        left_duration=_known(job.left),
    )
    checkpoints = job.statistics.checkpoints
    if checkpoints is not None and checkpoints.name is not None:
        message.checkpoint_age_duration.CopyFrom(duration(max(0.0, checkpoints.age_seconds)))
    return message


def _worker(worker: WorkerView) -> cluster_pb2.WorkerView:
    return cluster_pb2.WorkerView(
        rank=worker.rank,
        activity=worker.activity,
        awaited_ranks=worker.awaited,
        steps_per_second=worker.steps_per_second,
        phase_fractions=[worker.fractions[phase] for phase in PHASES] if worker.fractions else [],
        awaited_fraction=worker.awaited_fraction,
    )


def _shard(shard: ShardView, sees: Sees) -> cluster_pb2.ShardView:
    work: list[ShardWork] = [each for name, each in shard.work.items() if sees(name)]
    applies = sum(each.applies for each in work)
    message = cluster_pb2.ShardView(
        index=shard.shard.index,
        silent_duration=duration(shard.silent),
        applies_per_second=applies,
        received_bytes_per_second=sum(each.received for each in work),
        sent_bytes_per_second=sum(each.sent for each in work),
    )
    if applies > 0:
        spent = sum(each.applies * each.apply_seconds for each in work if each.apply_seconds is not None)
        message.apply_duration.CopyFrom(duration(spent / applies))
    return message


# -- status -----------------------------------------------------------------------------------------------------------


def shard_status(
    shard: RegisteredShard, statistics: ShardStatistics | None, silent: float, sees: Sees
) -> cluster_pb2.ShardStatus:
    """Returns a shard's status with the jobs that a caller may see.

    statistics: the shard's last answer; None if it has not answered yet
    silent:     seconds since its last answer, if it does not answer now
    """
    jobs, figures = (statistics.jobs, statistics.figures) if statistics is not None else ({}, None)
    return cluster_pb2.ShardStatus(
        index=shard.index,
        address=shard.address,
        metrics_address=shard.metrics_address,
        pid=shard.pid,
        reachable=statistics is not None and not silent,
        restart_count=shard.restart_count,
        figures=shard_messages.shard_message(figures) if figures is not None else None,
        jobs=[shard_messages.shard_job_status(name, job) for name, job in sorted(jobs.items()) if sees(name)],
    )


def job_status(job: JobStatistics) -> cluster_pb2.JobStatus:
    """Returns the status of a job."""
    status = cluster_pb2.JobStatus(
        name=job.name,
        run=job.run,
        mode=job.mode,
        consistency=consistency_message(job.consistency),
        local_steps=job.local_steps,
        local_fragments=job.local_fragments,
        round_duration=duration(job.local_seconds) if job.local_seconds else None,
        trained_bytes=job.trained_bytes,
        group_size=job.group_size,
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


def _worker_status(worker: LiveWorker, now: float, figures: WorkerFigures | None) -> cluster_pb2.WorkerStatus:
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
