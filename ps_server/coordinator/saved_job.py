"""A job as a coordinator saves it, and as the next one resumes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol.job import JobSpec
from ps_server.coordinator.cluster import Cluster, Registry
from ps_server.coordinator.job import CoordinatedJob
from ps_server.core.accounting import StepAccounting
from ps_server.core.data_commits import Span
from ps_server.core.membership import Member, Membership
from ps_server.core.placement import place_job
from ps_server.core.rounds import Round, newest

ROUND_BYTES_ON_DISK = 2**20  # what is kept of past rounds there: it is written anew with each


@dataclass(frozen=True)
class SavedJob:
    """A job that runs. The names of the fields are those in the file.

    spec:             as plain data
    run:              tells this job from earlier ones of its name
    shard_processes:  by shard, the process that holds the job's part
    workers:          the live ones; by its attempt, one whose answer was lost gets the same when it asks again
    lost_steps, redone_steps, unaccounted, began, departed, settled: what rollbacks have cost; see core.accounting
    rejoining:        ranks that are expected to join again, after a rollback
    away:             what is known of the workers that had them
    pending_removals: (shard, rank, incarnation) that shards may still count; also of a worker that was joining
    continues:        the run and the checkpoint that this run began with
    launches:         that have taken part
    absent:           the workers for which the job waits before it ends, as all others have left
    left:             how the last of those left, and when: see Attendance
    done:             ranks whose workers have left because their scripts had come to their ends
    rounds_completed, rounds: how many rounds the workers have exchanged values in, and the last of them
    """

    spec: dict[str, Any]
    run: str
    placement: tuple[int, ...]
    shard_processes: Mapping[int, int]
    last_incarnation: int
    restore_count: int
    started: bool
    workers: tuple[Member, ...]
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    began: Mapping[int, int] = field(default_factory=dict)
    departed: Mapping[int, int] = field(default_factory=dict)
    settled: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    rejoining: tuple[int, ...] = ()
    away: tuple[Member, ...] = ()
    pending_removals: tuple[tuple[int, int, int], ...] = ()
    continues: tuple[str, str] | None = None
    rounds_completed: int = 0
    rounds: tuple[Round, ...] = ()
    launches: tuple[str, ...] = ()
    absent: tuple[Member, ...] = ()
    left: tuple[bool, float] | None = None
    done: tuple[int, ...] = ()


def saved(job: CoordinatedJob) -> SavedJob:
    """Returns what another coordinator needs to resume a job. Waits for no join."""
    completed, rounds = job.rounds.done()
    accounting, live = job.accounting, job.members.all()
    attendance, ranks = job.members.attendance, {member.rank for member in live}
    return SavedJob(
        spec=job.spec_data,
        run=job.placed.run,
        placement=job.placed.placement,
        shard_processes=dict(job.shard_processes),
        last_incarnation=job.members.last_incarnation(),
        restore_count=job.members.restore_count,
        started=job.members.roster()[2],
        workers=tuple(live),
        lost_steps=accounting.lost_steps,
        redone_steps=accounting.redone_steps,
        unaccounted=dict(accounting.unaccounted),
        began=dict(accounting.began),
        departed=dict(accounting.departed),
        settled=dict(accounting.settled),
        rejoining=job.members.rejoining(),
        away=tuple(member for member in job.members.all(and_away=True) if member.rank not in ranks),
        pending_removals=tuple(sorted(job.members.pending_removals())),
        continues=job.placed.continues,
        rounds_completed=completed,
        rounds=newest(rounds, ROUND_BYTES_ON_DISK),
        launches=attendance.launches,
        absent=job.absent_awaited(),
        left=(attendance.is_done, attendance.left_at) if attendance.waits else None,
        done=job.members.done(),
    )


def resumed(saved: SavedJob, spec: JobSpec, cluster: Cluster, registry: Registry) -> CoordinatedJob:
    """Returns a job as an earlier coordinator left it. Its workers may be training, and have two leases to say so."""
    until, count = cluster.clock.now() + 2 * cluster.lease, cluster.shards.count
    # No number twice: this may be an earlier copy of the file, and workers that joined after it was made may live.
    last_incarnation = max(saved.last_incarnation, int(cluster.clock.since_1970() * 1e3))
    absence = cluster.timing.absence
    membership = Membership(spec.world_size, cluster.lease, last_incarnation=last_incarnation, absence=absence)
    for worker in saved.workers:
        membership.join(replace(worker, expires=until))
    membership.started = saved.started
    # Also one whose workers were all gone: what they trained belongs into a last checkpoint before it ends.
    membership.ever_joined = membership.ever_joined or saved.last_incarnation > 0
    membership.rejoining = dict.fromkeys(saved.rejoining, until)
    membership.away = {worker.rank: replace(worker, expires=cluster.clock.now()) for worker in saved.away}
    back_by = cluster.clock.now() + absence
    membership.absent = {worker.rank: replace(worker, expires=back_by) for worker in saved.absent}
    membership.resume(set(saved.done), cluster.clock.now())
    placed = replace(place_job(spec, count, saved.run), continues=saved.continues)
    processes: dict[int, int] = {}
    # Otherwise the cluster has another number of shards now, and every part of the job is lost.
    if len(saved.shard_processes) == count and all(shard < count for shard in saved.placement):
        placed, processes = replace(placed, placement=saved.placement), dict(saved.shard_processes)
    accounting = StepAccounting(
        goes_back_together=spec.consistency.goes_back_together,
        lost_steps=saved.lost_steps,
        redone_steps=saved.redone_steps,
        unaccounted=dict(saved.unaccounted),
        began=dict(saved.began),
        departed=dict(saved.departed),
        settled=dict(saved.settled),
    )
    job = CoordinatedJob(
        placed,
        processes,
        cluster,
        registry,
        membership,
        pending_removals=frozenset(saved.pending_removals),
        restore_count=saved.restore_count,
        accounting=accounting,
    )
    job.members.attendance.launches = saved.launches
    if saved.left is not None:
        job.members.attendance.left(*saved.left)
        job.members.attendance.wait()
    job.rounds.resume(saved.rounds_completed, saved.rounds)
    if job.checkpoints is not None:
        job.checkpoints.resume()
    return job
