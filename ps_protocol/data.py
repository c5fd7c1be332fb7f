"""Elastic data: batches that the coordinator leases to workers, as both ends speak of them.

A *pass* goes once over a loader's samples, in an order that all workers compute from the loader's seed and the number
of the pass. A batch is a range of positions in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PUSH_RANGES = 1_024  # of leased data that one push names


@dataclass(frozen=True)
class DataRange:
    """Positions [start, stop) of one pass over one loader's data."""

    loader: int
    pass_number: int
    start: int
    stop: int

    @property
    def span(self) -> tuple[int, int]:
        """(start, stop)."""
        return self.start, self.stop


@dataclass(frozen=True)
class LoaderSpec:
    """What all workers must agree on about a loader.

    loader:     its number in the job, from 0
    size:       samples of the dataset
    batch_size: samples of a full batch
    drop_last:  leave out what is behind the last full batch
    seed:       of the shuffle; None: no shuffle
    """

    loader: int
    size: int
    batch_size: int
    drop_last: bool = False
    seed: int | None = None

    @property
    def samples(self) -> int:
        """Samples of a pass."""
        return self.size - (self.size % self.batch_size if self.drop_last else 0)

    @property
    def batches(self) -> int:
        """Batches of a pass."""
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True)
class LeaseReport:
    """What a worker says about the batches that it was given: those it still has, has pushed, and gives back."""

    leased: Sequence[DataRange] = ()
    committed: Sequence[DataRange] = ()
    returned: Sequence[DataRange] = ()


NOTHING = LeaseReport()


@dataclass(frozen=True)
class LeaseRequest:
    """A worker in pass `pass_number` asks for up to `count` batches of a loader."""

    loader: LoaderSpec
    pass_number: int
    count: int
    report: LeaseReport = NOTHING


@dataclass(frozen=True)
class BatchLease:
    """Batches given, all of one pass; or `complete`: the pass that was asked for is over. Neither: ask again."""

    ranges: tuple[DataRange, ...] = ()
    complete: bool = False
