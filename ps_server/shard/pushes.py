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
from ps_protocol.job import BLOCK_WIRES
from ps_protocol.row_memory import RowMemory
from ps_protocol.segment_layout import SegmentMap, SegmentOffer
from ps_protocol.tensors import bytes_of
from ps_server.core.commands import (
    Assign,
    AssignRows,
    BeginRows,
    BucketCommand,
    Commit,
    Draft,
    Stage,
    Staged,
    StageRows,
)
from ps_server.core.requests import PullCall, Push, PushCall, PushedBucket, PushKind, RowsPull, RowsPush, TablePush
from ps_server.failpoints import failpoint
from ps_server.shard import row_memory
from ps_server.shard.apply import Updates
from ps_server.shard.job import Attached, AttachedRows, HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import Pulls
from ps_server.shard.segments import attach
from ps_server.shard.waiting import Outbox


class Pushes:
    """The pushes of one shard. Methods may be called from any thread."""

    def __init__(self, metrics: ShardMetrics, pulls: Pulls, updates: Updates, shared_directory: Path) -> None:
        self._metrics = metrics
        self._pulls = pulls
        self._updates = updates
        self._shared_directory = shared_directory

    def push(self, job: HostedJob, call: PushCall, principal: str) -> list[Staged]:
        """Stages buckets, and schedules them."""
        fresh: list[int] = []
        try:
            return self._stage_all(job, call, principal, fresh)
        finally:
            self._updates.schedule(job, fresh)

    def push_rows(self, job: HostedJob, push: RowsPush | TablePush, principal: str) -> Staged:
        """Stages rows of a step, or takes those that a table begins with; keeps them until the others are here. Has
        the updates of their table applied then.

        Where rows are in a segment, the calling thread applies what can be applied.
        """
        staged, table = self._stage_rows(job, push, principal)
        if staged.fresh:
            in_segment = isinstance(push, RowsPush) and push.place is not None
            (self._updates.lend if in_segment else self._updates.schedule)(job, [table])
        return staged

    def exchange_rows(self, job: HostedJob, push: RowsPush, principal: str, wanted: RowsPull, outbox: Outbox) -> None:
        """Stages rows, then pulls rows of the same table; the calling thread applies what can be applied."""
        pull, table = self._pulls.check_rows(job, wanted, outbox, principal)
        pull.with_pushes = True
        staged, _ = self._stage_rows(job, push, principal)
        try:
            self._pulls.ask(job, pull, [table])
        finally:
            if staged.fresh:
                self._updates.lend(job, [table])

    def _stage_rows(self, job: HostedJob, push: RowsPush | TablePush, principal: str) -> tuple[Staged, int]:
        """Stages rows; returns the index of their table, too."""
        try:
            with job.lock:
                job.state.check_worker(push.rank, push.incarnation, push.key)
            command: StageRows | AssignRows | BeginRows
            if isinstance(push, TablePush):
                command = job.state.tables.checker.beginning(push)
            else:
                push = row_memory.with_payload(job, push)
                command = job.state.tables.checker.push(push, principal)
            failpoint("push-checked")
            with job.lock:
                if isinstance(command, StageRows | AssignRows):
                    job.check_taken(command.rank, command.table, command.clock)
                staged = job.state.execute(command)
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise
        failpoint("push-staged")
        self._metrics.pushed(job.name, len(push.payload), staged)
        if staged.fresh:
            self._pulls.release(job, job.parts[command.table])
        return staged, command.table

    def exchange(self, job: HostedJob, call: PushCall, principal: str, wanted: PullCall, outbox: Outbox) -> None:
        """Stages buckets, then pulls; where all lies in a segment, the calling thread applies what can be applied."""
        pull = self._pulls.check(job, wanted, outbox, principal)
        pull.with_pushes = wanted.in_segment
        if not wanted.in_segment:
            self.push(job, call, principal)  # apply threads begin while the pull looks at each of its buckets
            self._pulls.ask(job, pull, wanted.buckets)
            return
        fresh: list[int] = []
        try:
            self._stage_all(job, call, principal, fresh)
            self._pulls.ask(job, pull, wanted.buckets)
        finally:
            self._updates.lend(job, fresh)

    def attach(self, job: HostedJob, rank: int, incarnation: int, offer: SegmentOffer, key: bytes) -> None:
        """Maps the segment that a live worker offers.

        Raises NotShared if it cannot be had, TryLater while it is being had: a worker keeps one thread waiting at most.
        """
        in_blocks = {job.state.spec.gradient_wire, job.state.spec.weight_wire}.intersection(BLOCK_WIRES)
        if in_blocks and not offer.row_bytes:
            raise NotShared(f"buckets of job {job.name!r} travel as {in_blocks.pop()}, which is for messages alone")
        with job.lock:
            job.state.check_worker(rank, incarnation, key)
            if rank in job.of_workers.attaching:
                raise TryLater(f"worker {rank} is handing over a segment already")
            job.of_workers.attaching.add(rank)
        try:
            size = row_memory.segment_bytes(job, offer.row_bytes) if offer.row_bytes else job.plan.size
            memory = attach(offer, size, self._shared_directory)
            with job.lock:
                job.state.check_worker(rank, incarnation, key)
                if offer.row_bytes:
                    job.of_workers.row_memory[rank] = AttachedRows(incarnation, RowMemory(memory))
                else:
                    job.of_workers.segments[rank] = Attached(incarnation, SegmentMap(memory, job.plan))
        finally:
            with job.lock:
                job.of_workers.attaching.discard(rank)

    def _stage_all(self, job: HostedJob, call: PushCall, principal: str, fresh: list[int]) -> list[Staged]:
        """Checks all, then stages each: one that is refused for what it holds leaves none behind.

        fresh: takes the buckets that are staged, also those before another that was refused: when that one is sent
               again, these are repeats, and nothing else would schedule them
        """
        answers: list[Staged] = []
        try:
            with job.lock:
                job.state.check_worker(call.rank, call.incarnation, call.key)
            for command, size in _check(job, call, principal):
                failpoint("push-checked")
                with job.lock:
                    if isinstance(command, Stage | Draft | Assign | Commit):
                        job.check_taken(command.rank, command.bucket, command.clock)
                    if isinstance(command, Assign) and command.assignment.next is not None:
                        job.stage_room.make(job.buckets[command.bucket].spec, command.assignment.next)
                    staged = job.state.execute(command)
                    if staged.fresh and job.times.follows_any((call.rank,)):
                        job.times.staged(call.rank, command.bucket, call.clock, self._pulls.now())
                answers.append(staged)
                if staged.fresh:
                    fresh.append(command.bucket)
                failpoint("push-staged")
                self._metrics.pushed(job.name, size, staged)
                if staged.fresh:
                    self._pulls.release(job, job.buckets[command.bucket])  # or they learn what they wait for now
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise
        return answers


