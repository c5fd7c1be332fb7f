"""Rounds of values, which all live workers of a job exchange, one round after the other. The coordinator's side.

A round is open until every live worker has given a value. Its values are kept, so that a worker whose answer was lost
gets them again. A process that starts late gets the values of earlier rounds too, and so makes the same decisions as
the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ps_protocol.errors import InvalidRequest, LimitExceeded


@dataclass(frozen=True)
class ValueRound:
    """A round that is complete.

    number:  from 1
    clock:   the highest clock of the workers that took part
    values:  each worker's value, by rank, ascending
    refused: why there are no values, as text; empty: there are values
    """

    number: int
    clock: int
    values: tuple[tuple[int, bytes], ...]
    refused: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return sum(len(value) for _, value in self.values)


@dataclass(frozen=True)
class Given:
    """The value that one worker gave to the open round."""

    incarnation: int
    clock: int
    value: bytes = field(repr=False)


@dataclass
class RoundsOfValues:
    """The rounds of one job.

    limit:     bytes for the values of the open round and of the kept ones together
    completed: the number of the last complete round
    kept:      the last complete rounds, without a gap
    given:     by rank, the values of the open round
    behind:    this coordinator has resumed the job: its workers may know of later rounds than it does
    """

    limit: int
    completed: int = 0
    kept: tuple[ValueRound, ...] = ()
    given: dict[int, Given] = field(default_factory=dict)
    behind: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the values of the open round, and of those that are kept."""
        given = sum(len(given.value) for given in self.given.values())
        return given + sum(kept.bytes for kept in self.kept)

    def more(self, rank: int, number: int, given: Given) -> int:
        """Returns by how many bytes a worker's value increases the kept bytes; 0 for a repetition."""
        before = self.given.get(rank)
        if number <= self.completed or (before is not None and before.incarnation == given.incarnation):
            return 0
        return len(given.value)

    def following(self, clock: int) -> int:
        """Returns the first round for a worker at `clock` that has taken part in none yet."""
        return next((kept.number for kept in self.kept if kept.clock >= clock), self.completed + 1)

    def find(self, number: int) -> ValueRound | None:
        """Returns a round if it is complete; None if it is open.

        Raises InvalidRequest for a later round, unless this coordinator is `behind`; LimitExceeded for one that is not
        kept any more.
        """
        if number < 1 or (number > self.completed + 1 and not self.behind):
            raise InvalidRequest(f"round {self.completed + 1} is open, got a value for round {number}")
        if number > self.completed:
            return None
        if not self.kept or number < self.kept[0].number:
            raise LimitExceeded(
                f"what the workers exchanged in round {number} is not kept any more (the job is in round "
                f"{self.completed + 1}): a worker that starts anew cannot catch up; --max-round-bytes is {self.limit}"
            )
        return self.kept[number - self.kept[0].number]

    def contribute(
        self, rank: int, number: int, given: Given, live: Mapping[int, int], started: bool
    ) -> ValueRound | None:
        """Adds a live worker's value; returns the round if it is complete now. A repeat changes nothing.

        live:    the incarnation of each live worker, by rank
        started: whether all declared workers have joined
        Raises InvalidRequest or LimitExceeded as `find` does.
        """
        complete = self.find(number)
        if complete is not None:
            return complete
        # The other workers have completed the rounds before: values for these come too late
        if number > self.completed + 1:
            self.completed, self.kept, self.given = number - 1, (), {}
        before = self.given.get(rank)
        if before is not None and before.incarnation == given.incarnation:
            given = replace(given, value=before.value)  # a repeat does not change the first value
        self.given[rank] = given
        size = sum(len(other.value) for other in self.given.values())
        if size > self.limit:
            ranks = ", ".join(map(str, sorted(self.given)))
            return self._complete(
                f"the values of workers {ranks} are {size} bytes together: the limit max-round-bytes is {self.limit}"
            )
        return self.settle(live, started)

    def settle(self, live: Mapping[int, int], started: bool) -> ValueRound | None:
        """Drops the values of workers that are gone. Returns the round if it is complete without them,
        otherwise None.
        """
        self.given = {rank: given for rank, given in self.given.items() if live.get(rank) == given.incarnation}
        if not started or not self.given or self.given.keys() != live.keys():
            return None
        return self._complete("")

    def _complete(self, refused: str) -> ValueRound:
        values = () if refused else tuple((rank, given.value) for rank, given in sorted(self.given.items()))
        clock = max(given.clock for given in self.given.values())
        complete = ValueRound(self.completed + 1, clock, values, refused)
        self.completed, self.given, self.behind = complete.number, {}, False
        self.kept = newest((*self.kept, complete), self.limit)
        return complete


def newest(rounds: tuple[ValueRound, ...], limit: int) -> tuple[ValueRound, ...]:
    """Returns the last rounds whose values have at most `limit` bytes together, and at least the very last one."""
    size, first = 0, len(rounds)
    while first and (size + rounds[first - 1].bytes <= limit or first == len(rounds)):
        first -= 1
        size += rounds[first].bytes
    return rounds[first:]
