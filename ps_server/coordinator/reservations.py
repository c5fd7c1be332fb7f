"""The joins of one job that are under way: what each worker is going to be, until every shard counts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ps_protocol.errors import Fenced, TryLater
from ps_server.core.membership import Member


@dataclass(frozen=True, eq=False)
class Reservation:
    """What a worker that may join is going to be.

    older:  the live worker that it replaces
    is_new: its process has not had a place before
    """

    rank: int
    incarnation: int
    attempt: int
    key: bytes = field(repr=False)
    older: Member | None
    is_new: bool


class Reservations:
    """One for each rank that is being taken. Not thread-safe."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._by_rank: dict[int, Reservation] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_rank.values())

    def __len__(self) -> int:
        return len(self._by_rank)

    def ranks(self) -> Collection[int]:
        """Returns the ranks that are being taken."""
        return self._by_rank.keys()

    def add(self, reservation: Reservation) -> Reservation | None:
        """Takes a reservation in; returns the one of the same rank that it makes void."""
        before = self._by_rank.get(reservation.rank)
        self._by_rank[reservation.rank] = reservation
        return before

    def check(self, reservation: Reservation) -> None:
        """Raises TryLater or Fenced where a join was overtaken by a rollback or by another process.

        A new process may try again: the other one may be its predecessor, whose last call arrives after its death.
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
        """Makes all of them void: the job is rolled back."""
        self._by_rank.clear()
