"""Pulls: those that are admitted are sent, those that are not wait without a thread and can always say for whom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ps_protocol.codecs import weight_codec
from ps_protocol.errors import InvalidRequest, PSError, UnknownWorker
from ps_protocol.tensors import bytes_of
from ps_server.core.commands import PullCall
from ps_server.core.consistency import Admission
from ps_server.failpoints import failpoint
from ps_server.rpc.streams import Outbox
from ps_server.shard.job import HostedBucket, HostedJob, Pull, Waiter
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.segments import copy_out

NOTICE_AFTER_SECONDS = 2.0
NOTICE_EVERY_SECONDS = 10.0
# A worker whose pushes came with a pull learns from the first bucket that they are staged, or else after this time: a
# message for nothing but that would take a core from the worker that is waited for (measured).
STAGED_AFTER_SECONDS = 0.1
READER = 0  # the incarnation of who is no worker

# Writes one message of a pull stream: (bucket, version, seconds waited, notice, payload, whether this version is kept
# for a checkpoint). Without payload, and without notice, the bucket is in the worker's segment.
WritePull = Callable[[int, int, float, Admission | None, memoryview | None, bool], bytes]


@dataclass(frozen=True)
class Writers:
    """How a pull's messages are written: over the network, by way of a segment, and the word that what came with the
    pull has been staged for so many seconds."""

    pull: WritePull
    shared: WritePull
    staged: Callable[[float], bytes]


class Pulls:
    """Every pull of one shard. Methods may be called from any thread; none waits for a worker."""

    def __init__(self, metrics: ShardMetrics, writers: Writers) -> None:
        self._metrics = metrics
        self._writers = writers
        self._unsaid: deque[tuple[HostedJob, Pull]] = deque()  # that came with pushes, by age

    def say_staged(self, now: float) -> None:
        """Tells pulls of some age that the pushes that came with them are staged, where no bucket has."""
        while self._unsaid and now - self._unsaid[0][1].since >= STAGED_AFTER_SECONDS:
            job, pull = self._unsaid.popleft()
            with job.lock:
                word = self._staged_word(pull)
            if word:
                pull.outbox.put(lambda word=word: word)  # type: ignore[misc]

    def _staged_word(self, pull: Pull) -> bytes:
        """Once for each pull that came with pushes, before any other word. Called with the job's lock held."""
        if not pull.with_pushes:
            return b""
        pull.with_pushes = False
        return self._writers.staged(time.monotonic() - pull.since)

    def check(self, job: HostedJob, call: PullCall, outbox: Outbox, shared: bool) -> Pull:
        """A pull to `ask` for. Raises what is wrong with it.

        shared: the buckets go into the worker's segment, and only the word of it on the outbox
        """
        rank, incarnation, indices = call.rank, call.incarnation, call.buckets
        segment = job.segment(rank, incarnation, call.key) if shared else None
        if len(indices) > len(job.buckets):
            raise InvalidRequest(f"this shard holds {len(job.buckets)} buckets of the job, got {len(indices)}")
        if len(set(indices)) != len(indices):
            raise InvalidRequest("a pull names each bucket at most once")
        for index in indices:
            (job.state.trained if shared else job.state.bucket)(index)
        if incarnation != READER:
            with job.lock:
                job.state.check_worker(rank, incarnation, call.key)
        elif call.clock or shared:
            raise InvalidRequest(f"who has not joined may only Pull at clock 0, got clock {call.clock}")
        now = time.monotonic()
        return Pull(rank, incarnation, call.clock, outbox, len(indices), now, segment, word_bytes=call.word_bytes)

    def ask(self, job: HostedJob, pull: Pull, indices: Sequence[int]) -> None:
        """Sends each bucket on the pull's outbox as soon as it is admitted, then ends the stream. Returns at once."""
        now, outbox = time.monotonic(), pull.outbox
        with job.lock:
            pull.since = now
            if pull.incarnation != READER:  # it may have lost its place since
                job.state.check_worker(pull.rank, pull.incarnation)
            verdicts = {index: job.state.admits(index, pull.rank, pull.clock) for index in indices}
            for index, verdict in verdicts.items():
                if not verdict.admitted:
                    job.buckets[index].waiters.append(Waiter(pull, verdict, now))
        if pull.with_pushes:
            self._unsaid.append((job, pull))
        outbox.on_close(lambda: self._forget(job, pull))
        if not indices:
            outbox.finish()
        for index, verdict in verdicts.items():
            if verdict.admitted:
                self._send(job, job.buckets[index], pull, 0.0)

    def _send(self, job: HostedJob, bucket: HostedBucket, pull: Pull, waited: float) -> None:
        layout, weights = bucket.state.layout, bucket.state.weights
        if pull.segment is not None:
            # Written here and now, by the thread that stepped the bucket: it is still in the cache.
            target = pull.segment.weight(layout)
            with bucket.tensors:
                version = bucket.state.protocol.version
                copy_out(target, weights.flat)
            failpoint("pull-half-sent")
            self._metrics.pulled(job.state.spec.name, target.nbytes)
            message = self._writers.shared(layout.index, version, waited, None, None, _kept(job, pull, version))
        else:
            message = b""
            pull.outbox.put(lambda: self._read_out(job, bucket, pull, waited))
        with job.lock:
            pull.left -= 1
            last = pull.left == 0
            words = pull.said(message, layout.nbytes)
            if words:
                words = self._staged_word(pull) + words
        if words:
            pull.outbox.put(lambda: words)
        if last:
            pull.outbox.finish()

    def _read_out(self, job: HostedJob, bucket: HostedBucket, pull: Pull, waited: float) -> bytes:
        """One bucket as a message, in the wire format of the job's weights."""
        layout = bucket.state.layout
        codec = weight_codec(job.state.spec, layout)
        with bucket.tensors:
            weights, version = bucket.state.weights.flat, bucket.state.protocol.version
            payload = bytes_of(
                weights if codec.keeps(layout) else job.narrowed.get(layout.index, version, weights, codec)
            )
            message = self._writers.pull(layout.index, version, waited, None, payload, _kept(job, pull, version))
        failpoint("pull-half-sent")
        self._metrics.pulled(job.state.spec.name, len(payload))
        return message

    def admit(self, job: HostedJob, bucket: HostedBucket) -> None:
        """Sends the bucket to every waiting pull that is admitted now, and ends those whose worker lost its place."""
        if not bucket.waiters:
            return  # one that is added meanwhile looks for itself, under the same lock as whoever changed something
        admitted: list[Waiter] = []
        lost: list[tuple[Pull, UnknownWorker]] = []
        index = bucket.state.layout.index
        with job.lock:
            now = time.monotonic()  # not before: a pull that came meanwhile would have begun to wait later
            staying: list[Waiter] = []
            for waiter in bucket.waiters:
                pull = waiter.pull
                try:
                    if pull.incarnation != READER:
                        job.state.check_worker(pull.rank, pull.incarnation)
                except UnknownWorker as error:
                    lost.append((pull, error))
                    continue
                verdict = job.state.admits(index, pull.rank, pull.clock)
                self._account(job, waiter, verdict, now)
                (admitted if verdict.admitted else staying).append(waiter)
            bucket.waiters = staying
        for waiter in admitted:
            self._send(job, bucket, waiter.pull, waiter.waited)
        for pull, reason in lost:
            pull.outbox.fail(reason)

    def _account(self, job: HostedJob, waiter: Waiter, verdict: Admission, now: float) -> None:
        """Books the time that a pull waited on whom it waited for; called whenever its verdict may have changed."""
        blamed = waiter.verdict.waiting_for
        if verdict.waiting_for != blamed or verdict.admitted:
            if blamed and blamed != (waiter.pull.rank,):  # the time until its own push is nobody's
                waiter.waited += now - waiter.since
                self._metrics.waited_for(job.state.spec.name, now - waiter.since, blamed)
            waiter.since = now
        if verdict.admitted and waiter.waited:
            self._metrics.waited(job.state.spec.name, job.mode, waiter.waited)
        waiter.verdict = verdict

    def _forget(self, job: HostedJob, pull: Pull) -> None:
        with job.lock:
            for bucket in job.buckets.values():
                bucket.waiters = [waiter for waiter in bucket.waiters if waiter.pull is not pull]

    def fail(self, job: HostedJob, error: PSError) -> None:
        """Ends every waiting pull of a job with an error."""
        with job.lock:
            pulls = {id(waiter.pull): waiter.pull for bucket in job.buckets.values() for waiter in bucket.waiters}
            for bucket in job.buckets.values():
                bucket.waiters = []
        for pull in pulls.values():
            pull.outbox.fail(error)

    def notify(self, job: HostedJob, now: float) -> None:
        """Tells pulls that wait long whom they wait for."""
        with job.lock:
            due = {
                id(waiter.pull): (waiter, bucket.state.layout.index)
                for bucket in job.buckets.values()
                for waiter in bucket.waiters
                if now - waiter.pull.since >= NOTICE_AFTER_SECONDS
                and now - waiter.pull.notified >= NOTICE_EVERY_SECONDS
            }
            for waiter, _ in due.values():
                waiter.pull.notified = now
        for waiter, index in due.values():
            write = self._writers.pull if waiter.pull.segment is None else self._writers.shared
            message = write(index, 0, 0.0, waiter.verdict, None, False)
            waiter.pull.outbox.put(lambda message=message: message)  # type: ignore[misc]


def _kept(job: HostedJob, pull: Pull, version: int) -> bool:
    """Whether a bucket that this pull gets is in a checkpoint for which its worker is to save its own state."""
    capture = job.capture
    return capture is not None and pull.incarnation != READER and capture.tells(pull, version)
