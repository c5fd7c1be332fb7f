"""The members of a worker that is a group of processes: each on a host of its own, with a part of the job's buckets.

What one of them does for a step, it does on its host. The group goes on once all are through, as its collectives have
it: a member that hangs or that the others do not reach holds all of them up, and one that dies ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ps_protocol.errors import PSError
from tests.simulation.processes import Host
from tests.simulation.servers import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.worker import Place, Worker

HEARTBEATS_PER_LEASE = 4
MEET_SECONDS = 0.1
NOTICED_SECONDS = 1.0  # after the death of a member, within which the others' collectives end


class Members:
    """The members of one worker; of one process there is one.

    hosts: of the members, the first one's first
    """

    def __init__(self, worker: Worker, count: int) -> None:
        self._worker, self._world = worker, worker.world
        self._apart_until = 0.0
        others = [Host(self._world, f"{worker.host.name}, member {number}") for number in range(1, count)]
        self.hosts = [worker.host, *others]
        for host in others:
            worker.cluster.network.connect(host)
            host.on_death.append(self._one_died)
            worker.host.on_death.append(host.kill)

    def of(self, bucket: int) -> int:
        """Returns the member that has a bucket."""
        return bucket % len(self.hosts)

    def do(self, member: int, work: Callable[[], object]) -> None:
        """Does something in the process of a member; of one that is dead nothing comes."""
        if self.hosts[member].alive:
            self.hosts[member].spawn("call", work)

    def begin(self) -> None:
        """Has each member but the first keep the place, too: that one is the worker's own heartbeat."""
        for number, host in enumerate(self.hosts[1:], start=1):
            host.spawn("heartbeat", partial(self._beat, number))

    def meet(self) -> None:
        """Waits for a member that hangs, or that the others do not reach, before what all do together."""
        while any(host.stopped for host in self.hosts) or self._world.now < self._apart_until:
            self._world.let_pass(MEET_SECONDS)

    def part(self, seconds: float) -> None:
        """Cuts members off from each other, and from no server: all keep the place, and none ends a step."""
        self._apart_until = max(self._apart_until, self._world.now + seconds)

    def _beat(self, number: int) -> None:
        """Says that this member is there; the first one takes the next place where one is lost."""
        worker, pause = self._worker, self._worker.cluster.lease / HEARTBEATS_PER_LEASE
        while not worker.left:
            self._world.let_pass(pause)
            place = worker.place
            who = worker.run.name, place.run, worker.rank, place.incarnation, place.clock, place.key, number
            try:
                worker.cluster.network.call(COORDINATOR, "heartbeat", *who, seconds=pause)
            except PSError as error:
                self._world.trace(f"{self.hosts[number].name} hears: {error}")

    def leave(self, place: Place) -> bool:
        """Leaves a place, one member after the other; returns whether the job has ended."""
        worker, ended = self._worker, False
        for number in range(len(self.hosts)):
            who = worker.run.name, worker.rank, place.incarnation, place.key, place.run
            more = (None, True, number) if len(self.hosts) > 1 else ()
            ended = bool(worker.cluster.network.call(COORDINATOR, "leave", *who, *more, seconds=15.0))
        return ended

    def _one_died(self) -> None:
        worker = self._worker
        if worker.host.alive and not worker.left:
            noticed = self._world.random.uniform(0.0, NOTICED_SECONDS)
            self._world.at(noticed, self._end)

    def _end(self) -> None:
        if self._worker.host.alive:
            self._worker.cluster.kill_worker(self._worker)


class Works:
    """A call that one member of a worker makes."""

    def __init__(self, member: int, work: Callable[[], object]) -> None:
        self.member, self._work = member, work

    def __call__(self) -> object:
        """Makes it."""
        return self._work()
