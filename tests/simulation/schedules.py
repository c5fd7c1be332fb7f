"""The schedules of workers' scripts: real schedulers, kept and told by the code of a real worker.

Each step is pushed with the rate that the worker's schedule has, and its gradient is divided by the rate of its clock.
So a step adds to the weights what the counting oracle expects where the two are the same, and otherwise not. All rates
are powers of two: nothing is rounded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from ps_protocol.errors import PSError
from ps_protocol.messages.workers import SavedState
from ps_worker.cluster.participation import (
    AGAIN_CALL_SECONDS,
    AGAIN_SECONDS,
    FIRST_PAUSE_SECONDS,
    SCRIPT_SECONDS,
    PlaceLost,
)
from ps_worker.cluster.script import ScriptTelling
from ps_worker.state.checkpoint import WorkerCheckpoint
from ps_worker.state.encoding import decode
from ps_worker.state.model_state import ModelState
from ps_worker.strategies.late_script import LateScript
from tests.simulation.servers import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.worker import Place, Worker

PERIOD = 5  # of the rates


def rate_of(clock: int) -> float:
    """Returns the rate of the step that leads to a clock."""
    return float(2.0 ** -((clock - 1) % PERIOD))


def is_state_of(content: bytes, rank: int, clock: int) -> bool:
    """Whether what a checkpoint got of a script is of a rank, at a clock."""
    state = decode(content)
    return state.clock == clock and _Owner(rank).state_dict() in state.script.settings.stateful


class _Owner:
    """Has a worker's state say whose it is."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, int]:
        """Returns the rank."""
        return {"rank": self._rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes no other rank's."""
        assert state == self.state_dict()


class Script:
    """What a worker's script has set: a schedule that it steps once a step. For the training thread.

    telling: answers the coordinator's requests for it
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self.telling = worker, ScriptTelling()
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self._schedule = LambdaLR(self._optimizer, lambda steps: rate_of(steps + 1))
        self._checkpoint = WorkerCheckpoint(torch.device("cpu"), lambda clock, state: None)
        self._checkpoint.watch([self._optimizer], ModelState({}))
        self._checkpoint.add(self._schedule)
        self._checkpoint.add(_Owner(worker.rank), own=True)
        part: Any = SimpleNamespace(ask_script=self._ask, rank=worker.rank, script=self.telling)
        self._late = LateScript(part, self._checkpoint, lambda: worker.clock, self._tell, in_step=True)
        self.telling.send = self._send
        self._could_tell: set[Worker] = set()
        self._restore_count = 0  # of the rollbacks that it has made

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def begin(self, place: Place) -> None:
        """Begins in the first place, with the state that a checkpoint has of its rank; does as JobTraining.begin."""
        self._restore_count = place.result.restore_count
        saved = self._restore(place)
        if place.result.clock > saved:
            self._late.joins()
        else:
            self._tell()

    def moved(self, place: Place) -> None:
        """Goes back with a job that was rolled back, between two steps; does as JobTraining._roll_back."""
        if place.result.restore_count == self._restore_count:
            return
        self._restore_count = place.result.restore_count
        if self._schedule.last_epoch == place.clock:
            return  # the job has all that it has done
        if place.result.state is None:
            self._late.goes_back()
        else:
            self._restore(place)

    def _restore(self, place: Place) -> int:
        """Restores what a checkpoint has of this rank; returns the clock of that, 0 without."""
        if place.result.state is None:
            return 0
        saved, content = place.result.state
        self._checkpoint.rollback(content, place.result.clock, saved)
        restored = self._checkpoint.restored_clock
        self._checkpoint.try_restore()
        return restored or 0

    def state(self, clock: int) -> bytes:
        """Returns what a checkpoint gets of it between two steps."""
        return self._checkpoint.last_state(clock, counts=False, cut_short=False)

    def stepping(self) -> None:
        """Begins a step; a process that has come late continues with the job's schedule."""
        self._could_tell = self._tellers()
        self._late.follow()
        if self._late.is_late:
            self._set_alone()
        at = self._schedule.last_epoch
        self._worker.world.trace(f"{self._worker.host.name} at clock {self._worker.clock}: its schedule is at {at}")

    def stepped(self) -> None:
        """Ends a step."""
        self._optimizer.step()
        self._schedule.step()

    def _tell(self) -> None:
        self._set_alone()
        self.telling.begin(self._told)

    def _set_alone(self) -> None:
        """Sets the schedule to the worker's clock if nobody could tell it what is so new."""
        clock = self._worker.clock
        if self._schedule.last_epoch != clock and not self._could_tell & self._tellers():
            self._schedule.last_epoch = clock - 1
            self._schedule.step()

    def _tellers(self) -> set[Worker]:
        """Returns the other workers that have the job's schedule."""
        others = [each for each in self._worker.run.workers.values() if each is not self._worker and each.is_training]
        return {each for each in others if each.script is not None and not each.script._late.is_late}

    def _told(self) -> SavedState | None:
        told = self._checkpoint.tells(self._worker.clock)
        return None if told is None else SavedState(self._worker.clock, told)

    def _who(self) -> tuple[Any, ...]:
        place = self._worker.place
        return self._worker.run.name, place.run, self._worker.rank, place.incarnation, place.key

    def _ask(self, seconds: float | None = None) -> tuple[SavedState | None, bool]:
        """Does as Participation.ask_script."""
        world, told, is_first = self._worker.world, None, seconds is None
        began, longest = world.now, SCRIPT_SECONDS if seconds is None else seconds
        timeout = SCRIPT_SECONDS if is_first else AGAIN_CALL_SECONDS
        while True:
            is_coming, patience = True, longest
            try:
                network = self._worker.cluster.network
                told, is_coming = network.call(COORDINATOR, "ask_script", *self._who(), seconds=timeout)
            except PSError as error:
                if not error.retryable:
                    raise PlaceLost from error
                patience = longest if is_first else min(longest, AGAIN_SECONDS)
            if not is_coming or world.now - began >= patience:
                return (None if told is None else SavedState(*told)), is_coming
            world.let_pass(10 * FIRST_PAUSE_SECONDS)

    def _send(self, request: int, script: SavedState | None) -> None:
        """Does as Membership._tell."""
        told = None if script is None else (script.clock, script.content)

        def tell() -> None:
            network = self._worker.cluster.network
            try:
                network.call(COORDINATOR, "tell_script", *self._who(), request, told, seconds=SCRIPT_SECONDS)
            except PSError as error:
                self._worker.world.trace(f"{self._worker.host.name} cannot tell of its script: {error}")

        self._worker.host.spawn("script", tell)
