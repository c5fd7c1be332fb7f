"""Simulated processes of the operating system: they are killed, stopped and continued with all that runs in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.world import Killed, Task, World

Serve = Callable[..., Any]

LOSES_POWER = 0.2  # of the processes that are killed: their machine goes down with them


class Host:
    """One process, on a machine of its own.

    address:   where it is called; empty: nowhere
    methods:   what can be called there, by name; a call is answered with what the method returns or raises
    dies_at:   by the name of a failpoint, how often it passes that until it dies there
    lost_power: its machine has gone down with it: no other one hears of its death, and what was not flushed is lost
    """

    def __init__(self, world: World, name: str, address: str = "") -> None:
        self.world, self.name, self.address = world, name, address
        self.alive, self.stopped_until, self.lost_power = True, 0.0, False
        self.since = world.now
        self.methods: dict[str, Serve] = {}
        self.tasks: list[Task] = []
        self.dies_at: dict[str, int] = {}
        self.on_death: list[Callable[[], object]] = []
        world.hosts.append(self)

    def __repr__(self) -> str:
        return self.name

    @property
    def stopped(self) -> bool:
        """Whether it is stopped now."""
        return self.stopped_until > self.world.now

    def spawn(self, name: str, work: Callable[[], object]) -> Task:
        """Runs something in a thread of this process."""
        return self.world.spawn(self, name, work)

    def kill(self, why: str = "") -> None:
        """kill -9. The thread that calls this, if it is one of this process, ends at its next step."""
        if not self.alive:
            return
        self.alive, self.lost_power = False, self.world.random.random() < LOSES_POWER
        self.methods = {}
        self.world.trace(f"{self.name} {'loses power' if self.lost_power else 'is killed'}{why}")
        self.world.at(0.0, self.unwind)
        for notice in self.on_death:
            notice()

    def unwind(self) -> None:
        """Ends its threads where they stand."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            if not task.over:
                before, self.world.current = self.world.current, task
                task.unwind()
                self.world.current = before

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so many seconds later. It hangs: connections to it stay, and nothing comes."""
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)
        self.world.trace(f"{self.name} is stopped for {seconds:.1f} s")

    def check_alive(self) -> None:
        """Ends the running thread if its process is dead."""
        if not self.alive:
            raise Killed
