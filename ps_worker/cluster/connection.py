"""One incarnation of a worker in its job: its place, and its connections to all shards.

A worker that joins again makes another connection: its calls carry another incarnation, shards may have moved, and they
have unmapped the segment that the older incarnation shared. A connection does not recover when its place is lost: its
owner makes the next one (participation.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from ps_frames.attending import Attending
from ps_frames.client import ClientConnection, reading_threads
from ps_frames.reading import ReadingThreads
from ps_protocol.batches import DataRange
from ps_protocol.errors import PSError
from ps_protocol.identity import Identity
from ps_protocol.layout import BucketSpec
from ps_protocol.messages.data import BucketPush, PullCall, PulledState, read_notice, write_open, write_pull
from ps_protocol.messages.workers import JoinResult, ShardMap
from ps_protocol.row_ids import Ids
from ps_runtime.background import join_within
from ps_runtime.pools import JOIN_SECONDS
from ps_runtime.quantities import ranges
from ps_runtime.signals import await_all, await_done
from ps_tables.contributions import RowValues
from ps_worker.cluster.calls import ShardCalls, open_data_connections
from ps_worker.cluster.options import JobOptions
from ps_worker.cluster.row_transport import RowStep, RowTransport
from ps_worker.cluster.shared_memory import SharedTransport, share_memory, share_rows
from ps_worker.cluster.transport import Draft, NetworkTransport, Transport, network_pushers, pullers
from ps_worker.model.flat import FlatModel
from ps_worker.tables.ahead import RowsAhead
from ps_worker.tables.server_rows import FirstRows, RowsOfShard, TableStep
from ps_worker.timeline.clocks import ClockReading
from ps_worker.timeline.recording import Timeline
from ps_worker.values import BucketAssignment, PullResult, PushResult

log = logging.getLogger("ps_worker")

LARGE_BYTES = 2**20  # of weights from one shard

T = TypeVar("T")


@dataclass
class _LastStep:
    """The last step, which may not have ended.

    pushed:     its pushes
    commits:    the pulls that commit drafts
    has_failed: one of its calls has failed: some shards may have had the step, and others not
    left:       calls of earlier steps that did not end; only `end` waits for them
    """

    pushed: Sequence[Future[PushResult]] = ()
    commits: Sequence[Future[PullResult]] = ()
    has_failed: bool = False
    left: list[Future[Any]] = field(default_factory=list)


class Connection:
    """A worker with one place (membership) in its job, connected to every shard. The model lies in shared memory if
    shards can map it.

    For the training thread. Exceptions: autograd's thread calls `draft`, while the training thread waits in backward;
    any thread may use `cut`, `close`, `place`, `clock` and `finished`.

    place:    the worker's identity and the clock at which it began
    clock:    that of the last step that was sent or finished
    finished: that of the last step that is over. A later step is pushed again from the next place, if this one is lost

    Raises NotShared if memory must be shared and cannot be, PSError if shards do not answer; nothing is open then.
    """

    def __init__(
        self, options: JobOptions, place: JoinResult, shard_map: ShardMap, model: FlatModel, timeline: Timeline
    ) -> None:
        self.place = place
        self._timeline = timeline
        timeline.connect()
        self.clock = self.finished = place.clock
        self._shard_of = shard_map.bucket_shards
        self._buckets = _own_buckets(model, shard_map)
        self._under_way: list[Future[Any]] = []
        self._last = _LastStep()
        self._draft: Draft | None = None  # of the step that is being made
        self._drafted: dict[int, Future[PushResult]] = {}  # by bucket, its draft
        self._calls = {
            index: ShardCalls(index, address, options.connect_timeout, options.access, options.shared_directory)
            for index, address in shard_map.addresses.items()
        }
        self._reading: ReadingThreads | None = None  # of data connections
        self._attending: Attending | None = None  # the training thread, to them
        self._attended: Sequence[int] = ()  # the shards from which it receives itself while it waits
        try:
            segment, sharing = share_memory(
                model.spec, model.layout, self._calls, place.identity, options.transport, options.shared_directory
            )
            if options.transport != "grpc":
                self._open_data_connections(options.transport, sharing)
            shared_rows = share_rows(
                model.spec, self._calls, place.identity, options.transport, options.shared_directory
            )
            model.move(segment)
            self._log_ways(sharing)
        except BaseException:
            self.cut()
            raise
        self._has_tables = bool(model.spec.tables)
        self._rows = RowTransport(self._calls, place.identity, model.spec, shared_rows)
        self._pushers, self._pullers = network_pushers(len(self._calls)), pullers(len(self._calls))
        self._network = {
            index: NetworkTransport(call, place.identity, model, self._pushers, self._pullers, timeline)
            for index, call in self._calls.items()
        }
        self._transports: Mapping[int, Transport] = {
            index: SharedTransport(call, place.identity, model, self._pullers, timeline)
            if index in sharing
            else self._network[index]
            for index, call in self._calls.items()
        }

    @cached_property
    def has_drafts(self) -> bool:
        """Whether any transport can send drafts."""
        return any(transport.has_drafts for transport in self._transports.values())

    @property
    def shards(self) -> int:
        """How many shards the job has."""
        return len(self._calls)

    def _log_ways(self, sharing: Collection[int]) -> None:
        ways: dict[str, list[int]] = {}
        for index, calls in self._calls.items():
            open_way = "over data connections" if calls.is_connected else "by gRPC"
            ways.setdefault("in shared memory" if index in sharing else open_way, []).append(index)
        for way, shards in ways.items():
            log.info("buckets travel %s to shards %s", way, ranges(shards))

    def _open_data_connections(self, transport: str, sharing: Collection[int]) -> None:
        self._reading = reading_threads()
        open_data_connections(self._calls.values(), write_open(self.place.identity), transport, self._reading)
        self._attending, self._attended = Attending(), self._received_here(sharing)

    def _received_here(self, sharing: Collection[int]) -> list[int]:
        """Returns the shards from which the training thread itself receives. Only one of them may send large messages:
        writing these to the model needs several cores.
        """
        large = [
            index
            for index, buckets in self._buckets.items()
            if index not in sharing and sum(bucket.nbytes for bucket in buckets) >= LARGE_BYTES
        ]
        return [index for index in self._calls if index not in large[1:]]

    def _attended_now(self) -> list[ClientConnection]:
        return [data for index in self._attended if (data := self._calls[index].data()) is not None]

    def _begin_wait(self) -> None:
        """Announces that `settle` follows at once: no other thread need be woken for answers."""
        if self._attending is not None:
            self._attending.begin(self._attended_now())

    def read_clocks(self) -> None:
        """Reads the shards' clocks for the timeline, if they are due. A shard that does not answer is left out."""
        clocks = self._timeline.clocks
        if clocks.are_due:
            clocks.read(list(self._readings()))

    def _readings(self) -> Iterator[tuple[int, ClockReading]]:
        for index, calls in self._calls.items():
            try:
                yield from ((index, reading) for reading in read_clock(calls, self.place.identity))
            except PSError as error:
                log.info("the timeline has no times of shard %d: %s", index, error)

    def push_initial(self, buckets: Sequence[BucketSpec]) -> list[Future[PushResult]]:
        """Sends initial values."""
        return self._note([self._network[self._shard_of[b.index]].push_initial(b) for b in buckets])

    def tell(self, bucket: BucketSpec, number: int, payload: memoryview) -> Future[PushResult]:
        """Sends a bucket that no optimizer steps, for readers of the weights. No step waits for it.

        number: the step that the values are of; shards keep the values with the highest number
        """
        return self._network[self._shard_of[bucket.index]].tell(number, bucket, payload)

    def begin_tables(self, tables: Sequence[FirstRows], ask: bool = False) -> list[Future[int | None]]:
        """Sends the initial content of all tables to every shard; see RowTransport.begin."""
        return self._note(self._rows.begin(tables, ask))

    def draft(self, bucket: BucketSpec) -> int:
        """Sends a bucket's gradient before the step, in which it may still change. Returns the bytes that its shard
        keeps until then; 0: it was not sent.
        """
        if self._draft is None:
            self._draft = Draft()
        if self._draft.is_dropped:
            return 0
        push = BucketPush(bucket, self.clock + 1, empty=False, absent=(), groups={})
        future = self._transports[self._shard_of[bucket.index]].draft(push, self._draft)
        if future is None:
            return 0
        self._drafted[bucket.index] = future
        return bucket.nbytes

    def drop_drafts(self) -> None:
        """Drops all drafts: the step that they belong to is not made.

        No draft is sent until the next step. Otherwise a shard that has an old draft of the same clock could take it
        for the one that the step commits, if the commit comes first; and where a step was interrupted, a draft of the
        next one could overtake its pushes, and be refused.
        """
        dropped = self._draft or Draft()
        self._settle_drafts(False)
        dropped.settle(False)
        self._draft = dropped

    def _settle_drafts(self, count: bool) -> dict[int, Future[PushResult]]:
        """Decides whether drafts count; returns those that do, by bucket."""
        draft, drafted, self._draft, self._drafted = self._draft, self._drafted, None, {}
        if draft is not None:
            draft.settle(count)
        if count:
            return drafted
        self._last.left = [future for future in (*self._last.left, *drafted.values()) if not future.done()]
        return {}

    def assign(self, clock: int, assignment: BucketAssignment) -> None:
        """Sends an assignment, which takes effect with the step of that clock."""
        transport = self._network[self._shard_of[assignment.bucket.index]]
        self._under_way.append(transport.assign(clock, assignment))

    def assign_rows(self, clock: int, table: int, rows: RowValues, begun: int | None) -> None:
        """Sends rows of a table that the script has set, which take effect with the step of that clock.

        begun: as in `push_pull`
        """
        had = None if begun is None else partial(self._has_had, begun)
        self._under_way += self._rows.assign(clock, table, rows, had)

    def forget_assigned_rows(self) -> None:
        """Leaves the rows that `assign_rows` has sent out of the next step, because some were refused."""
        self._rows.forget_assigned()

    def pull_state(self, land: Callable[[PulledState], None]) -> None:
        """Pulls the optimizer state of all buckets. land: is called with each; see `NetworkTransport.pull_state`"""
        for index, buckets in self._buckets.items():
            wanted = [bucket for bucket in buckets if not bucket.frozen]
            if wanted:
                self._under_way.append(self._network[index].pull_state(wanted, land))

    def pull_rows(self, table: int, ids: Ids, out: torch.Tensor, ends: Ids) -> list[Future[PullResult]]:
        """Pulls rows at this clock into `out`; see Servers.pull_rows. `settle` follows at once."""
        self._begin_wait()
        return self._note(self._rows.pull(self.clock, table, ids, out, ends))

    def pull_table(self, table: int, count_only: bool) -> list[Future[RowsOfShard]]:
        """Pulls a table at this clock, from each shard its part. count_only: only the number of rows"""
        return self._note(self._rows.pull_table(self.clock, table, count_only))

    def pull(self, frozen: bool = False, all_staged: bool = False) -> list[Future[PullResult]]:
        """Pulls weights at this clock from every shard.

        frozen:     pull the frozen buckets; False: those that an optimizer steps
        all_staged: the weights must have every update, of any worker, that is staged when the call comes to the shard
        """
        pulls = []
        for index, buckets in self._buckets.items():
            wanted = [bucket for bucket in buckets if bucket.frozen == frozen]
            if wanted:
                ways = self._network if frozen else self._transports
                pulls.append(ways[index].pull(self.clock, wanted, all_staged))
        return self._note(pulls)

    def push_pull(
        self,
        pushes: Sequence[BucketPush],
        drafts_count: bool,
        rows: Sequence[TableStep],
        ranges: Sequence[DataRange],
        ahead: Sequence[RowsAhead] = (),
        is_part: bool = False,
        begun: int | None = None,
        is_awaited: bool = False,
    ) -> tuple[list[Future[PushResult]], list[Future[PullResult]], list[Future[PullResult]]]:
        """Pushes the next step, and pulls the weights at its clock from every shard.

        pushes:       one for every trained bucket; if the model is sent fragment by fragment, for those of one fragment
        drafts_count: the drafts are unchanged: they are committed and not sent again
        rows:         the pushes of every table
        ranges:       the leased data that the step used
        ahead:        rows to pull at the same time; `settle` waits for them only after `await_with_others`
        is_part:      other fragments of the step follow: `clock` stays as it is
        begun:        the clock at which the step was first pushed, from a place that is lost. A shard that has had its
                      part gets a skip. None: this is the first time
        is_awaited:   `settle` follows at once: no other thread need be woken for answers

        Returns the pushes, the pulls, and those of the pulls that commit drafts: such drafts count once their pull has
        landed.
        """
        step = self._timeline.step  # another thread may end the timeline
        if step is not None:
            step.pushing()
        if is_awaited:
            self._begin_wait()
        drafted = self._settle_drafts(drafts_count)
        # The clock rises before any call is sent: after a heartbeat with the old clock, the coordinator would count a
        # step as lost that a shard has staged.
        clock = self.clock + 1
        self.clock = clock - is_part
        sent = RowStep([], [], [])
        if self._has_tables:
            had = None if begun is None else partial(self._has_had, begun)
            trains = any(not bucket.frozen for buckets in self._buckets.values() for bucket in buckets)
            sent = self._rows.step(clock, rows, ranges, ahead, ends=bool(rows) and not trains, had=had)
        self._last.left = [future for future in self._last.left if not future.done()] + sent.ahead
        pushed = sent.pushed
        if begun is not None:
            pushes = [_skip(push) if self.has_had(push.bucket, begun) else push for push in pushes]
        pulled: list[Future[PullResult]] = []
        commits: list[Future[PullResult]] = []
        rest: list[BucketPush] = []
        # The pulls are asked for first: the shards hold them until their own pushes are in and the mode admits them.
        for index, transport in self._transports.items():
            own = [push for push in pushes if self._shard_of[push.bucket.index] == index]
            if own:
                sending = transport.exchange(clock, own, [push.bucket for push in own], drafted)
                pushed += sending.pushes
                pulled.append(sending.pull)
                if sending.commits:
                    commits.append(sending.pull)
                rest += sending.rest
        # In one order over all shards.
        for push in sorted(rest, key=lambda push: push.bucket.index):
            pushed.append(self._transports[self._shard_of[push.bucket.index]].push(push))
        pulled = pulled or sent.ended
        self._last.pushed, self._last.commits = pushed, commits
        self._under_way += [*pushed, *pulled]
        return pushed, pulled, commits

    def end_step(self) -> None:
        """Records that the last step is over: it is not pushed again from a later place."""
        self.finished = self.clock

    def has_had(self, bucket: BucketSpec, clock: int) -> bool:
        """Whether a bucket already had this worker's push of `clock` when the worker took this place."""
        return self.place.has_had(self._shard_of[bucket.index], bucket.index, clock)

    def _has_had(self, clock: int, shard: int, table: int) -> bool:
        """Whether a table on one shard already had this worker's push of `clock` when the worker took this place."""
        return self.place.has_had(shard, len(self._shard_of) + table, clock)

    def push_apart(self, pushes: Sequence[BucketPush]) -> list[Future[PushResult]]:
        """Sends empty pushes for a step that failed or is left out, without a pull. They go over the network, because
        the segment may still have the step's gradients.
        """
        return self._note([self._network[self._shard_of[push.bucket.index]].push(push) for push in pushes])

    def _note(self, futures: list[Future[T]]) -> list[Future[T]]:
        self._under_way += futures
        return futures

    def await_with_others(self, calls: Sequence[Future[Any]]) -> None:
        """Adds calls for which the next `settle` waits."""
        self._under_way += calls

    def fail(self, clock: int | None = None) -> None:
        """Marks the last step as failed: some shards may have it, and others not.

        clock: the clock of the failed step. It is needed if this process had sent nothing of that step yet, but other
               members of its group may have. None: the failed step is the one that this process sent last
        """
        self.clock = self.clock if clock is None else clock
        self._last.has_failed = True

    def resume(self) -> bool:
        """Ends the last step, if it has not ended, so that all shards are at its clock before the next one. Returns
        whether the caller must `settle` calls.

        An interrupt has left pushes under way, which the next step must not overtake; `settle` raises the error of one
        that has failed since. If a call is known to have failed, buckets that have not had the step get a skip for it.
        """
        if not self._last.has_failed:
            calls: list[Future[Any]] = [*self._last.pushed, *self._last.commits]
            calls = [call for call in calls if not _is_through(call)]
            self._under_way += calls
            self._last.has_failed = any(call.done() for call in calls)
            return bool(calls)
        # Not for pulls: they wait for other workers, and those may wait for what this one sends in place of the step.
        await_done([push for push in self._last.pushed if not push.done()])
        trained = [bucket for buckets in self._buckets.values() for bucket in buckets if not bucket.frozen]
        rows = self._rows.leave_out(self.clock)
        skips = self.push_apart(
            [BucketPush(bucket, self.clock, empty=True, absent=(), groups={}) for bucket in trained]
        )
        self._last = _LastStep([*skips, *self._note(rows)], left=self._last.left)
        return True

    @property
    def is_at_rest(self) -> bool:
        """Whether `resume` and `settle` have nothing to do, except for what was asked for ahead."""
        return not (self._under_way or self._last.has_failed)

    def settle(self) -> BaseException | None:
        """Waits for all calls under way. Returns the first error as soon as there is one; None if there was none."""
        # One wait for all: each wait looks at every future, and there may be thousands.
        if self._attending is None:
            await_all(self._under_way)
        else:
            self._attending.wait(self._under_way, self._attending.begun or self._attended_now())
        error: BaseException | None = None
        for future in self._under_way:
            if not future.done():
                self._last.left.append(future)
            elif error is None:
                error = future.exception()
        self._under_way = []
        return error

    def cut(self) -> None:
        """Aborts all calls under way. For any thread."""
        draft = self._draft
        if draft is not None:
            draft.settle(False)
        if self._reading is not None:
            self._reading.close()
        for call in self._calls.values():
            call.close()

    def close(self) -> None:
        """Ends every call, thread and connection."""
        self.cut()
        for transport in {*self._network.values(), *self._transports.values()}:
            transport.close()
        for pool in (self._pushers, self._pullers):
            pool.close()
        self._rows.close()
        join_within(self._threads(), JOIN_SECONDS)

    def _threads(self) -> Iterator[threading.Thread]:
        yield from (*self._pushers.threads, *self._pullers.threads, *self._rows.threads)
        if self._reading is not None:
            yield from self._reading.threads
        for calls in self._calls.values():
            yield from calls.threads
        for transport in {*self._network.values(), *self._transports.values()}:
            yield from transport.threads

    def end(self, patience: float = 0.0) -> None:
        """Closes the connection, and waits until no call reads or writes the model any more.

        patience: for so many seconds it waits for calls under way before that. A shard that has the model's memory
                  mapped may write the weights of such a call there even after the connection is closed.
        """
        try:
            if patience:
                if self._attending is not None:
                    self._attending.end()  # other threads receive
                wait([*self._under_way, *self._last.left], patience)
        finally:
            self.close()
        self.drop_drafts()
        wait([*self._under_way, *self._last.left])
        self._under_way, self._last.left = [], []


