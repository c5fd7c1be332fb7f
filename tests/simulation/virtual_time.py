"""A world with a clock of its own: processes, hosts that stop and die, and links that lose, delay, repeat and reorder.

Nothing in it waits for real: an event takes place when all before it have. The same seed makes the same world.

A process is a generator. It yields seconds to sleep, or something to wait for: a call's reply, or another process.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import PSError, TryLater

Then = Callable[[Any, PSError | None], None]
Steps = Generator[Any, Any, Any]


@dataclass(frozen=True)
class Weather:
    """What happens on every link: chances that a message is lost or comes twice, and its mean and longest seconds."""

    loss: float = 0.0
    repeat: float = 0.0
    mean: float = 0.005
    longest: float = 0.01


class World:
    """Time, and what happens in it."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.weather = Weather()
        self._events: list[tuple[float, int, Host | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cut: dict[frozenset[Host], float] = {}  # until when nothing passes between two

    def at(self, delay: float, event: Callable[[], None], host: Host | None = None) -> None:
        """Has something happen later; on a host that is stopped then, when it goes on."""
        heapq.heappush(self._events, (self.now + delay, next(self._order), host, event))

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Lets time pass until a condition holds; False if it did not by the deadline."""
        while not until():
            if not self._events or self._events[0][0] > deadline:
                return False
            when, _, host, event = heapq.heappop(self._events)
            self.now = when
            if host is not None and host.stopped_until > when:
                self.at(host.stopped_until - when, event, host)
            else:
                event()
        return True

    def cut(self, one: Host, other: Host, seconds: float) -> None:
        """Nothing passes between two hosts for so long; what is sent meanwhile arrives afterwards."""
        self._cut[frozenset((one, other))] = self.now + seconds

    def delays(self, one: Host, other: Host) -> list[float]:
        """When the copies of a message from one host arrive at another, in seconds from now."""
        weather, draw = self.weather, self.random
        copies = 0 if draw.random() < weather.loss else 2 if draw.random() < weather.repeat else 1
        held = max(0.0, self._cut.get(frozenset((one, other)), 0.0) - self.now)
        return [held + min(weather.longest, draw.expovariate(1 / weather.mean)) for _ in range(copies)]


class Host:
    """A process of the operating system: it can be stopped, and can die with all that runs in it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.stopped_until = 0.0
        self.alive = True
        self._running: list[Process] = []

    def spawn(self, steps: Steps) -> Process:
        """Runs a process here."""
        self._running = [process for process in self._running if not process.over]
        self._running.append(Process(self, steps))
        return self._running[-1]

    def die(self) -> None:
        """kill -9."""
        self.alive = False
        for process in self._running:
            process.kill()

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Then) -> None:
        """Handles a call that arrived; `answer` may be called later."""
        raise NotImplementedError

    def call(self, callee: Host, method: str, *arguments: Any, timeout: float = 1.0) -> Reply:
        """Calls another host."""
        reply, world = Reply(), self.world

        def arrive() -> None:
            if callee.alive:
                callee.serve(method, arguments, answer)

        def answer(value: Any, error: PSError | None) -> None:
            for delay in world.delays(callee, self):
                world.at(delay, lambda: reply.settle(value, error), self)

        for delay in world.delays(self, callee):
            world.at(delay, arrive, callee)
        world.at(timeout, lambda: reply.settle(None, TryLater(f"{callee.name} does not answer")), self)
        return reply


class Reply:
    """What a call will be answered with: the first answer counts."""

    def __init__(self) -> None:
        self._settled: tuple[Any, PSError | None] | None = None
        self._then: list[Then] = []

    def settle(self, value: Any, error: PSError | None) -> None:
        """It is answered."""
        if self._settled is None:
            self._settled = value, error
            for then in self._then:
                then(value, error)

    def wait(self, then: Then) -> None:
        """Calls back with the answer."""
        if self._settled is not None:
            then(*self._settled)
        else:
            self._then.append(then)


class Process(Reply):
    """A generator that runs on a host; it is answered with what the generator returns or raises."""

    def __init__(self, host: Host, steps: Steps) -> None:
        super().__init__()
        self._host = host
        self._steps = steps
        self.over = False
        host.world.at(0.0, lambda: self._go_on(None, None), host)

    def kill(self) -> None:
        """It does nothing more, and nobody is told."""
        self.over = True

    def _go_on(self, value: Any, error: PSError | None) -> None:
        if self.over:
            return
        try:
            awaited = self._steps.send(value) if error is None else self._steps.throw(error)
        except StopIteration as end:
            self.over = True
            self.settle(end.value, None)
        except PSError as found:
            self.over = True
            self.settle(None, found)
        else:
            if isinstance(awaited, Reply):
                awaited.wait(self._go_on)
            else:
                self._host.world.at(awaited, lambda: self._go_on(None, None), self._host)
