"""The measurements of one job's workers: from their last heartbeats, or from the end of a worker that is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Lock

from ps_protocol.figures import WorkerFigures


class HeardFigures:
    """The figures of one job's workers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._heard: dict[int, tuple[int, WorkerFigures]] = {}  # by rank: its incarnation, and its figures
        self._done: dict[int, WorkerFigures] = {}  # by rank

    def heard(self, rank: int, incarnation: int, figures: WorkerFigures) -> None:
        """Keeps the figures of a live worker's heartbeat."""
        with self._lock:
            self._heard[rank] = incarnation, figures
            self._done.pop(rank, None)

    def done(self, rank: int, figures: WorkerFigures) -> None:
        """Keeps the last figures of a worker that leaves because its script has ended."""
        with self._lock:
            self._done[rank] = figures

    def of_done(self) -> Mapping[int, WorkerFigures]:
        """Returns the last figures of the workers that are done, by rank."""
        with self._lock:
            return dict(self._done)

    def of(self, workers: Collection[tuple[int, int]]) -> Mapping[tuple[int, int], WorkerFigures]:
        """Returns the figures of workers, by rank and incarnation; forgets those of all others."""
        with self._lock:
            self._heard = {
                rank: (inc, figures) for rank, (inc, figures) in self._heard.items() if (rank, inc) in workers
            }
            return {(rank, incarnation): figures for rank, (incarnation, figures) in self._heard.items()}
