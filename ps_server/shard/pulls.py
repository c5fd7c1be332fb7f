"""Pulls: an admitted pull is sent at once; the others wait without a thread, and record which workers they wait for.

A bucket is sent from its own memory, or copied into the worker's segment. Rows are copied while their table is not
being stepped, into the worker's segment or into messages of a few MiB: the table itself has them in another order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest, PSError, without_traceback
from ps_protocol.framing import Buffer
from ps_protocol.messages.data import BucketTimes, Notice, PullCall, PulledBucket, PulledState
from ps_protocol.messages.rows import PulledRows, PulledTable, RowsPull, TablePull
from ps_protocol.row_ids import Ids
from ps_protocol.segment_layout import SegmentMap
from ps_protocol.tensors import Cast, Codec, bytes_of, plain_codec, row_codec, weight_codec
from ps_server.core.consistency import ALL_STAGED_APPLIED, Admission
from ps_server.core.unit import Bucket
from ps_server.core.validation import check_once
from ps_server.failpoints import armed, failpoint
from ps_server.shard.hosted_job import HostedJob, HostedTable, HostedUnit
from ps_server.shard.metrics import ShardMetrics
from ps_server.shard.outbox import SMALL_BYTES, Lent, Outbox
from ps_server.shard.waiting import READER, Pull, PulledBuckets, Waiter
from ps_server.storage.tensor_file import file_chunks

NOTICE_AFTER_SECONDS = 2.0
NOTICE_EVERY_SECONDS = 10.0
# A worker whose pushes came with a pull learns from the first bucket that they are staged, otherwise after this time: a
# message for nothing but that would take a core from the worker that is waited for (measured).
STAGED_AFTER_SECONDS = 0.1
MESSAGE_BYTES = 4 * 2**20  # of rows, a feed's too


class Pulls:
    """Every pull of one shard. Methods may be called from any thread; none waits for a worker."""

    def __init__(
        self, metrics: ShardMetrics, clock: Callable[[], float], wake: Callable[[], None], limit: float = math.inf
    ) -> None:
        """wake:  called when `needs_ticks` becomes true
        limit: the most buckets that one principal may wait for
        """
        self._wake = wake
        self._clock, self._began = clock, clock()
        self._under_way = PulledBuckets(limit)
        self._metrics = metrics
        self._with_pushes: dict[int, tuple[HostedJob, Pull]] = {}  # by number, the oldest first

    def now(self) -> float:
        """Returns the seconds since the shard has started: the clock of the times that timelines get."""
        return self._clock() - self._began

    @property
    def needs_ticks(self) -> bool:
        """Whether a worker has not been told yet that its pushes are staged."""
        return bool(self._with_pushes)

    def tell_staged(self, now: float) -> None:
        """Tells workers that the pushes of their exchange are staged, if no answer has told them within
        STAGED_AFTER_SECONDS.
        """
        for number, (job, pull) in self._with_pushes.copy().items():  # other threads add and remove
            if now - pull.since < STAGED_AFTER_SECONDS:
                break
            self._with_pushes.pop(number, None)
            with job.lock:
                seconds = pull.staged_seconds(self._clock())
            if seconds is not None:
                pull.outbox.tell(Notice(staged_seconds=seconds))

    def check(self, job: HostedJob, call: PullCall, outbox: Outbox, principal: str, is_checked: bool = False) -> Pull:
        """Checks a call, and returns the pull to hand to `ask`. Raises the PSError for what is wrong with the call.

        outbox:     where the answers go
        principal:  the caller, to whom the pull counts
        is_checked: the buckets of this call were checked against this job before
        """
        worker, indices, shared = call.worker, call.buckets, call.in_segment
        segment = job.segment(worker) if shared else None
        if not is_checked:
            _check_buckets(job, call)
        if worker.incarnation != READER:
            if not shared:  # its segment was found only because it is live
                job.check_worker(worker)
        elif call.clock or shared:
            raise InvalidRequest(f"a caller that has not joined may only Pull at clock 0, got clock {call.clock}")
        return Pull(
            worker,
            call.clock,
            outbox,
            len(indices),
            self._clock(),
            segment,
            notify_bytes=call.notify_bytes,
            principal=principal,
            times_wanted=call.times_wanted and worker.incarnation != READER,
            whole=call.whole,
            all_staged=call.all_staged,
        )

    def check_rows(
        self, job: HostedJob, call: RowsPull | TablePull, outbox: Outbox, principal: str, shares: bool = False
    ) -> tuple[Pull, int]:
        """Checks a call for rows or a table. Returns the pull to hand to `ask`, and the index of its table. Raises as
        `check`.

        shares: the call also pushes rows that lie in the worker's segment
        """
        checker = job.partition.row_checker
        checker.table(call.table)
        places = call.places if isinstance(call, RowsPull) else None
        memory = job.row_memory(call.worker) if shares or places is not None else None
        ids: Buffer | None = None
        rows: torch.Tensor | None = None
        if isinstance(call, RowsPull) and places is not None and memory is not None:
            ids, rows = job.pulled(call, places, memory)
        wanted = call if isinstance(call, TablePull) else checker.wanted(call, ids)
        if call.worker.incarnation != READER or isinstance(call, TablePull):
            if memory is None:  # otherwise row_memory() has checked the worker
                job.check_worker(call.worker)
        elif call.clock:
            raise InvalidRequest(f"a caller that has not joined may only pull rows at clock 0, got clock {call.clock}")
        pull = Pull(
            call.worker,
            call.clock,
            outbox,
            1,
            self._clock(),
            principal=principal,
            wanted=wanted,
            row_memory=memory,
            rows=rows,
        )
        index = checker.first + call.table
        # What is saved of a table has every update that is staged; a lookup has those of its mode.
        pull.all_staged = isinstance(wanted, TablePull) and not wanted.count_only
        if not isinstance(wanted, TablePull):
            pull.id_bytes = wanted.nbytes
        elif not wanted.count_only:
            weights = job.partition.tables[index].weights
            pull.copy_bytes = weights.nbytes + weights.in_file.nbytes
        return pull, index

    def ask(self, job: HostedJob, pull: Pull, indices: Sequence[int]) -> None:
        """Begins a pull: each unit is sent to the pull's outbox as soon as it is admitted, then the stream ends.
        Returns at once.

        indices: the buckets, or the table
        Raises Backlogged if the principal has asked for too much. Pushes of the same call are staged and stay so.
        """
        now, outbox = self._clock(), pull.outbox
        with job.lock:
            pull.since = now
            if pull.worker.incarnation != READER:  # it may have lost its place since
                job.partition.check_worker(pull.worker)
                job.times.follow(pull.worker.rank, pull.times_wanted)
            owed = {index: job.partition.owed(index) for index in indices} if pull.all_staged else {}
            units, asked = job.units, [(pull.worker.rank, pull.clock)]
            admitted: list[int] = []
            waiting: list[tuple[int, Admission]] = []
            for index in indices:
                [admission] = units[index].unit.admit_all(asked)
                if owed:
                    admission = _with_owed(units[index], admission, owed[index])
                if admission.admitted:
                    admitted.append(index)
                else:
                    waiting.append((index, admission))
            times = {index: self._times(job, index, pull) for index in indices} if pull.times_wanted else {}
            over = self._under_way.take(pull.principal, len(indices), bool(waiting), pull.id_bytes, pull.copy_bytes)
            for index, admission in waiting:
                units[index].waiters[pull.number] = Waiter(pull, admission, now, owed=owed.get(index, {}))
        if pull.with_pushes:
            self._with_pushes[pull.number] = job, pull
            self._wake()

        def forget() -> None:
            self._forget(job, pull, indices)
            over()

        outbox.on_close(forget)
        if not indices:
            if pull.times_wanted:
                outbox.tell_last(Notice(clock=self.now()))
            else:
                outbox.finish()
        for index in admitted:
            self._send(job, index, pull, 0.0, times.get(index))

    def _times(self, job: HostedJob, index: int, pull: Pull) -> BucketTimes | None:
        """Returns the times of a bucket that is admitted now, for a worker that records a timeline. The caller holds
        the lock.
        """
        return job.times.of(pull.worker.rank, index, pull.clock, self.now()) if pull.times_wanted else None

    def _send(self, job: HostedJob, index: int, pull: Pull, waited: float, times: BucketTimes | None) -> None:
        if pull.wanted is None:
            self._send_bucket(job, job.buckets[index], pull, waited, times)
        else:
            self._send_rows(job, job.tables[index], pull, waited)

    def _send_bucket(
        self, job: HostedJob, bucket: HostedUnit[Bucket], pull: Pull, waited: float, times: BucketTimes | None
    ) -> None:
        if pull.segment is None:
            is_small = bucket.unit.spec.nbytes <= SMALL_BYTES
            with pull.outbox.together() if is_small else contextlib.nullcontext():
                pull.outbox.lend(partial(self._lend, job, bucket, pull, waited, times), is_small)
                with job.lock:
                    pull.unsent -= 1
                    last = pull.unsent == 0
                if last:
                    pull.outbox.finish()
        else:
            landed = self._copy_out(job, bucket, pull, pull.segment, waited)._replace(times=times)
            with job.lock:
                pull.unsent -= 1
                last = pull.unsent == 0
                buckets = pull.landed(landed, bucket.unit.spec.nbytes)
                seconds = pull.staged_seconds(self._clock()) if buckets else None
            if buckets:
                (pull.outbox.tell_last if last else pull.outbox.tell)(Notice(buckets, seconds))
            elif last:
                pull.outbox.finish()

    def _copy_out(
        self, job: HostedJob, bucket: HostedUnit[Bucket], pull: Pull, segment: SegmentMap, waited: float
    ) -> PulledBucket:
        """Writes one bucket into a segment: here and now, by the thread that stepped it, in whose cache it still is."""
        spec = bucket.unit.spec
        target = segment.weight(spec)
        with bucket.tensors:
            version = bucket.rule.version
            if bucket.rule.mixes_clocks:
                _note_sent(job, bucket, pull)
            _copy(target, bucket.unit.weights.flat)
        if armed:
            failpoint("pull-half-sent")
        self._metrics.pulled(job.name, target.nbytes)
        return PulledBucket(
            spec.index,
            version,
            waited,
            save_state=job.saves_state(pull, version),
        )

    @contextlib.contextmanager
    def _lend(
        self, job: HostedJob, bucket: HostedUnit[Bucket], pull: Pull, waited: float, times: BucketTimes | None
    ) -> Iterator[Lent]:
        """Lends a bucket in the wire format of the job's weights, as it is now."""
        spec = bucket.unit.spec
        codec: Codec = weight_codec(job.partition.spec, spec)
        with contextlib.ExitStack() as until_sent:
            loan = None
            with bucket.tensors:
                values, version = bucket.unit.weights.flat, bucket.rule.version
                if bucket.rule.mixes_clocks:
                    _note_sent(job, bucket, pull)
                sent = bucket.unit.weights.sent
                if sent is not None:
                    # The codes lead to this version from the one before, which a worker has that has come to it.
                    codes = sent.codes if version == pull.clock and spec.index not in pull.whole else None
                    codec, values = (plain_codec(spec), sent.flat.clone()) if codes is None else (codec, codes)
                elif codec.keeps(spec) and spec.nbytes <= SMALL_BYTES:
                    values = values.clone()  # so that no update has to wait until it is sent
                elif codec.keeps(spec):
                    loan = until_sent.enter_context(bucket.lend())
                else:
                    assert isinstance(codec, Cast)  # blocks are those of `sent`
                    narrowed = job.narrowed.take(spec.index, version, values, codec)
                    until_sent.callback(job.narrowed.give, narrowed)
                    values = narrowed.values
                save_state = job.saves_state(pull, version)
            payload = bytes_of(values)
            answer = PulledBucket(
                spec.index,
                version,
                waited,
                save_state=save_state,
                payload=payload,
                wire_format=codec.wire_format(spec),
                times=times,
            )
            yield Lent(answer, loan)
        if armed:
            failpoint("pull-half-sent")
        self._metrics.pulled(job.name, len(payload))

    def _send_rows(self, job: HostedJob, table: HostedTable, pull: Pull, waited: float) -> None:
        """Sends what a pull wants of a table on its outbox, then ends the stream."""
        with job.lock:
            pull.with_pushes = False  # rows say it
        if isinstance(pull.wanted, TablePull):
            self._send_table(job, table, pull, pull.wanted.count_only)
            pull.outbox.finish()
        elif pull.rows is not None:
            pull.outbox.tell_last(self._put(job, table, pull, pull.rows, waited))
        elif pull.wanted is not None and not len(pull.wanted):
            save_state = job.saves_state(pull, table.rule.version)
            wire_format = wire_format_of(row_codec(job.partition.spec.weight_wire))
            pull.outbox.tell_last(PulledRows(table.rule.version, 0, 0, 0, waited, None, save_state, None, wire_format))
        elif pull.wanted is not None:
            row_bytes = row_codec(job.partition.spec.weight_wire).size(table.unit.weights.dim)
            rows = max(1, MESSAGE_BYTES // row_bytes)
            with pull.outbox.together() if len(pull.wanted) <= rows else contextlib.nullcontext():
                for first in range(0, len(pull.wanted), rows):
                    some = pull.wanted[first : first + rows]
                    is_small = len(some) * row_bytes <= SMALL_BYTES
                    pull.outbox.lend(partial(self._lend_rows, job, table, pull, first, some, waited), is_small)
                pull.outbox.finish()

    def _put(self, job: HostedJob, table: HostedTable, pull: Pull, rows: torch.Tensor, waited: float) -> PulledRows:
        """Writes all rows into the worker's segment: here and now, by the thread that stepped them."""
        assert isinstance(pull.wanted, np.ndarray)
        with table.tensors:
            trained, version = table.unit.weights.pull(pull.wanted, rows), table.rule.version
        self._metrics.pulled(job.name, rows.nbytes)
        save_state = job.saves_state(pull, version)
        count = len(pull.wanted)
        return PulledRows(version, 0, count, trained, waited, None, save_state, in_segment=True)

    @contextlib.contextmanager
    def _lend_rows(
        self, job: HostedJob, table: HostedTable, pull: Pull, first: int, ids: Ids, waited: float
    ) -> Iterator[Lent]:
        rows = torch.empty(len(ids), table.unit.weights.dim, dtype=torch.float32, device="cpu")
        with table.tensors:
            trained, version = table.unit.weights.pull(ids, rows), table.rule.version
            save_state = job.saves_state(pull, version)
        codec = row_codec(job.partition.spec.weight_wire)
        payload = bytes_of(codec.encode(rows.view(-1)))
        wire_format = wire_format_of(codec)
        answer = PulledRows(version, first, len(ids), trained, waited, None, save_state, payload, wire_format)
        yield Lent(answer, None)
        self._metrics.pulled(job.name, len(payload))

    def _send_table(self, job: HostedJob, table: HostedTable, pull: Pull, count_only: bool) -> None:
        with table.tensors:
            version, rows = table.rule.version, len(table.unit.weights)
            tensors = {} if count_only else table.unit.weights.snapshot()
        seed = table.unit.weights.spec.initializer.seed
        answer = PulledTable(version, rows, seed)
        if count_only:
            pull.outbox.tell(answer)
            return
        for chunk in file_chunks(tensors, {}):
            view = memoryview(chunk)
            for first in range(0, len(view), MESSAGE_BYTES):
                pull.outbox.lend(partial(self._lend_piece, job, answer, view[first : first + MESSAGE_BYTES]))

    @contextlib.contextmanager
    def _lend_piece(self, job: HostedJob, answer: PulledTable, piece: memoryview) -> Iterator[Lent]:
        yield Lent(answer._replace(payload=piece), None)
        self._metrics.pulled(job.name, len(piece))

    def send_state(self, job: HostedJob, call: PullCall, outbox: Outbox, principal: str) -> None:
        """Sends the optimizer state of buckets as it is now, one name after the other, then ends the stream."""
        job.check_worker(call.worker)
        check_once(call.buckets, "a pull names each bucket")
        buckets = [job.buckets[job.partition.checker.trained(index).index] for index in call.buckets]
        outbox.on_close(self._under_way.take(principal, len(buckets), waits=False))
        for bucket in buckets:
            with bucket.tensors:
                names = bucket.unit.weights.state_names()
            for name in names:
                outbox.lend(partial(_lend_state, bucket, name))
        outbox.finish()

    def release(self, job: HostedJob, unit: HostedUnit[Any]) -> None:
        """Sends a unit to all waiting pulls that are admitted now. Ends the pulls of workers that lost their place."""
        if not unit.waiters:
            return  # one that is added meanwhile looks for itself, under the lock that a change takes too
        lost: list[tuple[Pull, PSError]] = []
        index = unit.index
        with job.lock:
            now = self._clock()  # not before: a pull that came meanwhile would have begun to wait later
            there: dict[int, Waiter] = {}
            for number, waiter in unit.waiters.items():
                pull = waiter.pull
                try:
                    if pull.worker.incarnation != READER:
                        job.partition.check_worker(pull.worker)
                except PSError as error:
                    lost.append((pull, without_traceback(error)))
                else:
                    there[number] = waiter
            pulls = [(waiter.pull.worker.rank, waiter.pull.clock) for waiter in there.values()]
            by_mode = zip(there.values(), unit.unit.admit_all(pulls), strict=True)
            self._account(job, [(waiter, _with_owed(unit, each, waiter.owed)) for waiter, each in by_mode], now)
            left: dict[int, Waiter] = {}
            admitted = []
            for number, waiter in there.items():
                if waiter.admission.admitted:
                    admitted.append((waiter, self._times(job, index, waiter.pull)))
                else:
                    left[number] = waiter
            unit.waiters = left  # at once: others look there without the lock
        for waiter, times in admitted:
            self._send(job, index, waiter.pull, waiter.waited, times)
        for pull, reason in lost:
            pull.outbox.fail(reason)

    def _account(self, job: HostedJob, changed: Iterable[tuple[Waiter, Admission]], now: float) -> None:
        """Adds the time that pulls have waited to the ranks that they waited for, when their admission may have
        changed.
        """
        waited_for: dict[tuple[int, ...], float] = {}  # most wait for the same ranks: their seconds are booked together
        for waiter, admission in changed:
            blamed = waiter.admission.waiting_for
            if admission.admitted or admission.waiting_for != blamed:
                if blamed and blamed != (waiter.pull.worker.rank,):  # the time until its own push is no other's
                    waiter.waited += now - waiter.since
                    waited_for[blamed] = waited_for.get(blamed, 0.0) + now - waiter.since
                waiter.since = now
            if admission.admitted and waiter.waited:
                self._metrics.waited(job.name, job.mode, waiter.waited)
            waiter.admission = admission
        for blamed, seconds in waited_for.items():
            self._metrics.waited_for(job.name, seconds, blamed)

    def _forget(self, job: HostedJob, pull: Pull, indices: Sequence[int]) -> None:
        """Forgets a pull that is over. Looks only at its own buckets, most of which are sent."""
        self._with_pushes.pop(pull.number, None)
        with job.lock:
            for index in indices:
                job.units[index].waiters.pop(pull.number, None)

    def fail(self, job: HostedJob, error: PSError) -> None:
        """Ends every waiting pull of a job, and every feed, with an error."""
        job.end_feeds(error)
        with job.lock:
            pulls = {number: waiter.pull for unit in job.units.values() for number, waiter in unit.waiters.items()}
            for unit in job.units.values():
                unit.waiters = {}
        for pull in pulls.values():
            pull.outbox.fail(error)

    def notify(self, job: HostedJob, now: float) -> None:
        """Sends pulls that have waited for long the ranks that they wait for."""
        with job.lock:
            due = {
                number: (waiter, unit.index)
                for unit in job.units.values()
                for number, waiter in unit.waiters.items()
                if now - waiter.pull.since >= NOTICE_AFTER_SECONDS
                and now - waiter.pull.notified >= NOTICE_EVERY_SECONDS
            }
            for waiter, _ in due.values():
                waiter.pull.notified = now
        for waiter, index in due.values():
            waiter.pull.outbox.tell(waiter.notice(index))


def _check_buckets(job: HostedJob, call: PullCall) -> None:
    """Raises InvalidRequest or NotFound unless a pull asks for buckets that are here, each once."""
    indices, checker = call.buckets, job.partition.checker
    if len(indices) > len(job.buckets):
        raise InvalidRequest(f"this shard holds {len(job.buckets)} buckets of the job, got {len(indices)}")
    check_once(indices, "a pull names each bucket")
    for index in indices:
        (checker.trained if call.in_segment else checker.bucket)(index)
    stray = call.whole.difference(indices)
    if stray:
        raise InvalidRequest(f"a pull wants bucket {min(stray)} whole, and does not ask for it")


def _with_owed(unit: HostedUnit[Any], by_mode: Admission, owed: Mapping[int, int] | None) -> Admission:
    """Returns the admission of a pull, given the admission by its mode.

    owed: by rank, the clock of a contribution that the unit must have, too
    """
    return ALL_STAGED_APPLIED if owed and by_mode.admitted and not unit.rule.has(owed) else by_mode


def _note_sent(job: HostedJob, bucket: HostedUnit[Bucket], pull: Pull) -> None:
    """Records the version that a worker gets, if the rule needs it. The caller holds the bucket's `tensors` lock."""
    with job.lock:
        live = job.partition.roster.get(pull.worker.rank)
        if live is not None and live.incarnation == pull.worker.incarnation:
            bucket.rule.sent(pull.worker.rank, pull.clock)


@contextlib.contextmanager
def _lend_state(bucket: HostedUnit[Bucket], name: str) -> Iterator[Lent]:
    """Lends one kind of a bucket's optimizer state: a copy, so that training goes on while it is sent."""
    with bucket.tensors:
        values, absent = bucket.unit.weights.read_state(name)
        version, stage = bucket.rule.version, bucket.unit.weights.stage.number
    yield Lent(PulledState(bucket.index, version, name, absent, bytes_of(values), stage), loan=None)


def wire_format_of(codec: Cast) -> str:
    """Returns the name of a codec for rows in messages; for float32 it is the empty string."""
    return "" if codec.dtype == "float32" else codec.dtype


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a flat tensor [numel] into one of the same size in a segment, and converts it if the types differ.

    Without conversion numpy does it: it uses the C library's streaming stores (see ops.glibc), which torch never does.
    """
    if target.dtype == source.dtype:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source)
