"""Which process serves which shard of the cluster."""

from __future__ import annotations

import logging
import threading
import time

from ps_protocol.errors import InvalidRequest, TryLater
from ps_runtime.credentials import Access, is_loopback
from ps_server.coordinator.job import RegisteredShard
from ps_server.core.validation import check_address
from ps_server.rpc.shard_client import ShardClient

log = logging.getLogger("ps_server")

# A shard calls in every SHARD_CALL_SECONDS; one that was silent for SHARD_LOST_SECONDS may be replaced.
SHARD_CALL_SECONDS = 2.0
SHARD_LOST_SECONDS = 10.0


class ShardDirectory:
    """The shards that have called in. Methods may be called from any thread."""

    def __init__(self, count: int, access: Access) -> None:
        self.count = count
        self._access = access
        self._shards: dict[int, RegisteredShard] = {}
        self._lock = threading.Lock()

    def register(self, index: int, address: str, metrics_address: str, pid: int, process: int) -> None:
        """Makes a shard known, or renews it. Raises TryLater while another process has its index."""
        if not 0 <= index < self.count:
            raise InvalidRequest(f"shard index must be below {self.count}, got {index}")
        check_address(address, "a shard's address")
        if metrics_address:
            check_address(metrics_address, "where metrics are served")
        now = time.monotonic()
        with self._lock:
            known = self._shards.get(index)
            if known is not None and known.process == process:
                client = known.client
            else:
                # Nobody else can listen where a live process does: at the same address it is the shard, started again.
                if known is not None and known.client.address != address and now - known.seen < SHARD_LOST_SECONDS:
                    raise TryLater(f"shard {index} is already served by process {known.pid} at {known.client.address}")
                log.info("shard %d at %s", index, address)
                client = ShardClient(index, address, self._access)
            self._shards[index] = RegisteredShard(client, metrics_address, pid, process, now)

    def known(self) -> dict[int, RegisteredShard]:
        """The shards that have called in, by index."""
        with self._lock:
            return dict(self._shards)

    def on_one_machine(self) -> bool:
        """Whether only this machine can reach the shards: then their workers are on it too."""
        return all(is_loopback(shard.client.address.rpartition(":")[0]) for shard in self.known().values())

    def clients(self) -> list[ShardClient]:
        """How to call each shard, by index. Raises TryLater naming those that have not called in yet."""
        shards = self.known()
        missing = [index for index in range(self.count) if index not in shards]
        if missing:
            raise TryLater(f"waiting for shards {', '.join(map(str, missing))} of {self.count} to start")
        return [shards[index].client for index in range(self.count)]

    def close(self) -> None:
        """Closes the connections."""
        for shard in self.known().values():
            shard.client.close()
