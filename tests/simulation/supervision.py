"""The servers of a cluster, and what starts them again where they have died.

In some clusters the coordinator is a process of its own, as in Kubernetes; in the others it is shard 0, too, as
`ps-server up` and Docker Compose start it. Each process has a machine of its own, with its disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from ps_server.coordinator.state_file import FILE
from tests.simulation.disk import Image, SimulatedDisk, Storage
from tests.simulation.network import Network
from tests.simulation.processes import Host
from tests.simulation.servers import COORDINATOR, CoordinatorProcess, ShardProcess

SHARDS = 2
DIRECTORY = Path("/checkpoints")


@dataclass(frozen=True)
class Setup:
    """How the servers of one cluster are started.

    together: the coordinator is shard 0, too
    policy:   of checkpoints; None: there are none, and a coordinator does not come back with its jobs
    lease:    of workers
    own_disks: each shard has a disk of its own for its files
    """

    together: bool
    policy: CheckpointPolicy | None
    lease: float
    own_disks: bool


class Servers:
    """The servers of one cluster. `coordinator` and `shards`: the processes that were started last.

    died: is called when one has died, with the process and the index of the shard that it was, if it was one
    """

    def __init__(self, network: Network, setup: Setup, died: Callable[[Host, int | None], object]) -> None:
        self.network, self.setup, self._died = network, setup, died
        self.world = network.world
        self.storage = Storage(DIRECTORY)
        self.disks = [SimulatedDisk(self.world, self.storage) for _ in range(1 + SHARDS)]  # the coordinator's is first
        self.shards: list[ShardProcess] = []
        self._processes = 0

    def start(self) -> None:
        """Starts all."""
        self._start(True, 0 if self.setup.together else None)
        for index in range(len(self.shards), SHARDS):
            self._start(False, index)

    def hosts(self) -> list[Host]:
        """Returns the processes, each once."""
        return list(dict.fromkeys([self.coordinator.host, *(shard.host for shard in self.shards)]))

    def depose(self) -> None:
        """Another coordinator takes the lease of the store over, and the place where it is called. The one of now goes
        on for a while, and finds out late."""
        before, draw = self.coordinator.host, self.world.random
        if self.setup.together or self.setup.policy is None or not before.alive:
            return
        self.world.trace("another coordinator takes over")
        self.disks[0].take_over(self.world.now + draw.uniform(0.0, 3 * self.setup.lease))
        before.on_death.clear()
        self._start(True, None)
        self.world.at(draw.uniform(1.0, 6 * self.setup.lease), before.kill)

    def disk_of(self, host: Host) -> SimulatedDisk:
        """Returns the disk of the machine of a server."""
        return self.disks[0 if host is self.coordinator.host else 1 + [s.host for s in self.shards].index(host)]

    def _start(self, coordinates: bool, index: int | None, address: str = "") -> None:
        self._processes += 1
        name = "coordinator" if index is None else f"shard {index}"
        address = COORDINATOR if coordinates else address or f"10.0.1.{index}:{7000 + self._processes}"
        host = Host(self.world, name, address)
        self.network.listen(host)
        host.on_death.append(partial(self._has_died, host, coordinates, index))
        policy = self.setup.policy
        if coordinates:
            self.coordinator = CoordinatorProcess(self.network, host, self.disks[0], SHARDS, self.setup.lease, policy)
        if index is not None:
            disk, store = self.disks[0 if coordinates else 1 + index], policy.directory if policy else None
            shard = ShardProcess(self.network, host, disk, index, self._processes, store, self.setup.own_disks)
            self.shards[index:] = [shard, *self.shards[index + 1 :]]

    def _has_died(self, host: Host, coordinates: bool, index: int | None) -> None:
        draw = self.world.random
        if host.lost_power:
            self.disks[0 if coordinates or index is None else 1 + index].lose_power()
        self._died(host, index)
        address = host.address if draw.random() < 0.7 else ""
        self.world.at(draw.uniform(0.3, self.setup.lease), partial(self._start, coordinates, index, address))

    def lose_state_file(self) -> None:
        """Removes the coordinator's file, which has died."""
        self.storage.folder(DIRECTORY).pop(FILE, None)
        self.disks[0].forget()

    def set_back(self, image: Image) -> None:
        """Has the directory be as it was, while no server runs: all are killed, and start then."""
        for host in self.hosts():
            host.kill(": the directory is set back")
        self.storage.folders = image
        for disk in self.disks:
            disk.forget()
