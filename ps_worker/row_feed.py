"""A live copy of a table in a process that does not train: predictions follow training within seconds."""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from ps_protocol.errors import (
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    PSError,
    TryLater,
    Unauthenticated,
    Unreachable,
    Unsupported,
)
from ps_protocol.row_ids import shards_of
from ps_runtime.background import guarded, join_within, start
from ps_runtime.credentials import Access, access
from ps_runtime.memory import free_bytes
from ps_runtime.troubles import Troubles
from ps_worker.cluster.feeds import RowWatch, shard_addresses
from ps_worker.config import check
from ps_worker.tables.ahead import flat_ids
from ps_worker.tables.row_copy import FeedPart, RowCopy, saved_copy

log = logging.getLogger("ps_worker")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
REFUSED_PAUSE_SECONDS = 15.0  # after what is no passing trouble: a whole copy may have come before it
SILENT_SECONDS = 30.0  # a shard gives a sign of life every ten
EXIT_SECONDS = 2.0  # that the threads of a feed which is left open have when the interpreter ends
_UNKNOWN_BYTES = 2**34  # of memory, where the system does not say how much is free
_FINAL = (Forbidden, InvalidRequest, LimitExceeded, Unauthenticated, Unsupported)  # waiting helps against none of them
_RANDOM = random.Random()


class _Source:
    """What a feed follows, and where it keeps it."""

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
        """Returns the file of a shard's rows; None: they are kept nowhere."""
        return None if self._directory is None else self._directory / f"rows-{shard}-of-{shards}.safetensors"

    @property
    def about(self) -> dict[str, str]:
        """What the rows are of, as their files say."""
        return {"job": self.job, "table": self.table}

    def saved_shards(self) -> int:
        """Returns of how many shards there are files; of several numbers the one written last; 0: there are none."""
        found = [] if self._directory is None else sorted(self._directory.glob("rows-*-of-*.safetensors"))
        newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
        return 0 if newest is None else int(newest.stem.rpartition("-")[2])


class _Follower:
    """Follows one shard of several, in a thread of its own, until `end`.

    copy:  its rows; None: nothing has come yet
    thread: its thread
    heard: when the copy was last known to be as the shard has it, by time.monotonic; None: not in this process
    """

    def __init__(self, source: _Source, shard: int, shards: int, changed: Callable[[], None]) -> None:
        self.shard, self.shards = shard, shards
        self.copy: RowCopy | None = None
        self.heard: float | None = None
        self.trouble: PSError | None = None
        self._source, self._changed = source, changed
        self._path = source.path(shard, shards)
        self._ending = threading.Event()
        self._watch: RowWatch | None = None
        self._spoke = self._saved = time.monotonic()
        self._troubles = Troubles(log, "feed")
        if self._path is not None and self._path.exists():
            self.copy = saved_copy(self._path, source.about, source.memory)
        self.thread = threading.Thread(target=self._run, name=f"row-feed-{shard}", daemon=True)

    def start(self) -> None:
        """Begins. Raises TryLater where no thread can be had."""
        start(self.thread)

    @property
    def version(self) -> int:
        """The version of the copy; -1: it is not complete."""
        return -1 if self.copy is None else self.copy.version

    def end(self, wait: bool = True) -> None:
        """Ends the thread, which saves what it has."""
        self._ending.set()
        if (watch := self._watch) is not None:
            watch.cancel()
        if wait and self.thread.is_alive():
            self.thread.join()

    def look(self) -> None:
        """Calls the shard anew if it has been silent for long: its process may be stopped, or its host gone."""
        watch = self._watch
        if watch is not None and time.monotonic() - self._spoke > SILENT_SECONDS + self._source.period:
            watch.cancel()

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._ending.is_set():
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
        """Takes what comes, until the stream ends; notes why."""
        source = self._source
        try:
            addresses, self.shards = shard_addresses(source.server, source.access)
            if self.shard not in addresses:
                raise TryLater(f"shard {self.shard} of {self.shards} is not known at {source.server} yet")
            self._changed()
            cursor = self.copy.cursor if self.copy is not None else b""
            where = self.shard, addresses[self.shard], source.access
            self._spoke = time.monotonic()
            self._watch = RowWatch(*where, source.job, source.table, cursor, source.period)
            if not self._ending.is_set():
                for part in self._watch:
                    self._take(part)
        except PSError as error:
            self.trouble = error
            if isinstance(error, InvalidRequest) and self.copy is not None:
                self.copy.cursor = b""  # nothing that it could go on from: the rows come anew
            self._troubles.met(source.table, "feed of table %r: %s", source.table, error)
        finally:
            if (watch := self._watch) is not None:
                watch.cancel()

    def _take(self, part: FeedPart) -> None:
        self._spoke = time.monotonic()
        copy = self.copy
        if part.begin is not None and (copy is None or copy.begin.dim != part.begin.dim):
            copy = self.copy = RowCopy(part.begin, self._source.memory)
        if copy is None:
            return  # a message without a round: the table is gone, and the stream ends
        copy.take(part)
        if part.cursor:
            self.heard, self.trouble = time.monotonic(), None
            self._troubles.over(self._source.table)
            if time.monotonic() - self._saved >= self._source.save_every:
                self._save()
            self._changed()

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self._path is not None and self.copy is not None:
            self.copy.save(self._path, self._source.about)


_open: weakref.WeakSet[RowFeed] = weakref.WeakSet()  # those that are not closed


