"""Sends each captured state to the coordinator, in a thread."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait

from ps_protocol.errors import PSError, UnknownWorker
from ps_runtime.pools import DaemonPool
from ps_runtime.troubles import Troubles
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.cluster.own_membership import OwnMembership

log = logging.getLogger("ps_worker")

# A worker that leaves waits at most so long for its last state to be sent.
LEAVING_SECONDS = 5.0


class StateSender:
    """Sends states, and repeats each call as long as the worker is in the job, also after a rejoin."""

    def __init__(self, coordinator: CoordinatorClient, membership: OwnMembership) -> None:
        self._coordinator = coordinator
        self._membership = membership
        self._pool = DaemonPool(1, "save")
        self._closing = threading.Event()
        self._last: Future[None] | None = None
        self._troubles = Troubles(log, None)  # ps_checkpoints_without_states_total counts them

    def send(self, clock: int, state: bytes) -> None:
        """Sends the state of a clock; returns at once."""
        place = self._membership.place
        assert place is not None
        restored = place.restore_count
        self._last = self._pool.submit(lambda: self._send(clock, state, restored))

    def close(self) -> None:
        """Ends the thread once the last state is sent, or after LEAVING_SECONDS."""
        if self._last is not None:
            wait([self._last], LEAVING_SECONDS)
        self._closing.set()
        self._pool.close()

    def join(self) -> None:
        """Waits for the thread after the coordinator's connection is closed, which ends a call in progress."""
        self._pool.join()

    def _send(self, clock: int, state: bytes, restored: int) -> None:
        while not self._closing.is_set():
            place = self._membership.place
            assert place is not None
            if place.restore_count != restored:
                return  # the job was rolled back: that clock will come again
            if self._membership.error is not None:
                return  # no place follows this one
            try:
                self._coordinator.save_state(place.identity, clock, state)
                self._troubles.over("save")
                return
            except UnknownWorker:
                self._membership.await_change(place)
            except PSError as error:
                self._troubles.met("save", "this worker's state at clock %d is not in the checkpoint: %s", clock, error)
                return
