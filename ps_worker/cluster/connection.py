"""The way to every shard, for one incarnation of a worker.

A worker that joins again opens a new one: its calls carry another incarnation, shards may have moved, and they have let
go of the segment that the older incarnation shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec, Layout
from ps_runtime.credentials import PLAINTEXT, Access
from ps_worker.cluster.calls import ShardCalls
from ps_worker.cluster.network import NetworkTransport, network_pushers
from ps_worker.cluster.shared_memory import SharedTransport, share_memory
from ps_worker.cluster.threads import DaemonPool
from ps_worker.cluster.transport import Draft, Transport
from ps_worker.model.flat import FlatModel
from ps_worker.values import BucketPush, Identity, PullResult, PushResult, ShardMap, StateChunk

T = TypeVar("T")


@dataclass(frozen=True)
class ConnectionOptions:
    """How shards are reached.

    timeout:   seconds without any progress after which a call gives up
    transport: "shm", "grpc", or "auto": shared memory with every shard that can see this worker's
    shared_directory: where that memory is a file if it must be
    """

    timeout: float
    transport: str
    shared_directory: Path
    access: Access = PLAINTEXT


class Shards:
    """Connections to every shard of a job. Between making it and `open` its `segment` is there to be moved into.

    Raises what `share_memory` does; nothing is open then.
    """

    def __init__(
        self, link: ConnectionOptions, who: Identity, spec: JobSpec, layout: Layout, shard_map: ShardMap
    ) -> None:
        self.who = who
        self._shard_of = shard_map.bucket_shards
        self._calls = {
            index: ShardCalls(index, address, link.timeout, link.access)
            for index, address in shard_map.addresses.items()
        }
        self._buckets: dict[int, list[BucketSpec]] = {index: [] for index in self._calls}
        for bucket, shard in zip(layout.buckets, shard_map.bucket_shards, strict=True):
            self._buckets[shard].append(bucket)
        self._pushers: DaemonPool | None = None
        self._network: dict[int, NetworkTransport] = {}
        self._transports: Mapping[int, Transport] = {}
        self._under_way: list[Future[Any]] = []
        self._left: list[Future[Any]] = []  # of steps that failed: nobody waits for them but `end`
        self._draft: Draft | None = None  # of the step that is being made
        self._drafted: dict[int, Future[PushResult]] = {}  # by bucket, what was sent of it
        try:
            self.segment, self._sharing = share_memory(
                spec, layout, self._calls, who, link.transport, link.shared_directory
            )
        except BaseException:
            self.cut()
            raise

    def open(self, flat: FlatModel) -> None:
        """Buckets may travel from here on, from and into the model."""
        pushers = self._pushers = network_pushers(len(self._calls))
        self._network = {index: NetworkTransport(call, self.who, flat, pushers) for index, call in self._calls.items()}
        self._transports = {
            index: SharedTransport(call, self.who, flat) if index in self._sharing else self._network[index]
            for index, call in self._calls.items()
        }

    def push_initial(self, buckets: Sequence[BucketSpec]) -> list[Future[PushResult]]:
        """Sends initial values."""
        return self._note([self._network[self._shard_of[b.index]].push_initial(b) for b in buckets])

    def draft(self, push: BucketPush) -> int:
        """Sends a bucket that may still change; returns how many bytes of it its shard keeps meanwhile."""
        if self._draft is None:
            self._draft = Draft()
        future = self._transports[self._shard_of[push.bucket.index]].draft(push, self._draft)
        if future is None:
            return 0
        self._drafted[push.bucket.index] = future
        return push.bucket.nbytes

    def drop_drafts(self) -> None:
        """What has left as a draft does not count."""
        self._settle_drafts(False)

    def _settle_drafts(self, count: bool) -> dict[int, Future[PushResult]]:
        """Says whether drafts count; returns those that do, by bucket."""
        draft, drafted, self._draft, self._drafted = self._draft, self._drafted, None, {}
        if draft is not None:
            draft.settle(count)
        if count:
            return drafted
        self._left = [future for future in (*self._left, *drafted.values()) if not future.done()]
        return {}

    def assign(
        self, clock: int, bucket: BucketSpec, absent: Sequence[int], state: str | None, payload: memoryview | None
    ) -> None:
        """Sends what the script has set in a bucket before its step of that clock; see `convert.assignment`."""
        transport = self._network[self._shard_of[bucket.index]]
        self._under_way.append(transport.assign(clock, bucket, absent, state, payload))

    def pull_state(self, land: Callable[[StateChunk], None]) -> None:
        """Fetches the optimizer state of all buckets; see `NetworkTransport.pull_state`."""
        for index, buckets in self._buckets.items():
            wanted = [bucket for bucket in buckets if not bucket.held]
            if wanted:
                self._under_way.append(self._network[index].pull_state(wanted, land))

    def pull(self, clock: int, held: bool = False) -> list[Future[PullResult]]:
        """Asks every shard for the weights at a clock; `held`: for what no optimizer steps."""
        found = []
        for index, buckets in self._buckets.items():
            wanted = [bucket for bucket in buckets if bucket.held == held]
            if wanted:
                found.append((self._network if held else self._transports)[index].pull(clock, wanted))
        return self._note(found)

    def push_pull(
        self, clock: int, pushes: Sequence[BucketPush], drafts_count: bool
    ) -> tuple[list[Future[PushResult]], list[Future[PullResult]], list[Future[PullResult]]]:
        """Sends a step, and asks every shard for the weights at its clock.

        pushes:       of every bucket that trains
        drafts_count: what has left as a draft is as it was: it is not sent again

        Returns the pushes, the pulls, and those of the pulls that made something count: what they made count does so
        once they have landed.
        """
        drafted = self._settle_drafts(drafts_count)
        pushed: list[Future[PushResult]] = []
        pulled: list[Future[PullResult]] = []
        committing: list[Future[PullResult]] = []
        rest: list[BucketPush] = []
        # The pulls are asked for first: the shards hold them until their own pushes are in and the mode admits them.
        for index, transport in self._transports.items():
            wanted = [bucket for bucket in self._buckets[index] if not bucket.held]
            mine = [push for push in pushes if self._shard_of[push.bucket.index] == index]
            both = transport.push_pull(clock, mine, wanted) if wanted else None
            if both is not None:
                pushed += both[0]
                pulled.append(both[1])
            elif wanted and index in self._sharing:
                rest += mine
                pulled.append(transport.pull(clock, wanted))
            elif wanted:
                committed = [push for push in mine if push.empty or push.bucket.index in drafted]
                pushed += [drafted[push.bucket.index] for push in committed if not push.empty]
                rest += [push for push in mine if not push.empty and push.bucket.index not in drafted]
                pulled.append(transport.pull(clock, wanted, committed))
                committing += [pulled[-1]] if committed else []
        # In one order over all shards.
        for push in sorted(rest, key=lambda push: push.bucket.index):
            pushed.append(self._transports[self._shard_of[push.bucket.index]].push(push))
        self._under_way += [*pushed, *pulled]
        return pushed, pulled, committing

    def _note(self, futures: list[Future[T]]) -> list[Future[T]]:
        self._under_way += futures
        return futures

    def settle(self) -> BaseException | None:
        """Waits for all that is under way; the first error of any as soon as it is, else None."""
        # One wait for all: each wait looks at every future, and there may be thousands.
        done, _ = wait(self._under_way, return_when=FIRST_EXCEPTION)
        error = next((found for future in done if (found := future.exception()) is not None), None)
        self._left += [future for future in self._under_way if not future.done()]
        self._under_way = []
        return error

    def cut(self) -> None:
        """Ends every call that is under way; from any thread."""
        draft = self._draft
        if draft is not None:
            draft.settle(False)
        for call in self._calls.values():
            call.close()

    def close(self) -> None:
        """Ends every call, thread and connection."""
        self.cut()
        transports: dict[int, Transport] = {id(t): t for t in (*self._network.values(), *self._transports.values())}
        for transport in transports.values():
            transport.close()
        if self._pushers is not None:
            self._pushers.close()

    def end(self) -> None:
        """As `close`; when it returns, nothing lands in the model or is read from it any more."""
        self.close()
        self.drop_drafts()
        wait([*self._under_way, *self._left])
        self._under_way, self._left = [], []
