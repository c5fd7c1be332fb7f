"""Taking a checkpoint of a job on one shard, beside training.

A bucket is copied in memory by the thread that steps it, at the moment at which it has applied exactly as many updates
as the checkpoint asks for; or, where the mode has no common moment, at once. When every bucket is there, a thread of
its own writes them. So training waits for copying, never for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from ps_protocol.errors import NotFound, OutOfOrder, PSError, TryLater
from ps_server.core.snapshot import BucketSnapshot, Part, ShardSnapshot, extent
from ps_server.failpoints import failpoint
from ps_server.shard.job import HostedBucket, HostedJob, Pull

log = logging.getLogger("ps_server")

# Writes the images of a checkpoint's part and describes the file.
Write = Callable[[str, list[BucketSnapshot]], Part]


class SnapshotTask:
    """One checkpoint of one job on this shard.

    clock: the version at which each bucket is copied; None: now
    """

    def __init__(self, name: str, clock: int | None, job: HostedJob, write: Write, writer: Executor) -> None:
        self.name = name
        self._job = job
        self.clock = clock
        self._write = write
        self._writer = writer
        self._changed = threading.Condition()
        buckets = list(job.buckets.values())
        self._trained = {bucket.state.layout.index for bucket in buckets if not bucket.state.layout.held}
        self._wanted = {bucket.state.layout.index for bucket in buckets}
        self._images: list[BucketSnapshot] = []
        self._held_up = 0.0
        self._captured: ShardSnapshot | None = None
        self._error: PSError | None = None
        self._told: dict[int, int] = {}  # by rank, the clock of the pull that was told first

    def is_at_least(self, other: SnapshotTask) -> bool:
        """Whether the other is this one, asked for once more. Raises OutOfOrder if it is an older one, or one that
        another coordinator gave the same name: a late call must not take the place of what was begun since."""
        if (self.name, self.clock) == (other.name, other.clock):
            return True
        if int(other.name) <= int(self.name):
            raise OutOfOrder(f"checkpoint {self.name} was begun already, and checkpoint {other.name} is asked for")
        return False

    def check(self, buckets: Iterable[HostedBucket]) -> None:
        """Raises OutOfOrder if a bucket is at the clock already or past it, TryLater if one has no weights yet."""
        for bucket in buckets:
            protocol = bucket.state.protocol
            if not protocol.initialised:
                raise TryLater("the job has no initial weights yet")
            if self.clock is not None and not bucket.state.layout.held and protocol.version >= self.clock:
                raise OutOfOrder(
                    f"bucket {bucket.state.layout.index} is at version {protocol.version}, "
                    f"and the checkpoint is of {self.clock}"
                )

    def begin(self) -> None:
        """A shard that holds no bucket of the job has its part already: a file with nothing in it."""
        if not self._wanted:
            self._writer.submit(self._finish)

    def look(self, bucket: HostedBucket) -> None:
        """Copies a bucket if its moment is now. The caller holds the bucket's `tensors` lock."""
        index, now = bucket.state.layout.index, bucket.state.protocol.version == self.clock
        if index not in self._wanted or not (now or self.clock is None or bucket.state.layout.held):
            return
        started = time.perf_counter()
        with self._job.lock:
            committed = self._job.state.committed(index)
        image = bucket.state.image(committed)
        with self._changed:
            self._held_up += time.perf_counter() - started
            self._images.append(image)
            self._wanted.discard(index)
            if not self._wanted:
                self._writer.submit(self._finish)

    def _finish(self) -> None:
        images, self._images = sorted(self._images, key=lambda image: image.index), []
        reached = extent((image.version, image.clocks) for image in images if image.index in self._trained)
        try:
            part = self._write(self.name, images)
            failpoint("shard-file-written")
        except PSError as error:
            log.warning("checkpoint %s: %s", self.name, error)
            self._end(error=error)
        except Exception:
            log.exception("checkpoint %s cannot be written", self.name)
            self._end(error=PSError("the checkpoint failed on this shard; its log says why"))
        else:
            self._end(ShardSnapshot(part, reached, self._held_up))

    def _end(self, captured: ShardSnapshot | None = None, error: PSError | None = None) -> None:
        with self._changed:
            self._captured, self._error = captured, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Another checkpoint takes this one's place: who waits for it is told."""
        with self._changed:
            self._wanted.clear()
            self._images.clear()
            if self._captured is None and self._error is None:
                self._error = NotFound(f"checkpoint {self.name} was given up for another one")
            self._changed.notify_all()

    def wait(self, seconds: float) -> ShardSnapshot:
        """The part, once it is on disk. Raises TryLater if that takes longer, or what kept it from being written."""
        with self._changed:
            self._changed.wait_for(lambda: self._captured or self._error, seconds)
            if self._error is not None:
                raise self._error
            if self._captured is None:
                raise TryLater(f"checkpoint {self.name}: {len(self._wanted)} buckets are not at clock {self.clock} yet")
            return self._captured

    def tells(self, pull: Pull, version: int) -> bool:
        """Whether a worker that gets this version by this pull is to save its own state.

        At one clock each; but at any pull of that clock: the answer to the first may be lost.
        """
        if self.clock is not None:
            return version == self.clock == pull.clock
        return self._told.setdefault(pull.rank, pull.clock) == pull.clock
