"""Sets of whole numbers that mostly lie together: kept as the intervals they form, however many numbers that are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Span = tuple[int, int]  # [start, stop)


class Intervals:
    """Disjoint half-open intervals, ascending, no two of them touching. `total` is how many numbers they hold."""

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
        """Returns the lowest interval; None where there is none."""
        return (self._starts[0], self._stops[0]) if self._starts else None

    def add(self, start: int, stop: int) -> None:
        """Puts in [start, stop), whether some of it was there or not."""
        if start >= stop:
            return
        low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._replace(low, high, [(start, stop)])

    def remove(self, start: int, stop: int) -> None:
        """Takes out [start, stop), whether all of it was there or not."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if start < stop and low < high:
            ends = (self._starts[low], start), (stop, self._stops[high - 1])
            self._replace(low, high, [end for end in ends if end[0] < end[1]])

    def count(self, start: int, stop: int) -> int:
        """Returns how many numbers of [start, stop) are in here."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return sum(max(0, min(stop, self._stops[i]) - max(start, self._starts[i])) for i in range(low, high))

    def common(self, other: Intervals) -> Intervals:
        """Returns what is in both."""
        both = Intervals()
        for start, stop in self.spans():
            low, high = bisect_right(other._stops, start), bisect_left(other._starts, stop)
            for i in range(low, high):
                both.add(max(start, other._starts[i]), min(stop, other._stops[i]))
        return both

    def without(self, other: Intervals) -> Intervals:
        """Returns what is in here and not in the other."""
        rest = Intervals(self.spans())
        for start, stop in other.spans():
            rest.remove(start, stop)
        return rest

    def _replace(self, low: int, high: int, spans: list[Span]) -> None:
        self.total += sum(stop - start for start, stop in spans)
        self.total -= sum(self._stops[low:high]) - sum(self._starts[low:high])
        self._starts[low:high] = [start for start, _ in spans]
        self._stops[low:high] = [stop for _, stop in spans]
