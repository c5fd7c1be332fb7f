"""Feeds of rows: each reader gets the changes of a table, round after round.

A message is made when the one before has left, from the table's present rows. So a slow reader gets fewer rounds, and
costs the memory of one message. Updates of the table wait for one step of an iteration at most
(ps_tables/changed_rows.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ps_protocol.errors import InvalidRequest, NotFound, PSError, RunEnded, TryLater
from ps_protocol.framing import Buffer
from ps_protocol.messages.rows import FeedRoundBegin, RowsMessage, RowsWatch
from ps_protocol.row_ids import ID_BYTES
from ps_protocol.tensors import bytes_of, row_codec
from ps_server.shard.feed_context import FeedContext
from ps_server.shard.hosted_job import HostedJob, HostedTable
from ps_server.shard.outbox import Lent, Outbox
from ps_server.shard.pulls import MESSAGE_BYTES, wire_format_of
from ps_tables.changed_rows import RowWalk

_FORMAT = 1  # the first byte of a cursor: its encoding
_SIZES = (4, 8, 8)  # bytes of the fields


class RowCursor(NamedTuple):
    """A reader's position in a feed of rows: it has all changes of one table up to `version`.

    Readers keep the cursor as bytes, and pass them to the next call.

    A history is one unbroken sequence of updates of a table on a shard. It ends when the shard's process or the run of
    the job ends, and when the job is rolled back to a checkpoint. A shard knows the changes after a version only within
    one history.

    table:   the index of the table in the job's list of tables
    history: the number of the history; no other history has it
    version: the version of the table's rows on this shard: see TableRows.version
    """

    table: int
    history: int
    version: int

    def to_bytes(self) -> bytes:
        """Returns the cursor as the bytes that readers keep."""
        fields = (value.to_bytes(size, "little") for value, size in zip(self, _SIZES, strict=True))
        return b"".join((bytes((_FORMAT,)), *fields))


def row_cursor(data: bytes) -> RowCursor:
    """Returns the cursor that a reader has kept. Raises InvalidRequest for invalid bytes."""
    if len(data) != 1 + sum(_SIZES) or data[0] != _FORMAT:
        raise InvalidRequest(
            f"expected a cursor as WatchRows gave it, of {1 + sum(_SIZES)} bytes of format {_FORMAT:02x}, "
            f"got {len(data)} bytes of format {data[:1].hex() or 'none'}"
        )
    fields, first = [], 1
    for size in _SIZES:
        fields.append(int.from_bytes(data[first : first + size], "little"))
        first += size
    return RowCursor(*fields)


SHORTEST_PERIOD, LONGEST_PERIOD = 0.1, 3600.0
SIGN_OF_LIFE_SECONDS = 10.0
LAST_ROWS_SECONDS = 10.0  # the time for readers to take the last rows of an ended job; then the memory is freed


class ShardFeed:
    """One reader's feed of one table.

    since:  the version up to which the reader has all changes; None if it has none, and gets all rows
    period: the least time from the beginning of a round to that of the next, in seconds
    caller: the principal that reads; empty: unknown
    give_back: called once the feed is over
    """

    def __init__(
        self,
        job: HostedJob,
        table: HostedTable,
        since: int | None,
        period: float,
        outbox: Outbox,
        clock: Callable[[], float],
        caller: str,
        give_back: Callable[[], None],
    ) -> None:
        self.outbox, self.caller, self._give_back = outbox, caller, give_back
        self._hosted: tuple[HostedJob, HostedTable] | None = (job, table)
        self._since, self._period, self._clock = since, period, clock
        self._walk: RowWalk | None = None  # the walk of the current round
        self._sent_version = 0  # the version of the last round
        self._waits = False  # for the time of the next round, or for changes
        self._due = self._sign_due = 0.0
        self._ending: tuple[PSError, float] | None = None  # the job has ended: the error for the reader, and a deadline
        self._held_bytes = 0  # bytes that are held for a job that has ended

    def begin(self) -> None:
        """Sends the first round, or waits for it until the table has its initial rows."""
        if self._hosted is not None and not self._hosted[1].rule.initialised:
            self._waits = True
            return
        self.outbox.lend(self._next)

    def tick(self, now: float) -> int:
        """Begins the next round if one is due: the table has changed, or the reader needs a keep-alive message. For one
        thread.

        Returns the bytes of an ended job that the feed has held until now, and holds no more.
        """
        hosted, ending = self._hosted, self._ending
        if hosted is None:
            return 0
        if ending is not None:
            return self._tick_last(hosted[1], *ending, now)
        if not self._waits or now < self._due or not hosted[1].rule.initialised:
            return 0
        if hosted[1].rule.version != self._sent_version or now >= self._sign_due:
            self._waits = False
            self.outbox.lend(self._next)
        return 0

    def _tick_last(self, table: HostedTable, error: PSError, deadline: float, now: float) -> int:
        """Ends the feed of a job that has ended, once its reader has the last rows or the deadline is over."""
        has_all = self._waits and (table.rule.version == self._sent_version or not table.rule.initialised)
        if has_all or now >= deadline:
            self._over(error)
            return self._held_bytes
        if self._waits:
            self._waits = False
            self.outbox.lend(self._next)
        return 0

    def end(self, error: PSError) -> None:
        """Ends the feed with an error. If the job has ended (NotFound), the reader gets its last rows first. If a later
        run takes its place (RunEnded), it does not: that run needs the memory.
        """
        hosted = self._hosted
        if isinstance(error, NotFound) and not isinstance(error, RunEnded) and hosted is not None:
            self._held_bytes = hosted[0].nbytes()
            self._ending = error, self._clock() + LAST_ROWS_SECONDS
        else:
            self._over(error)

    def stop(self) -> None:
        """Ends the feed of a job that has ended: the shard stops."""
        if self._ending is not None and self._hosted is not None:
            self._over(self._ending[0])

    def _over(self, error: PSError) -> None:
        """Ends the stream, and drops the reference to the table."""
        self._hosted = self._walk = None
        self.outbox.fail(error)

    def forget(self) -> None:
        """Removes the feed from its table, because the stream is over."""
        hosted, self._hosted, self._walk = self._hosted, None, None
        if hosted is not None:
            with hosted[0].lock:
                hosted[1].feeds.discard(self)
        self._give_back()

    @contextlib.contextmanager
    def _next(self) -> Iterator[Lent]:
        """Makes the next message, and queues the one after it when this one has left."""
        hosted = self._hosted
        yield Lent(RowsMessage() if hosted is None else self._part(*hosted), None)

    def _part(self, job: HostedJob, table: HostedTable) -> RowsMessage:
        begin = self._begin(job, table) if self._walk is None else None
        walk = self._walk
        if walk is None:  # the feed was ended meanwhile
            return RowsMessage()
        codec = row_codec(job.partition.spec.weight_wire)
        removed = walk.take_removed(MESSAGE_BYTES // ID_BYTES)  # updates do not wait for it
        pieces: list[list[Buffer]] = [[], []]
        rows, room = 0, (MESSAGE_BYTES - removed.nbytes) // (ID_BYTES + codec.size(table.unit.weights.dim))
        if not len(removed):
            room = max(1, room)
        while room > rows and not walk.is_over:
            with table.tensors:
                ids, values = walk.take(room - rows)
            rows += len(ids)
            pieces[0].append(ids.astype("<i8", copy=False).tobytes())
            pieces[1].append(bytes_of(codec.encode(values.view(-1))))
        payload = b"".join((removed.astype("<i8", copy=False).tobytes(), *pieces[0], *pieces[1]))
        cursor = b""
        if walk.is_over and not walk.has_removed:
            cursor = RowCursor(_number(job, table), table.history, walk.version).to_bytes()
            self._since, self._walk, self._waits = walk.version, None, True
        else:
            self.outbox.lend(self._next)
        content = len(removed), rows, wire_format_of(codec), cursor, payload or None
        return RowsMessage(self._sent_version, begin, *content)

    def _begin(self, job: HostedJob, table: HostedTable) -> FeedRoundBegin:
        now = self._clock()
        self._due, self._sign_due = now + self._period, now + max(self._period, SIGN_OF_LIFE_SECONDS)
        with table.tensors:
            walk = table.unit.weights.changes(self._since)
            self._sent_version = table.rule.version
        self._walk = walk
        spec, shards = table.unit.weights.spec, job.partition.row_checker.share.shards
        return FeedRoundBegin(walk.full, self._sent_version, shards, spec.dim, spec.initializer)


class RowFeeds:
    """The feeds of rows of one shard. Methods may be called from any thread."""

    def __init__(self, context: FeedContext) -> None:
        self._hosted, self._clock, self._wake, self._limit, self._taken = context
        self._open: set[ShardFeed] = set()
        self._lock = threading.Lock()

    def watch(self, call: RowsWatch, outbox: Outbox, caller: str = "") -> None:
        """Begins a feed of a table's changes, which go to `outbox` until it is closed. Returns at once.

        Raises NotFound, InvalidRequest for an invalid cursor or period, LimitExceeded if there are too many feeds, or
        the caller's feeds use too much memory.
        """
        if not SHORTEST_PERIOD <= call.period <= LONGEST_PERIOD:
            raise InvalidRequest(
                f"WatchRows: the period must be {SHORTEST_PERIOD:g} to {LONGEST_PERIOD:g} s, got {call.period:g}"
            )
        cursor = row_cursor(call.cursor) if call.cursor else None
        job = self._hosted.get(call.job, "")
        table = _table(job, call.table)
        since = _since(job, table, cursor)
        give_back = self._taken.take(caller, _message_bytes(job, table))
        feed = ShardFeed(job, table, since, call.period, outbox, self._clock, caller, give_back)
        try:
            job.add_feed(table.feeds, feed, self._limit)
        except PSError:
            give_back()
            raise
        with self._lock:
            self._open.add(feed)
        self._wake()
        try:  # it may have been closed meanwhile, with the feeds that it had then
            if self._hosted.get(call.job, "") is not job:
                raise TryLater(f"job {job.name!r} is no longer what it was when the call came")
        except PSError:
            self._forget(feed)
            raise
        outbox.on_close(partial(self._forget, feed))
        feed.begin()

    def _forget(self, feed: ShardFeed) -> None:
        feed.forget()
        with self._lock:
            self._open.discard(feed)

    @property
    def needs_ticks(self) -> bool:
        """Whether any feed is open."""
        return bool(self._open)

    def tick(self, now: float) -> None:
        """Begins the rounds that are due. For one thread."""
        if not self._open:
            return
        freed = sum([feed.tick(now) for feed in self._all()])
        if freed:
            self._hosted.freed(freed)

    def stop(self) -> None:
        """Ends the feeds of jobs that have ended: the shard stops."""
        for feed in self._all():
            feed.stop()

    def _all(self) -> list[ShardFeed]:
        with self._lock:
            return list(self._open)


def _table(job: HostedJob, name: str) -> HostedTable:
    names = {table.unit.spec.rows.name: table for table in job.tables.values()}
    if name not in names:
        known = ", ".join(repr(each) for each in sorted(names)) or "none"
        raise NotFound(f"job {job.name!r} has no table {name!r}; its tables: {known}")
    return names[name]


def _message_bytes(job: HostedJob, table: HostedTable) -> int:
    """Returns the bytes of a feed's largest message: a row may be larger than MESSAGE_BYTES."""
    return max(MESSAGE_BYTES, ID_BYTES + row_codec(job.partition.spec.weight_wire).size(table.unit.weights.dim))


def _number(job: HostedJob, table: HostedTable) -> int:
    return table.index - job.partition.row_checker.first


def _since(job: HostedJob, table: HostedTable, cursor: RowCursor | None) -> int | None:
    """Returns the version from which a reader continues; None if its cursor is of another history.

    Raises InvalidRequest for a cursor of this history with an impossible table or version.
    """
    if cursor is None or cursor.history != table.history:
        return None
    version = table.unit.weights.version
    if cursor.table != _number(job, table) or cursor.version > version:
        raise InvalidRequest(
            f"expected a cursor of table {_number(job, table)} up to version {version}, got one of table "
            f"{cursor.table} and version {cursor.version}"
        )
    return cursor.version
