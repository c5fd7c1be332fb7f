"""The coordinator's clock, and the times that it waits, in seconds. Tests and simulations pass their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ps_server.core.membership import DEFAULT_ABSENCE_SECONDS


class Clock:
    """The machine's clocks. Tests pass their own."""

    def now(self) -> float:
        """Returns seconds that never go backwards, from an arbitrary zero."""
        return time.monotonic()

    def since_1970(self) -> float:
        """Returns the time in seconds since 1970. It is for logs, and for runs and incarnations, which must rise."""
        return time.time()

    def wait(self, changed: threading.Condition, holds: Callable[[], bool], seconds: float) -> bool:
        """Waits up to `seconds` until `holds` returns True; returns its last result. The caller holds `changed`.

        holds: is called after each notification of `changed`
        """
        return changed.wait_for(holds, seconds)


@dataclass(frozen=True)
class Timing:
    """The intervals and timeouts of a coordinator, in seconds.

    recovery_look:     interval of checks for shards that lost their part of a job
    roll_back_again:   interval of attempts to roll a job back, if a shard needs an operator's help
    held_jobs_look:    interval of checks for jobs that only the shards or only the coordinator has
    save_again:        interval of attempts to write the state file after a failure
    deserted:          a job ends after this time without a worker
    unjoined:          the same for a job that no worker ever joined
    absence:           how long a job that all others have left waits for a worker that was removed as silent
    shard_awaited:     how long after its start a coordinator waits for all shards before it rolls one back alone
    shard_lost:        after this time without a call, another process may take a shard's index
    round_look:        interval of checks of the workers that wait in a round
    round_notice:      interval of messages to such a worker that say which ranks it waits for
    round_hold:        after this time the stream of such a worker ends, and the worker asks again
    checkpoint_look:   interval of checks of a checkpoint under way
    checkpoint_begin:  interval of attempts to begin a checkpoint while a shard cannot
    state:             in sync, how long a scheduled checkpoint waits for a worker's state after all parts are on disk.
                       A worker that evaluates may send none
    any_state:         the same in ssp and async, where an older state will do
    last_checkpoint:   timeout of the checkpoint at the end of a job
    asked_checkpoint:  for a requested checkpoint, how long live workers have to reach its clock
    fallback:          how much longer a requested checkpoint may then take to copy the buckets as they are
    stops_together:    how long a coordinator waits for a signal to stop of its own before it makes a checkpoint for a
                       shard that ends
    refusal:           after the last checkpoint before the servers end: how long a shard still refuses pushes, if the
                       servers have not ended
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
    stops_together: float = 1.0
    refusal: float = 30.0


DEFAULT_TIMING = Timing()
DEFAULT_LEASE_SECONDS = 10.0  # a worker counts as live for this long without a heartbeat
DEFAULT_DRAIN_SECONDS = 15.0  # the time for workers to reach the last checkpoint before the servers end
DEFAULT_SERVER_CALL_SECONDS = 10.0  # the longest wait for the answer to a call between servers
