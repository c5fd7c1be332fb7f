"""One loader's data, as the coordinator gives it out: batch by batch, each to one worker.

A pass goes over the positions [0, samples) of an order that all workers compute from the seed and the pass's number.
A position is free, leased, said to be pushed by the worker that had it, or committed: all shards said so. What a worker
had leased when it died or left is in doubt until the shards were asked; what they do not have is free again. What is
free is given out lowest first. A pass is complete when all is committed, and only then does the next one begin.

The shards decide what was used, once for each bucket (data_commits.py), and are asked when nothing is left to give out.
Leases only see to it that no work is done twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ps_protocol.data import NOTHING, BatchLease, DataRange, LeaseReport, LoaderSpec
from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_server.core.data_commits import Committed, common
from ps_server.core.intervals import Intervals, Span

Who = tuple[int, int]  # rank and incarnation


@dataclass(frozen=True)
class Progress:
    """How far a loader's data is, in samples: of the pass, committed and leased of it, and returned since the start."""

    pass_number: int
    samples: int
    committed: int
    leased: int
    returned: int


class DataLeases:
    """One loader of one job. `stale` until the shards have said what is committed: see `settle`."""

    def __init__(self, spec: LoaderSpec, limit: int = 1_024) -> None:
        """limit: batches that one worker may have leased."""
        self.loader = spec.loader
        self.spec = spec
        self.stale = True
        self.number = 0
        self._limit = limit
        self._returned = 0
        self._begin(0)

    def _begin(self, number: int) -> None:
        self.number = number
        self._committed = Intervals()
        self._pushed = Intervals()  # by the word of workers
        self._free = Intervals([(0, self.spec.samples)])
        self._leased: dict[Who, set[Span]] = {}
        self._doubtful: dict[Who, set[Span]] = {}

    # -- what workers ask --------------------------------------------------------------------------------------------

    def agree(self, spec: LoaderSpec) -> None:
        """Raises JobMismatch naming what differs from the loader that is known."""
        theirs = vars(spec)
        for name, mine in vars(self.spec).items():
            if mine != theirs[name]:
                raise JobMismatch(f"loader {self.loader} differs: {name} is {mine}, got {theirs[name]}")

    def lease(self, who: Who, asked: int, count: int, workers: int = 1, report: LeaseReport = NOTHING) -> BatchLease:
        """Gives a worker that is in pass `asked` up to `count` batches, fewer the fewer are left for `workers` of them.

        Raises InvalidRequest for a range that is none of this loader's; changes nothing then.
        """
        self._check([*report.leased, *report.committed, *report.returned])
        self._tell(who, report)
        if asked > self.number and self.complete:
            self._begin(self.number + 1)
            self._tell(who, report)
        if asked < self.number or (asked == self.number and self.complete):
            return BatchLease(complete=True)
        mine = self._leased.setdefault(who, set())
        held = {one.span for one in report.leased if one.pass_number == self.number}
        spans = sorted(mine - held)[:count]  # given before, in an answer that was lost
        fair = max(1, self._free.total // (2 * max(1, workers) * self.spec.batch_size))
        while len(spans) < min(count, fair) and len(mine) < self._limit and (span := self._next()) is not None:
            self._free.remove(*span)
            mine.add(span)
            spans.append(span)
        return BatchLease(tuple(DataRange(self.loader, self.number, *span) for span in spans))

    def _next(self) -> Span | None:
        """The lowest batch that is free. Batches come back as they were given, so they stay the same ones."""
        first = self._free.first()
        return (first[0], min(first[1], first[0] + self.spec.batch_size)) if first else None

    def _check(self, ranges: Iterable[DataRange]) -> None:
        for one in ranges:
            start, stop = one.span
            if one.loader != self.loader or not start < stop <= min(self.spec.samples, start + self.spec.batch_size):
                raise InvalidRequest(
                    f"loader {self.loader} gives out batches of {self.spec.batch_size} out of {self.spec.samples} "
                    f"samples, got [{start}, {stop}) of loader {one.loader}"
                )

    def _tell(self, who: Who, report: LeaseReport) -> None:
        def spans(ranges: Sequence[DataRange]) -> list[Span]:
            return [one.span for one in ranges if one.pass_number == self.number]

        mine = self._leased.setdefault(who, set())
        for span in spans(report.committed):
            mine.discard(span)
            self._pushed.add(*span)
            self._free.remove(*span)
        for span in spans(report.returned):
            if span in mine:
                mine.discard(span)
                self._give_back(span)
        for span in spans(report.leased):
            if span not in mine and len(mine) < self._limit and self._take_over(who, span):
                mine.add(span)

    def _take_over(self, who: Who, span: Span) -> bool:
        """A worker holds what was given to its older self, or by a coordinator before this one."""
        for older, spans in self._doubtful.items():
            if older[0] == who[0] and span in spans:
                spans.remove(span)
                return True
        if self._free.count(*span) < span[1] - span[0]:
            return False
        self._free.remove(*span)
        return True

    def _give_back(self, span: Span) -> None:
        left = Intervals([span]).without(self._committed)
        self._returned += left.total
        for start, stop in left.spans():
            self._free.add(start, stop)

    # -- what happens to workers and shards --------------------------------------------------------------------------

    def gone(self, rank: int, incarnation: int) -> None:
        """A worker, or an older one of its rank, takes no part any more: what it had leased is in doubt."""
        for who in [who for who in self._leased if who[0] == rank and who[1] <= incarnation]:
            spans = self._leased.pop(who)
            if spans:
                self._doubtful[who] = spans

    @property
    def doubtful(self) -> set[Who]:
        """Returns the workers that are gone, and whose leased batches may or may not be committed."""
        return set(self._doubtful)

    def settle(self, shards: Sequence[Committed], gone: Iterable[Who] = ()) -> None:
        """Takes over what the shards have committed.

        gone: those of `doubtful` from whom nothing can come any more; what they had and did not commit is free again
        """
        if self.stale:
            self._begin(max((had[self.loader][0] for had in shards if self.loader in had), default=0))
            self.stale = False
        self._committed = common(shards, self.loader, self.number, self.spec.samples)
        self._free = self._free.without(self._committed)
        lost, self._pushed = self._pushed.without(self._committed), Intervals()
        for span in lost.spans():  # a shard was rolled back to a checkpoint
            self._give_back(span)
        for spans in self._leased.values():
            spans -= {span for span in spans if self._committed.count(*span) == span[1] - span[0]}
        for who in gone:
            for span in self._doubtful.pop(who, ()):
                self._give_back(span)

    # -- how far it is -----------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every sample of the pass is committed."""
        return self._committed.total == self.spec.samples

    @property
    def progress(self) -> Progress:
        """How far the pass is."""
        held = [*self._leased.values(), *self._doubtful.values()]
        leased = sum(stop - start for spans in held for start, stop in spans)
        done = self._committed.total + self._pushed.without(self._committed).total
        return Progress(self.number, self.spec.samples, done, leased, self._returned)
