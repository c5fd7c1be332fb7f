"""A job and its shards, as the coordinator holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ps_protocol.convert import job_spec_data
from ps_protocol.job import JobSpec
from ps_protocol.layout import bucket_layout
from ps_server.coordinator.checkpoints import JobCheckpoints
from ps_server.coordinator.data import JobData
from ps_server.coordinator.rounds import JobRounds
from ps_server.coordinator.shards import RegisteredShard
from ps_server.coordinator.state_file import DurableRound, DurableWorker, SavedJob
from ps_server.core.membership import Member, Membership
from ps_server.core.placement import imbalance, place
from ps_server.core.rounds import Round, newest

Roster = tuple[list[int], int, bool]
ROUND_BYTES_ON_DISK = 2**20  # what is kept of past rounds there: it is written anew with each
SKIPS_KEPT = 32  # one that is forgotten counts as lost, where it is not: too many, rather than too few
Watcher = Callable[[Roster | None], None]


@dataclass
class CoordinatedJob:
    """A job, as the coordinator holds it.

    lock:  serialises joins and departures, which take round trips to the shards
    guard: guards `membership` for the moment of a look or a change, so that heartbeats never wait for a join
    run:   tells this job from earlier ones of its name
    held_by: by shard, the process that holds the job's part; where another process has the shard now, the part is lost
    restore_count: how many times the whole job was set back to a checkpoint
    unaccounted:   after a shard was set back: by rank, the clock that it still has of the worker, and the one that was
                   heard last. What the worker had done since is lost there; how much, it says when it comes back.
    began:         by rank, the clock at which a worker of that rank joined first
    skipped:       by rank, spans of clocks that it never made, because it came back at a later one; the last few
    joining: rank and incarnation of who takes a place at this moment
    lost_steps, redone_steps: by workers, of which a shard lost the updates (ssp, async); that are made again (sync)
    """

    spec: JobSpec
    placement: list[int]
    bytes: int
    imbalance: float
    membership: Membership
    run: str
    held_by: dict[int, int]
    restore_count: int = 0
    unaccounted: dict[int, tuple[int, int]] = field(default_factory=dict)
    began: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lost_steps: int = 0
    redone_steps: int = 0
    joining: tuple[int, int] | None = None
    checkpoints: JobCheckpoints | None = None
    data: JobData = field(default_factory=JobData)
    lock: threading.RLock = field(default_factory=threading.RLock)
    guard: threading.Lock = field(default_factory=threading.Lock)
    ghosts: set[tuple[int, int, int]] = field(default_factory=set)  # (shard, rank, incarnation) still to be retired
    watchers: list[Watcher] = field(default_factory=list)
    ended: bool = False
    rounds: JobRounds = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = JobRounds(self.spec.world_size, self.live)

    def live(self) -> tuple[dict[int, int], bool]:
        """The incarnation of each live worker, by rank, and whether training has started."""
        with self.guard:
            found = {rank: member.incarnation for rank, member in self.membership.members.items()}
            return found, self.membership.started

    def roster(self) -> Roster:
        """Live ranks, declared world size, whether training has started."""
        with self.guard:
            return sorted(self.membership.members), self.spec.world_size, self.membership.started

    def members(self) -> list[Member]:
        """The live workers, by rank."""
        with self.guard:
            return sorted(self.membership.members.values(), key=lambda member: member.rank)

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Calls back with the roster now and after every change. Returns how to stop it. The caller holds the lock."""
        self.watchers.append(watcher)
        watcher(self.roster())

        def stop() -> None:
            with self.lock:
                if watcher in self.watchers:
                    self.watchers.remove(watcher)

        return stop

    def announce(self) -> None:
        """Tells the watchers who takes part now, and those in a round. The caller holds the lock."""
        for watcher in self.watchers:
            watcher(self.roster())
        self.rounds.changed()

    def lost(self, shards: Mapping[int, RegisteredShard]) -> list[int]:
        """The shards that are served by another process than the one that held their part of the job."""
        return [index for index, shard in shards.items() if self.held_by.get(index) != shard.process]

    def buckets_of(self, shard: int) -> list[int]:
        """The buckets that a shard holds."""
        return [bucket for bucket, index in enumerate(self.placement) if index == shard]

    def counts(self) -> tuple[int, int]:
        """The last incarnation that was given out, and how many times the job was set back."""
        with self.guard:
            return self.membership.last_incarnation, self.restore_count

    def account(self, rank: int, clock: int | None = None) -> None:
        """Books what a worker had done, and a shard that was set back has not: lost, or to be made again.

        clock: how far it was, as it says itself, come back; None: nobody knows more than was heard of it
        """
        if rank not in self.unaccounted:
            return
        restored, heard = self.unaccounted.pop(rank)
        clock = heard if clock is None else clock
        lost = max(0, clock - restored)
        lost -= sum(max(0, min(end, clock) - max(start, restored)) for start, end in self.skipped.get(rank, []))
        if self.spec.consistency.aggregate:
            self.redone_steps += lost
        else:
            self.lost_steps += lost

    def joined(self, rank: int, clock: int, before: int | None) -> None:
        """Books that a worker joined at a clock. before: how far it was, if it comes back; None: a new process."""
        self.account(rank, before)
        self.began.setdefault(rank, clock)
        if before is not None and before < clock:
            self.skipped[rank] = [*self.skipped.get(rank, []), (before, clock)][-SKIPS_KEPT:]

    def give_up(self, rank: int) -> None:
        """Books what was heard of a worker that did not come back; what it did beyond that, if it comes after all."""
        if rank in self.unaccounted:
            restored, heard = self.unaccounted[rank]
            self.account(rank)
            self.unaccounted[rank] = max(restored, heard), heard

    def durable(self) -> SavedJob:
        """What is kept of it on disk."""
        workers = tuple(
            DurableWorker(
                *(m.rank, m.incarnation, m.clock, m.pid, m.host, m.metrics_address, m.key.hex(), m.attempt),
                *(m.launch, m.since, m.replaced),
            )
            for m in self.members()
        )
        last_incarnation, restore_count = self.counts()
        completed, kept = self.rounds.done
        joining = {(shard, *self.joining) for shard in self.held_by} if self.joining is not None else set()
        return SavedJob(
            spec=job_spec_data(self.spec),
            run=self.run,
            placement=tuple(self.placement),
            held_by=dict(self.held_by),
            last_incarnation=last_incarnation,
            restore_count=restore_count,
            started=self.membership.started,
            workers=workers,
            lost_steps=self.lost_steps,
            redone_steps=self.redone_steps,
            unaccounted=dict(self.unaccounted),
            began=dict(self.began),
            skipped={rank: tuple(spans) for rank, spans in self.skipped.items()},
            awaited=tuple(sorted(self.membership.awaited)),
            ghosts=tuple(sorted(self.ghosts | joining)),
            rounds_completed=completed,
            rounds=tuple(
                DurableRound(one.number, one.clock, tuple((r, v.hex()) for r, v in one.values), one.refused)
                for one in newest(kept, ROUND_BYTES_ON_DISK)
            ),
        )


