"""Adopts the settings of the job's script, such as a learning-rate schedule, in a process that joins late.

late     The process joins a job that is under way. Or the job was rolled back, and its checkpoint has no state of this
         worker. What the process' own script has set is then not what the job's script has set.
follows  Right before its first step, the worker asks the other workers for what their scripts have set, and takes it
         over (ps_worker/state/job_state.py). If they are at a later stage of the script, it does so right before its
         first step of that stage.
for now  The others may all be in code outside of the session, such as an evaluation. Or the coordinator is away. Then
         the worker takes over the last report of what they had set, and asks again with later steps until one of them
         tells what it has set now. After each vain question it leaves more steps without one.
nobody   The others may have nothing to tell. Then the process begins anew. But others that have to go back with the job
         know what their scripts have set only once they have asked themselves. So a new process asks some more times,
         and tells its own settings only after that: otherwise those others would take over what it has begun anew with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ps_protocol.messages.workers import SavedState
from ps_worker.cluster.participation import Participation, PlaceLost
from ps_worker.state.checkpoint import WorkerCheckpoint

log = logging.getLogger("ps_worker")

# The longest wait for an answer where all workers are at one clock. There a step waits for the others in any case.
QUESTION_SECONDS = 60.0
MOST_QUESTIONS = 4  # how often a new process asks others that have nothing to tell
MOST_LEFT_OUT = 15  # the most steps without a question, after questions that nobody could answer


class LateScript:
    """Sets the job's learning-rate schedules, and other state that scripts share, in a process that has joined late.
    For the training thread.

    clock:   returns this worker's clock
    tell:    begins to answer requests of other late workers
    in_step: all workers of the job are at one clock
    is_late: this process has not set that state yet, or has set an earlier one
    """

    def __init__(
        self,
        participation: Participation,
        checkpoint: WorkerCheckpoint,
        clock: Callable[[], int],
        tell: Callable[[], None],
        in_step: bool,
    ) -> None:
        self._participation, self._checkpoint, self._clock, self._tell = participation, checkpoint, clock, tell
        self._in_step = in_step
        self.is_late = False
        self._asks_again = False
        self._left_out = self._leave_out = 0  # steps since the last vain question, and so many are to be without one
        self._nobody_knew = 0  # how often the others had nothing to tell
        self._taken: SavedState | None = None  # for now, until another worker tells what its script has set
        self._goes_back = False  # it is ahead of the job's, which was rolled back
        self._until = 0  # the stage of the script at which what the job has can be taken over

    def joins(self) -> None:
        """Notes that the process joins a job that is under way."""
        self.is_late = True
        self._checkpoint.comes_late()

    def goes_back(self) -> None:
        """Notes that the job was rolled back to a checkpoint that has no state of this worker."""
        self.is_late = self._goes_back = True
        self._asks_again, self._taken, self._left_out, self._leave_out, self._nobody_knew = False, None, 0, 0, 0
        self._participation.script.end()  # others would take over what it has set later than the job

    def follow(self, may_ask_again: bool = True) -> None:
        """Takes over what the job's script has set, if this process is late and its script has reached the
        same stage.

        may_ask_again: whether to ask once more after a vain question; False within a round, when the other workers'
            answer would be of another step
        """
        if not self.is_late or self._checkpoint.stage < self._until or (self._asks_again and not may_ask_again):
            return
        if self._left_out < self._leave_out:
            self._left_out += 1
            return
        if self._checkpoint.job.are_some:
            try:
                report, is_coming = self._asked()
            except PlaceLost:
                return  # which the step meets, too; the next one asks anew
            if is_coming:
                self._go_on(report)
                return
            if report is None and self._begins_anew_for_now():
                return
            if report is not None and report != self._taken:
                self._take(report)
            self._left_out = self._leave_out = 0
            if self._checkpoint.stage < self._until:
                return
        if self._checkpoint.has_unknown_scheduler:
            log.warning(
                "worker %d joins at clock %d, and its learning-rate schedule begins anew: hand the scheduler to "
                "prepare, and workers that join late continue the job's",
                *(self._participation.rank, self._clock()),
            )
        self.is_late = self._goes_back = self._asks_again = False
        self._tell()

    def _asked(self) -> tuple[SavedState | None, bool]:
        """Returns what the job's script has set, and whether a newer report is on its way."""
        ask = self._participation.ask_script
        if not self._asks_again:
            return ask()
        report, is_coming = ask(QUESTION_SECONDS if self._in_step else 0.0)
        if is_coming or not self._in_step:
            return report, is_coming
        return ask(QUESTION_SECONDS)  # the first answer may be one to the question before an earlier step

    def _go_on(self, report: SavedState | None) -> None:
        """Goes on although no other worker has told what its script has set now. report: the last report; None: none"""
        if self._ask_later():
            return
        if report is not None:
            self._take(report)
            self._taken = None if self._checkpoint.stage < self._until else report
        log.warning(
            "worker %d goes on at clock %d with %s for now: no other worker tells what its script has set, so this one "
            "asks again with later steps",
            *(self._participation.rank, self._clock()),
            "its own schedules and the like" if report is None else f"those that the job had at clock {report.clock}",
        )

    def _ask_later(self) -> bool:
        """Has later steps ask again, after a vain question. Returns whether they did so already: then fewer do now."""
        if self._asks_again:
            self._left_out, self._leave_out = 0, min(2 * self._leave_out + 1, MOST_LEFT_OUT)
            return True
        self._asks_again = True
        return False

    def _begins_anew_for_now(self) -> bool:
        """Begins anew, because the other workers have no state to send. Returns whether to ask them again."""
        if not self._nobody_knew:
            self._take(None)
        self._nobody_knew += 1
        if self._goes_back or self._nobody_knew == MOST_QUESTIONS:
            return False
        self._ask_later()
        return True

    def _take(self, report: SavedState | None) -> None:
        content = None if report is None else report.content
        self._until = self._checkpoint.adopt(content, self._clock(), self._goes_back)
