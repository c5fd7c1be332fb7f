"""A job as a coordinator saves it, and as the next one resumes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol.convert import job_spec_data
from ps_protocol.job import JobSpec
from ps_server.coordinator.cluster import Cluster, Registry
from ps_server.coordinator.job import CoordinatedJob
from ps_server.core.accounting import StepAccounting
from ps_server.core.membership import Member, Membership
from ps_server.core.placement import place_job
from ps_server.core.rounds import Round, newest

ROUND_BYTES_ON_DISK = 2**20  # what is kept of past rounds there: it is written anew with each


@dataclass(frozen=True)
class SavedWorker:
    """A live worker; see core.membership.Member. The key as hexadecimal digits.

    With the attempt: a worker whose answer was lost asks again, and is to get the same one. Files of earlier versions
    have no launch.
    """

    rank: int
    incarnation: int
    clock: int
    pid: int
    host: str
    metrics_address: str
    key: str
    attempt: int = 0
    launch: str = ""
    since: float = 0.0
    replaced: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class SavedRound:
    """What the workers exchanged in a round; see core.rounds.Round. Values as hexadecimal digits."""

    number: int
    clock: int
    values: tuple[tuple[int, str], ...]
    refused: str = ""


@dataclass(frozen=True)
class SavedJob:
    """A job that runs. The names of the fields are those in the file.

    spec:    as plain data
    run:     tells this job from earlier ones of its name
    held_by: by shard, the process that holds the job's part
    lost_steps, redone_steps, unaccounted, began, skipped: what rollbacks have cost; see core.accounting
    awaited: ranks that are expected to join again, after a rollback
    ghosts:  pending removals: (shard, rank, incarnation) that shards may still count; also of a worker that was joining
    rounds_completed, rounds: how many rounds the workers have exchanged values in, and the last of them
    """

    spec: dict[str, Any]
    run: str
    placement: tuple[int, ...]
    held_by: Mapping[int, int]
    last_incarnation: int
    restore_count: int
    started: bool
    workers: tuple[SavedWorker, ...]
    lost_steps: int = 0
    redone_steps: int = 0
    unaccounted: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    began: Mapping[int, int] = field(default_factory=dict)
    skipped: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    awaited: tuple[int, ...] = ()
    ghosts: tuple[tuple[int, int, int], ...] = ()
    rounds_completed: int = 0
    rounds: tuple[SavedRound, ...] = ()


def saved(job: CoordinatedJob) -> SavedJob:
    """Returns what another coordinator needs to resume a job. Waits for no join."""
    completed, rounds = job.rounds.done()
    accounting = job.accounting
    return SavedJob(
        spec=job_spec_data(job.spec),
        run=job.placed.run,
        placement=job.placed.placement,
        held_by=dict(job.held_by),
        last_incarnation=job.members.last_incarnation(),
        restore_count=job.members.restore_count,
        started=job.members.roster()[2],
        workers=tuple(_saved_worker(member) for member in job.members.all()),
        lost_steps=accounting.lost_steps,
        redone_steps=accounting.redone_steps,
        unaccounted=dict(accounting.unaccounted),
        began=dict(accounting.began),
        skipped=dict(accounting.skipped),
        awaited=job.members.rejoining(),
        ghosts=tuple(sorted(job.members.pending_removals())),
        rounds_completed=completed,
        rounds=tuple(
            SavedRound(each.number, each.clock, tuple((r, v.hex()) for r, v in each.values), each.refused)
            for each in newest(rounds, ROUND_BYTES_ON_DISK)
        ),
    )


def resumed(saved: SavedJob, spec: JobSpec, cluster: Cluster, registry: Registry) -> CoordinatedJob:
    """Returns a job as an earlier coordinator left it. Its workers may be training, and have two leases to say so."""
    until, count = cluster.clock.now() + 2 * cluster.lease, cluster.shards.count
    membership = Membership(spec.world_size, cluster.lease, last_incarnation=saved.last_incarnation)
    for worker in saved.workers:
        membership.join(_live_worker(worker, until))
    membership.started = saved.started
    membership.rejoining = dict.fromkeys(saved.awaited, until)
    placed, held_by = place_job(spec, count, saved.run), dict[int, int]()
    # Otherwise the cluster has another number of shards now, and every part of the job is lost.
    if len(saved.held_by) == count and all(shard < count for shard in saved.placement):
        placed, held_by = replace(placed, placement=saved.placement), dict(saved.held_by)
    accounting = StepAccounting(
        aggregate=spec.consistency.aggregate,
        lost_steps=saved.lost_steps,
        redone_steps=saved.redone_steps,
        unaccounted=dict(saved.unaccounted),
        began=dict(saved.began),
        skipped=dict(saved.skipped),
    )
    removals, count = frozenset(saved.ghosts), saved.restore_count
    job = CoordinatedJob(placed, held_by, cluster, registry, membership, removals, count, accounting)
    rounds = [
        Round(each.number, each.clock, tuple((r, bytes.fromhex(v)) for r, v in each.values), each.refused)
        for each in saved.rounds
    ]
    job.rounds.resume(saved.rounds_completed, rounds)
    return job


def _saved_worker(member: Member) -> SavedWorker:
    return SavedWorker(
        rank=member.rank,
        incarnation=member.incarnation,
        clock=member.clock,
        pid=member.pid,
        host=member.host,
        metrics_address=member.metrics_address,
        key=member.key.hex(),
        attempt=member.attempt,
        launch=member.launch,
        since=member.since,
        replaced=member.replaced,
    )


def _live_worker(saved: SavedWorker, expires: float) -> Member:
    return Member(
        rank=saved.rank,
        incarnation=saved.incarnation,
        expires=expires,
        clock=saved.clock,
        pid=saved.pid,
        host=saved.host,
        metrics_address=saved.metrics_address,
        key=bytes.fromhex(saved.key),
        attempt=saved.attempt,
        launch=saved.launch,
        since=saved.since,
        replaced=saved.replaced,
    )
