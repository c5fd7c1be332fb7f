"""One job in one wire format: the editions of it that a relay keeps, and their readers.

A relay keeps the last `MOST` editions. It sends the newest to each reader that asks for its version or a lower one.
While both are being read, a newer edition waits until one of them is given back. Readers that hold it up for
`HELD_SECONDS` lose the edition that they read. So a job takes the memory of four editions at most: two that are read,
one that waits, and one that is being received. The changes between some of these take at most as much as one more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from ps_feed.edition import EditionArrays
from ps_feed.subscription import Subscription
from ps_protocol.changes import BucketDelta
from ps_protocol.errors import InvalidRequest, LimitExceeded, NotFound, OutOfOrder, PSError, RunEnded, TryLater, anew
from ps_protocol.messages.editions import EditionCall, WeightsHere
from ps_runtime.background import guarded
from ps_server.core.feed_figures import FeedFigures
from ps_server.relay.kept import KeptEdition, Reader
from ps_server.relay.room import EditionRoom
from ps_server.relay.sending import RelaySender
from ps_server.shard.mapped import MappedFiles
from ps_server.shard.outbox import Outbox
from ps_server.shard.relay_reports import RelayReports
from ps_server.shard.shared_changes import BucketChanges

MOST = 2
HELD_SECONDS = 30.0  # the longest that readers may hold an edition that a newer one waits to replace


class FollowedJob:
    """Follows a job until `close`. Methods may be called from any thread.

    subscribe: begins to follow the job; calls its argument at every change
    room:      the relay's memory
    mapped:    the editions that readers on this host have mapped; None: editions are always sent
    relays:    the relays among the job's readers, in all wire formats
    """

    def __init__(
        self,
        name: str,
        wire: str,
        subscribe: Callable[[Callable[[], None]], Subscription],
        room: EditionRoom,
        mapped: MappedFiles | None = None,
        clock: Callable[[], float] | None = None,
        relays: RelayReports | None = None,
    ) -> None:
        self.name, self.wire, self.mapped = name, wire, mapped or MappedFiles(None)
        self.relays = relays or RelayReports()
        self._clock = clock or time.monotonic  # no default argument, so that a simulation can replace time.monotonic
        self.asked = self._clock()  # when a reader last asked for the job
        self.sent_bytes = self.sent_elements = 0  # `sent_elements`: the bytes if changes had been sent whole
        self._changes_of: tuple[str, int] | None = None  # the run and the timeline of `_changes`
        self._changes: dict[int, BucketChanges] = {}
        self.ended_at: float | None = None  # when the job was known to have ended
        self._ended_run = ""  # the last run that has ended; kept while the next run is followed
        self._is_closed = False
        self._subscribe, self._room = subscribe, room
        self._kept: list[KeptEdition] = []  # the oldest first
        self._pending: EditionArrays | None = None  # an edition that waits until `_kept` has room
        self._pending_equal = 0.0  # when the waiting edition was last known to equal the shards' weights
        self._waiting: set[RelaySender] = set()
        self._following = threading.Lock()  # held while another subscription is made; taken before `_lock`
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)
        self._subscription = subscribe(self._on_event)
        self._on_event()  # events that came before `_subscription` was set

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The highest known version of the job."""
        return self._subscription.latest

    @property
    def ended(self) -> bool:
        """Whether the job has ended: no edition comes after the newest."""
        return self.ended_at is not None

    @property
    def trouble(self) -> PSError | None:
        """What keeps editions from arriving; None if no error is known."""
        return self._subscription.trouble

    @property
    def newest(self) -> KeptEdition | None:
        """The newest edition; None if there was none yet."""
        kept = self._kept
        return kept[-1] if kept else None

    @property
    def current(self) -> KeptEdition | None:
        """The newest edition, for readers that name no run; None if there is none of the present run."""
        newest = self.newest
        is_over = newest is not None and not self.ended and newest.arrays.run == self._ended_run
        return None if is_over else newest

    def kept(self) -> list[KeptEdition]:
        """Returns the editions that are kept, the oldest first."""
        with self._lock:
            return list(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all editions that are kept or wait."""
        with self._lock:
            kept = sum(each.nbytes for each in self._kept)
            return kept + (sum(each.nbytes for each in self._pending.spaces.values()) if self._pending else 0)

    def callers(self) -> list[str]:
        """Returns the principal of each reader."""
        with self._lock:
            readers = {reader for kept in self._kept for reader in kept.readers}
            return [each.caller for each in (*self._waiting, *readers)]

    @property
    def reader_count(self) -> int:
        """How many readers have an edition, or wait for one."""
        with self._lock:
            return len(self._waiting) + sum(len(kept.readers) for kept in self._kept)

    @property
    def present_version(self) -> int | None:
        """The version of the newest edition; None if there is none of the job's present run and timeline."""
        newest, following = self.newest, self._subscription
        edition = following.edition
        if newest is None or edition is None or following.is_left:
            return None
        return newest.arrays.version if newest.series == (edition.run, edition.timeline) else None

    @property
    def figures(self) -> FeedFigures:
        """The figures of the job's readers, for status and metrics."""
        kept = self.newest
        version, age = (None, 0.0) if kept is None else (kept.arrays.version, kept.age())
        behind = 0 if version is None else max(0, self.latest - version)
        sent = self.sent_bytes, self.sent_elements, str(self.trouble or "")
        own = [file for each in self.kept() for file in each.arrays.files.values()]
        held = self.mapped.held_bytes(own)
        numbers = self.reader_count, version, age, behind, self.nbytes
        relays = self.relays.figures(self.latest, self._clock())
        return FeedFigures(*numbers, *sent, mapped=self.mapped.readers, held=held, relays=relays)

    def describe(self, with_spec: bool, run: str = "") -> WeightsHere:
        """Describes the job's weights and its newest edition. Raises TryLater, NotFound or RunEnded.

        run: empty: the running one. A run that has ended must be named
        """
        kept = self._there(run)
        if self.ended and not run:
            raise NotFound(f"job {self.name!r} has ended at version {kept.arrays.version}")
        edition, contents, is_last = kept.arrays, kept.arrays.contents, self._is_last(kept.arrays)
        return WeightsHere(
            edition.run,
            edition.version,
            edition.version if is_last else max(edition.version, self.latest),
            edition.timeline,
            1,
            tuple(sorted(contents.buckets)),
            contents.spec.consistency.has_one_version,
            tuple(each.arrays.version for each in list(self._kept) if each.arrays.run == edition.run),
            contents.spec if with_spec else None,
            is_last,
            kept.age(),
            {index: edition.versions[index] for index in contents.buckets if edition.tells(index)},
        )

    def wait(self, seconds: float) -> None:
        """Waits until there is an edition, for `seconds` at most."""
        with self._has_news:
            self._has_news.wait_for(lambda: bool(self._kept) or self.ended or self._is_closed, seconds)

    # -- readers -------------------------------------------------------------------------------------------------------

    def pull(self, call: EditionCall, outbox: Outbox, caller: str) -> None:
        """Sends an edition of the wanted version or a higher one to the outbox, now or when it comes. Returns at once.

        Raises the errors of `describe`, InvalidRequest or OutOfOrder.
        """
        kept = self._there(call.run)
        unknown = [index for index in call.buckets if index not in kept.arrays.contents.buckets]
        if unknown:
            raise InvalidRequest(f"job {self.name!r} has no bucket {unknown[0]}")
        if call.timeline != kept.arrays.timeline:
            raise OutOfOrder(f"job {self.name!r} is on timeline {kept.arrays.timeline}, and not on {call.timeline}")
        count = len(kept.arrays.contents.buckets)
        if max(len(call.buckets), len(call.bases)) > count:
            raise InvalidRequest(f"job {self.name!r} has {count} buckets: more were asked for, or given as bases")
        wanted = frozenset(call.buckets or kept.arrays.contents.buckets)
        bases = {index: base for index, base in call.bases.items() if index in wanted}
        wants = kept.series, call.version, wanted, bases
        how = call.part_bytes, call.mapping, call.sparse
        sender = RelaySender(self, *wants, outbox, caller, self._clock(), *how)
        with self._lock:
            if self._is_closed:
                raise self._not_followed()
            self._waiting.add(sender)
        outbox.on_close(sender.forget)  # before anything is sent: the end may come at once
        self._promote()

    def hold(self, reader: Reader, fits: Callable[[KeptEdition], bool]) -> KeptEdition | None:
        """Returns the newest edition that fits, for a reader until `leave`; None if there is none."""
        with self._lock:
            kept = next((each for each in reversed(self._kept) if fits(each)), None)
            if kept is not None:
                kept.readers.add(reader)
            return kept

    def leave(self, reader: Reader) -> None:
        """Forgets a reader: it has its edition, or has gone."""
        with self._lock:
            self._waiting = {each for each in self._waiting if each is not reader}
            for kept in self._kept:
                kept.readers.discard(reader)
        self._promote()

    def sent(self, size: int, whole: int) -> None:
        """Counts bytes sent to readers. whole: the bytes of the same elements without changes"""
        with self._lock:
            self.sent_bytes += size
            self.sent_elements += whole

    def change(self, kept: KeptEdition, index: int, base: int, sparse: bool) -> BucketDelta | None:
        """Returns the changes of a bucket since a version on the same timeline; None: send the bucket whole.

        sparse: it may be sparse
        """
        contents = kept.arrays.contents
        with self._lock:
            if self._changes_of != kept.series:
                self._changes_of, self._changes = kept.series, {}
            changes = self._changes.get(index)
            if changes is None:
                changes = self._changes[index] = BucketChanges(contents.dtype(contents.buckets[index]), self._room.has)
            copies = [each.bucket(index) for each in self._kept if each.series == kept.series]
        return changes.between(base, kept.bucket(index), copies, sparse)

    # -- editions ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Sends keep-alive messages, and ends readers that hold up newer editions. For one thread."""
        newest, subscription = self.newest, self._subscription
        self.mapped.look()
        if newest is not None and subscription.edition is newest.arrays:
            newest.equal = max(newest.equal, now - subscription.age)
        self._promote()
        with self._lock:
            waiting = list(self._waiting)
        for each in waiting:
            each.tick(now, 0.0 if newest is None else newest.age())

    def follow_again(self) -> None:
        """Follows another run of the job after one has ended. The old run's editions stay until the new one has an
        edition.
        """
        with self._following:
            if self.ended_at is None or self._is_closed:
                return
            before, following = self._subscription, self._subscribe(self._on_event)
            with self._lock:
                self._subscription, self.ended_at = following, None
            before.close(0)
        self._on_event()

    def close(self) -> None:
        """Ends following the job, and all its readers."""
        with self._following:
            self._is_closed = True
            self._subscription.close(0)
        error = self._not_followed()
        with self._lock:
            readers: set[Reader] = {reader for kept in self._kept for reader in kept.readers} | self._waiting
            self._kept, self._pending, self._waiting = [], None, set()
            self._has_news.notify_all()
        _end(dict.fromkeys(readers, error))

    def _not_followed(self) -> TryLater:
        return TryLater(f"job {self.name!r} is not followed here any more")

    def _there(self, run: str) -> KeptEdition:
        """Returns the newest edition. Raises TryLater if there is none of that run; NotFound if the job has ended."""
        kept = self.newest
        if kept is None:
            if isinstance(self.trouble, (NotFound, LimitExceeded)):
                raise anew(self.trouble)
            why = f": {self.trouble}" if self.trouble else ""
            raise TryLater(f"this relay has no whole edition of job {self.name!r} yet{why}")
        if run and run != kept.arrays.run:
            if run < kept.arrays.run:
                raise RunEnded(f"run {run} of job {self.name!r} has ended")
            raise TryLater(f"this relay has no edition of run {run} of job {self.name!r} yet")
        if not run and self.current is None:
            raise TryLater(f"this relay has no edition of the new run of job {self.name!r} yet")
        return kept

    def _on_event(self) -> None:
        """Adopts the subscription's newest edition or its end. The subscription's thread calls this."""
        with self._lock:
            # The old subscription may report its end while it is closed: only the present one counts.
            subscription: Subscription | None = getattr(self, "_subscription", None)
            if subscription is None or self._is_closed:  # None: the constructor has not set it yet
                return
            edition = subscription.edition
            if subscription.ended and edition is not None:
                self._ended_run = edition.run
            self.ended_at = self._clock() if subscription.ended else None
            newest = self._pending or (self._kept[-1].arrays if self._kept else None)
            if edition is not None and edition is not newest:
                self._pending, self._pending_equal = edition, self._clock() - subscription.age
        self._promote()

    def _promote(self) -> None:
        """Makes the waiting edition the newest, if there is room; then serves the readers that wait for it."""
        lost: set[Reader] = set()
        with self._lock:
            if self._pending is not None and self._has_room(lost):
                now = self._clock()
                if self._kept:
                    self._kept[-1].replaced = now
                following = self._subscription  # a newer one than the edition's, if another run has begun
                equal = now - following.age if following.edition is self._pending else self._pending_equal
                self._kept.append(KeptEdition(self._pending, equal, self._clock))
                self._pending = None
            newest, served = self.newest, set[RelaySender]()
            refused: dict[Reader, PSError] = {}
            if newest is not None:
                for sender in self._waiting:
                    error = self._refusal(sender, newest)
                    if error is not None:
                        refused[sender] = error
                    elif sender.version <= newest.arrays.version:
                        served.add(sender)
                newest.readers |= served
            self._waiting -= served | refused.keys()
            self._has_news.notify_all()
        _end({each: TryLater("this edition was given up for a newer one: it was not read in time") for each in lost})
        _end(refused)
        if newest is not None:
            for sender in served:
                guarded("relay", partial(sender.send, newest))

    def _refusal(self, sender: RelaySender, newest: KeptEdition) -> PSError | None:
        """Returns the error for a waiting reader that can never get its edition; None if it still may."""
        (run, _), edition = sender.series, newest.arrays
        if run != edition.run:
            return RunEnded(f"run {run} of job {self.name!r} has ended")
        if sender.series != newest.series:
            return OutOfOrder(f"job {self.name!r} was rolled back: it is on timeline {edition.timeline}")
        if self._is_last(edition) and sender.version > edition.version:
            return NotFound(f"job {self.name!r} has ended at version {edition.version}")
        return None

    def _is_last(self, edition: EditionArrays) -> bool:
        """Whether an edition is the last of a run that has ended."""
        waits = self._pending
        return edition.run == self._ended_run and (waits is None or waits.run != edition.run)

    def _has_room(self, lost: set[Reader]) -> bool:
        """Makes room for another edition; returns whether there is any. The caller holds the lock.

        If `MOST` editions are kept, one without readers is dropped, or the oldest one if its readers have held up a
        newer one for too long.

        lost: gets the readers whose edition was dropped
        """
        if len(self._kept) < MOST:
            return True
        gone = next((each for each in self._kept if not each.readers), None)
        oldest = self._kept[0]
        if gone is None and oldest.replaced is not None and self._clock() - oldest.replaced > HELD_SECONDS:
            gone = oldest
            lost |= oldest.readers
        if gone is not None:
            self._kept.remove(gone)
        return gone is not None


def _end(readers: Mapping[Reader, PSError]) -> None:
    for reader, error in readers.items():
        guarded("relay", partial(reader.end, anew(error)))
