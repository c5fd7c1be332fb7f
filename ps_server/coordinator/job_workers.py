"""The live workers of one job, and which of them each shard counts.

A join takes two rounds over the shards, so that each shard counts the worker from the same clock on:

1. Every shard counts the worker from its own frontier on, and returns this frontier. From then on, no update that needs
   the worker is complete there without it.
2. The highest frontier becomes the clock at which the worker starts, on all shards.

A worker that has left stays a pending removal until every shard has stopped counting it (removals.py).

No lock is held during a call to a shard. A join is first a reservation. It becomes a live worker when all shards count
it, unless the reservation has become void meanwhile: by a later join of the same rank, or by a rollback.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Fenced, LimitExceeded, NotFound, PSError, TryLater, without_traceback
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.refusals import refusal, still_joining, try_soon
from ps_server.coordinator.removals import Removal, Removals
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.membership import Arrival, LiveWorker, Membership, NamedProcess, ShardProgress, check_key
from ps_server.failpoints import failpoint

log = logging.getLogger("ps_server")

LEASE_KEY_BYTES = 16

Roster = tuple[list[int], int, bool]


class _OnDisk:
    """The live workers that are in the state file. The caller holds the lock of the workers.

    unsaved: incarnations of live workers that are not in the file yet
    """

    def __init__(self, started: bool) -> None:
        self.unsaved: set[int] = set()
        self._started = started

    def roster(self, membership: Membership) -> Roster:
        """Returns the roster without unsaved workers. Its last value is False if training would not have started
        without an unsaved worker.
        """
        ranks = [rank for rank, each in membership.workers.items() if each.incarnation not in self.unsaved]
        self._started = membership.started and (self._started or not self.unsaved)
        return sorted(ranks), membership.world_size, self._started


@dataclass(frozen=True)
class Joined:
    """The result of counting a worker on all shards. clock: shards count it from this clock; others: see LiveWorker"""

    clock: int
    pushed: int | None
    on_shards: Mapping[int, ShardProgress]


class JobWorkers:
    """The workers of one job. Methods may be called from any thread.

    removals:      workers that are gone, and that shards may still count
    restore_count: how many times the whole job was rolled back to a checkpoint
    attendance:    which launches have taken part, and how the last worker left
    """

    def __init__(
        self,
        name: str,
        run: str,
        membership: Membership,
        cluster: Cluster,
        pending_removals: Iterable[Removal] = (),
        restore_count: int = 0,
    ) -> None:
        self.restore_count = restore_count
        self._name, self._run, self._membership = name, run, membership
        self._shards, self._limits, self._clock = cluster.shards, cluster.limits, cluster.clock
        self._lock = threading.Lock()  # held for the moment of a look or a change
        self.removals = Removals(name, run, cluster.shards, pending_removals)
        self._joining = Reservations(name)
        self._fenced: dict[int, LiveWorker] = {}  # by rank, workers that were fenced by a join that failed half way
        self.attendance = Attendance()
        self._on_disk = _OnDisk(membership.started)
        self._closed = False

    # -- looks -------------------------------------------------------------------------------------------------------

    def live(self) -> tuple[dict[int, int], bool]:
        """Returns the incarnation of each live worker, by rank, and whether training has started."""
        with self._lock:
            incarnations = {rank: worker.incarnation for rank, worker in self._membership.workers.items()}
            return incarnations, self._membership.started

    def roster(self) -> Roster:
        """Returns the live ranks, the declared world size, and whether training has started."""
        with self._lock:
            return sorted(self._membership.workers), self._membership.world_size, self._membership.started

    def announced(self) -> Roster:
        """Returns the roster for other workers: without those whose join is not in the state file yet.

        If this coordinator restarts, it does not know such a worker. Others must not begin to train because of it.
        """
        with self._lock:
            return self._on_disk.roster(self._membership)

    def all(self, and_fenced: bool = False, and_away: bool = False) -> list[LiveWorker]:
        """Returns the live workers, by rank.

        and_fenced: include workers that were live until a join of their rank failed half way, which has fenced them
        and_away:   include workers that were live until a rollback, and are expected to join again
        """
        with self._lock:
            rejoining, away = self._membership.rejoining, self._membership.away
            gone = {rank: worker for rank, worker in away.items() if rank in rejoining} if and_away else {}
            workers = {**gone, **(self._fenced if and_fenced else {}), **self._membership.workers}
            return [workers[rank] for rank in sorted(workers)]

    def rejoining(self) -> tuple[int, ...]:
        """Returns the ranks that are expected to join again, after a rollback or because no worker was left."""
        with self._lock:
            return tuple(sorted(self._membership.rejoining))

    def absent(self) -> tuple[LiveWorker, ...]:
        """Returns the workers that were removed as silent and may come back, by rank. `expires` is the end of this
        time.
        """
        with self._lock:
            return tuple(worker for _, worker in sorted(self._membership.absent.items()))

    def done(self) -> tuple[int, ...]:
        """Returns the ranks whose workers have left because their scripts ended."""
        with self._lock:
            return tuple(sorted(self._membership.done))

    def stand_still(self) -> bool:
        """Whether no worker can be in a step: there is none, or training has not begun."""
        with self._lock:
            membership = self._membership
            return not (membership.workers or membership.rejoining or self._joining) or not (
                membership.started or membership.in_doubt
            )

    def newly_awaited(self) -> tuple[int, ...]:
        """Returns, once, the ranks that the job begins to wait for because no worker is left; later calls
        return none.
        """
        with self._lock:
            return self._membership.newly_awaited()

    def last_incarnation(self) -> int:
        """Returns the last incarnation that was given out."""
        with self._lock:
            return self._membership.last_incarnation

    def empty(self, without_awaited: bool = False) -> bool:
        """Whether no worker is live, none is joining, and none is expected to join again.

        without_awaited: ignore workers that are expected to join again
        """
        with self._lock:
            awaited = self._membership.rejoining and not without_awaited
            return not (self._membership.workers or awaited or self._joining)

    def pending_removals(self) -> set[Removal]:
        """Returns all workers that a shard may count although they are not live: workers that have left, and joining
        ones.
        """
        with self._lock:
            joining = [(reservation.rank, reservation.incarnation) for reservation in self._joining]
        return self.removals.pending() | self.removals.everywhere(joining)

    def ever_joined(self) -> bool:
        """Whether any worker has been live since this coordinator coordinates the job."""
        with self._lock:
            return self._membership.ever_joined

    def check(self, rank: int, incarnation: int, key: bytes) -> int:
        """Returns the number of live workers. Raises UnknownWorker, Fenced or Forbidden unless the caller is one of
        them.
        """
        with self._lock:
            self._membership.check(rank, incarnation, key)
            return len(self._membership.workers)

    # -- a worker comes ----------------------------------------------------------------------------------------------

    def repeated(self, request: JoinRequest) -> LiveWorker | None:
        """Returns the worker that an earlier call of this request has made live; None if there is none.

        A worker repeats its request when the answer to the first call was lost.

        Also returns None if the worker may be in a step, and this coordinator has restarted: it does not know which
        shards have had that step. The worker then joins once more, and the shards report it. That is safe: the worker
        never learned of the first membership, so it has pushed nothing under it.

        Raises TryLater while the first call is being carried out.
        """
        with self._lock:
            for reservation in self._joining:
                if request.attempt and reservation.attempt == request.attempt:
                    raise still_joining(self._name, reservation.rank, self._clock.now() - reservation.since)
            worker = self._membership.repeated(request.attempt, self._clock.now())
        is_known = worker is not None and (request.previous is None or bool(worker.on_shards))
        return worker if is_known else None

    def reserve(self, rank: int | None, request: JoinRequest) -> Reservation:
        """Reserves a rank and an incarnation for a worker. The caller must write the state file before any shard counts
        the worker.

        rank: the rank that the worker asks for; None: any
        Raises Fenced, JobInUse, TryLater or LimitExceeded if the worker cannot join.
        """
        with self._lock:
            if self._closed:
                raise TryLater("the cluster is stopping")
            membership, now = self._membership, self._clock.now()
            rank = membership.claim(rank, request, self._joining.ranks(), now)
            rivals = membership.rivals(rank, request, now)
            if rivals is not None:
                raise refusal(self._name, rivals, request, membership.lease)
            if self._joining.are_strange(rank, request):
                raise try_soon(f"another launch joins job {self._name!r} at this moment")
            # Shards remember the clock of every rank that ever joined, to recognise repeats. So ranks must be bounded.
            if rank >= self._limits.workers:
                raise LimitExceeded(f"a rank must be below max-workers, {self._limits.workers}, got {rank}")
            key, older = secrets.token_bytes(LEASE_KEY_BYTES), membership.workers.get(rank)
            if older is not None and _may_be_late(request):
                raise try_soon(f"worker {rank} of job {self._name!r} is live: a successor has to ask again")
            number, is_new = membership.next_incarnation(), request.previous is None
            reservation = Reservation(rank, number, request.attempt, request.launch, key, older, is_new, now)
            before = self._joining.add(reservation)
            if before is not None:  # shards may count the worker of the void reservation
                self.removals.add((before.rank, before.incarnation))
            return reservation

    def close(self) -> None:
        """Refuses new joins, because the servers end. Joins that are under way may still complete."""
        with self._lock:
            self._closed = True

    def release(self, reservation: Reservation) -> None:
        """Cancels a reservation of which no shard has heard."""
        with self._lock:
            self._joining.drop(reservation)

    def count(self, reservations: Sequence[Reservation]) -> list[Joined | PSError]:
        """Adds workers on every shard. Returns for each worker a Joined, or its error: TryLater or Fenced, as `admit`.

        A worker gets an error if a shard knows a later incarnation of its rank. Raises PSError if a shard does not
        answer: that shard may count any of the workers.
        """
        shards = self._shards.all()
        # Updates on a shard that counts a worker wait for this worker. So all shards must answer before one counts it.
        self._shards.call(shards, lambda shard: shard.api.process())
        try:
            first = self._count_from(shards, dict.fromkeys(reservations))
            clocks = {
                reservation: max(counted.frontier for counted in each)
                for reservation, each in first.items()
                if not isinstance(each, Fenced)
            }
            last = {**first, **self._count_from(shards, clocks)}
        except NotFound as error:  # a shard was restarted and has not registered yet, or see held_jobs.py
            raise TryLater(f"job {self._name!r}: {error}") from None
        joined: list[Joined | PSError] = []
        for reservation in reservations:
            each, refused = first[reservation], last[reservation]
            if isinstance(each, Fenced) or isinstance(refused, Fenced):
                joined.append(self._retired(reservation, each if isinstance(each, Fenced) else refused))
                continue
            pushed = [counted.pushed for counted in each if counted.pushed is not None]
            on_shards = {shard.index: counted for shard, counted in zip(shards, each, strict=True)}
            joined.append(Joined(clocks[reservation], min(pushed, default=None), on_shards))
        return joined

    def _count_from(
        self, shards: Sequence[RegisteredShard], clocks: Mapping[Reservation, int | None]
    ) -> dict[Reservation, tuple[ShardProgress, ...] | Fenced]:
        """Makes every shard count workers from these clocks on. Returns, for each worker, each shard's state, or the
        error of a shard that has fenced it.
        """
        arrivals = [Arrival(each.rank, each.incarnation, each.key, clock) for each, clock in clocks.items()]

        def count(shard: RegisteredShard) -> list[ShardProgress | Fenced]:
            counted = shard.api.add_workers(self._name, arrivals, self._run)
            failpoint("worker-half-added")
            return counted

        of_shards = self._shards.call(shards, count) if arrivals else []
        found: dict[Reservation, tuple[ShardProgress, ...] | Fenced] = {}
        for reservation, answers in zip(clocks, zip(*of_shards, strict=True), strict=True):
            fenced = next((answer for answer in answers if isinstance(answer, Fenced)), None)
            found[reservation] = fenced or tuple(answer for answer in answers if isinstance(answer, ShardProgress))
        return found

    def _retired(self, reservation: Reservation, fenced: object) -> PSError:
        """Returns the error for a join if a shard knows a later incarnation of the rank."""
        with self._lock:
            try:
                self._joining.check(reservation)
            except PSError as overtaken:
                return without_traceback(overtaken)
        # A rollback has fenced later incarnations on the shard than this coordinator knows. The next attempt of the
        # worker gets a higher one.
        return TryLater(f"job {self._name!r}: {fenced}")

    def admit(self, reservation: Reservation, request: JoinRequest, joined: Joined) -> LiveWorker:
        """Makes a worker live, which all shards count. Raises Fenced if another process took the rank meanwhile,
        TryLater if the job was rolled back.
        """
        rank = reservation.rank
        with self._lock:
            self._joining.check(reservation)
            self._joining.drop(reservation)
            self._fenced.pop(rank, None)
            self._on_disk.unsaved.add(reservation.incarnation)
            self.attendance.joined(request.launch)
            self._membership.join(
                LiveWorker(
                    rank=rank,
                    incarnation=reservation.incarnation,
                    expires=self._clock.now() + self._membership.lease,
                    clock=joined.clock,
                    pushed=joined.pushed,
                    on_shards=joined.on_shards,
                    pid=request.pid,
                    host=request.host,
                    metrics_address=request.metrics_address,
                    key=reservation.key,
                    attempt=request.attempt,
                    launch=request.launch,
                    since=self._clock.since_1970(),
                ),
                request.launch_ranks,
                is_back=request.previous is not None,
            )
            return self._membership.workers[rank]

    def begin_lease(self, worker: LiveWorker) -> LiveWorker:
        """Begins the lease of a worker, once its join is in the state file: the write may have taken longer than a
        lease.

        Returns the worker with its new lease. Raises TryLater if the worker was removed meanwhile.
        """
        with self._lock:
            self._on_disk.unsaved.discard(worker.incarnation)
            current = self._membership.workers.get(worker.rank)
            if current is None or current.incarnation != worker.incarnation:
                raise TryLater(f"worker {worker.rank} lost its place in job {self._name!r} while it joined")
            begun = replace(current, expires=self._clock.now() + self._membership.lease)
            self._membership.workers[worker.rank] = begun
            return begun

    def abort(self, reservation: Reservation) -> bool:
        """Undoes a join that failed half way. Some shards may have fenced the older worker of the rank, so it is
        removed too.

        Returns whether the older worker was live until now.
        """
        older = reservation.older
        with self._lock:
            self._joining.drop(reservation)
            now = self._clock.now()
            fenced = older is not None and self._membership.leave(older.rank, older.incarnation, now, expired=True)
            if older is not None and fenced:
                self._fenced[older.rank] = older
        self.removals.add((reservation.rank, reservation.incarnation))
        if older is not None and fenced:
            self.removals.add((older.rank, older.incarnation))
        self.removals.tell()
        return fenced

    def heartbeat(
        self, rank: int, incarnation: int, clock: int, key: bytes, of: int = 0, process: tuple[str, int] | None = None
    ) -> int:
        """Renews a lease; returns the number of live workers. of, process: as in Membership.heartbeat"""
        with self._lock:
            self._membership.heartbeat(rank, incarnation, clock, self._clock.now(), key, of, process)
            return len(self._membership.workers)

    # -- a worker goes -----------------------------------------------------------------------------------------------

    def leave(self, rank: int, incarnation: int, key: bytes, done: bool = False) -> tuple[LiveWorker, bool] | None:
        """Removes a worker, and returns it with whether it was live; None if there is no such worker. Raises Forbidden
        for a wrong key.

        A worker that was not live was expected to join again after a rollback or a silence. done: its script has ended
        """
        with self._lock:
            self._fenced.pop(rank, None)
            for workers in (self._membership.workers, self._membership.away, self._membership.absent):
                worker = workers.get(rank)
                if worker is not None and worker.incarnation == incarnation:
                    check_key(rank, key, worker.key)
                    self.attendance.left(done, self._clock.since_1970())
                    self._membership.absent.pop(rank, None)
                    return worker, self._membership.leave(rank, incarnation, self._clock.now(), done)
            return None

    def member_leaves(self, rank: int, incarnation: int, key: bytes, of: int) -> bool:
        """Records that a member of a group is done. Returns whether the group stays because other members are not.

        Raises UnknownWorker, Fenced or Forbidden unless the worker is live.
        """
        with self._lock:
            self._membership.check(rank, incarnation, key)
            return not self._membership.member_leaves(rank, of)

    def take_gone(self, process: NamedProcess | None = None) -> tuple[list[LiveWorker], list[LiveWorker]]:
        """Removes the workers whose lease has run out, and those of a process that has ended. Returns the two lists."""
        with self._lock:
            now = self._clock.now()
            ended = self._membership.ended(process, now) if process is not None else []
            for worker in ended:
                self._membership.leave(worker.rank, worker.incarnation, now, expired=True)
            expired = self._membership.take_silent(now)
            if expired or ended:
                self.attendance.lost()
            return expired, ended

    def forget_absent(self) -> list[int]:
        """Forgets the workers that were silent and have not come back in time. Returns their ranks."""
        with self._lock:
            return self._membership.forget_absent(self._clock.now())

    def postpone(self, seconds: float) -> None:
        """Extends all leases, and all waits for workers to come back, by up to `seconds`; see Membership.postpone."""
        with self._lock:
            self._membership.postpone(seconds, self._clock.now())

    def stop_waiting(self) -> list[int]:
        """Drops the workers that did not rejoin in time after a rollback. Returns their ranks."""
        with self._lock:
            return self._membership.stop_waiting(self._clock.now())

    def doubt_is_over(self) -> bool:
        """Whether a worker has sent a heartbeat after all workers seemed dead: see Membership."""
        with self._lock:
            return self._membership.doubt_is_over()

    def rollback(self, everywhere: bool, last_incarnation: int) -> list[LiveWorker]:
        """Removes all workers, and expects them to join again. Makes reservations void. Returns the removed workers.

        everywhere:       all shards were rolled back, and so count none of the workers; False: the other shards must
                          remove them
        last_incarnation: the highest incarnation that any worker of the job may have had
        """
        with self._lock:
            workers = self._membership.rollback(self._clock.now(), self._fenced.values())
            self._fenced = {}
            self._membership.last_incarnation = max(last_incarnation, self._membership.last_incarnation)
            gone = [(each.rank, each.incarnation) for each in (*workers, *self._joining)]
            self._joining.clear()
            if everywhere:
                self.restore_count += 1
                self.removals.clear()
            else:  # the shards that kept their part of the job still count these workers
                self.removals.add(*gone)
        return workers


def _may_be_late(request: JoinRequest) -> bool:
    """Whether the caller may be dead: a network that was cut delivers a call of a dead process when it heals.

    Such a call must not displace the process that replaced the dead one. A live process asks again, and reports how
    long it has waited. A client that names no launch need not ask again.
    """
    return request.previous is None and bool(request.attempt and request.launch) and not request.waited


# -- launches that have taken part -------------------------------------------------------------------------------------

# Attendance decides whether a job has finished, and for which launches. A job whose last worker has left may wait for a
# worker that was removed as silent, until that one comes back, is known to be dead, or was away for too long.


LAUNCHES_KEPT = 256  # launches remembered of those that took part in one job; the oldest are forgotten


class Attendance:
    """Which launches have taken part in a job, and how its last worker left.

    launches: the launches, the latest last
    has_been: a worker has joined since this coordinator knows the job
    has_left: a worker has left; since then none has joined, and none was lost
    is_done:  the last worker that left was done: its script had ended
    left_at:  when that worker left, in seconds since 1970
    waits:    all other workers have left, and the job waits for absent ones before it ends
    """

    def __init__(self) -> None:
        self.launches: tuple[str, ...] = ()
        self.has_been = self.has_left = self.is_done = self.waits = False
        self.left_at = 0.0

    def joined(self, launch: str) -> None:
        """Records that a worker has joined. launch: the launch that started it; empty: unknown"""
        self.has_been, self.has_left, self.waits = True, False, False
        if launch and launch not in self.launches:
            self.launches = (*self.launches, launch)[-LAUNCHES_KEPT:]

    def left(self, done: bool, at: float) -> None:
        """Records that a worker has left. done: its script has ended; at: in seconds since 1970"""
        self.has_left, self.is_done, self.left_at = True, done, at

    def lost(self) -> None:
        """Records that a live worker was lost. Its work is not done: the job does not end with the others' leaving."""
        self.has_left = self.waits = False

    def wait(self) -> bool:
        """Records that the job waits for absent workers. Returns True the first time, False if it waited already."""
        begins, self.waits = not self.waits, True
        return begins


