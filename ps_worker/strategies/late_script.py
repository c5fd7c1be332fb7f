"""Adopts the settings of the job's script, such as a learning-rate schedule, in a process that joins late.

late     The process joins a job that is under way. Or the job was rolled back, and its checkpoint has no state of this
         worker. What the process' own script has set is then not what the job's script has set.
follows  Right before its first step, the worker asks the other workers for what their scripts have set, and takes it
         over (ps_worker/state/job_state.py). If they are at a later stage of the script, it does so right before its
         first step of that stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ps_worker.cluster.participation import Participation, PlaceLost
from ps_worker.state.checkpoint import WorkerCheckpoint

log = logging.getLogger("ps_worker")


class LateScript:
    """Sets the job's learning-rate schedules, and other state that scripts share, in a process that has joined late.
    For the training thread.

    clock:   returns this worker's clock
    tell:    begins to answer requests of other late workers
    is_late: this process has not set that state yet
    """

    def __init__(
        self,
        participation: Participation,
        checkpoint: WorkerCheckpoint,
        clock: Callable[[], int],
        tell: Callable[[], None],
    ) -> None:
        self._participation, self._checkpoint, self._clock, self._tell = participation, checkpoint, clock, tell
        self.is_late = False
        self._goes_back = False  # it is ahead of the job's, which was rolled back
        self._until = 0  # the stage of the script at which what the job has can be taken over

    def joins(self) -> None:
        """Notes that the process joins a job that is under way."""
        self.is_late = True
        self._checkpoint.comes_late()

    def goes_back(self) -> None:
        """Notes that the job was rolled back to a checkpoint that has no state of this worker."""
        self.is_late = self._goes_back = True

    def follow(self) -> None:
        """Takes over what the job's script has set, if this process is late and its script has reached the
        same stage.
        """
        if not self.is_late or self._checkpoint.stage < self._until:
            return
        if self._checkpoint.job.are_some:
            try:
                told = self._participation.ask_script()
            except PlaceLost:
                return  # which the step meets, too; the next one asks anew
            content = None if told is None else told.content
            self._until = self._checkpoint.adopt(content, self._clock(), self._goes_back)
            if self._checkpoint.stage < self._until:
                return
        elif self._checkpoint.has_unknown_scheduler:
            log.warning(
                "worker %d joins at clock %d, and its learning-rate schedule begins anew: hand the scheduler to "
                "prepare, and workers that join late continue the job's",
                *(self._participation.rank, self._clock()),
            )
        self.is_late = self._goes_back = False
        self._tell()
