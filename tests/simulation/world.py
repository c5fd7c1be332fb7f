"""A world with a clock of its own, in one thread of the operating system.

What happens is an event on a heap; nothing waits for real. A simulated thread is a greenlet: it runs until it blocks,
which hands control back to the loop that takes the next event. One seed draws everything, so the same seed makes the
same world.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet

if TYPE_CHECKING:
    from tests.simulation.processes import Host

LOOK_SECONDS = 0.05  # between two looks whether what a loop waits for holds

# What happens: a call, or a thread that goes on, if it still waits as it did then: (thread, ticket, whether woken).
Event = "Callable[[], object] | tuple[Task, int, bool | None]"


class Killed(greenlet.GreenletExit):  # type: ignore[misc,unused-ignore]
    """Ends a simulated thread whose process is dead. It is no Exception: no handler of the real code takes it."""


class Task:
    """A simulated thread: of a host, in which it is called `name`."""

    __slots__ = ("_greenlet", "_joiners", "_work", "host", "name", "over", "ticket")

    def __init__(self, host: Host, name: str, work: Callable[[], object]) -> None:
        self.host, self.name = host, name
        self.over = False
        self.ticket = 0  # what a wake-up must name to be for the wait that is under way
        self._work = work
        self._greenlet: Any = None  # in which it runs, once it does
        self._joiners: list[Task] = []

    def run(self) -> None:
        """Runs it to its end."""
        try:
            self._work()
        except Killed:
            pass
        except Exception as error:
            if self.host.alive:
                self.host.world.thread_died(self, error)
        finally:
            self.over = True
            for joiner in self._joiners:
                self.host.world.wake(joiner)

    def enter(self, value: Any) -> None:
        """Lets it run until it blocks; for the loop alone."""
        self.ticket += 1
        if self._greenlet is None:
            self._greenlet = self.host.world.free_greenlet()
            value = self
        self._greenlet.switch(value)

    def unwind(self) -> None:
        """Ends it where it stands; for the loop alone."""
        if self._greenlet is not None:
            self._greenlet.throw(Killed)
        self.over = True

    def join(self, seconds: float | None = None) -> bool:
        """Has the calling thread wait until this one is over. Returns whether it is."""
        world = self.host.world
        if not self.over:
            assert world.current is not None
            self._joiners.append(world.current)
            world.block(seconds)
        return self.over


class World:
    """Time, chance, and what happens. `current`: the simulated thread that runs; None: the loop itself."""

    def __init__(self, seed: str, tracing: bool = False) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        self.current: Task | None = None
        self.numbers = itertools.count(1)
        self.hosts: list[Host] = []
        self.dead_threads: list[tuple[Host, str, Exception]] = []  # those that an exception ended, in a living process
        self.failed_rounds: list[tuple[Host, str, Exception]] = []  # of background threads, which go on
        self.preemption = 0.0  # the chance that a thread is held up before it takes a lock
        self.tracing = tracing
        self.events: list[str] = []
        self._ready: deque[tuple[Host | None, Any]] = deque()  # what happens now, in order
        self._heap: list[tuple[float, int, Host | None, Any]] = []  # what happens later
        self.hub = greenlet.getcurrent()
        self._free: list[Any] = []  # greenlets whose thread is over: to make one costs as much as to call a shard

    # -- time --------------------------------------------------------------------------------------------------------

    def at(self, delay: float, event: Any, host: Host | None = None) -> None:
        """Has an Event happen later; on a host that is stopped then, when it goes on, and on a dead one never."""
        if delay > 0.0:
            heapq.heappush(self._heap, (self.now + delay, next(self.numbers), host, event))
        else:
            self._ready.append((host, event))

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Lets time pass until a condition holds, which is looked at now and then; False if it did not within so many
        seconds."""
        assert self.hub is greenlet.getcurrent(), "the loop runs where the world was made"
        deadline, look = self.now + seconds, self.now
        heap, ready, pop = self._heap, self._ready, heapq.heappop
        while True:
            if ready:
                host, event = ready.popleft()
            elif heap and heap[0][0] < look:
                self.now, _, host, event = pop(heap)
            else:
                self.now = look
                if until():
                    return True
                if look >= deadline:
                    return False
                look = min(deadline, look + LOOK_SECONDS)
                continue
            if host is not None and (not host.alive or host.stopped_until > self.now):
                if host.alive:
                    self.at(host.stopped_until - self.now, event, host)
            elif type(event) is tuple:
                task, ticket, woken = event
                if task.ticket == ticket and not task.over:
                    self.current = task
                    task.enter(woken)
                    self.current = None
            else:
                event()

    # -- threads -----------------------------------------------------------------------------------------------------

    def spawn(self, host: Host, name: str, work: Callable[[], object]) -> Task:
        """Starts a simulated thread."""
        task = Task(host, name, work)
        host.tasks.append(task)
        if len(host.tasks) > 64:
            host.tasks = [other for other in host.tasks if not other.over]
        self._ready.append((host, (task, 0, None)))
        return task

    def free_greenlet(self) -> Any:
        """Returns what runs the task that is handed to it first."""
        return self._free.pop() if self._free else greenlet.greenlet(self._run_tasks, self.hub)

    def _run_tasks(self, task: Task) -> None:
        while True:
            task.run()
            self._free.append(greenlet.getcurrent())
            task = self.hub.switch()

    def block(self, seconds: float | None = None) -> Any:
        """Suspends the running thread until it is woken, or for so long. Returns True if it was woken."""
        task = self.current
        assert task is not None, "the loop itself cannot wait"
        if not task.host.alive:
            raise Killed
        if seconds is not None:
            self.at(seconds, (task, task.ticket, False), task.host)
        woken = self.hub.switch()
        if not task.host.alive:
            raise Killed
        return woken

    def let_pass(self, seconds: float) -> None:
        """Suspends the running thread for so long."""
        task = self.current
        assert task is not None
        until = self.now + seconds
        while self.now < until:  # a wake-up that was meant for a wait before is none
            self.block(until - self.now)

    def wake(self, task: Task) -> None:
        """Has a thread that is blocked go on, now."""
        self._ready.append((task.host, (task, task.ticket, True)))

    def thread_died(self, task: Task, error: Exception) -> None:
        """Notes that an exception has ended a thread of a process that lives on."""
        self.dead_threads.append((task.host, task.name, error))
        self.trace(f"{task.host.name}: thread {task.name} ends with {type(error).__name__}: {error}")

    def round_failed(self, name: str) -> None:
        """Notes the exception that a background thread is handling: it goes on, and should not have met it."""
        assert self.current is not None
        error = sys.exc_info()[1]
        assert isinstance(error, Exception)
        self.failed_rounds.append((self.current.host, name, error))
        self.trace(f"{self.current.host.name}: a round of {name} fails: {type(error).__name__}: {error}")

    def end(self) -> None:
        """Ends all processes."""
        for host in self.hosts:
            host.alive = False
        for host in self.hosts:
            host.unwind()
        while self._free:  # one that is not at its end keeps the world in memory: nothing looks through its stack
            self._free.pop().throw(Killed)

    # -- what happened -----------------------------------------------------------------------------------------------

    def trace(self, said: str) -> None:
        """Keeps a line, if lines are kept."""
        if self.tracing:
            self.events.append(f"{self.now - 1000:9.3f}  {said}")


class Log(logging.Handler):
    """Has what the servers log stand among what happens."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        task = self._world.current
        self._world.trace(f"{task.host.name if task else '-'}: {record.getMessage()}")
