"""Pushes: each is checked, then staged, then its bucket is scheduled.

check      outside of every lock: sizes, hyper-parameters, whether a gradient is finite; all pushes of a call first
stage      under the job's lock, for microseconds: exactly once, if there is room
schedule   has the bucket's updates applied, also where a later push of the same call is refused

The thread of the call does all three, and waits for no worker.
"""

from __future__ import annotations

from pathlib import Path

from ps_protocol.errors import InvalidRequest, NotShared, PSError, TryLater
from ps_protocol.framing import Buffer
from ps_protocol.identity import Identity
from ps_protocol.job import BLOCK_WIRES
from ps_protocol.messages.data import PullCall, PushCall, PushKind
from ps_protocol.messages.rows import RowsPull, RowsPush, TablePush
from ps_protocol.segment_layout import RowMemory, SegmentMap, SegmentOffer
from ps_protocol.tensors import bytes_of
from ps_server.core.commands import Assign, Initialise, PushCommand, Staged, UnitCommand
from ps_server.core.validation import check_once
from ps_server.failpoints import failpoint
from ps_server.shard.apply import Updates
from ps_server.shard.hosted_job import Attached, AttachedRows, HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import Outbox
from ps_server.shard.pulls import Pulls
from ps_server.shard.segments import attach
from ps_server.shard.told_room import check_told


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

        Then the table's updates are scheduled; if the rows came in a segment, the calling thread applies them.
        """
        fresh: list[int] = []
        try:
            return self._stage_rows(job, push, principal, fresh)
        finally:
            if isinstance(push, RowsPush) and push.place is not None:
                self._updates.lend(job, fresh)
            else:
                self._updates.schedule(job, fresh)

    def exchange_rows(self, job: HostedJob, push: RowsPush, principal: str, wanted: RowsPull, outbox: Outbox) -> None:
        """Stages pushed rows, then begins a pull of rows of the same table.

        The calling thread then applies the updates that can be made. The pull's answer goes to `outbox`.
        """
        pull, table = self._pulls.check_rows(job, wanted, outbox, principal)
        pull.with_pushes = True
        fresh: list[int] = []
        try:
            self._stage_rows(job, push, principal, fresh, is_live=True)
            self._pulls.ask(job, pull, [table])
        finally:
            self._updates.lend(job, fresh)

    def _stage_rows(
        self, job: HostedJob, push: RowsPush | TablePush, principal: str, fresh: list[int], is_live: bool = False
    ) -> Staged:
        """Checks pushed rows, then stages them.

        fresh:   takes their table if something may be applied now
        is_live: see _stage_all
        """
        try:
            command: UnitCommand
            is_shared = isinstance(push, RowsPush) and push.place is not None  # its memory is a live worker's
            if not (is_live or is_shared):
                job.check_worker(push.worker)
            if isinstance(push, TablePush):
                command = job.state.row_checker.beginning(push)
            else:
                push = job.with_payload(push)
                command = job.state.row_checker.push(push, principal)
            return self._stage(job, command, len(push.payload), fresh)
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise

    def _stage(self, job: HostedJob, command: UnitCommand, size: int, fresh: list[int]) -> Staged:
        """Stages what was checked, and sends what it admits.

        size:  bytes of its payload
        fresh: takes its unit if something may be applied now, whatever fails then: sent again, it is a repeat, and
               nothing else would schedule it
        """
        failpoint("push-checked")
        if isinstance(command, Initialise):
            told = job.buckets[command.unit].unit.told_bytes(command)
            if told:
                check_told(job.name, told, job.promised)
        with job.lock:
            if isinstance(command, PushCommand):
                job.check_taken(command.worker.rank, command.unit, command.clock)
                if isinstance(command, Assign) and command.assignment.next is not None:
                    job.stage_room.make(job.buckets[command.unit].unit.spec, command.assignment.next)
            staged = job.state.execute(command)
            if staged.fresh and isinstance(command, PushCommand) and job.times.follows_any((command.worker.rank,)):
                job.times.staged(command.worker.rank, command.unit, command.clock, self._pulls.now())
        if staged.fresh:
            fresh.append(command.unit)
        failpoint("push-staged")
        self._metrics.pushed(job.name, size, staged)
        if staged.fresh:
            self._pulls.release(job, job.units[command.unit])  # or they learn what they wait for now
        return staged

    def exchange(self, job: HostedJob, call: PushCall, principal: str, wanted: PullCall, outbox: Outbox) -> None:
        """Stages the buckets of a call, then begins a pull. The answers go to `outbox`.

        If the pull goes into a segment, the calling thread then applies the updates that can be made.
        """
        pull = self._pulls.check(job, wanted, outbox, principal)
        pull.with_pushes = wanted.in_segment
        fresh: list[int] = []
        if not wanted.in_segment:
            try:
                self._stage_all(job, call, principal, fresh, is_live=True)
            finally:
                self._updates.schedule(job, fresh)  # apply threads begin while the pull looks at each of its buckets
            self._pulls.ask(job, pull, wanted.buckets)
            return
        try:
            self._stage_all(job, call, principal, fresh, is_live=True, segment=pull.segment)
            self._pulls.ask(job, pull, wanted.buckets)
        finally:
            self._updates.lend(job, fresh)

    def attach(self, job: HostedJob, worker: Identity, offer: SegmentOffer) -> None:
        """Maps the segment that a live worker offers.

        Raises NotShared if it cannot be mapped; TryLater while an earlier call of the worker maps one, so that a worker
        holds one thread at most.
        """
        in_blocks = {job.state.spec.gradient_wire, job.state.spec.weight_wire}.intersection(BLOCK_WIRES)
        if in_blocks and not offer.row_bytes:
            raise NotShared(f"buckets of job {job.name!r} travel as {in_blocks.pop()}, which is for messages alone")
        process, incarnation = (worker.rank, worker.member), worker.incarnation
        with job.lock:
            job.state.check_worker(worker)
            if process in job.of_workers.attaching:
                raise TryLater(f"worker {worker.rank} is handing over a segment already")
            job.of_workers.attaching.add(process)
        try:
            memory = attach(offer, job.segment_bytes(offer.row_bytes), self._shared_directory)
            with job.lock:
                job.state.check_worker(worker)
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
        is_live: bool = False,
        segment: SegmentMap | None = None,
    ) -> list[Staged]:
        """Checks all, then stages each: one that is refused for what it holds leaves none behind.

        fresh:   takes the buckets that are staged, also those before another that was refused
        is_live: the worker was found to be live just now. If it is not any more, its commands are refused
        segment: of a worker that is live; None: not looked up yet, or the payload is in the message
        """
        answers: list[Staged] = []
        try:
            if call.payload is None and segment is None:
                segment = job.segment(call.worker)
            elif not is_live:
                job.check_worker(call.worker)
            check_once([bucket.bucket for bucket in call.buckets], "a push names each bucket")
            answers.extend(self._stage(job, *checked, fresh) for checked in _check(job, call, principal, segment))
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise
        return answers


def _check(job: HostedJob, call: PushCall, principal: str, segment: SegmentMap | None) -> list[tuple[UnitCommand, int]]:
    """Returns the commands that stage a call, each with the bytes of its payload."""
    payloads = _payloads(job, call, segment)
    return [
        (job.state.checker.check(call, bucket, payload, principal), len(payload))
        for bucket, payload in zip(call.buckets, payloads, strict=True)
    ]


def _payloads(job: HostedJob, call: PushCall, segment: SegmentMap | None) -> list[Buffer]:
    """Returns the payload of each bucket of a call: a view into the worker's segment, or into the call's own."""
    checker = job.state.checker
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
