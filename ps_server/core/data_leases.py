"""One loader's data, as the coordinator leases it: batch by batch, each to one worker.

A pass covers the positions [0, samples) of an order that all workers compute from the seed and the number of the pass.
A position is free; leased; reported as pushed by its worker; or committed, which all shards have confirmed. If a worker
dies or leaves, its leased positions are in doubt until the shards are asked; those that the shards do not have are free
again. Free positions are leased lowest first. A pass is complete when all is committed; then the next one begins.

The shards decide which data was used, for each bucket (data_commits.py). The coordinator asks them when no position is
free. Leases only keep two workers from training on the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ps_protocol.batches import NOTHING, BatchLease, DataRange, LeaseReport, LoaderSpec
from ps_protocol.errors import InvalidRequest, JobMismatch
from ps_server.core.data_commits import Committed, Intervals, Span, common

WorkerId = tuple[int, int]  # rank and incarnation


@dataclass(frozen=True)
class LoaderProgress:
    """The state of a loader's current pass, in samples.

    samples:   those of the whole pass
    committed: pushed, as shards have confirmed or workers have reported
    leased:    leased to workers, live or gone
    returned:  returned unused since the job began, over all passes
    """

    pass_number: int
    samples: int
    committed: int
    leased: int
    returned: int


class DataLeases:
    """The leases of one loader of one job.

    stale: the committed samples are unknown until `settle` is called"""

    def __init__(self, spec: LoaderSpec, limit: int = 1_024) -> None:
        """limit: batches that one worker may have leased."""
        self.loader = spec.loader
        self.spec = spec
        self.stale = True
        self._limit = limit
        self._returned = 0
        self._begin(0)

    def _begin(self, number: int) -> None:
        """Begins a pass, of which all samples are free."""
        self.number = number
        self._committed = Intervals()
        self._pushed = Intervals()  # reported by workers, and not yet confirmed by the shards
        self._free = Intervals([(0, self.spec.samples)])
        self._leased: dict[WorkerId, set[Span]] = {}
        self._doubtful: dict[WorkerId, set[Span]] = {}
        self._claimed: dict[int, int] = {}  # by rank, how many batches it claimed that were not leased to it

    # -- requests of workers
    # --------------------------------------------------------------------------------------------

    def agree(self, spec: LoaderSpec) -> None:
        """Raises JobMismatch, naming the difference, if a worker's loader differs from the known one."""
        for (name, value), got in zip(vars(self.spec).items(), vars(spec).values(), strict=True):
            if value != got:
                raise JobMismatch(f"loader {self.loader} differs: {name} is {value}, got {got}")

    def lease_batches(
        self, worker: WorkerId, asked: int, count: int, workers: int = 1, report: LeaseReport = NOTHING
    ) -> BatchLease:
        """Leases up to `count` batches to a worker; fewer if few are left for `workers` workers.

        asked:  the number of the pass in which the worker is
        report: what the worker reports of its earlier leases
        Raises InvalidRequest, and changes nothing, if a range in the report is not one of this loader's.
        """
        self._check([*report.leased, *report.committed, *report.returned])
        self._tell(worker, report)
        if asked > self.number and self.complete:
            self._begin(self.number + 1)
            self._tell(worker, report)
        if asked < self.number or (asked == self.number and self.complete):
            return BatchLease(complete=True)
        leased = self._leased.setdefault(worker, set())
        known = {batch.span for batch in report.leased if batch.pass_number == self.number}
        spans = sorted(leased - known)[:count]  # leased to this worker before, in an answer that it did not get
        fair = max(1, self._free.total // (2 * max(1, workers) * self.spec.batch_size))
        while len(spans) < min(count, fair) and len(leased) < self._limit and (span := self._next()) is not None:
            self._free.remove(*span)
            leased.add(span)
            spans.append(span)
        return BatchLease(tuple(DataRange(self.loader, self.number, *span) for span in spans))

    def _next(self) -> Span | None:
        """Returns the lowest free batch. Returned batches keep their bounds, so batches stay the same ones."""
        first = self._free.first()
        return (first[0], min(first[1], first[0] + self.spec.batch_size)) if first else None

    def _check(self, ranges: Iterable[DataRange]) -> None:
        for batch in ranges:
            start, stop = batch.span
            if batch.loader != self.loader or not start < stop <= min(self.spec.samples, start + self.spec.batch_size):
                raise InvalidRequest(
                    f"loader {self.loader} gives out batches of {self.spec.batch_size} out of {self.spec.samples} "
                    f"samples, got [{start}, {stop}) of loader {batch.loader}"
                )

    def _tell(self, worker: WorkerId, report: LeaseReport) -> None:
        """Adopts a worker's report about the current pass: batches that it has pushed, returned, or still has."""

        def spans(ranges: Sequence[DataRange]) -> list[Span]:
            return [batch.span for batch in ranges if batch.pass_number == self.number]

        leased = self._leased.setdefault(worker, set())
        for span in spans(report.committed):
            if span in leased:
                leased.discard(span)
            elif not self._claims(worker, span):
                continue
            self._pushed.add(*span)
            self._free.remove(*span)
        for span in spans(report.returned):
            if span in leased:
                leased.discard(span)
                self._give_back(span)
        for span in spans(report.leased):
            if span not in leased and len(leased) < self._limit and self._take_over(worker, span):
                leased.add(span)

    def _claims(self, worker: WorkerId, span: Span) -> bool:
        """Whether to believe a worker that reports a batch which this coordinator did not lease to it.

        An earlier coordinator may have leased it. A worker may claim as many batches as it can have had leased; the
        shards are asked about all others.
        """
        claimed = self._claimed.get(worker[0], 0)
        if claimed >= self._limit or not self._take_over(worker, span):
            return False
        self._claimed[worker[0]] = claimed + 1
        return True

    def _take_over(self, worker: WorkerId, span: Span) -> bool:
        """Whether a worker may have a batch that was leased to its older incarnation, or by an earlier coordinator."""
        for older, spans in self._doubtful.items():
            if older[0] == worker[0] and span in spans:
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

    # -- changes of workers and shards --------------------------------------------------------------------------

    def gone(self, rank: int, incarnation: int) -> None:
        """Records that worker `rank` of this incarnation, and all earlier ones, are gone: their leased batches are in
        doubt.
        """
        for worker in [worker for worker in self._leased if worker[0] == rank and worker[1] <= incarnation]:
            spans = self._leased.pop(worker)
            if spans:
                self._doubtful[worker] = spans

    @property
    def doubtful(self) -> set[WorkerId]:
        """The workers that are gone, and whose leased batches may or may not be committed."""
        return set(self._doubtful)

    def settle(self, shards: Sequence[Committed], gone: Iterable[WorkerId] = ()) -> None:
        """Adopts the shards' record of which samples are committed.

        gone: workers of `doubtful` whose pushes can no longer arrive; their uncommitted batches become free again
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
        for worker in gone:
            for span in self._doubtful.pop(worker, ()):
                self._give_back(span)

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every sample of the pass is committed."""
        return self._committed.total == self.spec.samples

    @property
    def progress(self) -> LoaderProgress:
        """How many samples of the pass are committed or reported as pushed, leased, and returned."""
        batches = [*self._leased.values(), *self._doubtful.values()]
        leased = sum(stop - start for spans in batches for start, stop in spans)
        done = self._committed.total + self._pushed.without(self._committed).total
        return LoaderProgress(self.number, self.spec.samples, done, leased, self._returned)