# -- joins under way ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reservation:
    """The rank and incarnation of a worker that is about to join.

    launch: the launch that started it; empty: unknown
    older:  the live worker that it replaces. is_new: its process was not a worker of the job before
    since:  when it was made, in seconds
    """

    rank: int
    incarnation: int
    attempt: int
    launch: str
    key: bytes = field(repr=False)
    older: LiveWorker | None
    is_new: bool
    since: float


class Reservations:
    """The reservations of one job, one for each rank. Not thread-safe."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._by_rank: dict[int, Reservation] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_rank.values())

    def __len__(self) -> int:
        return len(self._by_rank)

    def ranks(self) -> Collection[int]:
        """Returns the reserved ranks."""
        return self._by_rank.keys()

    def are_strange(self, rank: int, request: JoinRequest) -> bool:
        """Whether another launch is taking one of a new launch's ranks: see Membership.rivals. Of two launches that
        begin at once, one gets all ranks.
        """
        if not request.launch or request.previous is not None or request.take_over:
            return False
        strange = (each.rank for each in self if each.launch not in ("", request.launch))
        return any(each == rank or each in request.launch_ranks for each in strange)

    def add(self, reservation: Reservation) -> Reservation | None:
        """Adds a reservation; returns the one of the same rank that it makes void."""
        before = self._by_rank.get(reservation.rank)
        self._by_rank[reservation.rank] = reservation
        return before

    def check(self, reservation: Reservation) -> None:
        """Raises TryLater or Fenced if a rollback, or a join of another process, has made the reservation void.

        A new process gets TryLater: the other join may be a late call of its dead predecessor.
        """
        current = self._by_rank.get(reservation.rank)
        if current is None:
            raise TryLater(f"job {self._job!r} was rolled back while worker {reservation.rank} joined")
        if current is not reservation:
            if reservation.is_new:
                raise TryLater(f"another process joins job {self._job!r} as worker {reservation.rank} at this moment")
            raise Fenced(f"worker {reservation.rank} was replaced by another process while it joined")

    def drop(self, reservation: Reservation) -> None:
        """Forgets a reservation, unless a later one has made it void."""
        if self._by_rank.get(reservation.rank) is reservation:
            del self._by_rank[reservation.rank]

    def clear(self) -> None:
        """Forgets all reservations: the job is rolled back."""
        self._by_rank.clear()
