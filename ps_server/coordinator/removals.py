"""Pending removals: workers that have left, and that a shard may still count.

As long as a shard counts such a worker, the live workers wait there for steps that it never makes.

Each shard gets its removals in a thread of its own, again and again until it has answered. A shard that hangs delays
only work that needs this shard anyway.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from functools import partial

from ps_protocol.errors import NotFound, PSError
from ps_runtime.quantities import ranks_text
from ps_runtime.troubles import Troubles
from ps_server.coordinator.shards import Shards
from ps_server.core.data_leases import WorkerId
from ps_server.core.membership import WORKERS_A_CALL

log = logging.getLogger("ps_server")

Removal = tuple[int, int, int]  # shard, rank, incarnation


class Removals:
    """The pending removals of one run of a job. Methods may be called from any thread, and wait for no shard."""

    def __init__(self, name: str, run: str, shards: Shards, pending: Iterable[Removal] = ()) -> None:
        self._name, self._run, self._shards = name, run, shards
        self._lock = threading.Lock()
        self._pending = set(pending)
        self._telling: set[int] = set()  # the shards to which a thread is sending removals
        self._troubles = Troubles(log, "removal")

    def everywhere(self, workers: Iterable[WorkerId]) -> set[Removal]:
        """Returns a removal of each worker for every shard of the cluster, also for shards that have not registered
        yet.
        """
        return {(shard, *worker) for worker in workers for shard in range(self._shards.count)}

    def add(self, *workers: WorkerId) -> None:
        """Adds removals of workers, on every shard. `tell` sends them."""
        with self._lock:
            self._pending |= self.everywhere(workers)

    def clear(self) -> None:
        """Forgets all removals: no shard counts any of these workers."""
        with self._lock:
            self._pending.clear()

    def pending(self) -> set[Removal]:
        """Returns the removals that shards have not carried out yet."""
        with self._lock:
            return set(self._pending)

    def tell(self) -> None:
        """Sends each shard its pending removals, in a thread of that shard. Returns at once."""
        for index in self._shards.known():
            with self._lock:
                due = index not in self._telling and any(shard == index for shard, _, _ in self._pending)
                if due:
                    self._telling.add(index)
            if due:
                self._shards.beside(index, partial(self._tell_all, index))

    def _tell_all(self, index: int) -> None:
        """Sends one shard its removals, until none is left or the shard does not answer."""
        is_done = False
        try:
            while workers := self._next(index):
                if not self._tell(index, workers):
                    return
            is_done = True
        finally:
            if not is_done:
                with self._lock:
                    self._telling.discard(index)

    def _next(self, index: int) -> list[WorkerId]:
        """Returns the next removals for a shard. If there are none, marks its thread as ended."""
        with self._lock:
            workers = sorted((rank, incarnation) for shard, rank, incarnation in self._pending if shard == index)
            if not workers:
                self._telling.discard(index)
            return workers[:WORKERS_A_CALL]

    def _tell(self, index: int, workers: Sequence[WorkerId]) -> bool:
        try:
            self._shards.known()[index].api.remove_workers(self._name, workers, self._run)
        except NotFound:
            pass  # a new process, which counts none of them
        except PSError as error:
            ranks = {rank for rank, _ in workers}
            what = f"job %s: %s {'is' if len(ranks) == 1 else 'are'} not removed from shard %d yet: %s"
            self._troubles.met(index, what, self._name, ranks_text(ranks), index, error)
            return False
        self._troubles.over(index)
        with self._lock:
            self._pending.difference_update((index, *worker) for worker in workers)
        return True
