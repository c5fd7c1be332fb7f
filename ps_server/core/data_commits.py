"""Counts each sample into each bucket of a shard exactly once, whichever worker brings it.

A push says which leased ranges its step used. They are taken for its bucket in the moment in which it is staged. A
range that the bucket has had already is not taken twice: the push that brings it counts as one without a gradient. So
when a worker dies with a step half pushed, and another is given the same batch again, the buckets that had it leave it
out and the others take it.

A range is *whole* when every bucket that trains here has had it. What only some have had is kept by range, so memory
grows with the steps that are under way and not with the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.data import DataRange
from ps_protocol.errors import InvalidRequest, LimitExceeded
from ps_server.core.intervals import Intervals, Span

MAX_LOADERS = 64
MAX_RANGES = 1_024  # of one push
MAX_FRAGMENTS = 65_536  # that the committed part of a pass may be in

# By loader, the latest pass and what is committed of it, ascending: plain data, for a snapshot.
Committed = dict[int, tuple[int, list[Span]]]


@dataclass(frozen=True)
class Use:
    """What became of the ranges of one push in one bucket.

    spent: the bucket has had some of them: the gradient must be left out
    lost:  how many samples are left out with it although the bucket has not had them; only if a push has several ranges
    """

    spent: bool = False
    lost: int = 0


UNUSED = Use()


@dataclass
class _Pass:
    """One loader's latest pass on this shard.

    whole:  what every bucket has had
    parts:  what some buckets have had, by range
    extras: by bucket, what else it has had; known only from a snapshot that was restored
    """

    number: int
    whole: Intervals = field(default_factory=Intervals)
    parts: dict[Span, set[int]] = field(default_factory=dict)
    extras: dict[int, Intervals] = field(default_factory=dict)

    def had(self, bucket: int, span: Span) -> int:
        """How many samples of a range a bucket has had."""
        if bucket in self.parts.get(span, ()):
            return span[1] - span[0]
        extra = self.extras.get(bucket)
        return self.whole.count(*span) + (extra.count(*span) if extra else 0)


class DataCommits:
    """The data that the trained buckets of one job on one shard have had."""

    def __init__(self, buckets: Iterable[int]) -> None:
        """buckets: the indices of those that train here."""
        self._buckets = frozenset(buckets)
        self._passes: dict[int, _Pass] = {}

    @property
    def has_say(self) -> bool:
        """Whether a bucket that trains is here."""
        return bool(self._buckets)

    def use(self, bucket: int, ranges: Sequence[DataRange]) -> Use:
        """Takes the ranges of a push for its bucket. Raises LimitExceeded, and changes nothing then."""
        if not ranges:
            return UNUSED
        had = 0
        for one in ranges:
            known = self._passes.get(one.loader)
            if known is not None and one.pass_number == known.number:
                had += known.had(bucket, one.span)
                if len(known.whole) + len(known.parts) >= MAX_FRAGMENTS and one.span not in known.parts:
                    raise LimitExceeded(f"loader {one.loader}: what is committed lies in {MAX_FRAGMENTS} pieces")
            elif known is not None and one.pass_number < known.number:
                had += one.stop - one.start  # that pass is over
        for one in ranges:
            self._take(bucket, one)
        return Use(True, sum(one.stop - one.start for one in ranges) - had) if had else UNUSED

    def _take(self, bucket: int, one: DataRange) -> None:
        known = self._passes.get(one.loader)
        if known is None or known.number < one.pass_number:
            # A pass begins when the one before is complete everywhere: nothing of that one needs to be kept.
            known = self._passes[one.loader] = _Pass(one.pass_number)
        if known.number > one.pass_number or known.whole.count(*one.span) == one.stop - one.start:
            return
        part = known.parts.setdefault(one.span, set())
        part.add(bucket)
        if len(part) == len(self._buckets):
            del known.parts[one.span]
            known.whole.add(*one.span)
            for extra in known.extras.values():
                extra.remove(*one.span)

    def whole(self) -> Committed:
        """What every bucket that trains here has had."""
        return {loader: (known.number, known.whole.spans()) for loader, known in self._passes.items()}

    def of(self, bucket: int, without: Iterable[DataRange] = ()) -> Committed:
        """What one bucket has had, but for some ranges: those of pushes that are not in its weights yet."""
        found: Committed = {}
        not_yet = list(without)
        for loader, known in self._passes.items():
            had = Intervals(known.whole.spans())
            for span, buckets in known.parts.items():
                if bucket in buckets:
                    had.add(*span)
            for span in known.extras[bucket].spans() if bucket in known.extras else ():
                had.add(*span)
            for one in not_yet:
                if (one.loader, one.pass_number) == (loader, known.number):
                    had.remove(*one.span)
            found[loader] = known.number, had.spans()
        return found

    def restore(self, each: Mapping[int, Committed]) -> None:
        """Sets all back to what a snapshot has, by bucket. A bucket that it does not know has had nothing."""
        self._passes = {}
        for loader in {loader for had in each.values() for loader in had}:
            number = max(had[loader][0] for had in each.values() if loader in had)
            mine: dict[int, Intervals] = {}
            for bucket in self._buckets:
                theirs, spans = each.get(bucket, {}).get(loader, (-1, []))
                mine[bucket] = Intervals(spans if theirs == number else ())
            whole: Intervals | None = None
            for had in mine.values():
                whole = had if whole is None else whole.common(had)
            known = self._passes[loader] = _Pass(number, Intervals(whole.spans() if whole else ()))
            extras = {bucket: had.without(known.whole) for bucket, had in mine.items()}
            known.extras = {bucket: extra for bucket, extra in extras.items() if extra.total}


def check_ranges(ranges: Sequence[DataRange]) -> None:
    """Raises InvalidRequest naming the first thing wrong with the ranges of a push."""
    if len(ranges) > MAX_RANGES:
        raise InvalidRequest(f"a push has at most {MAX_RANGES} ranges of data, got {len(ranges)}")
    for one in ranges:
        if one.loader >= MAX_LOADERS:
            raise InvalidRequest(f"expected a loader below {MAX_LOADERS}, got {one.loader}")
        if one.start >= one.stop:
            raise InvalidRequest(f"a range of data ends after it starts, got [{one.start}, {one.stop})")
    if len(set(ranges)) != len(ranges):
        raise InvalidRequest("a push names each range of data at most once")


def common(shards: Iterable[Committed], loader: int, number: int, samples: int) -> Intervals:
    """What is committed of one pass on all shards. A shard that is in a later pass has had all of this one."""
    found = Intervals([(0, samples)])
    for committed in shards:
        theirs, spans = committed.get(loader, (-1, []))
        if theirs <= number:
            found = found.common(Intervals(spans if theirs == number else ()))
    return found