def make_job(
    spec: JobSpec, shards: Mapping[int, RegisteredShard], shard_count: int, lease: float, run: str
) -> CoordinatedJob:
    """A job with its buckets placed, of which no shard holds anything yet."""
    layout = bucket_layout(spec.parameters, spec.bucket_bytes)
    sizes = [bucket.nbytes for bucket in layout.buckets]
    placement = place(sizes, shard_count)
    held_by = {index: shard.process for index, shard in shards.items()}
    uneven = imbalance(sizes, placement, shard_count)
    return CoordinatedJob(spec, placement, layout.nbytes, uneven, Membership(spec.world_size, lease), run, held_by)


def job_that_ran(kept: SavedJob, spec: JobSpec, shard_count: int, lease: float, now: float) -> CoordinatedJob:
    """A job as its coordinator left it: its workers may be training, and have two leases to say so."""
    job = make_job(spec, {}, shard_count, lease, kept.run)
    membership = job.membership
    membership.last_incarnation, job.restore_count = kept.last_incarnation, kept.restore_count
    job.lost_steps, job.redone_steps, job.unaccounted = kept.lost_steps, kept.redone_steps, dict(kept.unaccounted)
    job.began, job.skipped = dict(kept.began), {rank: list(spans) for rank, spans in kept.skipped.items()}
    for worker in kept.workers:
        key = bytes.fromhex(worker.key)
        place_of = worker.pid, worker.host, worker.metrics_address
        known = worker.rank, worker.incarnation, now + 2 * lease, worker.clock, *place_of, key, worker.attempt
        membership.join(Member(*known, worker.launch, worker.since, replaced=worker.replaced))
    membership.started = kept.started
    membership.awaited = dict.fromkeys(kept.awaited, now + 2 * lease)
    job.ghosts = set(kept.ghosts)
    past = [
        Round(one.number, one.clock, tuple((r, bytes.fromhex(v)) for r, v in one.values), one.refused)
        for one in kept.rounds
    ]
    job.rounds.take_up(kept.rounds_completed, past)
    if len(kept.held_by) == shard_count and all(shard < shard_count for shard in kept.placement):
        job.placement, job.held_by = list(kept.placement), dict(kept.held_by)
    return job
