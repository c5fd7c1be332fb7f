"""What happened in the window of a run that counts, and what it says: rates, and how long recovery takes."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import Fault
from tests.chaos.ledger import Record
from tests.chaos.oracle import Violation

STANDSTILL_SECONDS = 1.0  # from one step to the next: longer than any in a run that nothing disturbs


@dataclass
class Trace:
    """What happened in the window that counts, from `begun` to `ended`.

    missed: faults that could not be done, for want of a victim
    """

    begun: float
    ended: float
    records: list[Record]
    faults: list[Fault]
    violations: list[Violation] = field(default_factory=list)
    missed: int = 0

    def steps(self) -> list[tuple[float, int]]:
        """When each step of the window was acknowledged, and its worker's slot."""
        return sorted(
            (at, record.life.rank) for record in self.records for at in record.steps if self.begun <= at <= self.ended
        )

    def useful(self, begin: float | None = None, end: float | None = None) -> int:
        """Steps of the window, or of a part of it, that are in the weights: one that was undone and made again counts
        once."""
        first, last = self.begun if begin is None else begin, self.ended if end is None else end
        return len(
            {
                (record.life.rank, number) if record.averaged else (-1 - record.life.number, number)
                for record in self.records
                for number, at in record.life.at.items()
                if first <= at < last
            }
        )

    def missing(self) -> float:
        """Worker-seconds of the window in which a worker was not there, from its fault to its first step after it."""
        found = 0.0
        for fault in self.faults:
            back = self.back(fault)
            if fault.kind == "kill" or (fault.of_worker and fault.until > fault.at):
                found += min(self.ended, fault.at + back if back is not None else self.ended) - fault.at
        return found

    def back(self, fault: Fault) -> float | None:
        """Seconds from a fault's beginning until its victim's first step after its end; of a server's, the time
        in which no worker stepped."""
        if not fault.of_worker:
            return self.stall(fault)
        after = (at for at, slot in self.steps() if slot == fault.victim and at > fault.until)
        first = next(after, None)
        return None if first is None else first - fault.at

    def stall(self, fault: Fault) -> float:
        """The longest time in which none of the other workers finished a step, between this fault and the next."""
        following = min((other.at for other in self.faults if other.at > fault.at), default=self.ended)
        others = [at for at, slot in self.steps() if not fault.hits(slot)]
        before = [max((at for at in others if at <= fault.at), default=fault.at)]
        after = [next((at for at in others if at > following), following)]
        times = before + [at for at in others if fault.at < at <= following] + after
        return max(end - start for start, end in itertools.pairwise(times))

    def step_ms(self) -> float:
        """A worker's median time from one step to the next."""
        gaps = [end - start for record in self.records for start, end in itertools.pairwise(record.steps)]
        return round(1e3 * statistics.median(gaps), 2) if gaps else 0.0

    def pairs(self) -> dict[str, int]:
        """How often a fault of one kind overlapped with one of another, by `first+second`."""
        return dict(Counter(f"{fault.first}+{fault.kind}" for fault in self.faults if fault.first is not None))

    def recoveries(self) -> list[tuple[str, float | None]]:
        """For each fault, or pair of them, seconds from its end until every worker steps again.

        A step may have been under way: where a worker then stands still before the next fault, its longest standstill
        is what is waited for.
        """
        slots = {record.life.rank for record in self.records}
        # Those after the window too.
        steps = {one: sorted(at for r in self.records if r.life.rank == one for at in r.steps) for one in slots}
        found: list[tuple[str, float | None]] = []
        for number, fault in enumerate(self.faults):
            following = self.faults[number + 1] if number + 1 < len(self.faults) else None
            if following is not None and following.first is not None:
                continue  # its second fault stands for both
            paired = fault.first is not None
            end = max(fault.until, self.faults[number - 1].until) if paired else fault.until
            backs = [_back(steps[one], end, self.ended if following is None else following.at) for one in slots]
            seconds = None if None in backs else max(at for at in backs if at is not None) - end
            found.append((f"{fault.first}+{fault.kind}" if paired else fault.kind, seconds))
        return found


def _back(steps: Sequence[float], end: float, following: float) -> float | None:
    """When a worker's longest standstill after a fault's end is over; None: it never is."""
    after = [at for at in steps if at > end]
    if not after:
        return None
    gaps = [(late - early, late) for early, late in itertools.pairwise(after) if early < following]
    longest, late = max(gaps, default=(0.0, 0.0))
    return late if longest > STANDSTILL_SECONDS else after[0]


def summaries(found: Iterable[tuple[str, float | None]]) -> dict[str, dict[str, Any]]:
    """By kind, the median and the most; `never` counts those that did not end in time to be seen."""
    by_kind: dict[str, list[float | None]] = {}
    for kind, seconds in found:
        by_kind.setdefault(kind, []).append(seconds)
    return {kind: _summary(values) for kind, values in by_kind.items()}


def _summary(values: list[float | None]) -> dict[str, Any]:
    known = [seconds for seconds in values if seconds is not None]
    summary: dict[str, Any] = {}
    if known:
        summary = {"median": round(statistics.median(known), 2), "most": round(max(known), 2)}
    return {**summary, "never": len(values) - len(known)} if len(known) < len(values) else summary


def table(pairs: Mapping[str, int], kinds: Iterable[str]) -> str:
    """How often each pair of kinds was made: a row for each first fault, a column for each second."""
    known = [*kinds]
    width = max(map(len, known))
    rows = [" " * width + "".join(f"{number:4}" for number in range(1, 1 + len(known)))]
    for number, first in enumerate(known, start=1):
        counts = (pairs.get(f"{first}+{second}", 0) for second in known)
        rows.append(f"{first:>{width}}" + "".join(f"{count or '.':>4}" for count in counts) + f"  {number}")
    return "\n".join(rows)