def _own_buckets(model: FlatModel, shard_map: ShardMap) -> dict[int, list[BucketSpec]]:
    """Returns the buckets that this process pushes or pulls, by shard."""
    found: dict[int, list[BucketSpec]] = {index: [] for index in shard_map.addresses}
    frozen = model.frozen()
    for bucket, shard in zip(model.layout.buckets, shard_map.bucket_shards, strict=True):
        # Of what a group's first member has and nobody trains, others may have some, too: buffers, for example.
        has_some = bucket.frozen and any(part.parameter in frozen for part in bucket.slices)
        if model.layout.member in (None, bucket.member) or (has_some and not bucket.member):
            found[shard].append(bucket)
    return found


def _is_through(call: Future[Any]) -> bool:
    """Whether a call has succeeded."""
    return call.done() and not call.cancelled() and call.exception() is None


def _skip(push: BucketPush) -> BucketPush:
    """Returns an empty push in place of this one."""
    return replace(push, empty=True, absent=())


READINGS = 8
READING_SECONDS = 2.0


def read_clock(calls: ShardCalls, worker: Identity) -> Iterator[ClockReading]:
    """Yields readings of a shard's clock; none if its version does not tell it. Raises PSError."""
    request = write_pull(PullCall(worker, 0, (), times_wanted=True))
    for _ in range(READINGS):
        asked = time.perf_counter()
        message = calls.first_of("Pull", request, READING_SECONDS)
        answered = time.perf_counter()
        clock = read_notice(message).clock if message is not None else None
        if clock is None:
            return
        yield ClockReading(asked, answered, clock)
