"""Who takes part in a job, and until when: the coordinator's side. Times are seconds on the caller's clock."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field, replace

from ps_protocol.errors import Fenced, Forbidden, InvalidRequest, UnknownWorker


@dataclass(frozen=True)
class Member:
    """One live worker.

    incarnation: rises with every join in the job, and fences whoever held the rank before
    expires:     when its lease runs out unless a heartbeat comes
    clock:       steps finished, as last heard
    key:         the secret that proves the incarnation: numbers can be guessed
    """

    rank: int
    incarnation: int
    expires: float
    clock: int = 0
    pid: int = 0
    host: str = ""
    metrics_address: str = ""
    key: bytes = field(default=b"", repr=False)


@dataclass
class Membership:
    """The live workers of one job.

    world_size: how many the job declares; 0 is elastic.
    started:    true from the moment that all declared workers had joined (at once for an elastic job). A worker that
                dies later does not undo it: training goes on with who is left.
    """

    world_size: int
    lease: float
    members: dict[int, Member] = field(default_factory=dict)
    last_incarnation: int = 0
    started: bool = False
    ever_joined: bool = False

    def claim(self, rank: int | None) -> int:
        """The rank that a newcomer gets: the one asked for, or the lowest free one. Changes nothing."""
        if rank is None:
            rank = next(r for r in range(len(self.members) + 1) if r not in self.members)
        if self.world_size and rank >= self.world_size:
            raise InvalidRequest(f"rank must be below the job's world_size {self.world_size}, got {rank}")
        return rank

    def next_incarnation(self) -> int:
        """A number that no worker of this job has had."""
        self.last_incarnation += 1
        return self.last_incarnation

    def join(self, member: Member) -> None:
        """Counts a worker as live, in place of an earlier one of its rank."""
        self.members[member.rank] = member
        self.ever_joined = True
        self.started = self.started or len(self.members) >= self.world_size

    def heartbeat(self, rank: int, incarnation: int, clock: int, now: float, key: bytes = b"") -> None:
        """Renews a lease. Raises UnknownWorker, Fenced or Forbidden if the caller lost its place or never had it."""
        member = self.check(rank, incarnation, key)
        self.members[rank] = replace(member, expires=now + self.lease, clock=max(clock, member.clock))

    def leave(self, rank: int, incarnation: int) -> bool:
        """Takes a worker off; False if it was not there any more."""
        member = self.members.get(rank)
        if member is None or member.incarnation != incarnation:
            return False
        del self.members[rank]
        return True

    def expired(self, now: float) -> list[Member]:
        """Whose lease has run out."""
        return [member for member in self.members.values() if member.expires <= now]

    def check(self, rank: int, incarnation: int, key: bytes = b"") -> Member:
        """The live worker with this rank, incarnation and key. Raises UnknownWorker, Fenced or Forbidden."""
        member = self.members.get(rank)
        check_incarnation(rank, incarnation, member.incarnation if member else None)
        assert member is not None
        check_key(rank, key, member.key)
        return member


def check_incarnation(rank: int, incarnation: int, live: int | None) -> None:
    """Raises unless `incarnation` is the live one of a rank; `live` is None where the rank has no live worker."""
    if live is None:
        raise UnknownWorker(f"worker {rank} is not a live member of the job: its lease ran out, or it never joined")
    if incarnation != live:
        raise Fenced(f"worker {rank} was replaced: incarnation {live} is live, the call came from {incarnation}")


def check_key(rank: int, key: bytes, issued: bytes) -> None:
    """Raises Forbidden unless `key` is the one that was issued with a live incarnation; in constant time."""
    if not hmac.compare_digest(key, issued):
        raise Forbidden(f"the call does not come from worker {rank}: its lease_key is not the one that JoinJob gave")
