"""What goes wrong, when, and for how long: drawn by the seed. Each seed has kinds of its own that are frequent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tests.simulation.disk import Image
from tests.simulation.network import Weather
from tests.simulation.processes import Host
from tests.simulation.runs import NAME

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.worker import Worker

MEAN_SECONDS = 1.5  # between two faults
TOGETHER_SECONDS = 3.0  # within which the second of two comes
AT_A_FAILPOINT = 0.3  # of the kills of servers: in the middle of something
# What goes wrong, and how often, one against the others; bad weather on all links comes besides.
KINDS = {
    "a worker is killed": 4,
    "a worker hangs": 3,
    "a worker is cut off": 3,
    "a shard is killed": 3,
    "a shard hangs": 2,
    "the coordinator is killed": 3,
    "the coordinator hangs": 1,
    "the coordinator is cut off from a shard": 1,
    "a disk is full": 1,
    "a disk is slow": 1,
    "the coordinator's file is lost": 1,
    "the directory is set back": 1,
}
# What strikes a whole launch, or the store, by name and how often; in clusters that are told so. It is drawn apart, so
# that what else goes wrong with a seed stays as it was.
WHOLESALE = {"all workers are killed": 3, "another coordinator takes over": 3}
# What strikes readers, in clusters that have some.
READERS = {"a reader is killed": 2, "a reader hangs": 3, "a reader is cut off": 2, "a shard dies in an edition": 2}
# What strikes relays, in clusters that have some.
RELAYS = {"a relay is killed": 2, "a relay hangs": 2, "a relay is cut off": 2, "a relay dies in an edition": 2}
# What strikes one member of a group, in clusters whose workers are groups.
MEMBERS = {"a member is killed": 4, "a member hangs": 4, "a member is cut off": 3, "members lose each other": 3}
ALL_KINDS = KINDS | WHOLESALE | READERS | RELAYS | MEMBERS
AT_AN_END = (
    *("a shard is killed", "a shard hangs", "the coordinator is killed", "the coordinator is cut off from a shard"),
    "a disk is full",
)
OF_AN_END = 0.6  # of the simulations: all leave, while something goes wrong perhaps
AT_SHARDS = (
    *("shard-file-half-written", "shard-file-written", "restore-read", "contribution-added", "update-stepped"),
    *("push-checked", "push-staged", "pull-half-sent"),
)
AT_THE_COORDINATOR = (
    *("worker-half-added", "restore-half-done", "manifest-missing", "manifest-half-written", "manifest-unnamed"),
    *("coordinator-file-half-written", "coordinator-file-unnamed", "checkpoint-half-removed"),
)


class Faults:
    """The faults of one simulation.

    kinds:     those that there are; one that is named several times is so much more frequent. None: the seed draws them
    wholesale: those that strike a whole launch, or the store, are among them
    of_an_end: how likely it is that a run ends, and another one follows it
    """

    def __init__(self, cluster: Cluster, kinds: Collection[str] | None = None, wholesale: bool = False) -> None:
        self._cluster, self._world = cluster, cluster.world
        draw = self._world.random
        self._do: dict[str, Callable[[], object]] = {
            "a worker is killed": self._kill_worker,
            "a worker hangs": self._stop_worker,
            "a worker is cut off": self._cut_worker,
            "a shard is killed": self._kill_shard,
            "a shard hangs": self._stop_shard,
            "the coordinator is killed": self._kill_coordinator,
            "the coordinator hangs": self._stop_coordinator,
            "the coordinator is cut off from a shard": self._cut_coordinator,
            "a disk is full": self._fill_disk,
            "a disk is slow": self._slow_disk,
            "the coordinator's file is lost": self._lose_file,
            "the directory is set back": self._set_back,
            "all workers are killed": self._cluster.kill_all_workers,
            "another coordinator takes over": self._depose,
            "a reader is killed": self._kill_reader,
            "a reader hangs": self._stop_reader,
            "a reader is cut off": self._cut_reader,
            "a shard dies in an edition": self._kill_shard_in_an_edition,
        }
        self._do |= {"a relay is killed": self._kill_relay, "a relay hangs": self._stop_relay}
        self._do |= {
            "a relay is cut off": self._cut_relay,
            "a relay dies in an edition": self._kill_relay_in_an_edition,
        }
        self._do |= {"a member is killed": self._kill_member, "a member hangs": self._stop_member}
        self._do |= {"a member is cut off": self._cut_member, "members lose each other": self._part_members}
        assert self._do.keys() == ALL_KINDS.keys()
        self._weights = {kind: weight * draw.choice([0, 0, 1, 3]) for kind, weight in KINDS.items()}
        self._pairs = draw.choice([0.0, 0.2, 0.6])  # of the faults: another one comes at once, or soon
        self._seconds = [*KINDS]
        self._at_an_end = [kind for kind in AT_AN_END if kinds is None or kind in kinds]
        self.of_an_end = 1.0 if kinds is not None and self._at_an_end else OF_AN_END
        if kinds is not None:
            self._weights = {kind: ALL_KINDS[kind] * count for kind, count in Counter(kinds).items()}
            self._pairs, self._seconds = 0.6, [*kinds]
        elif wholesale:
            self._weights |= WHOLESALE
        if kinds is None and cluster.with_readers:
            self._weights |= READERS | (RELAYS if cluster.relays.count else {})
        if kinds is None and cluster.job.members > 1:
            self._weights |= MEMBERS
        self._on = False
        self._images: deque[tuple[str | None, Image]] = deque(maxlen=4)  # of the directory: the run in it
        self.disturbed: dict[Host, float] = {}  # until when a process was disturbed, at the least

    def weather(self) -> Weather:
        """Returns the weather that the seed draws."""
        draw = self._world.random
        bad = Weather(loss=draw.choice([0, 0.02, 0.1]), repeat=draw.choice([0, 0.1]), mean=0.02, longest=1.0)
        return draw.choice([Weather(), Weather(), bad])

    def begin(self) -> None:
        """Begins."""
        self._on = True
        if "the directory is set back" in self._seconds and (self._pairs or self._weights["the directory is set back"]):
            self._keep_image()
        self._world.at(self._world.random.expovariate(1 / MEAN_SECONDS), self._next)

    def end(self) -> None:
        """Ends: nothing fails any more, and the weather is good."""
        self._on = False
        self._cluster.network.weather = Weather()
        for disk in self._cluster.servers.disks:
            disk.full_until, disk.slow = 0.0, 0.0
        for host in self._world.hosts:
            host.dies_at.clear()

    def last(self) -> bool:
        """Whether a hang or a cut that began earlier lasts still, or what comes of it: the loss of a place."""
        return any(until + 2 * self._cluster.lease > self._world.now for until in self.disturbed.values())

    def begin_of_an_end(self) -> None:
        """While all workers leave: one fault, or two, that cannot end their run otherwise."""
        draw = self._world.random
        count = draw.choice([0, 1, 1, 2]) if self.of_an_end < 1 else 2
        for _ in range(count):
            self._world.at(draw.uniform(0.0, 2.0), self._do[draw.choice(self._at_an_end or AT_AN_END)])

    def _next(self) -> None:
        if not self._on:
            return
        draw = self._world.random
        self._world.at(draw.expovariate(1 / MEAN_SECONDS), self._next)
        kinds = [kind for kind, weight in self._weights.items() if weight]
        if not kinds:
            return
        self._make(draw.choices(kinds, [self._weights[kind] for kind in kinds])[0])
        if draw.random() < self._pairs:
            second = draw.choices(self._seconds, [ALL_KINDS[kind] for kind in self._seconds])[0]
            self._world.at(draw.choice([0.0, draw.uniform(0.0, TOGETHER_SECONDS)]), lambda: self._make(second))

    def _make(self, kind: str) -> None:
        if self._on:
            self._do[kind]()

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
            seconds, servers = self._hang_seconds(), cluster.servers.hosts()
            self._disturb(worker.host, seconds)
            for server in draw.choice([servers[:1], servers[1:], servers[1:2], servers]):
                cluster.network.cut(worker.host, server, seconds)

    # -- members of groups ---------------------------------------------------------------------------------------------

    def _member(self) -> tuple[Worker, Host] | None:
        """Returns a member of a group that is no first one, if it lives."""
        draw = self._world.random
        worker = draw.choice([*self._cluster.this_run.workers.values()] or [None])
        others = [] if worker is None else [host for host in worker.members.hosts[1:] if host.alive]
        return None if worker is None or not others or not worker.host.alive else (worker, draw.choice(others))

    def _kill_member(self) -> None:
        found = self._member()
        if found is not None and self._cluster.has_room:
            found[1].kill()

    def _stop_member(self) -> None:
        found = self._member()
        if found is not None:
            seconds = self._world.random.choice([self._hang_seconds(), self._hang_seconds(), 20.0])
            for host in (found[0].host, found[1]):  # the place of all is lost with it
                self._disturb(host, seconds)
            found[1].stop(seconds)

    def _cut_member(self) -> None:
        found, draw, servers = self._member(), self._world.random, self._cluster.servers.hosts()
        if found is not None:
            seconds = self._hang_seconds()
            for host in (found[0].host, found[1]):
                self._disturb(host, seconds)
            for server in draw.choice([servers[:1], servers[1:], servers[1:2], servers]):
                self._cluster.network.cut(found[1], server, seconds)

    def _part_members(self) -> None:
        found = self._member()
        if found is not None:
            seconds = self._hang_seconds()
            for host in found[0].members.hosts:
                self._disturb(host, seconds)
            found[0].members.part(seconds)

    # -- readers -----------------------------------------------------------------------------------------------------

    def _kill_reader(self) -> None:
        reader = self._world.random.choice(self._cluster.readers.all or [None])
        if reader is not None and reader.host.alive:
            self._cluster.readers.kill(reader)

    def _stop_reader(self) -> None:
        reader = self._world.random.choice(self._cluster.readers.all or [None])
        if reader is not None and reader.host.alive:
            seconds = self._world.random.choice([self._hang_seconds(), 20.0])
            self._disturb(reader.host, seconds)
            reader.host.stop(seconds)

    def _cut_reader(self) -> None:
        reader = self._world.random.choice(self._cluster.readers.all or [None])
        if reader is not None and reader.host.alive:
            seconds = self._hang_seconds()
            self._disturb(reader.host, seconds)
            for server in self._cluster.servers.hosts():
                self._cluster.network.cut(reader.host, server, seconds)

    def _kill_shard_in_an_edition(self) -> None:
        draw = self._world.random
        draw.choice(self._cluster.servers.shards).host.dies_at = {"edition-half-sent": draw.choice([1, 2, 3])}

    # -- relays ------------------------------------------------------------------------------------------------------

    def _relay(self) -> Host | None:
        host = self._world.random.choice(self._cluster.relays.hosts() or [None])
        return host if host is not None and host.alive else None

    def _kill_relay(self) -> None:
        host = self._relay()
        if host is not None:
            host.kill()

    def _stop_relay(self) -> None:
        host = self._relay()
        if host is not None:
            seconds = self._world.random.choice([self._hang_seconds(), 20.0])
            self._disturb(host, seconds)
            host.stop(seconds)

    def _cut_relay(self) -> None:
        """Cuts a relay off from the servers, or from its readers and other relays."""
        host, cluster = self._relay(), self._cluster
        if host is not None:
            seconds, readers = self._hang_seconds(), [each.host for each in cluster.readers.all]
            others = self._world.random.choice([cluster.servers.hosts(), [*readers, *cluster.relays.hosts()]])
            self._disturb(host, seconds)
            for each in others:
                if each is not host:
                    cluster.network.cut(host, each, seconds)

    def _kill_relay_in_an_edition(self) -> None:
        host = self._relay()
        if host is not None:
            host.dies_at = {"edition-half-relayed": self._world.random.choice([1, 2, 3])}

    # -- servers -----------------------------------------------------------------------------------------------------

    def died(self, host: Host) -> None:
        """Notes that a server has died."""
        self._disturb(host)

    def _kill_shard(self) -> None:
        self._kill(self._world.random.choice(self._cluster.servers.shards).host, AT_SHARDS)

    def _kill_coordinator(self) -> None:
        self._kill(self._cluster.servers.coordinator.host, AT_THE_COORDINATOR)

    def _kill(self, host: Host, places: tuple[str, ...]) -> None:
        draw = self._world.random
        if draw.random() < AT_A_FAILPOINT:
            host.dies_at = {draw.choice(places): draw.choice([1, 1, 2, 5])}
        else:
            host.kill()

    def _stop_shard(self) -> None:
        draw = self._world.random
        host = draw.choice(self._cluster.servers.shards).host
        if host.alive:
            seconds = draw.choice([self._hang_seconds(), self._hang_seconds(), 12.0, 25.0])
            self._disturb(host, seconds)
            host.stop(seconds)

    def _stop_coordinator(self) -> None:
        host = self._cluster.servers.coordinator.host
        if host.alive:
            seconds = self._world.random.choice([self._hang_seconds(), 12.0])
            self._disturb(host, seconds)
            host.stop(seconds)

    def _cut_coordinator(self) -> None:
        draw, servers = self._world.random, self._cluster.servers
        coordinator = servers.coordinator.host
        host = draw.choice([shard.host for shard in servers.shards if shard.host is not coordinator])
        seconds = draw.choice([self._hang_seconds(), 12.0])
        self._disturb(host, seconds)
        self._cluster.network.cut(coordinator, host, seconds)

    def _depose(self) -> None:
        """Another coordinator finds the lease over, and takes it: the one of now stood still, or was cut off."""
        self._disturb(self._cluster.servers.coordinator.host)
        self._cluster.servers.depose()

    # -- disks -------------------------------------------------------------------------------------------------------

    def _fill_disk(self) -> None:
        disks, seconds = self._cluster.servers.disks, self._hang_seconds()
        disk = self._world.random.choice(disks)
        disk.full_until = self._world.now + seconds
        self._world.trace(f"disk {disks.index(disk)} is full for {seconds:.1f} s")

    def _slow_disk(self) -> None:
        disks = self._cluster.servers.disks
        disk = self._world.random.choice(disks)
        disk.slow = self._world.random.choice([0.1, 1.0])
        self._world.trace(f"disk {disks.index(disk)} is slow: {disk.slow} s")
        self._world.at(self._hang_seconds(), lambda: setattr(disk, "slow", 0.0))

    # -- the directory -----------------------------------------------------------------------------------------------

    def _lose_file(self) -> None:
        if self._world.random.random() < 0.3:
            servers = self._cluster.servers
            servers.coordinator.host.kill()
            servers.lose_state_file()
            for run in self._cluster.running():
                run.may_end = run.may_end or "the coordinator came back without its file"

    def _keep_image(self) -> None:
        if self._on:
            self._world.at(self._world.random.uniform(0.5, 2.0), self._keep_image)
            run = self._cluster.promises.in_state_file().get(NAME)
            self._images.append((run, self._cluster.servers.storage.image()))

    def _set_back(self) -> None:
        """All servers are down, and come back with the directory as it was: not with an earlier run in it."""
        of_now = None, self._cluster.this_run.identity
        images = [image for run, image in self._images if run in of_now]
        if images and self._world.random.random() < 0.3:
            self._cluster.servers.set_back(self._world.random.choice(images))
            self._images.clear()
            for run in self._cluster.running():
                self._cluster.promises.was_set_back(run)
