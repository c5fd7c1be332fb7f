"""Processes that follow the job's weights: the real feed over the simulated network, and what is wrong with it.

What is right is noted where shards step: the bytes of each version of each bucket. Of buckets that no optimizer steps,
it is noted by the processes of rank 0, which say what is in them (buffers.py).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ps_feed.edition_client
import ps_feed.subscription
from ps_feed.edition import EditionArrays
from ps_feed.edition_client import CALL_SECONDS, KnownShards, receive
from ps_feed.subscription import Subscription
from ps_protocol.errors import PSError, TryLater
from ps_protocol.messages.editions import EditionBucket, EditionCall, WeightsAsked, WeightsHere
from ps_protocol.tensors import bytes_of
from ps_runtime.credentials import Access
from ps_runtime.pools import DaemonPool
from ps_server.core.commands import Initialise, Staged, UnitCommand
from ps_server.core.unit import Bucket
from ps_server.shard.hosted import HostedJobs
from ps_server.shard.hosted_job import HostedJob, HostedUnit
from ps_server.shard.pushes import Pushes
from ps_worker.followed_model import WeightFeed
from tests.chaos.oracle import Violation
from tests.simulation.network import Call, Network
from tests.simulation.processes import Host
from tests.simulation.runs import BUFFER, NAME, Run
from tests.simulation.servers import COORDINATOR
from tests.simulation.threads import Future, ThreadPoolExecutor
from tests.simulation.world import LOOK_SECONDS, World

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

STREAM_SECONDS = 1e6  # a reader waits for an edition as long as the shard is heard of
READING_THREADS = 2
CALM_SECONDS = 6.0  # after the last disturbance, from when on an end brings the last weights
NEWEST_WITHIN = 40.0  # seconds, in which a reader has the newest weights in quiet times

Version = tuple[str, int, int]  # the run, the bucket, its updates
Came = Callable[[EditionBucket], None]  # is told of each bucket that comes


class SimulatedShardReader:
    """ps_feed.edition_client.ShardReader over the simulated network."""

    def __init__(self, network: Network, came: Came, index: int, address: str, access: Access) -> None:
        self.index, self._address, self._network, self._came = index, address, network, came
        self._call: Call | None = None
        self._is_cancelled = self._is_closed = False

    def describe(self, asked: WeightsAsked) -> WeightsHere:
        """Asks the shard what it has."""
        if self._is_closed:
            raise TryLater("the call was cancelled")
        here: WeightsHere = self._network.call(self._address, "describe_weights", asked, seconds=CALL_SECONDS)
        return here

    def pull(
        self,
        call: EditionCall,
        take: Callable[[EditionBucket, int], None],
        alive: Callable[[int, float | None], None],
        memory_for: Callable[[EditionBucket], memoryview | None],
    ) -> None:
        """Receives buckets, as the real one does."""
        if self._is_cancelled:
            raise TryLater("the call was cancelled")
        stream = self._network.stream(
            self._address,
            "pull_edition",
            call,
            seconds=STREAM_SECONDS,
            begun=lambda begun: setattr(self, "_call", begun),
        )

        def taken(sent: EditionBucket, timeline: int) -> None:
            self._came(sent)
            take(sent, timeline)

        with contextlib.closing(stream) as parts:  # type: ignore[type-var]
            is_whole = receive(parts, taken, alive, memory_for)
        if not is_whole:
            raise TryLater("the edition ended too early")

    def allow(self) -> None:
        """Has pulls begin again."""
        self._is_cancelled = self._is_closed

    def cancel(self) -> None:
        """Ends the pull that is under way."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.deliver(None, TryLater("the call was cancelled"))

    def close(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        self.cancel()


class SimulatedPool(ThreadPoolExecutor):
    """ps_runtime.pools.DaemonPool."""

    def close(self) -> None:
        """Takes no more calls."""
        self.shutdown(wait=False)

    def join(self) -> None:
        """Does nothing."""


def replacements(world: World, network: Network, readers: Readers) -> list[tuple[Any, Any]]:
    """Returns what stands in a reader's modules for the real connections, threads and chance; see binding.bound."""

    def cluster(server: str, access: Access) -> KnownShards:
        known: KnownShards = network.call(server, "known_shards", seconds=CALL_SECONDS)
        return known

    def wait(futures: Collection[Future], timeout: float = math.inf, return_when: str = "ALL_COMPLETED") -> None:
        until = world.now + timeout

        def is_over() -> bool:
            failed = return_when == "FIRST_EXCEPTION" and any(each.done() and each._error for each in futures)
            return failed or all(each.done() for each in futures) or world.now >= until

        while not is_over():
            world.let_pass(LOOK_SECONDS / 10)

    real = ps_feed.edition_client
    return [
        (real.ShardReader, lambda *arguments: SimulatedShardReader(network, readers.came, *arguments)),
        (real.cluster, cluster),
        (real.wait, wait),
        (ps_feed.subscription._RANDOM, world.random),
        (ps_feed.subscription._open, set()),  # none is closed when the interpreter ends
        (DaemonPool, lambda count, name: SimulatedPool(world, count, name)),
    ]


class CellsModel(nn.Module):
    """The job's buckets as a model."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        for parameter in run.spec.parameters:
            zeros = torch.zeros(parameter.shape)
            if parameter.name == BUFFER:
                self.register_buffer(parameter.name, zeros)
            else:
                self.register_parameter(parameter.name, nn.Parameter(zeros, requires_grad=False))


class Reader:
    """A process that follows the job, at the servers or at relays. It is started again where it has died, and where a
    job has ended.
    """

    def __init__(self, readers: Readers, number: int, servers: str, settings: dict[str, Any]) -> None:
        self.readers, self.number, self.servers, self.settings = readers, number, servers, settings
        world = readers.cluster.world
        self.host = Host(world, f"reader {number}")
        self.subscription: Subscription | None = None
        self.read = 0
        readers.cluster.network.connect(self.host)
        self.host.spawn("main", self._main)

    def _main(self) -> None:
        while True:
            subscription = self.subscription = Subscription(self.servers, NAME, **self.settings)
            feed = WeightFeed(subscription, NAME, None)
            model = CellsModel(self.readers.cluster.this_run)
            for index in range(READING_THREADS):
                self.host.spawn(f"reading {index}", partial(self._read, feed, subscription, model))
            last: tuple[EditionArrays, int] | None = None
            for edition in subscription:
                self.readers.check(self, edition)
                if last is not None:
                    self.readers.check_order(self, *last, edition, subscription.restores)
                last = edition, subscription.restores
            self.readers.check_end(self, subscription)
            while subscription._thread.is_alive():
                self.host.world.let_pass(0.1)
            self.host.world.let_pass(self.host.world.random.uniform(0.1, 2.0))

    def _read(self, feed: WeightFeed, subscription: Subscription, model: nn.Module) -> None:
        """Reads the model again and again, as a server's requests do."""
        world, draw = self.host.world, self.host.world.random
        while not subscription.ended:
            world.let_pass(draw.expovariate(1.0))
            try:
                feed.load(model, timeout=1.0)
                with feed.reading(model, draw.choice([None, None, 2]), timeout=1.0) as version:
                    before = _sums(model)
                    world.let_pass(draw.expovariate(2.0))
                    after, edition = _sums(model), feed._models[model].edition
            except PSError:
                continue
            if before != after or edition is None or edition.version != version:
                self.readers.broken("two versions in one reading", f"{self.host.name} began with version {version}")
                return
            of_edition = {name: zlib.crc32(bytes_of(edition.tensor(name).reshape(-1))) for name in edition.names()}
            if after != of_edition:
                self.readers.broken("mixed model", f"{self.host.name}: the model is not version {version}")
            self.readers.check(self, edition.arrays)
            self.read += 1


def _sums(model: nn.Module) -> dict[str, int]:
    return {name: zlib.crc32(bytes_of(each.detach().reshape(-1))) for name, each in model.state_dict().items()}


class Readers:
    """The readers of a cluster, and what is known of the weights."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.all: list[Reader] = []
        self.known: dict[Version, dict[int, int]] = {}  # by timeline, the checksum of what shards had
        # By run, bucket and step, the checksums of what processes of rank 0 said was in it: no optimizer steps it.
        self.told: dict[tuple[str, int, int], set[int]] = {}
        self.dropped: dict[str, set[int]] = {}  # by run, the shards that had their part of it when it ended

    def begin(self, count: int) -> None:
        """Starts them."""
        draw = self.cluster.world.random
        for number in range(count):
            settings = {
                "every": draw.choice([1, 1, 3, 8]),
                "changes": draw.choice([True, True, False]),
                "period": draw.choice([0.0, 0.0, 2.0]),
            }
            self.all.append(Reader(self, number, self.cluster.relays.draw_servers(), settings))

    def kill(self, reader: Reader) -> None:
        """kill -9 of one, which is started again."""
        reader.host.kill()
        after = self.cluster.world.random.uniform(0.1, 3.0)
        self.cluster.world.at(after, lambda: self._again(reader))

    def _again(self, reader: Reader) -> None:
        self.all[reader.number] = Reader(self, reader.number, reader.servers, reader.settings)

    def broken(self, kind: str, said: str) -> None:
        """Notes a broken promise."""
        if not any(each.kind == kind for each in self.cluster.violations):
            now = round(self.cluster.world.now - 1000, 3)
            self.cluster.violated(Violation(kind, said, {"at": now}))

    # -- what shards have ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what shards have after each step, and which have a run when it ends."""
        real, real_drop, real_stage, known = HostedJob.stepped, HostedJobs.drop, Pushes._stage, self.known

        def stepped(job: HostedJob, unit: HostedUnit[Any], now: float) -> None:
            if isinstance(unit.unit, Bucket) and job.name == NAME:
                of_version = known.setdefault((job.run, unit.index, unit.rule.version), {})
                of_version[job.timeline] = zlib.crc32(bytes_of(unit.unit.weights.flat))
            real(job, unit, now)

        def staged(pushes: Pushes, job: HostedJob, command: UnitCommand, size: int, fresh: list[int]) -> Staged:
            done = real_stage(pushes, job, command, size, fresh)
            if isinstance(command, Initialise) and job.name == NAME:
                bucket = job.buckets[command.unit].unit
                if bucket.reader_version:
                    version, values = bucket.shown()
                    known.setdefault((job.run, command.unit, version), {})[job.timeline] = zlib.crc32(bytes_of(values))
            return done

        def drop(hosted: HostedJobs, name: str, run: str = "", now: float = 0.0) -> None:
            job = hosted.all().get(name)
            if name == NAME and job is not None and run in ("", job.run):
                self.dropped.setdefault(job.run, set()).add(hosted._index)
            real_drop(hosted, name, run, now)

        HostedJob.stepped, HostedJobs.drop, Pushes._stage = stepped, drop, staged  # type: ignore[method-assign]
        try:
            yield
        finally:
            HostedJob.stepped, HostedJobs.drop, Pushes._stage = real, real_drop, real_stage  # type: ignore[method-assign]

    # -- promises ------------------------------------------------------------------------------------------------------

    def check(self, reader: Reader, edition: EditionArrays) -> None:
        """Each bucket is what shards had at its version; in sync all that an optimizer steps are of one version.

        What no optimizer steps is as the run began, or as rank 0 had it at the version's step.
        """
        buckets = edition.contents.buckets
        trained = {edition.versions[index] for index, bucket in buckets.items() if not bucket.frozen}
        if self.cluster.job.rules().averaged and len(trained) != 1:
            self.broken("mixed edition", f"{reader.host.name} has the versions {dict(edition.versions)}")
        for index, bucket in buckets.items():
            version, found = edition.versions[index], zlib.crc32(edition.elements(index).data)
            key, timeline = (edition.run, index, version), edition.timelines[index]
            of_version = self.known.setdefault(key, {})
            if bucket.frozen and not version:
                timeline = 0  # as the run began, also after a rollback
            elif self._hides_timelines(reader):
                timeline = max((each for each in of_version if each <= timeline), default=timeline)
            if bucket.frozen and found not in self.told.get((edition.run, index, version), ()):
                said = f"{reader.host.name} has in bucket {index} what rank 0 did not have at step {version}"
                self.broken("other buffers", said)
            if of_version.setdefault(timeline, found) != found:  # no step makes the first version, or a restored one
                said = f"{reader.host.name} has other bytes of {key} on timeline {timeline} than the shard"
                self.broken("other bytes", said)

    def _hides_timelines(self, reader: Reader) -> bool:
        """Whether a reader does not know which timeline each bucket is on: shards may be on several, and a relay tells
        the highest."""
        return reader.servers != COORDINATOR and not self.cluster.job.rules().averaged

    def came(self, sent: EditionBucket) -> None:
        """What no optimizer steps comes once, and again only where rank 0 has told something newer since."""
        task = self.cluster.world.current
        reader = next((each for each in self.all if task is not None and each.host is task.host), None)
        subscription = reader.subscription if reader is not None else None
        edition = subscription.edition if subscription is not None else None
        if subscription is None or edition is None or subscription.is_left:
            return
        if edition.contents.buckets[sent.bucket].frozen and sent.version <= edition.versions[sent.bucket]:
            said = f"{subscription.version}: bucket {sent.bucket}, version {sent.version}, which the reader has"
            self.broken("came again", said)

    def check_order(
        self, reader: Reader, before: EditionArrays, restores: int, after: EditionArrays, restores_after: int
    ) -> None:
        """A version falls only where a rollback, or another run, is told; those of buffers never do in between."""
        is_same = (before.run, before.timeline) == (after.run, after.timeline)
        untrained = [index for index, bucket in after.contents.buckets.items() if bucket.frozen]
        risen = [index for index in untrained if after.versions[index] > before.versions[index]]
        # The last edition may have newer buffers alone. Without one clock the lowest version may also stay where
        # another bucket's rises.
        least = before.version + (1 if self.cluster.job.rules().averaged and not risen else 0)
        if is_same and any(after.versions[index] < before.versions[index] for index in untrained):
            said = f"{reader.host.name}: buffers of {dict(after.versions)} follow those of {dict(before.versions)}"
            self.broken("fell unsaid", said)
        if before.run == after.run and after.version < least and restores_after <= restores:
            said = f"{reader.host.name}: version {after.version} follows {before.version} of the same run"
            self.broken("fell unsaid", said)
        if after.run < before.run:
            self.broken("fell unsaid", f"{reader.host.name}: run {after.run} follows the later {before.run}")

    def check_end(self, reader: Reader, subscription: Subscription) -> None:
        """A feed ends with the last weights, if nothing goes wrong in these seconds, and no shard has lost its part."""
        edition, cluster = subscription.edition, self.cluster
        hosts = [reader.host, *cluster.servers.hosts(), *cluster.relays.hosts()]
        calm = self.cluster.world.now - max(
            max(host.since, host.stopped_until, cluster.faults.disturbed.get(host, 0.0)) for host in hosts
        )
        if edition is None or calm < CALM_SECONDS or not cluster.network.is_calm:
            return
        if len(self.dropped.get(edition.run, ())) < len(cluster.servers.shards):
            return  # the job has ended because a shard has lost it, or without that shard
        if self._hides_timelines(reader):
            return
        newest = dict.fromkeys(edition.timelines, 0)
        for (run, index, version), of_version in self.known.items():
            if run == edition.run and edition.timelines.get(index) in of_version:
                newest[index] = max(newest[index], version)
        if newest != dict(edition.versions):
            self.broken("not the last", f"{reader.host.name} ends with {dict(edition.versions)}, shards with {newest}")

    def have_newest(self, run: Run) -> bool:
        """Whether all readers have what shards have of a run."""
        versions = {
            index: bucket.rule.version
            for process in self.cluster.servers.shards
            for job in [process.hosted().get(run.name)]
            if job is not None
            for index, bucket in job.buckets.items()
            if bucket.unit.is_trained
        }
        lowest = min(versions.values(), default=0)
        return all(self._has(reader, run, lowest) for reader in self.all)

    def _has(self, reader: Reader, run: Run, version: int) -> bool:
        every, subscription = reader.settings["every"], reader.subscription
        if subscription is None or subscription.edition is None or not reader.host.alive:
            return False
        # The first edition is what there is; those that follow have versions that `every` divides, or are as far apart.
        return subscription.edition.run == run.identity and subscription.version > version - every