@atexit.register
def _end_open_feeds() -> None:
    """Ends the feeds that a script has left open: none of their threads may be in torch when the interpreter ends."""
    for feed in list(_open):
        feed._end_now()


class RowFeed:
    """A copy of a job's table that follows training: it has every row, and what changes comes within about a second.

    It takes no part in the job: it needs the role of a reader, and training does not wait for it. It finds shards again
    that were started again, or moved. After a rollback, or in a new run of the job, it copies the table anew; the rows
    that it has stay readable meanwhile. It needs memory for all rows. All methods may be called from any thread.

    table:      its name: that of its module in the model, such as "item" or "towers.user"
    server:     HOST:PORT of the coordinator (PS_SERVER)
    job:        the job's name (PS_JOB), "default"
    directory:  where rows are kept for the next process: it begins with them, and asks for what changed since; None:
                nowhere
    period:     seconds from one look for changes to the next one: 0.1 to 3600
    save_every: seconds after which the files in `directory` are written anew; so they are by `close`
    tls_cert, tls_key, tls_ca, token_file, insecure: as for `connect`

    Raises InvalidRequest for settings that contradict each other, and for a directory with rows of another table.
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
        names = ("tls_cert", "tls_key", "tls_ca", "token_file", "insecure")
        given = (tls_cert, tls_key, tls_ca, token_file, insecure)
        shown = access(*(check(name, value) for name, value in zip(names, given, strict=True)))
        address = check("server", server)
        if address is None:
            raise InvalidRequest("a feed needs a server: RowFeed(server='HOST:PORT') or PS_SERVER")
        if not 0.1 <= period <= 3600:
            raise InvalidRequest(f"period must be 0.1 to 3600 seconds, got {period}")
        where = Path(directory) if directory is not None else None
        self._source = _Source(address, shown, check("job", job), table, period, where, save_every)
        self._condition = threading.Condition()
        self._closing = threading.Event()
        self._serving: tuple[_Follower, ...] = ()  # complete
        self._coming: tuple[_Follower, ...] = ()  # to serve when they are complete
        self._trouble: PSError | None = None  # of finding out how many shards there are
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
        """How many rows the copy has."""
        return sum(len(each.copy) for each in self._serving if each.copy is not None)

    @property
    def version(self) -> int:
        """Updates of the table that all rows have, at least: the lowest over the shards. In sync that is the workers'
        clock; in ssp and async each worker's step is one. It goes down with a rollback. -1: the copy is not complete.
        """
        return min((each.version for each in self._serving), default=-1)

    @property
    def age(self) -> float:
        """Seconds since the copy was last known to be as the servers have it; inf: not in this process."""
        heard = [each.heard for each in self._serving]
        times = [when for when in heard if when is not None]
        return time.monotonic() - min(times) if times and len(times) == len(heard) else float("inf")

    @property
    def trouble(self) -> PSError | None:
        """Why nothing comes at the moment; None: all is well, as far as is known."""
        followers = self._coming or self._serving
        return next((each.trouble for each in followers if each.trouble is not None), self._trouble)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows: ids of any shape, int64 or int32, to [*ids.shape, dim] float32, on the CPU.

        An id that is no row, because training has not met it, has the value with which its row would begin.

        Raises InvalidRequest for what are no ids, TryLater as long as the copy is not complete: see `wait_for`.
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
        return found.view(*ids.shape, -1)

    def wait_for(self, version: int = 0, timeout: float = 60.0) -> int:
        """Waits until the copy is complete and has a version; returns that which it has.

        Raises Unreachable with the reason when the time is over; at once what waiting cannot help, such as Forbidden.
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
        """Ends the feed as `close` does, and waits for its threads for a moment: the interpreter ends."""
        self._closing.set()
        followers = {*self._serving, *self._coming}
        for each in followers:
            each.end(wait=False)
        join_within([self._thread, *(each.thread for each in followers)], EXIT_SECONDS)

    def close(self) -> None:
        """Ends the feed, and saves rows if there is a directory. What it has stays readable."""
        self._closing.set()
        with self._condition:
            self._condition.notify_all()
        self._thread.join()
        for each in {*self._serving, *self._coming}:
            each.end()
        _open.discard(self)

    # -- its threads -------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Finds out how many shards there are, has each followed, and wakes those that have fallen silent."""
        while not self._closing.is_set():
            guarded("row-feed", self._look)
            self._closing.wait(1.0 if self._serving or self._coming else 0.2)

    def _look(self) -> None:
        for each in {*self._serving, *self._coming}:
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
        """Follows another number of shards. Until they are complete, the rows of those before stay."""
        made = self._followers(shards)
        before, self._coming = self._coming, made
        for each in before:
            each.end(wait=False)
        self._settle()

    def _followers(self, shards: int) -> tuple[_Follower, ...]:
        made = tuple(_Follower(self._source, shard, shards, self._settle) for shard in range(shards))
        try:
            for each in made:
                each.start()
        except TryLater:
            for each in made:
                each.end(wait=False)
            raise
        return made

    def _settle(self) -> None:
        """Serves those that came, if they are complete; tells those that wait."""
        with self._condition:
            if self._coming and all(each.version >= 0 for each in self._coming):
                before, self._serving, self._coming = self._serving, self._coming, ()
                for each in before:
                    each.end(wait=False)
            self._condition.notify_all()
