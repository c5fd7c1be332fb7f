"""Pushes: each is checked, then staged, then its bucket is scheduled.

check      outside of every lock: sizes, hyper-parameters, whether a gradient is finite; all pushes of a call first
stage      under the job's lock, for microseconds: exactly once, if there is room
schedule   has the bucket's updates applied, also where a later push of the same call is refused

The thread of the call does all three, and waits for no worker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ps_protocol.errors import PSError
from ps_protocol.tensors import bytes_of
from ps_server.core.commands import BucketCommand, Staged
from ps_server.core.requests import PullCall, Push, PushKind, SharedPush, StepCommit
from ps_server.failpoints import failpoint
from ps_server.shard.apply import Updates
from ps_server.shard.job import Attached, HostedJob
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.pulls import Pulls
from ps_server.shard.segments import attach
from ps_server.shard.waiting import Outbox

Worker = tuple[int, int, bytes]  # rank, incarnation, key
Checked = list[tuple[BucketCommand, int]]  # each with the bytes of its payload


class Pushes:
    """The pushes of one shard. Methods may be called from any thread."""

    def __init__(self, metrics: ShardMetrics, pulls: Pulls, updates: Updates, shared_directory: Path) -> None:
        self._metrics = metrics
        self._pulls = pulls
        self._updates = updates
        self._shared_directory = shared_directory

    def push(self, job: HostedJob, push: Push, principal: str) -> Staged:
        """Stages one bucket, and schedules it."""
        fresh: list[int] = []
        try:
            worker = push.rank, push.incarnation, push.key
            [staged] = self._stage_all(job, worker, lambda: _check(job, [push], principal), fresh)
            return staged
        finally:
            self._updates.schedule(job, fresh)

    def push_shared(self, job: HostedJob, push: SharedPush, principal: str) -> int:
        """Stages buckets whose gradients lie in the worker's segment; answers how many were repeats."""
        fresh: list[int] = []
        try:
            return sum(staged.duplicate for staged in self._stage_shared(job, push, principal, fresh))
        finally:
            self._updates.schedule(job, fresh)

    def push_pull_shared(
        self, job: HostedJob, push: SharedPush, principal: str, call: PullCall, outbox: Outbox
    ) -> None:
        """As `push_shared`, then pulls; the calling thread applies what can be applied."""
        pull = self._pulls.check(job, call, outbox, shared=True)
        pull.with_pushes = True
        fresh: list[int] = []
        try:
            self._stage_shared(job, push, principal, fresh)
            self._pulls.ask(job, pull, call.buckets)
        finally:
            self._updates.lend(job, fresh)

    def commit(self, job: HostedJob, call: PullCall, step: StepCommit) -> None:
        """Makes count what a worker's step consists of, besides what it pushes in full."""
        fresh: list[int] = []
        try:
            worker = call.rank, call.incarnation, call.key
            self._stage_all(job, worker, lambda: [(each, 0) for each in job.state.check_step(call, step)], fresh)
        finally:
            self._updates.schedule(job, fresh)

    def attach(self, job: HostedJob, rank: int, incarnation: int, location: str, nonce: bytes, key: bytes) -> None:
        """Maps the segment that a live worker made. Raises NotShared if it is not to be seen from here."""
        with job.lock:
            job.state.check_worker(rank, incarnation, key)
        segment = attach(location, nonce, job.plan, self._shared_directory)
        with job.lock:
            job.state.check_worker(rank, incarnation, key)
            job.segments[rank] = Attached(incarnation, segment)

    def _stage_shared(self, job: HostedJob, push: SharedPush, principal: str, fresh: list[int]) -> list[Staged]:
        pushes = _in_segment(job, push)
        worker = push.rank, push.incarnation, push.key
        return self._stage_all(job, worker, lambda: _check(job, pushes, principal), fresh)

    def _stage_all(
        self, job: HostedJob, worker: Worker, check: Callable[[], Checked], fresh: list[int]
    ) -> list[Staged]:
        """Checks all, then stages each: one that is refused for what it holds leaves none behind.

        fresh: takes the buckets that are staged, also those before another that was refused: when that one is sent
               again, these are repeats, and nothing else would schedule them
        """
        answers: list[Staged] = []
        try:
            with job.lock:
                job.state.check_worker(*worker)
            for command, size in check():
                failpoint("push-checked")
                with job.lock:
                    staged = job.state.execute(command)
                answers.append(staged)
                if staged.fresh:
                    fresh.append(command.bucket)
                failpoint("push-staged")
                self._metrics.pushed(job.name, size, staged)
                if staged.fresh:
                    self._pulls.release(job, job.buckets[command.bucket])  # or they learn whom they wait for now
        except PSError as error:
            self._metrics.refused(job.name, error)
            raise
        return answers


def _check(job: HostedJob, pushes: list[Push], principal: str) -> Checked:
    return [(job.state.check(push, principal), len(push.payload)) for push in pushes]


def _in_segment(job: HostedJob, push: SharedPush) -> list[Push]:
    """A push of each bucket, whose payload is where the worker's segment has it."""
    segment = job.segment(push.rank, push.incarnation, push.key)
    return [
        Push(
            job=push.job,
            rank=push.rank,
            incarnation=push.incarnation,
            bucket=bucket.index,
            clock=push.clock,
            kind=PushKind.SKIP if bucket.skip else PushKind.GRADIENT,
            payload=b"" if bucket.skip else bytes_of(segment.gradient(job.state.trained(bucket.index))),
            absent=bucket.absent,
            groups=push.groups,
            borrowed=True,
            key=push.key,
            ranges=push.ranges,
            finite=bucket.finite,
        )
        for bucket in push.buckets
    ]
