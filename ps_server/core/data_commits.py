"""Counts each sample exactly once into each bucket of a shard, whichever worker pushes it.

A push names the leased ranges that its step used. They are recorded for its bucket at the moment at which it is staged.
If the bucket has had a range already, the push counts as one without a gradient. So when a worker dies with a step half
pushed, and another worker gets the same batch, the buckets that had the batch leave it out, and the other buckets count
it.

A range is *whole* when all trained buckets of the shard have had it. Only ranges that some buckets have had are kept
one by one, so the memory grows with the steps under way and not with the samples.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.batches import MAX_PUSH_RANGES, DataRange
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_server.core.validation import check_once

Span = tuple[int, int]  # [start, stop)


class Intervals:
    """A set of numbers as disjoint half-open intervals, ascending, none touching another. total: the count of numbers
    in it
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0
        for start, stop in spans:
            self.add(start, stop)

    def __len__(self) -> int:
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self.spans() == other.spans()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def spans(self) -> list[Span]:
        """Returns the intervals, ascending."""
        return list(zip(self._starts, self._stops, strict=True))

    def first(self) -> Span | None:
        """Returns the lowest interval; None if the set is empty."""
        return (self._starts[0], self._stops[0]) if self._starts else None

    def add(self, start: int, stop: int) -> None:
        """Adds [start, stop). Some of it may be in the set already."""
        if start >= stop:
            return
        low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._replace(low, high, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Removes [start, stop). Some of it may not be in the set."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if start < stop and low < high:
            ends = (self._starts[low], start), (stop, self._stops[high - 1])
            self._replace(low, high, [end for end in ends if end[0] < end[1]])

    def count(self, start: int, stop: int) -> int:
        """Returns how many numbers of [start, stop) are in this set."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return sum(max(0, min(stop, self._stops[i]) - max(start, self._starts[i])) for i in range(low, high))

    def common(self, other: Intervals) -> Intervals:
        """Returns the numbers that are in both."""
        both = Intervals()
        for start, stop in self.spans():
            low, high = bisect_right(other._stops, start), bisect_left(other._starts, stop)
            for i in range(low, high):
                both.add(max(start, other._starts[i]), min(stop, other._stops[i]))
        return both

    def without(self, other: Intervals) -> Intervals:
        """Returns the numbers that are in this one and not in the other."""
        rest = Intervals(self.spans())
        for start, stop in other.spans():
            rest.remove(start, stop)
        return rest

    def _replace(self, low: int, high: int, spans: list[Span]) -> None:
        self.total += sum(stop - start for start, stop in spans)
        self.total -= sum(self._stops[low:high]) - sum(self._starts[low:high])
        self._starts[low:high] = [start for start, _ in spans]
        self._stops[low:high] = [stop for _, stop in spans]


MAX_LOADERS = 64
MAX_FRAGMENTS = 65_536  # most intervals of the committed samples of a pass

# By loader, its latest pass and that pass's committed intervals, ascending: plain data, for a snapshot.
Committed = dict[int, tuple[int, list[Span]]]


@dataclass(frozen=True)
class Use:
    """The outcome for the ranges of one push in one bucket.

    spent: the bucket has had some of them: the gradient must be left out
    lost:  the number of samples that are left out although the bucket has not had them; above 0 only if a push has
           several ranges
    """

    spent: bool = False
    lost: int = 0


UNUSED = Use()


@dataclass
class _Pass:
    """One loader's latest pass on this shard.

    whole:  the samples that every bucket has had
    parts:  by range, the buckets that have had it, if not all have
    extras: by bucket, further samples that it has had, from a restored snapshot
    """

    number: int
    whole: Intervals = field(default_factory=Intervals)
    parts: dict[Span, set[int]] = field(default_factory=dict)
    extras: dict[int, Intervals] = field(default_factory=dict)

    def had(self, bucket: int, span: Span) -> int:
        """Returns how many samples of a range a bucket has had."""
        if bucket in self.parts.get(span, ()):
            return span[1] - span[0]
        extra = self.extras.get(bucket)
        return self.whole.count(*span) + (extra.count(*span) if extra else 0)


class DataCommits:
    """The data that the trained buckets of one job on one shard have had."""

    def __init__(self, buckets: Iterable[int]) -> None:
        """buckets: the indices of the trained buckets on this shard"""
        self._buckets = frozenset(buckets)
        self._passes: dict[int, _Pass] = {}

    @property
    def has_say(self) -> bool:
        """Whether this shard has a trained bucket. Only such shards are asked which samples are committed."""
        return bool(self._buckets)

    def use(self, bucket: int, ranges: Sequence[DataRange]) -> Use:
        """Records the ranges of a push for its bucket. Raises LimitExceeded, and changes nothing then."""
        if not ranges:
            return UNUSED
        had = 0
        for used in ranges:
            latest = self._passes.get(used.loader)
            if latest is not None and used.pass_number == latest.number:
                had += latest.had(bucket, used.span)
                if len(latest.whole) + len(latest.parts) >= MAX_FRAGMENTS and used.span not in latest.parts:
                    raise LimitExceeded(f"loader {used.loader}: what is committed lies in {MAX_FRAGMENTS} pieces")
            elif latest is not None and used.pass_number < latest.number:
                had += used.stop - used.start  # the pass of that range is over
        for used in ranges:
            self._take(bucket, used)
        return Use(True, sum(used.stop - used.start for used in ranges) - had) if had else UNUSED

    def _take(self, bucket: int, used: DataRange) -> None:
        """Records that a bucket has had a range. Does nothing if all buckets have had it, or its pass is over."""
        latest = self._passes.get(used.loader)
        if latest is None or latest.number < used.pass_number:
            # A pass begins when the one before is complete everywhere: nothing of that one needs to be kept.
            latest = self._passes[used.loader] = _Pass(used.pass_number)
        if latest.number > used.pass_number or latest.whole.count(*used.span) == used.stop - used.start:
            return
        buckets = latest.parts.setdefault(used.span, set())
        buckets.add(bucket)
        if len(buckets) == len(self._buckets):
            del latest.parts[used.span]
            latest.whole.add(*used.span)
            for extra in latest.extras.values():
                extra.remove(*used.span)

    def whole(self) -> Committed:
        """Returns the data that all trained buckets of this shard have had."""
        return {loader: (latest.number, latest.whole.spans()) for loader, latest in self._passes.items()}

    def of(self, bucket: int, without: Iterable[DataRange] = ()) -> Committed:
        """Returns the data in one bucket's weights. without: the ranges of pushes that are staged and not
        applied yet
        """
        committed: Committed = {}
        not_yet = list(without)
        for loader, latest in self._passes.items():
            had = Intervals(latest.whole.spans())
            for span, buckets in latest.parts.items():
                if bucket in buckets:
                    had.add(*span)
            for span in latest.extras[bucket].spans() if bucket in latest.extras else ():
                had.add(*span)
            for used in not_yet:
                if (used.loader, used.pass_number) == (loader, latest.number):
                    had.remove(*used.span)
            committed[loader] = latest.number, had.spans()
        return committed

    def restore(self, committed: Mapping[int, Committed]) -> None:
        """Continues from a snapshot. committed: by bucket, the data that it has had; a bucket that is not named has had
        none
        """
        self._passes = {}
        for loader in {loader for had in committed.values() for loader in had}:
            number = max(had[loader][0] for had in committed.values() if loader in had)
            of_pass: dict[int, Intervals] = {}
            for bucket in self._buckets:
                latest, spans = committed.get(bucket, {}).get(loader, (-1, []))
                of_pass[bucket] = Intervals(spans if latest == number else ())
            whole: Intervals | None = None
            for had in of_pass.values():
                whole = had if whole is None else whole.common(had)
            restored = self._passes[loader] = _Pass(number, Intervals(whole.spans() if whole else ()))
            extras = {bucket: had.without(restored.whole) for bucket, had in of_pass.items()}
            restored.extras = {bucket: extra for bucket, extra in extras.items() if extra.total}


def in_all(parts: Sequence[Committed]) -> Committed:
    """Returns the data that is committed in each of several buckets or shards, of the latest pass of each loader.

    There is none if one of them has not begun that pass.
    """
    committed: Committed = {}
    for loader in set[int]().union(*parts):
        number = max(part[loader][0] for part in parts if loader in part)
        each = [part.get(loader, (-1, [])) for part in parts]
        had, *others = [Intervals(spans if latest == number else ()) for latest, spans in each]
        for other in others:
            had = had.common(other)
        committed[loader] = number, had.spans()
    return committed


def check_ranges(ranges: Sequence[DataRange]) -> None:
    """Raises InvalidRequest that names the first error in the ranges of a push."""
    if len(ranges) > MAX_PUSH_RANGES:
        raise InvalidRequest(f"a push has at most {MAX_PUSH_RANGES} ranges of data, got {len(ranges)}")
    for used in ranges:
        if used.loader >= MAX_LOADERS:
            raise InvalidRequest(f"expected a loader below {MAX_LOADERS}, got {used.loader}")
        if used.start >= used.stop:
            raise InvalidRequest(f"a range of data ends after it starts, got [{used.start}, {used.stop})")
    check_once(ranges, "a push names each range of data")


def common(shards: Iterable[Committed], loader: int, number: int, samples: int) -> Intervals:
    """Returns the samples of one pass that are committed on all shards. A shard in a later pass has had all of this
    one.

    number:  the number of the pass
    samples: the number of samples of a pass
    """
    everywhere = Intervals([(0, samples)])
    for committed in shards:
        latest, spans = committed.get(loader, (-1, []))
        if latest <= number:
            everywhere = everywhere.common(Intervals(spans if latest == number else ()))
    return everywhere
