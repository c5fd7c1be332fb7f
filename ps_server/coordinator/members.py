"""The live workers of one job, and which of them each shard counts.

A join takes two rounds over the shards, so that each counts the worker from the same clock on:

1. every shard counts the worker from its own frontier on, and says what that is: from here on nothing completes there
   that would need the worker;
2. the highest frontier becomes the clock at which the worker starts, everywhere.

A worker that is gone stays a pending removal until every shard has heard of it: others would wait for it for ever.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ps_protocol.errors import LimitExceeded, NotFound, PSError, TryLater
from ps_server.coordinator.cluster import Cluster
from ps_server.coordinator.refusals import refusal
from ps_server.coordinator.shards import RegisteredShard
from ps_server.core.data_leases import WorkerId
from ps_server.core.membership import JoinRequest, Member, Membership, check_key
from ps_server.failpoints import failpoint

log = logging.getLogger("ps_server")

LEASE_KEY_BYTES = 16

Roster = tuple[list[int], int, bool]
Removal = tuple[int, int, int]  # shard, rank, incarnation


@dataclass(frozen=True)
class Reservation:
    """What a worker that may join is going to be. older: the live worker that it replaces."""

    rank: int
    incarnation: int
    key: bytes
    older: Member | None


class JobMembers:
    """The workers of one job. Looks and heartbeats may come from any thread, and never wait for a join.

    What takes round trips to the shards (`add`, `remove`, `retry_removals`) is called by one thread at a time.
    restore_count: how many times the whole job was rolled back to a checkpoint
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
        self._pending_removals = set(pending_removals)
        self._joining: tuple[int, int] | None = None  # rank and incarnation of the worker that joins at this moment

    # -- looks -------------------------------------------------------------------------------------------------------

    def live(self) -> tuple[dict[int, int], bool]:
        """Returns the incarnation of each live worker, by rank, and whether training has started."""
        with self._lock:
            incarnations = {rank: member.incarnation for rank, member in self._membership.members.items()}
            return incarnations, self._membership.started

    def roster(self) -> Roster:
        """Returns the live ranks, the declared world size, and whether training has started."""
        with self._lock:
            return sorted(self._membership.members), self._membership.world_size, self._membership.started

    def all(self) -> list[Member]:
        """Returns the live workers, by rank."""
        with self._lock:
            return sorted(self._membership.members.values(), key=lambda member: member.rank)

    def rejoining(self) -> tuple[int, ...]:
        """Returns the ranks that are expected to join again after a rollback."""
        with self._lock:
            return tuple(sorted(self._membership.rejoining))

    def last_incarnation(self) -> int:
        """Returns the last incarnation that was given out."""
        with self._lock:
            return self._membership.last_incarnation

    def empty(self) -> bool:
        """Whether no worker is live, and none is expected to join again."""
        with self._lock:
            return not self._membership.members and not self._membership.rejoining

    def pending_removals(self) -> set[Removal]:
        """Returns what shards may still count: workers that are gone, and the one that joins at this moment."""
        worker = self._joining  # read once: a join may end meanwhile
        joining = {(shard, *worker) for shard in range(self._shards.count)} if worker else set()
        return self._pending_removals | joining

    def half_gone(self) -> set[WorkerId]:
        """Returns the workers that are gone, and of which a shard may still accept something."""
        return {(rank, incarnation) for _, rank, incarnation in set(self._pending_removals)}

    def check(self, rank: int, incarnation: int, key: bytes) -> int:
        """Returns how many workers are live. Raises UnknownWorker, Fenced or Forbidden unless the caller is one."""
        with self._lock:
            self._membership.check(rank, incarnation, key)
            return len(self._membership.members)

    # -- a worker comes ----------------------------------------------------------------------------------------------

    def repeated(self, request: JoinRequest) -> Member | None:
        """Returns the worker that this request made live already: the answer was lost, or is on its way."""
        with self._lock:
            return self._membership.repeated(request.attempt, self._clock.now())

    def reserve(self, rank: int | None, request: JoinRequest) -> Reservation:
        """Gives a worker its rank and incarnation. The shards may count it from now on, so this is to be saved.

        Raises Fenced, JobInUse, TryLater or LimitExceeded where the worker cannot join.
        """
        with self._lock:
            membership = self._membership
            rank = membership.claim(rank, request)
            rivals = membership.rivals(rank, request, self._clock.now())
            if rivals is not None:
                raise refusal(self._name, rivals, request, membership.lease)
            # Shards remember every rank that there ever was, so that a repeat is known: there must be a last one.
            if rank >= self._limits.workers:
                raise LimitExceeded(f"a rank must be below max-workers, {self._limits.workers}, got {rank}")
            key, older = secrets.token_bytes(LEASE_KEY_BYTES), membership.members.get(rank)
            reservation = Reservation(rank, membership.next_incarnation(), key, older)
        self._joining = rank, reservation.incarnation
        return reservation

    def add(self, reservation: Reservation, request: JoinRequest) -> Member:
        """Has every shard count a worker, and makes it live. Raises PSError if a shard does not answer."""
        rank, incarnation, key = reservation.rank, reservation.incarnation, reservation.key
        clock = self._add_on_shards(rank, incarnation, key)
        member = Member(
            rank=rank,
            incarnation=incarnation,
            expires=self._clock.now() + self._membership.lease,
            clock=clock,
            pid=request.pid,
            host=request.host,
            metrics_address=request.metrics_address,
            key=key,
            attempt=request.attempt,
            launch=request.launch,
            since=self._clock.since_1970(),
        )
        with self._lock:
            self._membership.join(member)
        self._joining = None
        return member

    def _add_on_shards(self, rank: int, incarnation: int, key: bytes) -> int:
        """Returns the clock from which on all shards count a worker."""

        def count(shard: RegisteredShard, clock: int | None) -> int:
            frontier = shard.api.add_worker(self._name, rank, incarnation, clock, key, self._run)
            failpoint("worker-half-added")
            return frontier

        shards = self._shards.all()
        try:
            clock = max(self._shards.call(shards, lambda shard: count(shard, None)))
            self._shards.call(shards, lambda shard: count(shard, clock))
        except NotFound as error:  # a shard was started anew, and has not called in yet
            raise TryLater(f"job {self._name!r}: {error}") from None
        return clock

    def abort_join(self, reservation: Reservation) -> None:
        """Takes back a join that failed half way. On some shards it has fenced the older worker: that one is gone."""
        self._joining = None
        older = reservation.older
        if older is not None:
            with self._lock:
                self._membership.leave(older.rank, older.incarnation)
        self.remove(reservation.rank, reservation.incarnation)

    def heartbeat(self, rank: int, incarnation: int, clock: int, key: bytes) -> int:
        """Renews a lease; returns the number of live workers."""
        with self._lock:
            self._membership.heartbeat(rank, incarnation, clock, self._clock.now(), key)
            return len(self._membership.members)

    # -- a worker goes -----------------------------------------------------------------------------------------------

    def leave(self, rank: int, incarnation: int, key: bytes) -> bool:
        """Takes a worker off. Returns False if it was not there any more. Raises Forbidden for a wrong key."""
        with self._lock:
            member = self._membership.members.get(rank)
            if member is not None and member.incarnation == incarnation:
                check_key(rank, key, member.key)
            return self._membership.leave(rank, incarnation)

    def take_expired(self) -> list[Member]:
        """Takes off the workers whose lease has run out, and returns them."""
        with self._lock:
            expired = self._membership.expired(self._clock.now())
            for member in expired:
                self._membership.leave(member.rank, member.incarnation)
            return expired

    def stop_waiting(self) -> list[int]:
        """Drops the workers that did not rejoin in time after a rollback. Returns their ranks."""
        with self._lock:
            return self._membership.stop_waiting(self._clock.now())

    def remove(self, rank: int, incarnation: int) -> None:
        """Has every shard stop counting a worker."""
        self._pending_removals |= {(index, rank, incarnation) for index in self._shards.known()}
        self.retry_removals()

    def retry_removals(self) -> None:
        """Tells the shards which workers to stop counting, until each has heard it."""
        shards = self._shards.known()
        for removal in sorted(self._pending_removals):
            index, rank, incarnation = removal
            try:
                if index in shards:
                    shards[index].api.remove_worker(self._name, rank, incarnation, self._run)
            except NotFound:
                pass  # a new process, which has never heard of the worker
            except PSError as error:
                log.warning("job %s: worker %d is not removed from shard %d yet: %s", self._name, rank, index, error)
                continue
            if index in shards:
                self._pending_removals.discard(removal)

    def rollback(self, everywhere: bool, last_incarnation: int) -> list[Member]:
        """Takes all workers off, and expects them to join again. Returns them.

        everywhere: every shard was rolled back, and counts none of them any more
        """
        with self._lock:
            members = self._membership.rollback(self._clock.now())
            self._membership.last_incarnation = last_incarnation
        if everywhere:
            self.restore_count += 1
            self._pending_removals.clear()
        else:  # the shards that kept theirs still count them
            shards = self._shards.known()
            self._pending_removals |= {(i, member.rank, member.incarnation) for i in shards for member in members}
        return members
