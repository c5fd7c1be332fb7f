"""What goes wrong, when, and for how long: drawn by the seed. Each seed has kinds of its own that are frequent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.network import Weather
from tests.simulation.processes import Host

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

MEAN_SECONDS = 1.5  # between two faults
OLD_FILES = 0  # how often a coordinator comes back with an old file, against the others: no promise covers it
AT_SHARDS = (
    *("shard-file-half-written", "shard-file-written", "restore-read", "contribution-added", "update-stepped"),
    *("push-checked", "push-staged", "pull-half-sent"),
)
AT_THE_COORDINATOR = (
    *("worker-half-added", "restore-half-done", "manifest-missing", "manifest-half-written", "manifest-unnamed"),
    *("coordinator-file-half-written", "coordinator-file-unnamed", "checkpoint-half-removed"),
)


class Faults:
    """The faults of one simulation."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        draw = self._world.random
        kinds: dict[str, tuple[int, Callable[[], object]]] = {
            "kill a worker": (4, self._kill_worker),
            "stop a worker": (3, self._stop_worker),
            "cut a worker off": (3, self._cut_worker),
            "kill a shard": (2, self._kill_shard),
            "stop a shard": (2, self._stop_shard),
            "kill the coordinator": (2, self._kill_coordinator),
            "stop the coordinator": (1, self._stop_coordinator),
            "cut the coordinator off": (1, self._cut_coordinator),
            "kill at a failpoint": (2, self._kill_at_a_failpoint),
            "kill two": (2, self._kill_two),
            "fill a disk": (1, self._fill_disk),
            "slow a disk": (1, self._slow_disk),
            "lose the coordinator's file": (1, self._lose_file),
            "bring back an old file": (OLD_FILES, self._bring_back_old_file),
        }
        self._kinds = {name: (weight * draw.choice([0, 0, 1, 3]), do) for name, (weight, do) in kinds.items()}
        self._on = False
        self.disturbed: dict[Host, float] = {}  # until when a process was disturbed, at the least
        self.shard_died = 0.0

    def weather(self) -> Weather:
        """Returns the weather that the seed draws."""
        draw = self._world.random
        bad = Weather(loss=draw.choice([0, 0.02, 0.1]), repeat=draw.choice([0, 0.1]), mean=0.02, longest=1.0)
        return draw.choice([Weather(), Weather(), bad])

    def begin(self) -> None:
        """Begins."""
        self._on = True
        self._world.at(self._world.random.expovariate(1 / MEAN_SECONDS), self._next)

    def end(self) -> None:
        """Ends: nothing fails any more, and the weather is good."""
        self._on = False
        self._cluster.network.weather = Weather()
        for disk in self._cluster.disks:
            disk.full_until, disk.slow = 0.0, 0.0
        for host in self._world.hosts:
            host.dies_at.clear()

    def begin_of_an_end(self) -> None:
        """While all workers leave: one fault, or two, that cannot end their run otherwise."""
        draw = self._world.random
        kinds = [self._kill_shard, self._stop_shard, self._kill_coordinator, self._cut_coordinator, self._fill_disk]
        for _ in range(draw.choice([0, 1, 1, 2])):
            self._world.at(draw.uniform(0.0, 2.0), draw.choice(kinds))

    def _next(self) -> None:
        if not self._on:
            return
        draw = self._world.random
        self._world.at(draw.expovariate(1 / MEAN_SECONDS), self._next)
        kinds = [name for name, (weight, _) in self._kinds.items() if weight]
        if kinds:
            self._kinds[draw.choices(kinds, [self._kinds[name][0] for name in kinds])[0]][1]()

    def _hang_seconds(self) -> float:
        return self._world.random.choice([0.3, 1.5, 3.0]) * self._cluster.lease

    def _disturb(self, host: Host, seconds: float = 0.0) -> None:
        self.disturbed[host] = max(self.disturbed.get(host, 0.0), self._world.now + seconds)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _kill_worker(self) -> None:
        worker = self._world.random.choice([*self._cluster.this_run.workers.values()] or [None])
        if worker is not None and worker.host.alive and self._cluster.has_room:
            self._cluster.kill_worker(worker)

    def _stop_worker(self) -> None:
        worker = self._world.random.choice([*self._cluster.this_run.workers.values()] or [None])
        if worker is not None and worker.host.alive:
            seconds = self._world.random.choice([self._hang_seconds(), self._hang_seconds(), 20.0])
            self._disturb(worker.host, seconds)
            worker.host.stop(seconds)

    def _cut_worker(self) -> None:
        draw, cluster = self._world.random, self._cluster
        worker = draw.choice([*cluster.this_run.workers.values()] or [None])
        if worker is not None and worker.host.alive:
            seconds, servers = self._hang_seconds(), cluster.servers()
            self._disturb(worker.host, seconds)
            for server in draw.choice([servers[:1], servers[1:], servers[1:2], servers]):
                cluster.network.cut(worker.host, server, seconds)

    # -- servers -----------------------------------------------------------------------------------------------------

    def _kill_shard(self) -> None:
        shard = self._world.random.choice(self._cluster.shards)
        self._prepare_loss(shard.index)
        shard.host.kill()

    def _prepare_loss(self, index: int) -> None:
        """Has a shard be started again when it dies, and its run know what that may cost."""
        cluster, shard, draw = self._cluster, self._cluster.shards[index], self._world.random
        if not shard.host.alive:
            return

        def died() -> None:
            self.shard_died, run = self._world.now, cluster.this_run
            for bucket, home in enumerate(cluster.placement):
                if home == index:
                    cluster.lossy.setdefault(bucket, self._world.now)
            if not cluster.promises.has_checkpoint(run):
                run.may_end = run.may_end or "a shard is lost, and there is no checkpoint"
            address = shard.host.address if draw.random() < 0.7 else ""
            self._world.at(draw.uniform(0.3, cluster.lease), lambda: cluster.start_shard(index, address))

        if not any(getattr(notice, "__name__", "") == "died" for notice in shard.host.on_death):
            shard.host.on_death.append(died)

    def _stop_shard(self) -> None:
        draw = self._world.random
        shard = draw.choice(self._cluster.shards)
        if shard.host.alive:
            seconds = draw.choice([self._hang_seconds(), self._hang_seconds(), 12.0, 25.0])
            self._disturb(shard.host, seconds)
            shard.host.stop(seconds)

    def _kill_coordinator(self) -> None:
        self._prepare_death_of_the_coordinator()
        self._cluster.coordinator.host.kill()

    def _prepare_death_of_the_coordinator(self, lose_file: bool = False, back: int = 0) -> None:
        cluster, host = self._cluster, self._cluster.coordinator.host

        def died() -> None:
            self._disturb(host)
            run = cluster.this_run
            if lose_file or not cluster.keeps:
                run.may_end = run.may_end or "the coordinator came back without its file"
            if lose_file:
                self._world.trace("its file is lost")
                cluster.disks[0].lose_state_file()
            if back and cluster.disks[0].bring_back_state_file(back):
                self._world.trace(f"its file is the one of {back} writes ago")
            self._world.at(self._world.random.uniform(0.3, cluster.lease), cluster.start_coordinator)

        if host.alive and not any(getattr(notice, "__name__", "") == "died" for notice in host.on_death):
            host.on_death.append(died)

    def _lose_file(self) -> None:
        if self._world.random.random() < 0.3:
            self._prepare_death_of_the_coordinator(lose_file=True)
            self._cluster.coordinator.host.kill()

    def _bring_back_old_file(self) -> None:
        self._prepare_death_of_the_coordinator(back=self._world.random.choice([1, 2, 5]))
        self._cluster.coordinator.host.kill()

    def _stop_coordinator(self) -> None:
        host = self._cluster.coordinator.host
        if host.alive:
            seconds = self._world.random.choice([self._hang_seconds(), 12.0])
            self._disturb(host, seconds)
            host.stop(seconds)

    def _cut_coordinator(self) -> None:
        draw, cluster = self._world.random, self._cluster
        shard = draw.choice(cluster.shards)
        seconds = draw.choice([self._hang_seconds(), 12.0])
        self._disturb(shard.host, seconds)
        cluster.network.cut(cluster.coordinator.host, shard.host, seconds)

    def _kill_at_a_failpoint(self) -> None:
        draw, cluster = self._world.random, self._cluster
        shard = draw.choice([None, *cluster.shards])
        if shard is None:
            self._prepare_death_of_the_coordinator()
            host, name = cluster.coordinator.host, draw.choice(AT_THE_COORDINATOR)
        else:
            self._prepare_loss(shard.index)
            host, name = shard.host, draw.choice(AT_SHARDS)
        host.dies_at = {name: draw.choice([1, 1, 2, 5])}

    def _kill_two(self) -> None:
        draw = self._world.random
        kinds = [self._kill_worker, self._kill_shard, self._kill_coordinator, self._kill_at_a_failpoint]
        draw.choice(kinds)()
        self._world.at(draw.choice([0.0, draw.uniform(0.0, 3.0)]), draw.choice(kinds))

    # -- disks -------------------------------------------------------------------------------------------------------

    def _fill_disk(self) -> None:
        disk = self._world.random.choice(self._cluster.disks)
        disk.full_until = self._world.now + self._hang_seconds()
        self._world.trace(
            f"disk {self._cluster.disks.index(disk)} is full for {disk.full_until - self._world.now:.1f} s"
        )

    def _slow_disk(self) -> None:
        disk = self._world.random.choice(self._cluster.disks)
        disk.slow = self._world.random.choice([0.1, 1.0])
        self._world.trace(f"disk {self._cluster.disks.index(disk)} is slow: {disk.slow} s")
        self._world.at(self._hang_seconds(), lambda: setattr(disk, "slow", 0.0))
