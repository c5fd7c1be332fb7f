"""What the workers of one job have measured, as their last heartbeats said."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Lock

from ps_protocol.figures import WorkerFigures


class HeardFigures:
    """The figures of one job's workers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._heard: dict[int, tuple[int, WorkerFigures]] = {}  # by rank

    def heard(self, rank: int, incarnation: int, figures: WorkerFigures) -> None:
        """Takes what a live worker says."""
        with self._lock:
            self._heard[rank] = incarnation, figures

    def of(self, workers: Collection[tuple[int, int]]) -> Mapping[tuple[int, int], WorkerFigures]:
        """Returns the figures of workers, by rank and incarnation; forgets those of all others."""
        with self._lock:
            self._heard = {
                rank: (inc, figures) for rank, (inc, figures) in self._heard.items() if (rank, inc) in workers
            }
            return {(rank, incarnation): figures for rank, (incarnation, figures) in self._heard.items()}
