"""A cable between one worker and the servers, that a test can cut and plug in again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ps_worker
from ps_worker import Session
from ps_worker.cluster.coordinator import CoordinatorClient
from ps_worker.values import JoinResult, ShardMap
from tests.tools.cluster import Cluster, until
from tests.tools.links import Links

LEASE = 2.0  # short: a test waits for its end


class Cable:
    """Between the workers that are connected to `address`, and everything that a cluster serves."""

    def __init__(self, coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._links = Links()
        self._to = {coordinator: self._links.to(coordinator)}  # by the server's address
        self.address = self._to[coordinator].address
        register, join = CoordinatorClient.register, CoordinatorClient.join

        def registered(client: CoordinatorClient, *arguments: object) -> tuple[ShardMap, int]:
            found, bucket_bytes = register(client, *arguments)
            return self._through(found) if client.address == self.address else found, bucket_bytes

        def joined(client: CoordinatorClient, *arguments: object) -> JoinResult:
            found = join(client, *arguments)  # type: ignore[arg-type]
            if client.address != self.address or found.shard_map is None:
                return found
            return replace(found, shard_map=self._through(found.shard_map))

        # What this worker is told of addresses leads through the cable: as behind a router.
        monkeypatch.setattr(CoordinatorClient, "register", registered)
        monkeypatch.setattr(CoordinatorClient, "join", joined)

    def _through(self, found: ShardMap) -> ShardMap:
        for address in found.addresses.values():
            if address not in self._to:
                self._to[address] = self._links.to(address)
        return ShardMap({i: self._to[a].address for i, a in found.addresses.items()}, found.bucket_shards)

    def cut(self) -> None:
        for link in self._to.values():
            link.cut()

    def heal(self) -> None:
        for link in self._to.values():
            link.heal()

    def close(self) -> None:
        self._links.close()


def live(cluster: Cluster, job: str = "default") -> dict[int, int]:
    """By rank, the incarnations that the coordinator counts as live."""
    known = cluster.coordinator.jobs().get(job)
    return {} if known is None else {member.rank: member.incarnation for member in known.members.all()}


def lose(cluster: Cluster, cable: Cable, rank: int = 0) -> None:
    """Cuts a worker off until its lease is over."""
    cable.cut()
    until(lambda: rank not in live(cluster), "the lease runs out")


def session_at(address: str, mode: str, rank: int, transport: str = "auto", world_size: int = 2) -> Session:
    """A worker's session through a cable, or beside it: each has an address of its own."""
    return ps_worker.connect(address, mode, rank=rank, world_size=world_size, transport=transport)
