"""Pushes: each is checked, then staged, then its bucket is scheduled, and applied.

check      outside of every lock: sizes, hyper-parameters, whether a gradient is finite; all pushes of a call first
stage      under the job's lock, for microseconds: exactly once, if there is room
schedule   has the bucket's updates applied, also where a later push of the same call is refused
apply      adds contributions and steps optimizers, on the shard's threads or on the one of the call

The thread of the call does the first three, and waits for no worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest, NotShared, PSError, TryLater
from ps_protocol.framing import Buffer
from ps_protocol.identity import Identity
from ps_protocol.job import BLOCK_WIRES
from ps_protocol.messages.data import PullCall, PushCall, PushKind
from ps_protocol.messages.repeated import Groups
from ps_protocol.messages.rows import RowsPull, RowsPush, TablePush
from ps_protocol.segment_layout import RowMemory, SegmentMap, SegmentOffer
from ps_protocol.tensors import bytes_of
from ps_runtime.background import note_error
from ps_server.core.checking_rows import PushedRows
from ps_server.core.commands import Assign, Commit, Initialise, PushCommand, Staged, StageGradient, UnitCommand
from ps_server.core.consistency import Add, Step
from ps_server.core.validation import check_once
from ps_server.failpoints import armed, failpoint
from ps_server.shard.hosted_job import Attached, AttachedRows, HostedJob, HostedUnit
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Outbox
from ps_server.shard.pulls import Pulls
from ps_server.shard.reader_room import check_reader_buffers
from ps_server.shard.segments import attach
from ps_server.shard.threads import Task, Threads

log = logging.getLogger("ps_server")


@dataclass
class Checked:
    """An exchange that was checked, for those that differ from it in their clock and hyper-parameters alone.

    job, segment: with which it was; with others it is checked anew
    made:         its hyper-parameters, and the commands that stage it, each with the bytes of its payload
    """

    job: HostedJob | None = None
    segment: SegmentMap | None = None
    made: tuple[Groups, Sequence[tuple[StageGradient | Commit, int]]] = ({}, ())

    def commands_of(
        self, job: HostedJob, call: PushCall, principal: str, segment: SegmentMap | None
    ) -> Sequence[tuple[UnitCommand, int]]:
        """Returns the commands that stage a call, each with the bytes of its payload. Checks it if need be."""
        if self.job is job and self.segment is segment:
            worker, clock = call.worker, call.clock
            groups, made = self.made
            if call.groups is not groups:
                job.partition.checker.check_groups(call)
                made = [(each.with_groups(call.groups), size) for each, size in made]
                self.made = call.groups, made
            return [(replace(each, worker=worker, clock=clock, principal=principal), size) for each, size in made]
        commands = _check(job, call, principal, segment)
        if job.partition.checker.holds_for_all_clocks(call):
            kept = []
            for each, size in commands:
                assert isinstance(each, StageGradient | Commit), each
                kept.append((each, size))
            self.made, self.job, self.segment = (call.groups, kept), job, segment
        return commands


class Pushes:
    """The pushes of one shard. Methods may be called from any thread."""

    def __init__(self, metrics: ShardMetrics, pulls: Pulls, updates: Updates, shared_directory: Path) -> None:
        self._metrics = metrics
        self._pulls = pulls
        self._updates = updates
        self._shared_directory = shared_directory

    def push(self, job: HostedJob, call: PushCall, principal: str) -> list[Staged]:
        """Stages the buckets of a call, and schedules their updates. Returns a Staged for each bucket."""
        fresh: list[int] = []
        try:
            return self._stage_all(job, call, principal, fresh)
        finally:
            self._updates.schedule(job, fresh)

    def push_rows(self, job: HostedJob, push: RowsPush | TablePush, principal: str) -> Staged:
        """Stages rows of a worker's step, or of a table's initial content. The rows of a step count once all their
        messages came.

        Then the table's updates are scheduled, or the calling thread applies them; see `_apply_rows`.
        """
        fresh: list[int] = []
        try:
            return self._stage_rows(job, push, principal, fresh)
        finally:
            self._apply_rows(job, fresh, isinstance(push, RowsPush) and push.place is not None)

    def exchange_rows(self, job: HostedJob, push: RowsPush, principal: str, wanted: RowsPull, outbox: Outbox) -> None:
        """Stages pushed rows, then begins a pull of rows of the same table, whose answer goes to `outbox`.

        The table's updates come last, as in `push_rows`.
        """
        pull, table = self._pulls.check_rows(job, wanted, outbox, principal, shares=push.place is not None)
        pull.with_pushes = True
        fresh: list[int] = []
        try:
            self._stage_rows(job, push, principal, fresh, is_live=True, memory=pull.row_memory)
            self._pulls.ask(job, pull, [table])
        finally:
            self._apply_rows(job, fresh, pull.row_memory is not None)

    def _apply_rows(self, job: HostedJob, fresh: Sequence[int], in_segment: bool) -> None:
        """Has the updates of tables made: by the calling thread if the call's rows are in the worker's segment.

        A thread that applies goes on for as long as other workers push, and receives nothing meanwhile. Rows in
        messages take longer to receive, so an apply thread makes their updates.
        """
        if in_segment:
            self._updates.run_here(job, fresh)
        else:
            self._updates.schedule(job, fresh)

    def _stage_rows(
        self,
        job: HostedJob,
        push: RowsPush | TablePush,
        principal: str,
        fresh: list[int],
        is_live: bool = False,
        memory: RowMemory | None = None,
    ) -> Staged:
        """Checks pushed rows, then stages them.

        fresh:   takes their table if something may be applied now
        is_live: see _stage_all
        memory:  the worker's segment for rows; None: not looked up yet
        """
        try:
            command: UnitCommand
            pushed: PushedRows | None = None
            if isinstance(push, RowsPush) and push.place is not None:  # only a live worker has memory here
                pushed = job.pushed(push, push.place, memory)
            elif not is_live:
                job.check_worker(push.worker)
            if isinstance(push, TablePush):
                command = job.partition.row_checker.beginning(push)
            else:
                command = job.partition.row_checker.push(push, principal, pushed)
            return self._stage(job, command, len(push.payload if pushed is None else pushed.payload), fresh)
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise

    def _stage(self, job: HostedJob, command: UnitCommand, size: int, fresh: list[int]) -> Staged:
        """Stages a checked push, and sends the pulls that it admits.

        size:  bytes of its payload
        fresh: takes its unit if something may be applied now, whatever fails then: sent again, it is a repeat, and
               nothing else would schedule it
        """
        if armed:
            failpoint("push-checked")
        if isinstance(command, Initialise):
            reader_bytes = job.buckets[command.unit].unit.reader_bytes(command)
            if reader_bytes:
                check_reader_buffers(job.name, reader_bytes, job.promised)
        with job.lock:
            if isinstance(command, PushCommand):
                job.check_taken(command.worker.rank, command.unit, command.clock)
                if isinstance(command, Assign) and command.assignment.next is not None:
                    job.optimizer_room.make(job.buckets[command.unit].unit.spec, command.assignment.next)
            staged = job.partition.execute(command)
            is_fresh = not (staged.duplicate or staged.kept)  # it takes effect now: there may be something to apply
            if is_fresh and isinstance(command, PushCommand) and job.times.follows_any((command.worker.rank,)):
                job.times.staged(command.worker.rank, command.unit, command.clock, self._pulls.now())
        if is_fresh:
            fresh.append(command.unit)
        if armed:
            failpoint("push-staged")
        self._metrics.pushed(job.name, size, staged)
        if is_fresh and job.units[command.unit].waiters:
            self._pulls.release(job, job.units[command.unit])  # or they learn what they wait for now
        return staged

    def exchange(
        self, job: HostedJob, call: PushCall, principal: str, wanted: PullCall, outbox: Outbox, checked: Checked
    ) -> None:
        """Stages the buckets of a call, then begins a pull. The answers go to `outbox`.

        If the pull goes into a segment, the calling thread then applies the updates that can be made.

        checked: what is known of an exchange that has differed in its clock and hyper-parameters alone
        """
        pull = self._pulls.check(job, wanted, outbox, principal, is_checked=checked.job is job)
        pull.with_pushes = wanted.in_segment
        fresh: list[int] = []
        if not wanted.in_segment:
            try:
                self._stage_all(job, call, principal, fresh, checked, is_live=True)
            finally:
                self._updates.schedule(job, fresh)  # apply threads begin while the pull looks at each of its buckets
            self._pulls.ask(job, pull, wanted.buckets)
            return
        try:
            self._stage_all(job, call, principal, fresh, checked, is_live=True, segment=pull.segment)
            self._pulls.ask(job, pull, wanted.buckets)
        finally:
            self._updates.run_here(job, fresh)

    def attach(self, job: HostedJob, worker: Identity, offer: SegmentOffer) -> None:
        """Maps the segment that a live worker offers.

        Raises NotShared if it cannot be mapped; TryLater while an earlier call of the worker maps one, so that a worker
        holds one thread at most.
        """
        in_blocks = {job.partition.spec.gradient_wire, job.partition.spec.weight_wire}.intersection(BLOCK_WIRES)
        if in_blocks and not offer.row_bytes:
            raise NotShared(f"buckets of job {job.name!r} travel as {in_blocks.pop()}, which is for messages alone")
        process, incarnation = (worker.rank, worker.member), worker.incarnation
        with job.lock:
            job.partition.check_worker(worker)
            if process in job.of_workers.attaching:
                raise TryLater(f"worker {worker.rank} is handing over a segment already")
            job.of_workers.attaching.add(process)
        try:
            memory = attach(offer, job.segment_bytes(offer.row_bytes), self._shared_directory)
            with job.lock:
                job.partition.check_worker(worker)
                if offer.row_bytes:
                    job.of_workers.row_memory[process] = AttachedRows(incarnation, RowMemory(memory))
                else:
                    job.of_workers.segments[process] = Attached(incarnation, SegmentMap(memory, job.plan))
        finally:
            with job.lock:
                job.of_workers.attaching.discard(process)

    def _stage_all(
        self,
        job: HostedJob,
        call: PushCall,
        principal: str,
        fresh: list[int],
        checked: Checked | None = None,
        is_live: bool = False,
        segment: SegmentMap | None = None,
    ) -> list[Staged]:
        """Checks all buckets of a call, then stages each: if a bucket is invalid, none is staged.

        fresh:   takes the buckets that are staged, also those before another that was refused
        checked: what is known of a call that has differed in its clock and hyper-parameters alone; None: nothing
        is_live: the worker was found to be live just now. If it is not any more, its commands are refused
        segment: the segment of a live worker; None: it is not looked up yet, or the payload is in the message
        """
        answers: list[Staged] = []
        try:
            if call.payload is None and segment is None:
                segment = job.segment(call.worker)
            elif not is_live:
                job.check_worker(call.worker)
            check = _check if checked is None else checked.commands_of
            answers.extend(self._stage(job, *each, fresh) for each in check(job, call, principal, segment))
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise
        return answers


def _check(job: HostedJob, call: PushCall, principal: str, segment: SegmentMap | None) -> list[tuple[UnitCommand, int]]:
    """Checks a call; returns the commands that stage it, each with the bytes of its payload."""
    check_once([bucket.bucket for bucket in call.buckets], "a push names each bucket")
    payloads = _payloads(job, call, segment)
    return [
        (job.partition.checker.check(call, bucket, payload, principal), len(payload))
        for bucket, payload in zip(call.buckets, payloads, strict=True)
    ]


def _payloads(job: HostedJob, call: PushCall, segment: SegmentMap | None) -> list[Buffer]:
    """Returns the payload of each bucket of a call: a view into the worker's segment, or into the call's own."""
    checker = job.partition.checker
    if call.payload is None:
        assert segment is not None
        return [
            b"" if bucket.kind is PushKind.SKIP else bytes_of(segment.gradient(checker.trained(bucket.bucket)))
            for bucket in call.buckets
        ]
    if len(call.buckets) == 1:  # whose check says what was expected of all of it
        return [call.payload]
    payloads, position = [], 0
    for bucket in call.buckets:
        end = position + checker.payload_size(bucket.bucket, bucket.kind, bucket.state, call.stage)
        payloads.append(call.payload[position:end])
        position = end
    if len(call.payload) != position:
        raise InvalidRequest(f"{len(call.buckets)} buckets: expected {position} bytes in all, got {len(call.payload)}")
    return payloads


# -- applying what is staged -------------------------------------------------------------------------------------------

# An update rule (core/consistency.py) names a unit's next operation: to add a contribution, or to step. A unit is
# `busy` while a thread works on it; that thread continues until the rule names no operation. So the operations of a
# unit are done in order, and those of several in parallel.
#
# The update rule has no clock. So an update that is held back for a grace, although it has its quorum, is timed here.


@dataclass(frozen=True)
class Grace:
    """The time in which an open update, which has its quorum, still waits for more workers.

    job:     the job that the unit belongs to
    version: the version after which the update comes
    until:   the end of the grace, on the shard's clock
    """

    job: HostedJob
    version: int
    until: float


class Updates:
    """Applies updates on a shard's threads. All methods may be called from any thread."""

    def __init__(self, threads: Threads, pulls: Pulls, metrics: ShardMetrics, clock: Callable[[], float]) -> None:
        self._threads = threads
        self._pulls = pulls
        self._metrics = metrics
        self._clock = clock
        self._stopping = False
        self._graces: dict[HostedUnit[Any], Grace] = {}

    def stop(self) -> None:
        """Stops new work. Updates under way are completed by their threads."""
        self._stopping = True

    def schedule(self, job: HostedJob, units: Iterable[int]) -> None:
        """Queues the pending operations of units for the apply threads. Returns at once.

        units: the indices of buckets and tables
        """
        for index in units:
            task = self._due(job, index)
            if task is not None:
                self._threads.submit(task)

    def run_here(self, job: HostedJob, units: Iterable[int]) -> None:
        """As `schedule`, but the calling thread does the operations itself, unless enough threads are at
        work already.
        """
        self._threads.run_here([task for index in units if (task := self._due(job, index)) is not None])

    def _due(self, job: HostedJob, index: int) -> Task | None:
        """Returns the task for a unit; None if it has no operation to do, or a thread works on it already."""
        hosted = job.units[index]
        with job.lock:
            if hosted.busy or self._stopping:
                return None
            if hosted.rule.next() is None:
                if hosted.rule.mixes_clocks:
                    self._note_grace(job, hosted)
                return None
            hosted.busy = True
        return partial(self._apply, job, hosted)

    def _note_grace(self, job: HostedJob, hosted: HostedUnit[Any]) -> None:
        """Begins the grace of a unit's open update, if it has all that it needs. The caller holds the job's lock."""
        rule = hosted.rule
        if hosted.grace_of < rule.version and (seconds := rule.grace()) is not None:
            hosted.grace_of = rule.version
            self._graces[hosted] = Grace(job, rule.version, self._clock() + seconds)
            self._threads.wake()

    @property
    def needs_ticks(self) -> bool:
        """Whether an update has a grace."""
        return bool(self._graces)

    def end_graces(self, now: float) -> None:
        """Schedules the updates whose grace is over at the time `now`."""
        for hosted, grace in list(self._graces.items()):
            if grace.until <= now:
                with grace.job.lock:
                    if self._graces.get(hosted) is grace:
                        del self._graces[hosted]
                    hosted.rule.end_grace(grace.version)
                self.schedule(grace.job, [hosted.index])

    def _apply(self, job: HostedJob, hosted: HostedUnit[Any]) -> None:
        """Does the operations of one unit, one after the other, until the update rule names none."""
        try:
            while True:
                with job.lock:
                    work = hosted.rule.next()
                    if work is None:
                        if hosted.rule.mixes_clocks:
                            self._note_grace(job, hosted)
                        hosted.busy = False
                        return
                    is_last = isinstance(work, Add) and hosted.unit.completes(work)
                with hosted.tensors:
                    started = self._clock()
                    if isinstance(work, Add):
                        hosted.unit.weights.add(work.contribution, is_last)
                        if armed:
                            failpoint("contribution-added")
                    else:
                        hosted.recall()
                        hosted.unit.weights.step()
                        if armed:
                            failpoint("update-stepped")
                    self._metrics.applied(job.name, work, self._clock() - started)
                    with job.lock:
                        job.partition.done(hosted.index, work)
                        releases = hosted.rule.releases(work)
                        if isinstance(work, Step) and job.times.follows_any(work.ranks):
                            job.times.applied(
                                zip(work.ranks, work.clocks, strict=True), hosted.index, self._pulls.now()
                            )
                    if isinstance(work, Step):
                        job.stepped(hosted, started)
                if releases:
                    self._pulls.release(job, hosted)
        except Exception:
            log.error("job %s: bucket %d cannot be applied", job.name, hosted.index)
            note_error("apply")
            job.failure = PSError(f"job {job.name!r} failed on this shard; its log says why")
            self._pulls.fail(job, job.failure)
