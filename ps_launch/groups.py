"""The processes of the workers of a launch: one each, or the members of a group (`ps-worker run --group N`).

The members of a group are one worker. When one of them fails, the others cannot go on: each would wait for it in a
collective of torch. So the group ends as a whole, and is started again as a whole, at an address of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ps_launch.children import Children
from ps_runtime.free_ports import free_port

# For members of a group in which one has failed. The servers have all that they trained, so nothing is saved. A member
# in a collective of torch does not handle SIGTERM before the collective returns.
GROUP_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class _Ending:
    """The end of a group of which a member has failed.

    kill_at: when members that still run are killed; None if they have been killed
    again:   the pause before the group is started again; None if it is not
    """

    kill_at: float | None
    again: float | None


@dataclass
class WorkerProcesses:
    """The processes of workers, by number: those of worker W, from 0, have the numbers from W times `size` on.

    size:     how many processes a worker has
    children: runs the processes
    """

    size: int
    children: Children
    _left: set[int] = field(default_factory=set)  # members that run, or are about to
    _ending: dict[int, _Ending] = field(default_factory=dict)
    _ports: dict[int, int] = field(default_factory=dict)

    def start(self, worker: int) -> None:
        """Starts all processes of a worker. Raises OSError if one of them cannot be started."""
        self._begin(worker, None)

    def meeting(self, worker: int) -> dict[str, str]:
        """Returns the address at which the members of a group meet, as torch's variables. Each start of the group has
        another port.
        """
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._ports[worker])}

    def left(self) -> int:
        """Returns how many workers run, or are about to."""
        running = {number // self.size for number in self._left} - self._ending.keys()
        return len(running) + sum(ending.again is not None for ending in self._ending.values())

    def gone(self, workers: Iterable[int]) -> set[int]:
        """Returns those of some workers that have ended for good."""
        return {worker for worker in workers if not self._is_left(worker)}

    def _is_left(self, worker: int) -> bool:
        if worker in self._ending:
            return self._ending[worker].again is not None
        return not self._left.isdisjoint(self._numbers(worker))

    def is_over(self) -> bool:
        """Whether all have ended for good."""
        return not self._left and not self._ending

    def ended(self, number: int) -> bool:
        """Records the end of a process. Returns whether it was expected, because its group is ending."""
        self._left.discard(number)
        return number // self.size in self._ending

    def end(self, worker: int, again: float | None) -> None:
        """Ends the other processes of a worker of which one has failed. again: the pause before it is started again"""
        self.children.terminate(*self._numbers(worker))
        self._left.difference_update(self._numbers(worker))
        self._ending[worker] = _Ending(time.monotonic() + GROUP_STOP_SECONDS, again)

    def turn(self) -> float | None:
        """Kills members that are late to end, and restarts groups of which all members have ended. Returns the time of
        the next call, as far as that does not depend on the end of a process.
        """
        for worker, ending in list(self._ending.items()):
            running = [number for number in self._numbers(worker) if self.children.is_running(number)]
            if not running:
                del self._ending[worker]
                if ending.again is not None:
                    self._begin(worker, ending.again)
            elif ending.kill_at is not None and time.monotonic() >= ending.kill_at:
                self.children.kill(*running)
                self._ending[worker] = _Ending(None, ending.again)
        return min((each.kill_at for each in self._ending.values() if each.kill_at is not None), default=None)

    def _begin(self, worker: int, after: float | None) -> None:
        self._ports[worker] = free_port(taken=set(self._ports.values()))  # the old one may be in use still
        for number in self._numbers(worker):
            self._left.add(number)
            self.children.start(number, after)

    def _numbers(self, worker: int) -> range:
        return range(worker * self.size, (worker + 1) * self.size)


def by_cause(ended: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorts numbers and codes of processes that were seen to have ended at one time: causes come first. If a signal has
    ended a member of a group, the calls of its neighbours fail, and these end with a code.
    """
    return sorted(ended, key=lambda each: each[1] >= 0)
