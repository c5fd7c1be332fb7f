"""Restoring jobs from checkpoints: in a thread of its own, however long the files are, and told how far it is.

The shard lets go of what it held of a job before it reads, so that a restore takes no more memory than the job does:
every shard is asked for a restore only when the job goes back to a checkpoint as a whole, or when it has lost its part.
One that fails leaves the shard without the job, as if it had lost it; the coordinator asks again.

A call is answered after a few seconds, with the bytes that were read until then, and is repeated until the job is
there. Calls may be late or come twice. Each restore of a job that differs from the one before has a higher
`last_incarnation`: that tells a call of before, which changes nothing, from the next one, which replaces what is being
read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ps_protocol.errors import OutOfOrder, PSError, RunEnded, TryLater, anew
from ps_protocol.job import JobSpec
from ps_server.core.snapshot import RestoreProgress, StoredPart, VersionRange


@dataclass(frozen=True)
class RestoreRequest:
    """What a coordinator asks for: the job with some of its buckets as of a checkpoint, and whom it fences.

    own:    the file that has the buckets, the last one, and those that it builds on, oldest first, on a disk of this
            shard's own; none: as the manifest says, which all share
    shards: how many have a part of the job's tables
    """

    spec: JobSpec
    buckets: tuple[int, ...]
    checkpoint: str
    last_incarnation: int
    run: str = ""
    own: tuple[StoredPart, ...] = ()
    shards: int = 1


class Restoring:
    """One restore of a job on this shard: how far it is, and what came of it. Methods may be called from any thread."""

    def __init__(self, request: RestoreRequest) -> None:
        self.request = request
        self._changed = threading.Condition()
        self._done, self._total = 0, 0
        self._extent: VersionRange | None = None
        self._error: PSError | None = None

    def begin(self, total: int) -> None:
        """Notes how many bytes are to be read."""
        self._total = total

    def read(self, count: int) -> None:
        """Notes that so many more bytes were read. Raises TryLater once it was abandoned."""
        if self._error is not None:
            raise TryLater(str(self._error))
        self._done += count

    def complete(self, extent: VersionRange) -> None:
        """Notes that the job is here."""
        with self._changed:
            self._extent = extent
            self._changed.notify_all()

    def fail(self, error: PSError) -> None:
        """Ends it, unless it has ended: what reads stops soon, and calls that wait are told why."""
        with self._changed:
            if self._extent is None and self._error is None:
                self._error = anew(error)  # its frames hold what was read
                self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether it has ended without the job."""
        return self._error is not None

    @property
    def complete_or_failed(self) -> bool:
        """Whether it has ended."""
        return self._extent is not None or self._error is not None

    def wait(self, seconds: float) -> RestoreProgress:
        """Returns how far it is, once it is complete or after some time. Raises why it failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.complete_or_failed, seconds)
            if self._error is not None:
                raise anew(self._error)
            return RestoreProgress(self._done, self._total, self._extent)

    def __str__(self) -> str:
        job, read = self.request.spec.name, f"{self._done} of {self._total} bytes"
        return f"job {job!r} is being rolled back to checkpoint {self.request.checkpoint}: {read} are read"


class Restores:
    """The last restore of each job on this shard. Not thread-safe: the shard's lock guards it."""

    def __init__(self) -> None:
        self._last: dict[str, Restoring] = {}

    def get(self, job: str) -> Restoring | None:
        """Returns a job's last restore that has not failed, unless the job was dropped since."""
        last = self._last.get(job)
        return None if last is None or last.failed else last

    def ask(self, request: RestoreRequest, highest_incarnation: int) -> tuple[Restoring, bool]:
        """Returns the restore that a call asks for, and whether it is to be begun.

        highest_incarnation: of this run that the shard has heard of
        Raises OutOfOrder for a call of before, RunEnded for one of an earlier run.
        """
        last = self.get(request.spec.name)
        if last is not None and last.request == request:
            return last, False
        if last is not None and request.run < last.request.run:
            raise RunEnded(f"run {request.run} of job {request.spec.name!r} has ended")
        is_same_run = last is not None and request.run == last.request.run
        if last is not None and is_same_run and request.last_incarnation <= last.request.last_incarnation:
            raise OutOfOrder(
                f"job {request.spec.name!r} was restored from checkpoint {last.request.checkpoint} with incarnation "
                f"{last.request.last_incarnation} after this call was made with {request.last_incarnation}"
            )
        if request.last_incarnation < highest_incarnation:
            raise OutOfOrder(
                f"job {request.spec.name!r} has had a worker of incarnation {highest_incarnation} since this call was "
                f"made with {request.last_incarnation}"
            )
        if last is not None:
            last.fail(TryLater(f"checkpoint {request.checkpoint} is restored in its place"))
        begun = self._last[request.spec.name] = Restoring(request)
        return begun, True

    def forget(self, job: str, run: str = "") -> None:
        """Ends the restore of a job that is dropped or made anew, and forgets the last one. An empty run is any."""
        last = self._last.get(job)
        if last is not None and run in ("", last.request.run):
            del self._last[job]
            last.fail(TryLater(f"job {job!r} was dropped"))

    def stop(self) -> None:
        """Ends all that are under way: the shard stops."""
        for restoring in self._last.values():
            restoring.fail(TryLater("the shard is stopping"))
