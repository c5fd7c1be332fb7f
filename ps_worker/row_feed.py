"""`RowFeed`: a live copy of a table in a process that does not train."""

from __future__ import annotations

import atexit
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from ps_feed.subscribing import reading_from
from ps_protocol.errors import (
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    PSError,
    TryLater,
    Unauthenticated,
    Unreachable,
    Unsupported,
    anew,
)
from ps_protocol.row_ids import shards_of
from ps_runtime.background import guarded, join_within, start
from ps_runtime.credentials import Access
from ps_runtime.memory import free_bytes
from ps_runtime.settings import JOB_NAME
from ps_runtime.troubles import Troubles
from ps_worker.cluster.feeds import RowWatch, shard_addresses
from ps_worker.reading_blocks import ReadingBlocks
from ps_worker.tables.ahead import flat_ids
from ps_worker.tables.row_copy import ReadRowsMessage, RowCopy, saved_copy

log = logging.getLogger("ps_worker")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
REFUSED_PAUSE_SECONDS = 15.0  # after an error that does not pass: each attempt may transfer a whole table first
SILENT_SECONDS = 30.0  # a shard sends a message at least every ten seconds
EXIT_SECONDS = 2.0  # for the threads of open feeds when the interpreter exits
_UNKNOWN_BYTES = 2**34  # assumed free memory, if the system does not report it
_FINAL = (Forbidden, InvalidRequest, LimitExceeded, Unauthenticated, Unsupported)  # errors that waiting does not cure
_RANDOM = random.Random()


class _Source:
    """The table that a feed follows, and the directory that keeps its rows."""

    def __init__(
        self, server: str, access: Access, job: str, table: str, period: float, directory: Path | None, save: float
    ) -> None:
        self.server, self.access, self.job, self.table = server, access, job, table
        self.period, self.save_every = period, save
        self._directory = directory
        self.memory = free_bytes() or _UNKNOWN_BYTES
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def path(self, shard: int, shards: int) -> Path | None:
        """Returns the file of a shard's rows; None without a directory."""
        return None if self._directory is None else self._directory / f"rows-{shard}-of-{shards}.safetensors"

    @property
    def about(self) -> dict[str, str]:
        """The job and the table, in the form in which the files of rows name them."""
        return {"job": self.job, "table": self.table}

    def saved_shards(self) -> int:
        """Returns the number of shards in the most recent files of rows; 0 without files."""
        found = [] if self._directory is None else sorted(self._directory.glob("rows-*-of-*.safetensors"))
        newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
        return 0 if newest is None else int(newest.stem.rpartition("-")[2])


