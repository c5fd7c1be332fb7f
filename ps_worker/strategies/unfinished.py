"""A step that has ended on this worker, until it counts; and its fate if the worker loses its place.

A worker may lose its place in the middle of a step, when some shards have had the gradient and others have not. It
still has the gradient, so it pushes the step again from the next place. The step's clock is then the one after that at
which the next place begins. Shards that have had the gradient get a skip instead. So the step counts as a whole, once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ps_protocol.messages.workers import JoinResult
from ps_protocol.modes import Consistency
from ps_worker.model.flat import FlatModel
from ps_worker.model.step import EndedStep
from ps_worker.strategies.sent_step import SentStep


class Fate(enum.Enum):
    """What happens to a step whose place was lost. The values are texts for the log."""

    COUNTS = "its last gradient counts"
    AGAIN = "its last gradient is pushed from there"
    DATA_COMES_AGAIN = "the data of its last step comes again when the script next asks for a batch"
    NOT_KNOWN = (
        "its last gradient is lost, or a part of it: the coordinator does not say which shards have had it, because a "
        "server is of an earlier version"
    )
    OF_LATER_WEIGHTS = "its last gradient is lost: it was taken at later weights than those that the job went back to"
    INTERRUPTED = "its last gradient is lost, or a part of it: the step was interrupted, and the script has gone on"
    NO_STEP = "it was in no step"

    @property
    def is_lost(self) -> bool:
        """Whether the step's gradient is lost: it is in no weights, and its data does not come again."""
        return self in (Fate.NOT_KNOWN, Fate.OF_LATER_WEIGHTS, Fate.INTERRUPTED)


@dataclass
class Unfinished:
    """A step that has ended on this worker, and does not count yet.

    step:     its content
    done:     the clock before it, in the place in which it ended
    is_early: it is a round of local steps that ended early, because the place was lost
    begun:    the clock at which it was first pushed; None: no shard has had any of it
    """

    step: EndedStep
    done: int
    is_early: bool = False
    begun: int | None = None

    def counts(self, now: JoinResult) -> bool:
        """Whether every shard has had all of the step. now: the place that follows the lost one"""
        return self.begun is not None and now.pushed is not None and now.pushed >= self.begun

    def goes_on_from(self, now: JoinResult) -> None:
        """Prepares the step to be pushed again from a new place. If no shard has had any of it, it counts as not begun:
        after a rollback of all shards, its next clock may be below the one at which it was first pushed.
        """
        if self.begun is not None and now.on_shards and not now.has_some(self.begun):
            self.begun = None

    def fate(self, now: JoinResult, rolled_back: bool, one_clock: bool, is_leased: bool, waits_for_data: bool) -> Fate:
        """Returns whether the step counts, is pushed again, or is lost.

        now:            the place that follows the lost one
        rolled_back:    this worker was rolled back to before the step
        one_clock:      all workers share a clock
        is_leased:      the step used leased batches: if no shard has had them, they are leased again
        waits_for_data: this worker will repeat data of after a checkpoint
        """
        if self.counts(now):
            return Fate.COUNTS
        if self.begun is not None and now.pushed is not None and not now.on_shards:
            return Fate.NOT_KNOWN
        is_somewhere = self.begun is not None and now.has_some(self.begun)
        if is_leased and (rolled_back or not is_somewhere):
            return Fate.DATA_COMES_AGAIN
        if rolled_back and waits_for_data and now.clock <= self.done:
            return Fate.DATA_COMES_AGAIN
        if rolled_back and one_clock and now.clock < self.done:
            return Fate.OF_LATER_WEIGHTS
        return Fate.AGAIN


def fate_in(
    now: JoinResult,
    at_hand: Unfinished | None,
    sent: SentStep | None,
    sets: bool,
    rolled_back: bool,
    one_clock: bool,
    is_leased: bool,
    waits_for_data: bool,
) -> Fate:
    """Returns the fate of a worker's step in the place that follows a lost one.

    at_hand: the step; None: none has ended on this worker
    sent:    the step under way; without one at hand it was interrupted
    sets:    the script has set something for the step at hand
    The others are those of Unfinished.fate.
    """
    if at_hand is None:
        if sent is None:
            return Fate.NO_STEP
        return Fate.COUNTS if sent.has_counted(now) else Fate.DATA_COMES_AGAIN if rolled_back else Fate.INTERRUPTED
    if at_hand.begun is not None and now.pushed is None and sent is not None and sent.has_counted(now):
        return Fate.COUNTS
    if at_hand.step.is_empty and not sets:
        return Fate.COUNTS if at_hand.counts(now) else Fate.NO_STEP
    return at_hand.fate(now, rolled_back, one_clock, is_leased, waits_for_data)


def count_interrupted(
    at_hand: Unfinished | None, sent: SentStep | None, now: JoinResult, model: FlatModel, counted: int | None
) -> tuple[SentStep | None, int | None]:
    """Ends the step under way if it counts and another one has ended since: the script was interrupted in it. What its
    wire format has rounded off is added to the next push. Returns the step that is under way still, None if none is;
    and the clock of the last step that counts.

    at_hand: the step that has ended; None: none has
    sent:    the step under way, which is the one at hand if any shard may have had that; None: there is none
    now:     the place that follows the lost one
    counted: the clock of the last step that counts, before; None: there is none
    """
    if at_hand is None or at_hand.begun is not None or sent is None or not sent.has_counted(now):
        return sent, counted
    model.count(sent.left)
    return None, sent.clock


def has_all_before(
    now: JoinResult,
    done: int,
    at_hand: Unfinished | None,
    sent: SentStep | None,
    counted: int | None,
    rule: Consistency,
) -> bool:
    """Whether a job that was rolled back has all steps of a worker up to the one at hand: its own state stays as it is.

    now:     the place that follows the lost one
    done:    the clock of the last of them, if none is at hand
    sent:    the step under way; unless it is the one at hand it was interrupted, and may be the last one
    counted: the clock of the last step of this process that counts; None: there is none
    """
    if at_hand is None and sent is not None:
        return False
    if at_hand is not None:
        if at_hand.is_early:
            return False
        done = at_hand.done
        if at_hand.begun is None and sent is not None:  # the last one was interrupted: the job may lack it alone
            counted = sent.clock
    if rule.one_clock:
        return now.clock == done + (at_hand is not None and at_hand.counts(now))
    return counted is not None and now.pushed is not None and now.pushed >= counted