def _check(job: HostedJob, call: PushCall, principal: str) -> list[tuple[BucketCommand, int]]:
    """Returns the commands that stage a call, each with the bytes of its payload."""
    payloads = _payloads(job, call)
    return [
        (job.state.checker.check(_push_of(call, bucket, payload), principal), len(payload))
        for bucket, payload in zip(call.buckets, payloads, strict=True)
    ]


def _push_of(call: PushCall, bucket: PushedBucket, payload: Buffer) -> Push:
    return Push(
        job=call.job,
        rank=call.rank,
        incarnation=call.incarnation,
        bucket=bucket.bucket,
        clock=call.clock,
        kind=bucket.kind,
        payload=payload,
        absent=bucket.absent,
        groups=call.groups,
        borrowed=call.payload is None,
        key=call.key,
        finite=bucket.finite and call.payload is None,  # only the owner of a segment has looked at what lies there
        ranges=call.ranges,
        state=bucket.state,
        wire_format=bucket.wire_format,
        weight=call.weight,
        stage=call.stage,
        next_optimizer=bucket.next_optimizer,
    )


def _payloads(job: HostedJob, call: PushCall) -> list[Buffer]:
    """Returns the payload of each bucket of a call: a view into the worker's segment, or into the call's own."""
    checker = job.state.checker
    if call.payload is None:
        segment = job.segment(call.rank, call.incarnation, call.key)
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
