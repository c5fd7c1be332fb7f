"""Elastic data: the batches that the coordinator leases to workers.

A *pass* is one loop over a loader's samples. All workers compute its order from the loader's seed and the number of the
pass. A batch is a range of positions in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PUSH_RANGES = 1_024  # leased ranges in one push


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
    """The properties of a loader that must be the same on all workers.

    loader: its number in the job, from 0
    size: samples of the dataset
    batch_size: samples of a full batch
    drop_last: whether a pass leaves out the samples after the last full batch
    seed: of the shuffle; None: no shuffle
    """

    loader: int
    size: int
    batch_size: int
    drop_last: bool = False
    seed: int | None = None

    @property
    def samples(self) -> int:
        """The number of samples of a pass."""
        return self.size - (self.size % self.batch_size if self.drop_last else 0)

    @property
    def batches(self) -> int:
        """The number of batches of a pass."""
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True)
class LeaseReport:
    """A worker's report on its leased batches: those it still has, those it has pushed, and those it returns."""

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
    """Leased batches, all of one pass. `complete`: the requested pass is over. With neither, the worker asks again."""

    ranges: tuple[DataRange, ...] = ()
    complete: bool = False
