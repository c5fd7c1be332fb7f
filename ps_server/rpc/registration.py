"""Registers a shard with the coordinator, again and again."""

from __future__ import annotations

import logging
import os
import threading
import time

from ps_protocol.errors import PSError, TryLater
from ps_protocol.v1 import cluster_pb2
from ps_protocol.versions import VERSION
from ps_runtime.background import guarded, start
from ps_runtime.retry import Peer
from ps_runtime.troubles import Troubles
from ps_server.coordinator.shards import SHARD_CALL_SECONDS
from ps_server.rpc.operator_client import OperatorClient

log = logging.getLogger("ps_server")

FIRST_CALL_SECONDS = 0.25  # the pause between calls until the coordinator knows the shard, for which a start waits
# For which a coordinator may be silent before that is worth a warning: it ends before the shards do.
QUIET_SECONDS = 10.0


class ShardRegistration:
    """Registers this shard with the coordinator every few seconds, until it stops.

    process:       the number that this process chose when it started
    restart_count: how often its supervisor has started it again
    memory_place:  identifies the host and namespace in which it can share memory with workers
    known:         set when the coordinator has answered
    """

    def __init__(
        self,
        coordinator: Peer,
        index: int,
        address: str,
        metrics_address: str,
        process: int,
        restart_count: int = 0,
        memory_place: str = "",
    ) -> None:
        self.known = threading.Event()
        self._coordinator = coordinator
        self._shard = cluster_pb2.RegisterShardRequest(
            index=index,
            address=address,
            metrics_address=metrics_address,
            pid=os.getpid(),
            process=process,
            protocol_version=VERSION,
            restart_count=restart_count,
            memory_place=memory_place,
        )
        self._troubles = Troubles(log, "registration")
        self._heard = time.monotonic()  # when the coordinator answered last
        self._stopping = threading.Event()
        self._client = OperatorClient(coordinator)
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        start(self._thread)

    def stop(self) -> None:
        """Stops registering."""
        self._stopping.set()
        self._client.close()  # ends a call that waits for a coordinator that has gone
        self._thread.join()

    def checkpoint(self, job: str, seconds: float) -> None:
        """Asks the coordinator for a checkpoint before this shard ends; logs a warning if there is none."""
        with OperatorClient(self._coordinator) as coordinator:
            try:
                coordinator.checkpoint_job(job, seconds, caller_ends=True)
            except PSError as error:
                log.warning("stopping without a last checkpoint: %s", error)

    def _run(self) -> None:
        while not self._stopping.is_set():
            guarded("registration", self._register)
            self._stopping.wait(SHARD_CALL_SECONDS if self.known.is_set() else FIRST_CALL_SECONDS)

    def _register(self) -> None:
        try:
            self._client.register_shard(self._shard, SHARD_CALL_SECONDS)
            self._heard = time.monotonic()
            self.known.set()
            self._troubles.over("")
        except PSError as error:
            if self._stopping.is_set():
                return
            is_soon_over = isinstance(error, TryLater) and time.monotonic() - self._heard < QUIET_SECONDS
            level = logging.INFO if is_soon_over else logging.WARNING
            self._troubles.met("", "%s; trying again", error, level=level, detail=level)
