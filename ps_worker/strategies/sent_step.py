"""A step whose pushes are under way: whether it counts is not known yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol.messages.workers import JoinResult, SavedState
from ps_runtime.signals import is_cut_short
from ps_worker.model.flat import FlatModel
from ps_worker.model.residual import Leaving
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.state.state_sender import LEAVING_SECONDS
from ps_worker.tables.assigned import AssignedRows
from ps_worker.tables.server_rows import ServerTables

log = logging.getLogger("ps_worker")


@dataclass(frozen=True)
class SentStep:
    """A step whose calls are under way.

    place:      the place from which it is sent
    clock:      the clock of the step
    pushed:     the calls that must be done before the step counts
    committing: those of them that are pulls, which may wait for other workers
    left:       the gradients of the step that may have been rounded: not those in a segment
    assigned:   the rows that the script has set for it, by table, if the script has interrupted it and gone on
    """

    place: JoinResult
    clock: int
    pushed: Sequence[Future[Any]]
    committing: Sequence[Future[Any]]
    left: Sequence[Leaving]
    assigned: AssignedRows = field(default_factory=dict, kw_only=True)

    def counts(self, now: JoinResult | None) -> bool | None:
        """Whether the step counts, according to the servers' answer to a later join; None if they have not said so.

        now: the worker's current place; None if it has none
        """
        if now is None or now is self.place or now.pushed is None:
            return None
        return now.pushed >= self.clock

    def through(self) -> Sequence[Leaving]:
        """Returns the gradients of the step if all its calls have succeeded; none otherwise."""
        is_through = all(each.done() and not each.cancelled() and each.exception() is None for each in self.pushed)
        return self.left if is_through else ()

    def interrupted(self, tables: ServerTables) -> SentStep:
        """Returns the step with the rows that it includes. Rows that the script sets from now on belong to the next
        step.
        """
        assigned = tables.assigned()
        if not assigned:
            return self
        tables.forget_assigned()
        return replace(self, assigned=assigned)

    def has_counted(self, now: JoinResult) -> bool:
        """Whether the step counts. now: a later place"""
        counts = self.counts(now)
        return all(push.exception() is None for push in self.pushed) if counts is None else counts

    def counts_at_end(self, now: JoinResult | None, seconds: float) -> bool:
        """Whether the step counts, as far as is known when its pushes are done, or after `seconds`.

        Drafts count only with the pull that commits them. Such a pull is not waited for: the step counts unless it has
        failed.
        """
        counts = self.counts(now)
        if counts is not None:
            return counts
        wait([push for push in self.pushed if push not in self.committing], seconds)
        failed = [push for push in self.pushed if (push.exception() if push.done() else push not in self.committing)]
        if failed and len(failed) < len(self.pushed):
            log.warning("this worker stops in step %d, of which a part may count", self.clock)
        return not failed

    def lost(self, model: FlatModel) -> None:
        """Called if the step does not count, or may not: its gradient is sent again or given up."""


def last_state(
    checkpoint: WorkerCheckpoint,
    clock: int,
    sent: SentStep | None,
    now: JoinResult | None,
    model: FlatModel,
    rollbacks: int,
) -> SavedState:
    """Returns the state of a worker that leaves, after its last step that counts: a signal may have ended it in the
    middle of one. A step counts if all its pushes are staged, whether or not the other workers have come.

    After a rollback that the worker has not made, it is the state that the worker would go back to.

    clock: that of the last step that is over
    sent:  the step under way; None if there is none
    now:   the worker's current place; None if it has none
    rollbacks: the rollbacks of the job that this worker has made
    """
    if now is not None and now.restore_count > rollbacks and now.state is not None:
        if now.clock < clock and not is_cut_short():
            log.warning(
                "the job was rolled back from clock %d to clock %d after this worker's last step: what this process "
                "has is of clock %d, and the servers and their checkpoints are behind it",
                *(clock, now.clock, clock),
            )
        return now.state
    counts = sent is not None and sent.counts_at_end(now, LEAVING_SECONDS)
    if sent is not None:
        clock = sent.clock - (not counts)
        model.count(sent.left if counts else ())
    return SavedState(clock, checkpoint.last_state(clock, counts, cut_short=is_cut_short()))
