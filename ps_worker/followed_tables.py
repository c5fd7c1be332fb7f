"""The tables of models that follow a job: a feed of rows for each table, from which their modules read."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ps_protocol.errors import NotFound, PSError, Unreachable, Unsupported
from ps_runtime.credentials import Access
from ps_worker.cluster.feeds import upstream_of
from ps_worker.fitted_model import TableSlot, first_three
from ps_worker.reading_blocks import ReadingBlocks
from ps_worker.row_feed import RowFeed, RowFollower
from ps_worker.tables.followed_rows import FollowedRows
from ps_worker.tables.own_rows import LocalRows, Rows
from ps_worker.tables.row_copy import RowCopy


class Claim:
    """What keeps a feed going while its first rows come, until modules read it."""


LAST_ROWS_SECONDS = 15.0  # the wait for the last rows of an ended job; a shard offers them for 10 s


class SharedRowFeed(RowFeed):
    """The feed of one table, for all modules that read it. It ends by itself when none of them is left, and when the
    job has ended and its last rows are here: the rows of another run of the job belong to other weights.

    user:      what needs it: see `claim`
    has_ended: whether the job has ended
    more:      as for RowFeed
    """

    def __init__(self, table: str, user: object, has_ended: Callable[[], bool], **more: Any) -> None:
        self._users: weakref.WeakSet[object] = weakref.WeakSet([user])
        self._is_over = False
        self._ended_at: float | None = None  # when the job's end was first seen
        self._has_ended, self._claims = has_ended, threading.Lock()
        super().__init__(table, **more)

    def claim(self, user: object) -> bool:
        """Keeps the feed going as long as the user is in memory. Returns False if it has ended before."""
        with self._claims:
            if not self._is_over:
                self._users.add(user)
            return not self._is_over

    def give_back(self, user: object) -> None:
        """Ends a user's claim."""
        with self._claims:
            self._users.discard(user)

    @property
    def blocks(self) -> ReadingBlocks:
        """The blocks in which readers see no change of the rows."""
        return self._blocks

    @property
    def is_used(self) -> bool:
        """Whether a user is left."""
        return bool(self._users)

    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the ids that have a row, [n] int64, and their rows, [n, dim] float32: a copy."""
        ids, rows = zip(*(each.all_rows() for each in self._copies()), strict=True)
        return torch.cat(ids), torch.cat(rows)

    @property
    def seed(self) -> int:
        """The seed of rows that are not trained yet."""
        return self._copies()[0].begin.initializer.seed

    def _copies(self) -> list[RowCopy]:
        return [each.copy for each in self._serving if each.copy is not None]

    def _is_needed(self) -> bool:
        with self._claims:
            has_all = self._has_ended() and all(self._has_last_rows(each) for each in self._followed())
            self._is_over = has_all or not self._users
            return not self._is_over

    def _goes_on(self, follower: RowFollower) -> bool:
        return self._is_needed() and not self._has_last_rows(follower)

    def _has_last_rows(self, follower: RowFollower) -> bool:
        """Whether the job has ended and nothing more comes from a shard, which ends its stream behind the last rows.

        A stream that begins after the end may be one of another run.
        """
        if not self._has_ended():
            return False
        self._ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        is_late = follower.began > self._ended_at or time.monotonic() >= self._ended_at + LAST_ROWS_SECONDS
        return is_late or isinstance(follower.trouble, NotFound)


class FollowedTables:
    """The row feeds of one job, each for all models that a WeightFeed has loaded.

    servers, access: the addresses of the WeightFeed; of these a coordinator is asked for rows
    has_ended: whether the job has ended
    more:      further arguments of each RowFeed
    """

    def __init__(self, servers: str, access: Access, has_ended: Callable[[], bool], **more: Any) -> None:
        self._servers, self._access, self._has_ended, self._more = servers, access, has_ended, more
        # By the table's name. A feed that no module reads any more leaves with its thread.
        self._feeds: weakref.WeakValueDictionary[str, SharedRowFeed] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._is_closed = False

    def _used(self) -> list[SharedRowFeed]:
        return [feed for feed in self._all() if feed.is_used and feed.version >= 0]

    def _all(self) -> list[SharedRowFeed]:
        # A list of references is made in one step; another thread may add a feed while one iterates over values.
        return [feed for each in self._feeds.valuerefs() if (feed := each()) is not None]

    @property
    def age(self) -> float:
        """Seconds since the oldest copy was last known to equal the servers' rows; 0: there is no table."""
        return max((feed.age for feed in self._used()), default=0.0)

    @property
    def trouble(self) -> PSError | None:
        """The error that keeps changes of rows from arriving; None if no error is known."""
        return next((feed.trouble for feed in self._used() if feed.trouble is not None), None)

    def complete(self, slots: Sequence[TableSlot], user: Claim, timeout: float) -> dict[str, SharedRowFeed]:
        """Returns the feed of each of these tables, once all their rows are here. `user` keeps the feeds going.

        Raises Unsupported if the servers have no rows, or a module is in training; others as RowFeed.wait_for.
        """
        if not slots:
            return {}
        deadline = time.monotonic() + timeout
        for slot in slots:
            _check_untrained(slot)
        names = list(dict.fromkeys(slot.table for slot in slots))
        try:
            feeds = self._claimed(names, user)
            for feed in feeds.values():
                feed.wait_for(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException:  # its traceback may keep `user` in memory
            for feed in self._all():
                feed.give_back(user)
            raise
        return feeds

    def _claimed(self, names: Sequence[str], user: Claim) -> dict[str, SharedRowFeed]:
        with self._lock:
            found = {name: feed for name in names if (feed := self._feeds.get(name)) is not None}
            there = {name: feed for name, feed in found.items() if self._is_usable(feed, user)}
            lacking = [name for name in names if name not in there]
            if lacking and self._is_closed:
                raise Unreachable(f"the feed is closed, and has no rows of table {first_three(lacking)}")
            if lacking and self._has_ended():
                raise NotFound(
                    f"the job has ended, and its rows with it: none are here of table {first_three(lacking)}"
                )
            address = self._coordinator(lacking) if lacking else ""
            for name in lacking:
                made = SharedRowFeed(name, user, self._has_ended, server=address, **self._more)
                self._feeds[name] = there[name] = made
            return there

    def _is_usable(self, feed: SharedRowFeed, user: Claim) -> bool:
        """Whether a feed goes on, or has all that there will be."""
        return feed.claim(user) or ((self._is_closed or self._has_ended()) and feed.version >= 0)

    def _coordinator(self, tables: Sequence[str]) -> str:
        """Returns the address at which rows can be had. Raises Unsupported if there are only relays."""
        error: PSError | None = None
        for server in self._servers.split(","):
            try:
                upstream = upstream_of(server, self._access)
            except PSError as failed:
                error = error or failed
                continue
            if not upstream:
                return server
            error = Unsupported(
                f"{server} is a relay, which hands on no rows, and the model has the table {first_three(tables)}: "
                f"subscribe at the job's coordinator ({upstream})"
            )
        assert error is not None
        raise error

    def close(self) -> None:
        """Ends all feeds. Rows stay readable."""
        with self._lock:
            self._is_closed = True
        feeds = self._all()
        for feed in feeds:  # all of them first: one that waits for its server keeps no other
            feed._begin_close()
        for feed in feeds:
            feed.close()


def _check_untrained(slot: TableSlot) -> None:
    rows = slot.module.local
    if not isinstance(rows, LocalRows | FollowedRows) or rows.exchange is not None:
        raise Unsupported(f"table {slot.name!r} is in training in this process: load another model")


def bind(slots: Sequence[TableSlot], feeds: Mapping[str, SharedRowFeed]) -> None:
    """Has modules read the copies of these feeds, as long as they are in memory."""
    for slot in slots:
        rows: Rows = slot.module.local
        before = rows.before if isinstance(rows, FollowedRows) else rows
        assert isinstance(before, LocalRows)
        before.forget()
        if (
            isinstance(rows, FollowedRows)
            and isinstance(rows.feed, SharedRowFeed)
            and rows.feed is not feeds[slot.table]
        ):
            rows.feed.give_back(slot.module)  # another WeightFeed has loaded the module before
        feeds[slot.table].claim(slot.module)
        slot.module.local = FollowedRows(slot.table, feeds[slot.table], before)
