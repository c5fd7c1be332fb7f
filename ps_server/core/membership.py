"""The live workers of a job: leases, incarnations, ranks. Times are seconds on the caller's clock."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Fenced, Forbidden, InvalidRequest, UnknownWorker

TOGETHER_PER_LEASE = 8  # part of a lease: heartbeats that come no further apart were held back; a worker pauses longer
DELAYED_PER_LEASE = 16  # part of a lease: a heartbeat may lie so long in a queue before it is seen, its sender dead
# After a rollback live workers come back at once. For so many seconds no other launch gets their ranks. No longer: they
# may all be dead, and the other launch is their user's next try.
AWAY_SECONDS = 5.0
REPLACED_KEPT = 16  # launches that one after the other took a rank over; the first are forgotten


@dataclass(frozen=True)
class Member:
    """One live worker.

    incarnation: rises with every join in the job, and fences the process that held the rank before
    expires:     when its lease runs out unless a heartbeat comes
    clock:       steps finished, as last heard
    key:         the secret that proves the incarnation: numbers can be guessed
    attempt:     the number of the call that took the place; 0 for none
    launch:      the launch that started it; empty: not known
    pushed:      the last clock of which workers of this rank had pushed every bucket when it joined; None: not known
    since:       when a worker of that launch took the rank, for people to read: seconds since 1970
    heard:       when heartbeats came last; minus infinity: none yet. A join is no sign of life: it may be carried
                 out when its caller is dead
    heard_before: when they came last but once. Those that a network held back come together, and count as one
    replaced:    the launches that this one took the rank from, each with the incarnation of its last worker there
    """

    rank: int
    incarnation: int
    expires: float
    clock: int = 0
    pid: int = 0
    host: str = ""
    metrics_address: str = ""
    key: bytes = field(default=b"", repr=False)
    attempt: int = field(default=0, repr=False)
    launch: str = ""
    pushed: int | None = None
    since: float = 0.0
    heard: float = -math.inf
    heard_before: float = -math.inf
    replaced: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class JoinRequest:
    """A process that asks to join.

    previous:     for a worker that comes back, its incarnation before
    clock:        how many steps it had finished then
    attempt:      the same for all repeats of one call; 0: no two calls are repeats of each other
    launch:       the launch that started it; empty: not known
    take_over:    live workers of other launches are to be fenced
    waited:       seconds since it was told first that it has to wait for a launch that may be dead; 0: it was not yet
    launch_ranks: the ranks of all workers that the launch is about to start
    run:          of the job that the process registered; empty: any
    """

    pid: int = 0
    host: str = ""
    metrics_address: str = ""
    previous: int | None = None
    clock: int = 0
    attempt: int = field(default=0, repr=False)
    launch: str = ""
    take_over: bool = False
    waited: float = 0.0
    launch_ranks: range = range(0)
    run: str = ""


UNKNOWN = JoinRequest()


@dataclass(frozen=True)
class WorkerProcess:
    """A process as it named itself when it joined.

    incarnation: of the worker that is meant; 0: any. Containers have the same pid one after the other
    """

    launch: str
    host: str
    pid: int
    incarnation: int = 0

    def was(self, member: Member) -> bool:
        """Whether a worker is one of this process."""
        same = (member.launch, member.host, member.pid) == (self.launch, self.host, self.pid)
        return same and self.incarnation in (0, member.incarnation)


@dataclass(frozen=True)
class Rivals:
    """The workers of other launches that stand in the way of a join.

    members: by rank; at least one
    live:    one of them has sent heartbeats since the caller began to wait. Otherwise all may be dead: the workers of
             a launch that was killed look live until their leases are over
    seconds: until the last of their leases is over
    """

    members: tuple[Member, ...]
    live: bool
    seconds: float


@dataclass(frozen=True)
class JoinResult:
    """What a worker that joined gets.

    clock:         the clock that it starts from
    placement:     for each bucket, the index of its shard
    restore_count: how many times the job was rolled back to a checkpoint
    state:         what a worker of its rank had saved for the last checkpoint, and at which clock
    run:           of the job
    """

    member: Member
    clock: int
    placement: list[int]
    restore_count: int = 0
    state: tuple[int, bytes] | None = None
    run: str = ""


@dataclass
class Membership:
    """The live workers of one job.

    world_size: how many workers the job declares; 0 is elastic
    started:    true from the moment that all declared workers had joined (at once for an elastic job). A worker that
                dies later does not undo it: training goes on with the others
    rejoining:  after a rollback: by rank, until when the others wait for the worker to join again; for ever, as long
                as there are no others
    away:       the workers that were live at the rollback: for AWAY_SECONDS no other launch gets their rank
    """

    world_size: int
    lease: float
    members: dict[int, Member] = field(default_factory=dict)
    last_incarnation: int = 0
    started: bool = False
    ever_joined: bool = False
    rejoining: dict[int, float] = field(default_factory=dict)
    away: dict[int, Member] = field(default_factory=dict)

    def claim(self, rank: int | None, request: JoinRequest = UNKNOWN, reserved: Iterable[int] = ()) -> int:
        """Returns the rank that a worker gets: the one asked for, or the lowest free one. Changes nothing.

        reserved: the ranks of workers that are joining at this moment
        Raises Fenced for a worker that comes back to a rank that another process holds now.
        """
        live = self.members.get(rank) if rank is not None else None
        # The same process asks again where the answer to its first call was lost.
        repeats = live is not None and (live.pid, live.host) == (request.pid, request.host)
        if request.previous is not None and live is not None and live.incarnation > request.previous and not repeats:
            raise Fenced(
                f"worker {rank} was replaced by another process: incarnation {live.incarnation} is live"
                f"{_other_launch(live) if _strangers(live.launch, request.launch) else ''}"
            )
        if rank is None:
            taken = self.members.keys() | self.rejoining.keys() | set(reserved)
            rank = next(r for r in range(len(taken) + 1) if r not in taken)
        if self.world_size and rank >= self.world_size:
            raise InvalidRequest(f"rank must be below the job's world_size {self.world_size}, got {rank}")
        return rank

    def rivals(self, rank: int, request: JoinRequest, now: float) -> Rivals | None:
        """Returns the live workers of other launches because of which a rank may not be taken now; None: it may.

        A rank that is free, or held by a worker of the same launch (which starts it again), may always be taken, and so
        may one of which either launch is not known. A new launch is refused as a whole: in the way is each worker that
        holds one of `launch_ranks`. A launch that a rank was taken over from does not take it over in turn.
        """
        if not request.launch or request.previous is not None:
            return None
        taken = {r: member for r, member in self.away.items() if member.expires > now} | self.members
        rivals = [
            member
            for _, member in sorted(taken.items())
            if (member.rank == rank or member.rank in request.launch_ranks)
            and _strangers(member.launch, request.launch)
            and not (request.take_over and all(launch != request.launch for launch, _ in member.replaced))
        ]
        if not rivals:
            return None
        since = now - request.waited + self.lease / DELAYED_PER_LEASE
        # One heartbeat may be a dead worker's, which the network held back. Its others would come together with it.
        live = bool(request.waited) and any(member.heard_before > since for member in rivals)
        return Rivals(tuple(rivals), live, max(0.0, max(member.expires for member in rivals) - now))

    def repeated(self, attempt: int, now: float) -> Member | None:
        """Returns the live worker that joined with this attempt, and renews its lease; None if there is none."""
        member = next((m for m in self.members.values() if attempt and m.attempt == attempt), None)
        if member is not None:
            member = self.members[member.rank] = replace(member, expires=now + self.lease)
        return member

    def next_incarnation(self) -> int:
        """Returns a number that no worker of this job has had."""
        self.last_incarnation += 1
        return self.last_incarnation

    def join(self, member: Member) -> None:
        """Counts a worker as live, in place of an earlier one of its rank."""
        if not self.members:  # the first to rejoin waits no longer for the others than a lease
            self.rejoining = {r: member.expires if until == math.inf else until for r, until in self.rejoining.items()}
        older = self.members.get(member.rank)
        self.members[member.rank] = member if older is None else _after(member, older)
        self.away.pop(member.rank, None)
        self.ever_joined = True
        if self.rejoining.pop(member.rank, None) is not None:
            self.started = not self.rejoining
        elif not self.rejoining:
            self.started = self.started or len(self.members) >= self.world_size

    def rollback(self, now: float, fenced: Iterable[Member] = ()) -> list[Member]:
        """Takes all workers off, and expects those of a job that had started to rejoin within a lease. Returns them.

        fenced: workers that were live, and that are about to join again anyway
        """
        before, self.members = [*self.members.values(), *fenced], {}
        until = now + min(self.lease, AWAY_SECONDS)
        self.away |= {m.rank: replace(m, expires=until, heard=-math.inf, heard_before=-math.inf) for m in before}
        if self.started or self.rejoining:
            self.rejoining = dict.fromkeys([*self.rejoining, *(member.rank for member in before)], now + self.lease)
            self.started = self.ever_joined and not self.rejoining
        return before

    def stop_waiting(self, now: float) -> list[int]:
        """Drops the workers that did not rejoin in time: training starts without them. Returns their ranks.

        As long as none has come back at all, none is kept waiting: the lease for the others begins with the first.
        """
        late = [rank for rank, until in self.rejoining.items() if until <= now]
        if not self.members:
            self.rejoining |= dict.fromkeys(late, math.inf)
            return []
        for rank in late:
            del self.rejoining[rank]
        if late and not self.rejoining:
            self.started = True
        return late

    def heartbeat(self, rank: int, incarnation: int, clock: int, now: float, key: bytes = b"") -> None:
        """Renews a lease. Raises UnknownWorker, Fenced or Forbidden if the caller lost its place or never had it."""
        member = self.check(rank, incarnation, key)
        member = replace(member, expires=now + self.lease, clock=max(clock, member.clock))
        if now - member.heard > self.lease / TOGETHER_PER_LEASE:
            member = replace(member, heard=now, heard_before=member.heard)
        self.members[rank] = member

    def leave(self, rank: int, incarnation: int) -> bool:
        """Takes a worker off. Returns False if it was not there any more.

        One that a rollback took off does not join again: nothing waits for it any more.
        """
        away = self.away.get(rank)
        if away is not None and away.incarnation == incarnation:
            del self.away[rank]
            if self.rejoining.pop(rank, None) is not None:
                self.started = not self.rejoining
        member = self.members.get(rank)
        if member is None or member.incarnation != incarnation:
            return False
        del self.members[rank]
        return True

    def postpone(self, seconds: float, now: float) -> None:
        """Has all leases, and all waits for workers to rejoin, end so much later, but none later than a lease from now:
        heartbeats that lay in a queue meanwhile may be heard already."""

        def later(until: float) -> float:
            return max(until, min(until + seconds, now + self.lease))

        self.members = {rank: replace(m, expires=later(m.expires)) for rank, m in self.members.items()}
        self.rejoining = {rank: later(until) for rank, until in self.rejoining.items()}

    def expired(self, now: float) -> list[Member]:
        """Returns the workers whose lease has run out."""
        return [member for member in self.members.values() if member.expires <= now]

    def ended(self, process: WorkerProcess, now: float) -> list[Member]:
        """Returns the workers of a process that is gone. If one of it is expected to rejoin, it is not any more."""
        for rank in [rank for rank, member in self.away.items() if process.was(member)]:
            del self.away[rank]
            if rank in self.rejoining:
                self.rejoining[rank] = now
        return [member for member in self.members.values() if process.was(member)]

    def check(self, rank: int, incarnation: int, key: bytes = b"") -> Member:
        """Returns the live worker with this rank, incarnation and key. Raises UnknownWorker, Fenced or Forbidden."""
        member = self.members.get(rank)
        if member is not None and any(incarnation == last for _, last in member.replaced):
            raise Fenced(
                f"worker {rank} was replaced: incarnation {member.incarnation} is live, "
                f"the call came from {incarnation}{_other_launch(member)}"
            )
        check_incarnation(rank, incarnation, member.incarnation if member else None)
        assert member is not None
        check_key(rank, key, member.key)
        return member


def _strangers(launch: str, other: str) -> bool:
    """Whether two launches are known, and two."""
    return bool(launch) and bool(other) and launch != other


def _after(member: Member, older: Member) -> Member:
    """Returns a member that takes the rank of an older one, with what it takes on from that."""
    if older.launch == member.launch:
        return replace(member, since=older.since, replaced=older.replaced) if member.launch else member
    if not _strangers(older.launch, member.launch):
        return member
    replaced = (*older.replaced, (older.launch, older.incarnation))
    return replace(member, replaced=replaced[-REPLACED_KEPT:])


def _other_launch(member: Member) -> str:
    """Returns what a worker that was replaced is told of the launch that took over."""
    return f"; another launch took over: pid {member.pid} on host {member.host or '?'}"


def check_incarnation(rank: int, incarnation: int, live: int | None) -> None:
    """Raises unless `incarnation` is the live one of a rank; `live` is None where the rank has no live worker.

    An older incarnation was replaced: Fenced. A newer one was not: it joined servers that have gone back to an earlier
    state since, and do not know it any more. UnknownWorker: it may join again, and fences the one that is live.
    """
    if live is None:
        raise UnknownWorker(f"worker {rank} is not a live member of the job: its lease ran out, or it never joined")
    if incarnation > live:
        raise UnknownWorker(f"worker {rank} never joined: incarnation {live} is live, the call came from {incarnation}")
    if incarnation < live:
        raise Fenced(f"worker {rank} was replaced: incarnation {live} is live, the call came from {incarnation}")


def check_key(rank: int, key: bytes, issued: bytes) -> None:
    """Raises Forbidden unless `key` is the one that was issued with a live incarnation; in constant time."""
    if not hmac.compare_digest(key, issued):
        raise Forbidden(f"the call does not come from worker {rank}: its lease_key is not the one that Join gave")
