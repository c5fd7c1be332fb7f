"""Records the moments of the wanted steps. Other steps cost nothing.

ready    backward has made the bucket's last gradient. On a GPU its kernel is queued by then
sent     the bucket leaves: its message, its draft, or the notice that it lies in shared memory
staged, applied, admitted: the shard's, as the pull brings them
landed   the new weights are in the model. On a GPU their copy is queued by then

A step begins where the one before ends. One that does not count, because its worker lost its place, is left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.layout import Layout
from ps_protocol.messages.data import NO_PAYLOAD, PulledBucket
from ps_worker.timeline import chrome
from ps_worker.timeline.chrome import BucketMoments, StepMoments
from ps_worker.timeline.clocks import ShardClocks

log = logging.getLogger("ps_worker")

MOST_BUCKETS = 100_000  # in one recording, over all steps: about 100 MB as a file


@dataclass(frozen=True)
class RecordingRequest:
    """The steps that a timeline is to record.

    path:  the file; each worker writes its own, with its rank in the name
    first: the first step, counted from the next one: 1
    steps: how many
    """

    path: Path
    first: int
    steps: int


class RecordedStep:
    """The moments of a step that is recorded, on the clock of time.perf_counter. Methods are for any thread."""

    def __init__(self, clock: int, clocks: ShardClocks) -> None:
        """clock: the worker's clock after the step"""
        self._clock, self._clocks = clock, clocks
        self._began = self._pushing = time.perf_counter()
        self._gradients: dict[int, float] = {}  # by parameter; a later backward counts
        self._drafts: dict[int, float] = {}  # by bucket
        self._sent: dict[int, float] = {}  # by bucket; of a call that is repeated, the first attempt
        self._landed: dict[int, tuple[float, int, PulledBucket]] = {}

    def gradient(self, parameter: int) -> None:
        """Records that backward has finished a gradient."""
        self._gradients[parameter] = time.perf_counter()

    def pushing(self) -> None:
        """Records that `optimizer.step()` begins to push."""
        self._pushing = time.perf_counter()

    def sent(self, buckets: Iterable[int], draft: bool = False) -> None:
        """Records that buckets are sent. draft: another push may replace them"""
        now = time.perf_counter()
        for bucket in buckets:
            if draft:
                self._drafts[bucket] = now
            else:
                self._sent.setdefault(bucket, now)

    def landed(self, shard: int, pulled: PulledBucket) -> None:
        """Records that a bucket has come back from a shard."""
        # Without its payload, which would stay in memory.
        self._landed[pulled.bucket] = time.perf_counter(), shard, pulled._replace(payload=NO_PAYLOAD)

    def ended(self, layout: Layout) -> StepMoments:
        """Returns the moments of the step, which ends now."""
        now = time.perf_counter()
        buckets = tuple(self._moments(bucket, layout) for bucket in sorted(self._landed))
        return StepMoments(self._clock, self._began, self._pushing, now, buckets)

    def _moments(self, bucket: int, layout: Layout) -> BucketMoments:
        parameters = {part.parameter for part in layout.buckets[bucket].slices}
        made = [self._gradients[parameter] for parameter in parameters if parameter in self._gradients]
        sent = self._sent.get(bucket, self._drafts.get(bucket, self._pushing))
        ready = min(max(made, default=self._pushing), sent)
        landed, shard, pulled = self._landed[bucket]
        reading = self._clocks.of(shard)
        if pulled.times is None or reading is None:
            return BucketMoments(bucket, shard, ready, sent, landed)
        on_shard = (reading.own(moment) for moment in pulled.times)
        return BucketMoments(bucket, shard, ready, sent, landed, tuple(on_shard), reading.error)


class Timeline:
    """The recording of one session. For the training thread; any thread may read `step` and call `close`.

    step:   the step that is being made; None if it is not recorded
    clocks: of the shards
    wanted: the steps to record. None: none; `begin_step` and `end_step` need not be called
    """

    def __init__(self) -> None:
        self.step: RecordedStep | None = None
        self.clocks = ShardClocks()
        self.wanted: RecordingRequest | None = None
        self._layout = Layout((), (), {})
        self._rank = 0
        self._member: int | None = None
        self._is_connected = False  # from then on a step is being made at any time
        self._made = 0  # steps that were begun since a recording was asked for, and have ended
        self._steps: list[StepMoments] = []
        self._kept = 0  # buckets in these

    def record(self, wanted: RecordingRequest) -> None:
        """Begins a recording with the next step. An earlier recording is written first."""
        self.close()
        self.wanted, self._made = wanted, -1 if self._is_connected else 0

    def describe(self, layout: Layout, member: int | None = None) -> None:
        """Sets the layout of the job's buckets. member: this process's number in its group, if it is in one"""
        self._layout, self._member = layout, member

    def connect(self) -> None:
        """Forgets the step at hand and the shards' clocks: there is a new connection."""
        self.step, self._is_connected = None, True
        self.clocks.forget()

    def begin_step(self, clock: int, rank: int) -> bool:
        """Begins the step that leads to a clock. A step that has not ended is dropped. Returns whether it is
        recorded.
        """
        wanted, self._rank = self.wanted, rank
        recorded = wanted is not None and self._made + 1 >= wanted.first
        self.step = RecordedStep(clock, self.clocks) if recorded else None
        return recorded

    def end_step(self) -> None:
        """Ends the current step. After the last wanted step, writes the timeline's file."""
        wanted, step, self.step = self.wanted, self.step, None
        if wanted is None:
            return
        self._made += 1
        if step is not None:
            self._steps.append(step.ended(self._layout))
            self._kept += len(self._steps[-1].buckets)
            full = self._kept >= MOST_BUCKETS
            if full:
                log.warning("the timeline ends after %d steps: it has %d buckets", len(self._steps), self._kept)
            if full or self._made >= wanted.first + wanted.steps - 1:
                self.close()

    def close(self) -> None:
        """Writes the recorded steps, and ends the recording."""
        wanted, steps = self.wanted, self._steps
        if wanted is None:
            return
        name = str(self._rank) if self._member is None else f"{self._rank}.{self._member}"
        path = wanted.path.with_name(f"{wanted.path.stem}-rank{name}{wanted.path.suffix}")
        try:
            if steps:
                chrome.write(path, self._rank, steps, self._member)
                log.info("the timeline of steps %d to %d is in %s", steps[0].clock, steps[-1].clock, path)
            elif self._made > 0:
                log.warning("no step was recorded: there is no timeline")
        except OSError as error:
            log.warning("the timeline cannot be written to %s: %s", path, error.strerror)
        self.wanted, self._steps, self._kept = None, [], 0
        self.step = None
