"""Follows a job while it trains, and keeps the newest edition of its weights in memory.

Shards copy an edition only when a reader asks for it. In sync and local modes a reader asks all shards for one version.
It first asks how far the job is. Then it asks for that version, or for one that another reader has asked for. If a
shard is past that version by then, the reader asks for one further ahead, which shards copy when they come to it. So a
reader finds by itself how far ahead it has to ask where steps are short (pace.py). If the job makes no update for
IDLE_SECONDS, the reader asks for the version that is there. In ssp, async and quorum modes it asks each shard for its
weights as they are.

A reader asks for the next edition once it has the one before. So it gets the newest, however slow it is, and training
waits for no reader. On a slow network the reader says which versions it has. Shards then send what changed since, if
that is smaller than the bucket; this costs both ends some time. When the job ends, a reader gets the last weights,
whatever `every` and `period` say: shards keep them for a while for readers that follow the job.

A relay answers as if it were a cluster with one shard. It chooses its editions itself, so a reader asks it for at least
a version, not for exactly one. If several addresses are given, the reader tries the next when one does not answer. One
relay may have an older edition than another: the reader keeps its own until the relay offers a newer one.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from ps_feed.edition import Arriving, Contents, Damaged, EditionArrays, Incoming, ReceivingRoom
from ps_feed.edition_client import EachShard, ShardReader, Unreadable, cluster
from ps_feed.mapping import Handover
from ps_feed.pace import NetworkSpeed, UpdatesAhead
from ps_feed.telling import Telling
from ps_protocol.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    NotShared,
    OutOfOrder,
    PSError,
    TryLater,
    Unauthenticated,
    Unreachable,
    Unsupported,
    anew,
)
from ps_protocol.messages.editions import EditionCall, RelayReport, WeightsAsked, WeightsHere
from ps_protocol.numpy_numbers import as_python
from ps_protocol.wire_formats import EDITION_WIRES
from ps_runtime.background import guarded, start
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.troubles import Troubles

log = logging.getLogger("ps_feed")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0
IDLE_SECONDS = 1.0  # without an update, after which a job is asked for what it has
PASSED_SECONDS = 0.005  # after which a version further ahead is asked for
POLL_SECONDS = 0.05  # the pause between two looks at a job's version, in modes in which shards copy weights as they are
LOOK_SECONDS = 1.0  # the pause between two looks while no edition is due: they show shards that somebody follows
TELL_SECONDS = 5.0  # the least pause between two reports of a waiting relay; it is up to half as long again
MOST_UNREADABLE = 3  # editions in a row of which a message cannot be read: another one would not be read either
EXIT_SECONDS = 2.0  # the time for an open feed's thread to end when the interpreter exits
# Of a payload in one message. With messages of 2 MiB a reader of 100 MB took 150 MB beside its two editions, with these
# 30 (measured): gRPC has a message three times while it hands it over, and malloc keeps what large ones leave.
PART_BYTES = 2**19
_FINAL = (Forbidden, InvalidRequest, Unauthenticated, Unsupported)  # errors that waiting does not cure
_RANDOM = random.Random()


class _StandsStill(Exception):
    """The job makes no updates at present, and its weights are newer than the edition."""


@dataclass
class Received:
    """What has come so far.

    editions: that were whole
    nbytes:   that came of buckets; elements: of the buckets in these editions: both are equal where all came whole
    damaged:  editions that were dropped because a bucket was not what was sent
    unreadable: of these the last ones in a row, which had a message that could not be read
    """

    editions: int = 0
    nbytes: int = 0
    elements: int = 0
    damaged: int = 0
    unreadable: int = 0


_open: weakref.WeakSet[Subscription] = weakref.WeakSet()  # those that are not closed


@atexit.register
def _end_open() -> None:
    """Closes subscriptions that a script has left open: no thread may be in native code when the interpreter exits."""
    for each in list(_open):
        each.close(EXIT_SECONDS)


class Subscription:
    """Follows a job's weights. Its methods are thread-safe.

    server: HOST:PORT of the coordinator or a relay; of several, with a comma between them, the next is tried when one
            does not answer
    job:    the job's name
    every:  updates between two editions, at least
    wire:   the type in which float32 weights travel, and lie in an edition
    parameters: names of the tensors that are wanted, as in the model's state_dict, and of tables; None: all
    period: seconds between two editions, at least
    access: needs the role of a reader
    changes: True: changes of buckets in place of whole ones; False: never; None: while the network is slow
    shared_directory: where a server on this host may hand over the memory of its editions; None: all comes in messages
    on_event: is called, in the subscription's thread, at each new edition, at an error, and at the end
    room:   the memory into which editions are received
    relay:  returns what the reader says of itself; None: nothing, as it is no relay

    Raises InvalidRequest for settings that cannot be.
    """

    def __init__(
        self,
        server: str,
        job: str = "default",
        *,
        every: int = 1,
        wire: str = "float32",
        parameters: Collection[str] | None = None,
        period: float = 0.0,
        access: Access = PLAINTEXT,
        changes: bool | None = None,
        shared_directory: Path | None = None,
        on_event: Callable[[], None] | None = None,
        room: ReceivingRoom | None = None,
        relay: Callable[[], RelayReport | None] = lambda: None,
    ) -> None:
        every, period = as_python(every), as_python(period)
        if not isinstance(every, int) or every < 1:
            raise InvalidRequest(f"every must be a number of updates from 1, got {every!r}")
        if wire not in EDITION_WIRES:
            raise InvalidRequest(f"wire must be one of {', '.join(EDITION_WIRES)}, got {wire!r}")
        if not isinstance(period, int | float) or not 0 <= period <= 3600:
            raise InvalidRequest(f"period must be 0 to 3600 seconds, got {period!r}")
        self._servers, self._job, self._access = server.split(","), job, access
        self._on_event, self._room = on_event, room or ReceivingRoom()
        self._telling = Telling(relay, lambda: TELL_SECONDS * _RANDOM.uniform(1.0, 1.5))
        self._every, self._wire, self._period = every, wire, period
        self._process, self._wanted = os.getpid(), None if parameters is None else frozenset(parameters)
        self._contents: Contents | None = None
        self._shards: EachShard | None = None
        self._ahead = UpdatesAhead()
        self._edition: EditionArrays | None = None
        self._trouble: PSError | None = None
        self._series = "", -1  # the run and the timeline that shards were on last
        self._changes, self._handover = changes, Handover(shared_directory, job)
        self._network, self._is_damaged = NetworkSpeed(), False  # after a damaged edition, all is requested whole
        self.received = Received()
        self._due = 0.0  # when the next edition may come, if a period is set
        self._lag: float | None = None  # seconds since a relay knew last that its edition is the newest; None: no relay
        self._announced = 0  # the highest version that any shard has told of on these
        self._asked_for, self._refused = -1, -1  # the version asked for last, and the last that a shard was past
        self._updated = time.monotonic()  # when `_announced` rose last
        self._described_at = 0.0  # when shards were asked last how far they are
        self._equal: float | None = None  # when the edition was last known to be the newest there is
        self._ended, self._restores = False, 0
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._troubles = Troubles(log, "feed")
        self._thread = threading.Thread(target=self._run, name="ps-feed", daemon=True)
        start(self._thread)
        _open.add(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what a reader sees --------------------------------------------------------------------------------------------

    @property
    def edition(self) -> EditionArrays | None:
        """The newest edition; None if there was none yet."""
        return self._edition

    @property
    def version(self) -> int:
        """The version of the newest edition; -1: there was none yet."""
        return -1 if self._edition is None else self._edition.version

    @property
    def behind(self) -> int:
        """Updates that the newest edition lacks, as far as shards have told: -1 before the first edition."""
        return -1 if self._edition is None else max(0, self._announced - self._edition.version)

    @property
    def is_left(self) -> bool:
        """Whether the job has left the newest edition: it went back to a checkpoint, or another run has its name."""
        edition = self._edition
        return edition is not None and (edition.run, edition.timeline) != self._series

    @property
    def latest(self) -> int:
        """The highest version that shards have told of."""
        return self._announced

    @property
    def age(self) -> float:
        """Seconds since the newest edition was last known to equal the shards' weights; inf: never."""
        return float("inf") if self._equal is None else time.monotonic() - self._equal

    @property
    def restores(self) -> int:
        """How often the job went back to a checkpoint since this began: only then a version may fall."""
        return self._restores

    @property
    def trouble(self) -> PSError | None:
        """The error that keeps editions from arriving; None if no error is known."""
        return self._trouble

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing.is_set()

    @property
    def ended(self) -> bool:
        """Whether the job has ended: no edition comes after the newest, which has the job's last weights, unless
        `trouble` says why these could not be had."""
        return self._ended

    def wait(self, version: int = 0, timeout: float = 60.0) -> EditionArrays:
        """Waits for an edition that has at least so many updates, and returns it.

        version: 0: any will do; otherwise one that the job has left does not, however many updates it has

        Raises:
            NotFound: The job has ended before.
            Unreachable: The time is over, or the subscription is closed; the message has the reason.
            Forbidden, Unauthenticated, InvalidRequest, Unsupported: Waiting cannot help, as in a forked process.
        """
        if os.getpid() != self._process:
            raise Unsupported("a process that was forked has no thread that follows the job: subscribe in it")
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._edition is None or self._edition.version < version or (version and self.is_left):
                trouble, left = self._trouble, deadline - time.monotonic()
                if isinstance(trouble, _FINAL):
                    raise type(trouble)(str(trouble))
                if self._ended:
                    raise NotFound(f"job {self._job!r} has ended at version {self.version}")
                if left <= 0 or self._closing.is_set():
                    closed = "the subscription is closed" if self._closing.is_set() else None
                    at = f"it has left version {self.version}, for a checkpoint or another run"
                    why = closed or trouble or (at if self.is_left else f"it is at {self.version}")
                    raise Unreachable(f"job {self._job!r} did not come to version {version}: {why}")
                self._changed.wait(left)
            return self._edition

    def look(self, seen: object, timeout: float) -> None:
        """Waits for an edition that is not the one seen, or the end, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._edition is not seen or self._ended or self.closed, timeout)

    def __iter__(self) -> Iterator[EditionArrays]:
        """Iterates over editions, from the newest on; one that comes while another is worked on is passed over for a
        newer one. Ends when the job has ended, or the subscription is closed. Raises as `wait`."""
        seen: EditionArrays | None = None
        while True:
            with self._changed:
                while self._edition is seen:
                    if isinstance(self._trouble, _FINAL):
                        raise type(self._trouble)(str(self._trouble))
                    if self._ended or self._closing.is_set():
                        return
                    self._changed.wait()
                edition = seen = self._edition
            assert edition is not None
            yield edition

    def close(self, timeout: float | None = None) -> None:
        """Ends it. Editions stay as they are. timeout: seconds to wait for its thread, at most"""
        _open.discard(self)
        self._closing.set()
        shards = self._shards
        if shards is not None:
            shards.end()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closing.is_set() and not self._ended:
            before = self.received.editions  # a count: the edition itself would stay in memory while `_follow` runs
            guarded("ps-feed", self._follow)
            if self.received.editions != before:
                pause = FIRST_PAUSE_SECONDS
            self._closing.wait(pause * _RANDOM.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._drop_shards()
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._on_event is not None:
            self._on_event()

    def _follow(self) -> None:
        """Receives editions until an error occurs, and records the error."""
        try:
            while not self._closing.is_set():
                if self._shards is None:
                    self._shards = EachShard(self._servers[0], self._access)
                    if self._closing.is_set():  # `close` may have looked for shards before
                        self._shards.end()
                try:
                    self._next(self._shards)
                except OutOfOrder:
                    self._refused = self._asked_for  # what others have of that version may be a part of it
                    self._ahead.passed()
                    self._closing.wait(PASSED_SECONDS)
                except _StandsStill:
                    pass
                except NotShared as error:
                    self._handover.failed(error)
                    raise TryLater(str(error)) from None
                except Damaged as error:
                    self._is_damaged = True
                    self.received.damaged += 1
                    self.received.unreadable = self.received.unreadable + 1 if isinstance(error, Unreadable) else 0
                    if self.received.unreadable >= MOST_UNREADABLE:
                        raise InvalidRequest(f"{self.received.unreadable} times in a row {error}") from None
                    raise TryLater(str(error)) from None
                if self._ended:
                    return
        except PSError as error:
            if self._closing.is_set():
                return
            self._drop_shards()
            self._ended = isinstance(error, NotFound) and self._edition is not None and not self._is_there()
            trouble = self._trouble = anew(error)  # its traceback would keep what has come of an edition
            self._tell()
            self._servers.append(self._servers.pop(0))
            self._troubles.met(self._job, "job %s: its weights cannot be followed: %s", self._job, trouble)

    def _is_there(self) -> bool:
        """Whether the coordinator has the job; True if it does not answer."""
        try:
            return self._job in cluster(self._servers[0], self._access).jobs
        except PSError:
            return True

    def _drop_shards(self) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            shards.close()

    def _next(self, shards: EachShard) -> None:
        """Receives the next edition; waits until the job reaches it.

        Raises PSError: OutOfOrder if a shard was past that version already, _StandsStill if the job does not reach it.
        """
        edition, self._described_at = self._edition, time.monotonic()
        self._telling.renew()
        here = self._described(shards)
        highest, timeline = max(each.highest for each in here), max(each.timeline for each in here)
        is_same = edition is not None and (edition.run, edition.timeline) == (here[0].run, timeline)
        own = edition.version if edition is not None and is_same else None
        self._check_order(here[0], timeline)
        self._lag = here[0].age
        if self._series != (here[0].run, timeline):
            self._series, self._announced, self._refused = (here[0].run, timeline), 0, -1  # the version may have fallen
        self._heard_of(highest)
        ended = [each.ended for each in here]
        if any(ended) and not all(ended):
            self._closing.wait(POLL_SECONDS)  # a moment later all are told of the end
            return
        version = self._last_version(here) if all(ended) else self._version(here, highest, own)
        # A relay that was cut off before the end has older weights than this reader may have had from another.
        has_last = all(ended) and own is not None and version is not None and version < own + here[0].has_one_version
        if has_last and edition is not None:
            has_last = not any(edition.is_older(index, each.buffers) for each in here for index in edition.versions)
        if version is None or has_last:
            self._equal = time.monotonic() if own == highest else self._equal
            if all(ended):
                self._end()
            self._closing.wait(LOOK_SECONDS if time.monotonic() + LOOK_SECONDS < self._due else POLL_SECONDS)
            return
        self._asked_for, began = version, time.monotonic()
        try:
            received = self._receive(shards, here, version, edition if is_same else None, self._least(own))
        except NotFound:
            if all(ended):  # the last weights of the job lack what this reader wants
                raise
            self._closing.wait(POLL_SECONDS)  # it has ended: the next answer says whether last weights are kept
            return
        self._due = began + self._period
        self._publish(received, all(ended))

    def _end(self) -> None:
        with self._changed:
            self._ended = True

    def _last_version(self, here: list[WeightsHere]) -> int | None:
        """Returns the version with which a job has ended; None: its shards have none in common."""
        trained = [each for each in here if self._trains(each)]
        lowest = min((each.lowest for each in trained), default=0)
        is_one = all(each.lowest == each.highest == lowest for each in trained)
        return lowest if is_one or not here[0].has_one_version else None

    def _trains(self, here: WeightsHere) -> bool:
        """Whether an optimizer steps any bucket of a shard."""
        buckets = self._contents.layout.buckets if self._contents is not None else ()
        return any(not buckets[index].frozen for index in here.buckets)

    def _check_order(self, first: WeightsHere, timeline: int) -> None:
        """Raises TryLater if the offered weights are older than the present edition: another relay may lag behind."""
        edition = self._edition
        if first.is_relayed and edition is not None and (first.run, timeline) < (edition.run, edition.timeline):
            what = "an earlier run" if first.run < edition.run else "the weights from before a rollback"
            raise TryLater(f"job {self._job!r}: {self._servers[0]} has {what}, and no newer ones yet")

    def _described(self, shards: EachShard) -> list[WeightsHere]:
        """Queries all shards for their weights. Raises TryLater if the answers do not belong together."""
        run = self._series[0]
        try:
            here = self._asked(shards, run)
        except NotFound:
            if not run:
                raise
            here = self._asked(shards, "")  # another run may have the name
        first = here[0]
        if first.shards != len(here):
            self._drop_shards()
            raise TryLater(f"job {self._job!r} lies on {first.shards} shards, and {len(here)} were known")
        if any(each.run != first.run for each in here):
            raise TryLater(f"job {self._job!r}: not all shards have the same run of it yet")
        if first.has_one_version and any(each.timeline != first.timeline for each in here):
            raise TryLater(f"job {self._job!r}: not all shards have gone back to the same checkpoint yet")
        spec = first.spec
        if spec is None and (self._contents is None or run != first.run):
            spec = self._describe(shards.readers[0], first.run, with_spec=True).spec
        if spec is not None:
            self._contents = Contents(spec, self._wanted, self._wire)
        return here

    def _asked(self, shards: EachShard, run: str) -> list[WeightsHere]:
        """Queries all shards for their weights of a run; empty: of any."""
        is_first = self._contents is None
        return shards.all(lambda reader: self._describe(reader, run, is_first and reader.index == 0))

    def _describe(self, reader: ShardReader, run: str, with_spec: bool) -> WeightsHere:
        return reader.describe(self._asking(run, with_spec))

    def _asking(self, run: str, with_spec: bool = False) -> WeightsAsked:
        contents = self._contents
        buckets = () if contents is None or self._wanted is None else tuple(sorted(contents.buckets))
        return WeightsAsked(self._job, run, with_spec, self._wire, contents is not None, buckets, self._telling.last)

    def _version(self, here: list[WeightsHere], highest: int, own: int | None) -> int | None:
        """Returns the version to ask for; None if there is nothing newer yet, and shards are to be asked again."""
        contents = self._contents
        if own is not None and contents is not None and not contents.is_trained:
            return None  # what is wanted never changes
        if own is not None and time.monotonic() < self._due:
            return None
        if here[0].is_relayed:
            return max(here[0].lowest, self._least(own))
        if not here[0].has_one_version:
            lowest = min(each.lowest for each in here)
            return lowest if own is None or lowest >= own + self._every else None
        if own is not None and self._is_idle() and highest >= own + self._every:
            return highest  # versions that `every` divides were missed, and who knows when the next one comes
        ahead, least = highest + (0 if self._is_idle() else self._ahead.updates), self._least(own)
        wish = ahead if own is None else max(least, -(-ahead // self._every) * self._every)
        # What another reader waits for beyond that may be far away.
        shared = [version for version in here[0].editions if all(each.may_have(version) for each in here)]
        fitting = [each for each in shared if max(least, self._refused + 1) <= each <= wish]
        return max((each for each in fitting if own is None or each % self._every == 0), default=wish)

    def _least(self, own: int | None) -> int:
        """Returns the lowest version that comes after one's own."""
        return 0 if own is None else own - own % self._every + self._every

    def _is_idle(self) -> bool:
        return time.monotonic() - self._updated > IDLE_SECONDS

    def _heard_of(self, version: int) -> None:
        """Notes that a shard has told of a version."""
        if version > self._announced:
            self._announced, self._updated = version, time.monotonic()

    def _receive(
        self, shards: EachShard, here: list[WeightsHere], version: int, before: EditionArrays | None, least: int
    ) -> EditionArrays:
        """Receives an edition. least: the lowest version that would do; the one that is asked for may be further on"""
        contents = self._contents
        assert contents is not None
        shard_versions = {index: version for each in here for index, version in each.buffers.items()}
        room = self._room
        arriving = Arriving(contents, before, shard_versions, room.memory)
        room.check(arriving)
        base = before if self._wants_changes() else None
        came = Incoming(arriving, room, f"edition {version}")
        heard = dict.fromkeys(range(len(here)), time.monotonic())  # when each shard was heard of last

        def pull(reader: ShardReader) -> None:
            shard = here[reader.index]
            wanted = tuple(sorted(arriving.missing & set(shard.buckets)))
            if wanted:
                least = version if shard.has_one_version or shard.is_relayed else shard.lowest
                bases = {} if base is None else base.bases(wanted, shard.timeline)
                what = self._job, shard.run, shard.timeline, least, self._wire, wanted, bases, PART_BYTES
                with self._handover.offered(not self._is_damaged) as files:
                    call = EditionCall(*what, None if files is None else files.offer, sparse=True)
                    reader.pull(call, partial(came.take, files), partial(alive, reader.index), came.memory_for)
            else:
                del heard[reader.index]

        def alive(index: int, lowest: int, age: float | None) -> None:
            self._heard_of(lowest)
            self._lag = age
            heard[index] = time.monotonic() - (age or 0.0)
            if self._telling.is_due():  # the wait goes on meanwhile: the edition may come at any moment
                for each in shards.readers:
                    each.tell(self._asking(here[0].run))
            if before is not None and self._announced <= before.version:
                equal = min(list(heard.values()))
                self._equal = equal if self._equal is None else max(self._equal, equal)
            elif least <= self._announced < version and self._is_idle():
                raise _StandsStill

        try:
            shards.all(pull)
        finally:
            room.end(arriving)
        edition = arriving.complete(here[0].run, max(each.timeline for each in here))
        self._note_received(arriving, came.parts, is_measured=base is None and bool(came.parts))
        return edition

    def _wants_changes(self) -> bool:
        """Whether the next edition is asked for as what changed."""
        return not self._is_damaged and (self._network.is_slow() if self._changes is None else self._changes)

    def _note_received(self, arriving: Arriving, came: list[tuple[float, int]], is_measured: bool) -> None:
        """Counts a received edition.

        came:        when which bytes of it came, the first ones first
        is_measured: it was asked for whole. How long changes take says little of the network, also where all buckets
                     came whole because no change was smaller
        """
        if is_measured:
            self._network.note(came)
        self._is_damaged, self.received.unreadable = False, 0
        self.received.editions += 1
        self.received.nbytes += arriving.nbytes
        self.received.elements += arriving.elements

    def _publish(self, edition: EditionArrays, is_last: bool) -> None:
        """Publishes an edition. is_last: the job has ended; both are published together"""
        before = self._edition
        is_restored = before is not None and before.run == edition.run and edition.timeline > before.timeline
        if before is not None and before.run != edition.run:
            log.warning(
                "another run of job %s has begun: version %d takes the place of %d",
                *(self._job, edition.version, self.version),
            )
        if is_restored:
            log.warning(
                "job %s was rolled back to a checkpoint: version %d takes the place of %d",
                self._job,
                edition.version,
                self.version,
            )
        self._ahead.arrived()
        self._troubles.over(self._job)
        with self._changed:
            self._restores += is_restored
            self._edition, self._trouble, self._ended = edition, None, is_last
            if self._lag is not None or edition.version >= self._announced:
                self._equal = time.monotonic() - (self._lag or 0.0)
            elif self._equal is None or is_restored:
                self._equal = self._described_at
            else:  # it was asked for with what shards had then, or more
                self._equal = max(self._equal, self._described_at)
        self._tell()
