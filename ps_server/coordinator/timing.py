"""The coordinator's clock, and the times that it waits, in seconds. Tests and simulations pass their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ps_server.core.membership import DEFAULT_ABSENCE_SECONDS


class Clock:
    """The machine's clocks. Tests hand in their own."""

    def now(self) -> float:
        """Returns seconds that never go backwards, from an arbitrary zero."""
        return time.monotonic()

    def since_1970(self) -> float:
        """Returns the date in seconds: for people to read, and for runs and incarnations, which rise with it."""
        return time.time()

    def wait(self, changed: threading.Condition, holds: Callable[[], bool], seconds: float) -> bool:
        """Waits until `holds`, which is looked at after each notice, or for `seconds`. The caller holds `changed`."""
        return changed.wait_for(holds, seconds)


@dataclass(frozen=True)
class Timing:
    """How often a coordinator looks, and how long it waits, in seconds.

    recovery_look:   between looks for shards that lost their part of a job
    roll_back_again: between attempts to roll a job back where a shard cannot, until somebody does something
    held_jobs_look:  between looks for jobs that a shard holds and the coordinator does not know, or the reverse
    save_again:      between attempts to write the coordinator's file, where the disk did not take it
    deserted:        after so long without a worker a job ends that had some
    unjoined:        the same for a job that no worker ever joined
    absence:         so long after a worker was taken off as silent, a job that all others have left waits for it
    shard_awaited:   so long after its start a coordinator waits for all shards before it rolls one back alone
    shard_lost:      after so long without a call, a shard may be replaced by a process at another address
    round_look:      between looks at the workers that wait in a round
    round_notice:    between notices to such a worker that say which ranks it waits for
    round_hold:      after so long such a worker is told to ask again
    checkpoint_look: between looks at a checkpoint that is being made
    checkpoint_begin: between attempts to begin one while a shard cannot
    state:           all parts are on disk, and a worker has not sent its state, because it evaluates perhaps: it is
                     left out after this
    any_state:       the same without a common clock: there an older state will do
    last_checkpoint: for the checkpoint at the end of a job
    asked_checkpoint: a checkpoint was asked for: so long the live workers have to come to its clock
    fallback:        for taking the buckets as they are afterwards, without the states of workers that are late
    refusal:         after the last checkpoint before the servers end, a shard takes pushes again if they have not ended
    """

    recovery_look: float = 0.25
    roll_back_again: float = 5.0
    held_jobs_look: float = 5.0
    save_again: float = 1.0
    deserted: float = 3600.0
    unjoined: float = 300.0
    absence: float = DEFAULT_ABSENCE_SECONDS
    shard_awaited: float = 30.0
    shard_lost: float = 10.0
    round_look: float = 0.25
    round_notice: float = 2.0
    round_hold: float = 10.0
    checkpoint_look: float = 0.25
    checkpoint_begin: float = 0.05
    state: float = 60.0
    any_state: float = 10.0
    last_checkpoint: float = 10.0
    asked_checkpoint: float = 300.0
    fallback: float = 5.0
    refusal: float = 30.0


DEFAULT_TIMING = Timing()
DEFAULT_LEASE_SECONDS = 10.0  # for which a worker counts as live without a heartbeat
DEFAULT_DRAIN_SECONDS = 15.0  # that workers have to come to the last checkpoint before the servers end
DEFAULT_SERVER_CALL_SECONDS = 10.0  # for which a call between servers waits for its answer