class RowFollower:
    """Follows one of several shards, in its own thread, until `end`.

    blocks: in which nothing is added to the copy
    goes_on: whether rows may still be added to this follower's copy; False ends the thread
    copy: its rows; None before the first message
    thread: its thread
    began: the time.monotonic() at which its present stream began
    heard: the time.monotonic() at which the copy was last known to equal the shard's rows; None: not in this process
    """

    def __init__(
        self,
        source: _Source,
        shard: int,
        shards: int,
        blocks: ReadingBlocks,
        changed: Callable[[], None],
        goes_on: Callable[[RowFollower], bool],
    ) -> None:
        self.shard, self.shards, self._blocks, self._goes_on = shard, shards, blocks, goes_on
        self.copy: RowCopy | None = None
        self.heard: float | None = None
        self.trouble: PSError | None = None
        self._source, self._changed = source, changed
        self._path = source.path(shard, shards)
        self._ending = threading.Event()
        self._watch: RowWatch | None = None
        self.began = self._spoke = self._saved = time.monotonic()
        self._troubles = Troubles(log, "feed")
        if self._path is not None and self._path.exists():
            self.copy = saved_copy(self._path, source.about, source.memory)
        self.thread = threading.Thread(target=self._run, name=f"row-feed-{shard}", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises TryLater if the system has no thread to give."""
        start(self.thread)

    @property
    def version(self) -> int:
        """The version of the copy; -1 while it is incomplete."""
        return -1 if self.copy is None else self.copy.version

    def end(self, wait: bool = True) -> None:
        """Ends the thread, which saves its rows first."""
        self._ending.set()
        self._blocks.wake()
        if (watch := self._watch) is not None:
            watch.cancel()
        if wait and self.thread.is_alive():
            self.thread.join()

    def _is_over(self) -> bool:
        return self._ending.is_set() or not self._goes_on(self)

    def look(self) -> None:
        """Cancels the call if the shard has been silent for long: its process may be stopped, or its host gone."""
        watch = self._watch
        if watch is not None and time.monotonic() - self._spoke > SILENT_SECONDS + self._source.period:
            watch.cancel()

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._is_over():
            begun = self.heard
            guarded("row-feed", self._follow)
            if self.heard != begun:
                pause = FIRST_PAUSE_SECONDS
            self._changed()
            is_refused = isinstance(self.trouble, _FINAL) and not isinstance(self.trouble, InvalidRequest)
            self._ending.wait((REFUSED_PAUSE_SECONDS if is_refused else pause) * _RANDOM.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        if self.copy is not None and self.copy.cursor:
            guarded("row-feed", self._save)

    def _follow(self) -> None:
        """Receives messages until the stream ends, and records the reason of its end."""
        source = self._source
        try:
            addresses, self.shards = shard_addresses(source.server, source.access)
            if self.shard not in addresses:
                raise TryLater(f"shard {self.shard} of {self.shards} is not known at {source.server} yet")
            self._changed()
            cursor = self.copy.cursor if self.copy is not None else b""
            where = self.shard, addresses[self.shard], source.access
            self.began = self._spoke = time.monotonic()
            self._watch = RowWatch(*where, source.job, source.table, cursor, source.period)
            if not self._is_over():
                for part in self._watch:
                    self._take(part)
        except PSError as error:
            self.trouble = trouble = anew(error)  # its traceback would keep all rows, where somebody keeps the error
            if isinstance(error, InvalidRequest) and self.copy is not None:
                self.copy.cursor = b""  # the shard does not know this cursor: it sends all rows again
            self._troubles.met(source.table, "feed of table %r: %s", source.table, trouble)
        finally:
            if (watch := self._watch) is not None:
                watch.cancel()

    def _take(self, part: ReadRowsMessage) -> None:
        """Adds a message to the copy, as soon as nobody reads in a block."""
        came, self._spoke = time.monotonic(), math.inf  # it is not the shard that is waited for
        with self._blocks.change(self._is_over) as may_change:
            is_added = may_change and not self._is_over() and self._add(part)
        self._spoke = time.monotonic()
        if is_added and part.cursor:
            self.heard, self.trouble = came, None
            self._troubles.over(self._source.table)
            if time.monotonic() - self._saved >= self._source.save_every:
                self._save()
            self._changed()

    def _add(self, part: ReadRowsMessage) -> bool:
        """Adds a message to the copy. Returns False for one outside of a round: the table is gone, and the stream
        ends.
        """
        copy = self.copy
        if part.begin is not None and (copy is None or copy.begin.dim != part.begin.dim):
            copy = self.copy = RowCopy(part.begin, self._source.memory)
        if copy is not None:
            copy.take(part)
        return copy is not None

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self._path is not None and self.copy is not None:
            self.copy.save(self._path, self._source.about)


_open: weakref.WeakSet[RowFeed] = weakref.WeakSet()  # the feeds that are not closed


@atexit.register
def _end_open_feeds() -> None:
    """Ends the feeds that a script has left open: no thread of theirs may be in torch when the interpreter exits."""
    for feed in list(_open):
        feed._end_now()


class RowFeed:
    """A copy of a job's whole table that follows training. A change arrives within about a second.

    A feed takes no part in the job. It needs the role reader, and training does not wait for it. It follows shards that
    are started again or moved. After a rollback, or in a new run of the job, it copies the table again; the earlier
    rows stay readable meanwhile. It needs memory for all rows. Its methods are thread-safe.

    Args:
        table: The table's name, which is that of its module in the model, such as "item" or "towers.user".
        server: HOST:PORT of the coordinator (PS_SERVER).
        job: The job's name (PS_JOB); "default" by default.
        directory: A directory that keeps the rows for the next process, which then fetches only later changes. None:
            rows are not kept.
        period: Seconds between two looks for changes, 0.1 to 3600.
        save_every: Seconds between two saves of the rows in `directory`; `close` saves them, too.
        tls_cert, tls_key, tls_ca, token_file, insecure: As for `connect`.

    Raises:
        InvalidRequest: Settings contradict each other, or the directory has rows of another table.
    """

    def __init__(
        self,
        table: str,
        server: str | None = None,
        job: str | None = None,
        *,
        directory: str | Path | None = None,
        period: float = 1.0,
        save_every: float = 60.0,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        token_file: str | None = None,
        insecure: bool | None = None,
    ) -> None:
        address, shown = reading_from(server, tls_cert, tls_key, tls_ca, token_file, insecure)
        if not 0.1 <= period <= 3600:
            raise InvalidRequest(f"period must be 0.1 to 3600 seconds, got {period}")
        where = Path(directory) if directory is not None else None
        self._source = _Source(address, shown, JOB_NAME.find(job), table, period, where, save_every)
        self._condition = threading.Condition()
        self._closing = threading.Event()
        self._blocks = ReadingBlocks()
        self._serving: tuple[RowFollower, ...] = ()  # complete: `rows` reads their copies
        self._coming: tuple[RowFollower, ...] = ()  # incomplete: they replace `_serving` once all are complete
        self._trouble: PSError | None = None  # the error of the last request for the number of shards
        saved = self._source.saved_shards()
        if saved:
            self._coming = self._followers(saved)
            self._settle()
        self._thread = threading.Thread(target=self._look_after, name="row-feed", daemon=True)
        try:
            start(self._thread)
        except TryLater:
            for each in self._coming:
                each.end()
            raise
        _open.add(self)

    def __enter__(self) -> RowFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Returns the number of rows in the copy."""
        return sum(len(each.copy) for each in self._serving if each.copy is not None)

    @property
    def version(self) -> int:
        """The number of updates that all rows of the copy contain at least: the lowest over the shards.

        In sync it compares with the workers' clock; in ssp and async each worker's step is one update. A rollback
        lowers it. It is -1 while the copy is incomplete.
        """
        return min((each.version for each in self._serving), default=-1)

    @property
    def age(self) -> float:
        """Seconds since the copy was last known to equal the servers' rows; inf: never in this process."""
        heard = [each.heard for each in self._serving]
        times = [when for when in heard if when is not None]
        return time.monotonic() - min(times) if times and len(times) == len(heard) else float("inf")

    @property
    def trouble(self) -> PSError | None:
        """The error that keeps changes from arriving; None if no error is known."""
        followers = self._coming or self._serving
        return next((each.trouble for each in followers if each.trouble is not None), self._trouble)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows, on the CPU.

        Args:
            ids: int64 or int32, of any shape. An id without a row has the value with which its row would begin.

        Returns:
            [*ids.shape, dim] float32.

        Raises:
            InvalidRequest: These are no ids.
            TryLater: The copy is incomplete; see `wait_for`.
        """
        flat, parts = flat_ids([ids]), self._serving
        if not parts:
            raise TryLater(f"the rows of table {self._source.table!r} are not here yet")
        of, found = shards_of(flat, len(parts)), None
        for part in parts:
            assert part.copy is not None
            places = np.flatnonzero(of == part.shard)
            values = part.copy.read(flat[places])
            if found is None:
                found = torch.empty(len(flat), values.shape[1], dtype=torch.float32, device="cpu")
            found[torch.from_numpy(places)] = values
        assert found is not None
        return found.view(*ids.shape, found.shape[1])

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Gives a block in which no row changes, and returns the version of the rows.

        Changes that arrive wait until no thread is in such a block. A block that begins while some wait lets them in
        first, for a second at most.
        """
        self._blocks.give_way()
        self._blocks.enter()
        try:
            yield self.version
        finally:
            self._blocks.leave()

    def wait_for(self, version: int = 0, timeout: float = 60.0) -> int:
        """Waits until the copy is complete and has reached a version. Returns its version.

        Args:
            version: The lowest version to wait for.
            timeout: Seconds to wait.

        Raises:
            Unreachable: The time is over, or the feed is closed; the message has the reason.
            Forbidden, Unauthenticated, InvalidRequest, LimitExceeded, Unsupported: Waiting cannot help.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            while self.version < version:
                trouble, left = self.trouble, deadline - time.monotonic()
                if isinstance(trouble, _FINAL):
                    raise type(trouble)(str(trouble))
                if left <= 0 or self._closing.is_set():
                    why = "the feed is closed" if self._closing.is_set() else trouble or f"it is at {self.version}"
                    raise Unreachable(f"table {self._source.table!r} did not come to version {version}: {why}")
                self._condition.wait(left)
            return self.version

    def _end_now(self) -> None:
        """Ends the feed at the exit of the interpreter, and waits EXIT_SECONDS at most for its threads."""
        self._closing.set()
        self._blocks.wake()
        followers = self._followed()
        for each in followers:
            each.end(wait=False)
        join_within([self._thread, *(each.thread for each in followers)], EXIT_SECONDS)

    def _begin_close(self) -> None:
        """Tells the feed's threads to end."""
        self._closing.set()
        self._blocks.wake()
        with self._condition:
            self._condition.notify_all()
        for each in self._followed():
            each.end(wait=False)

    def close(self) -> None:
        """Ends the feed, and saves its rows if it has a directory. The rows stay readable."""
        self._begin_close()
        self._thread.join()
        for each in self._followed():
            each.end()
        _open.discard(self)

    # -- on the feed's own threads -----------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Follows each shard, learns how many there are, and restarts calls to silent ones."""
        while not self._closing.is_set() and self._is_needed():
            guarded("row-feed", self._look)
            self._closing.wait(1.0 if self._serving or self._coming else 0.2)
        self._closing.set()
        for each in self._followed():
            each.end(wait=False)
        with self._condition:
            self._condition.notify_all()

    def _is_needed(self) -> bool:
        """Whether a feed that is not closed goes on. The feed's own thread asks about once a second."""
        return True

    def _goes_on(self, follower: RowFollower) -> bool:
        """Whether rows of a shard may still be added. The follower's own thread asks."""
        return True

    def _followed(self) -> set[RowFollower]:
        return {*self._serving, *self._coming}

    def _look(self) -> None:
        for each in self._followed():
            each.look()
        current = self._coming or self._serving
        if current and all(each.shards == len(current) for each in current):
            return
        try:
            _, shards = shard_addresses(self._source.server, self._source.access)
        except PSError as error:
            self._trouble = error
        else:
            self._trouble = None
            if shards and shards != len(current):
                try:
                    self._replace(shards)
                except TryLater as error:
                    self._trouble = error
        with self._condition:
            self._condition.notify_all()

    def _replace(self, shards: int) -> None:
        """Follows another number of shards. The present rows stay until the new ones are complete."""
        made = self._followers(shards)
        before, self._coming = self._coming, made
        for each in before:
            each.end(wait=False)
        self._settle()

    def _followers(self, shards: int) -> tuple[RowFollower, ...]:
        made = tuple(
            RowFollower(self._source, shard, shards, self._blocks, self._settle, self._goes_on)
            for shard in range(shards)
        )
        try:
            for each in made:
                each.start()
        except TryLater:
            for each in made:
                each.end(wait=False)
            raise
        return made

    def _settle(self) -> None:
        """Serves the new followers once all of them are complete, and wakes waiters."""
        if self._are_complete(self._coming):
            with self._blocks.change(self._closing.is_set) as may_change, self._condition:
                if may_change and self._are_complete(self._coming):  # another thread may have been first
                    before, self._serving, self._coming = self._serving, self._coming, ()
                    for each in before:
                        each.end(wait=False)
        with self._condition:
            self._condition.notify_all()

    @staticmethod
    def _are_complete(followers: tuple[RowFollower, ...]) -> bool:
        return bool(followers) and all(each.version >= 0 for each in followers)
