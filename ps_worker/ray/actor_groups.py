"""`ActorGroups`: actors that several at a time are one worker, started as a whole and started again as a whole.

    groups = ActorGroups(servers, servers.settings(elastic=False), lambda group, member: Trainer.remote(), 2, 2)
    losses = groups.run(lambda trainer: trainer.train.remote())

The members of a group meet in collectives of torch. When the actor of one ends, the others wait for it or fail, so all
actors of its group are ended, the coordinator is told, and the group is started anew: it joins with the job's weights.
The other groups go on meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

from ps_protocol.errors import InvalidRequest, PSError
from ps_runtime.quantities import counted
from ps_worker.ray.deployment import MemberPlace, WorkerProcess, WorkerSettings
from ps_worker.ray.server_actors import ParameterServer, free_address

log = logging.getLogger("ps_worker")


class ActorGroups:
    """Groups of actors on a Ray cluster. Each group is one worker of a job; see docs/groups.md.

    Args:
        servers: The job's servers.
        settings: Those of the job, from `servers.settings(elastic=False)`.
        start: Returns a new actor for a member: start(group, member). Its class and where it runs are the script's own.
        groups, members: The number of groups, and of actors in each.
        max_restarts: How often each group is started again.

    Raises:
        InvalidRequest: The job is elastic, or there are no groups.
    """

    def __init__(
        self,
        servers: ParameterServer,
        settings: WorkerSettings,
        start: Callable[[int, int], Any],
        groups: int,
        members: int,
        max_restarts: int = 0,
    ) -> None:
        if settings.elastic:
            raise InvalidRequest("a job of groups has a fixed number of them: servers.settings(elastic=False)")
        if min(groups, members) < 1:
            raise InvalidRequest(f"groups and members are 1 or more, got {groups} and {members}")
        self._servers, self._settings, self._make = servers, settings, start
        self._groups, self._members, self._max_restarts = groups, members, max_restarts
        self._actors: dict[int, list[Any]] = {}
        self._first: dict[int, WorkerProcess] = {}  # of each group: by it the group's end is reported
        self._restarts = dict.fromkeys(range(groups), 0)
        self._running: dict[Any, tuple[int, int]] = {}  # what is awaited, and of which group and member
        self._found: dict[tuple[int, int], Any] = {}
        self._errors: list[Exception] = []

    def run(self, begin: Callable[[Any], Any]) -> list[list[Any]]:
        """Starts all groups, and waits until all have ended. Their actors end with it.

        Args:
            begin: Calls the method of an actor that trains: `lambda actor: actor.train.remote()`.

        Returns:
            What the method returned, by group and member.

        Raises:
            RayError: A group failed more often than `max_restarts`. The others have come to their end by then.
        """
        try:
            for group in range(self._groups):
                self._start(group, begin)
            while self._running:
                [ended], _ = ray.wait(list(self._running), num_returns=1)
                group, member = self._running.pop(ended)
                try:
                    self._found[group, member] = ray.get(ended)
                except ray.exceptions.RayError as error:
                    self._fail(group, begin, error)
        finally:
            for group in list(self._actors):
                self._kill(group)
        if self._errors:
            raise self._errors[0]
        return [[self._found[group, member] for member in range(self._members)] for group in range(self._groups)]

    def _start(self, group: int, begin: Callable[[Any], Any]) -> None:
        actors = self._actors[group] = [self._make(group, member) for member in range(self._members)]
        try:
            address = ray.get(actors[0].__ray_call__.remote(_meeting))
            told = [
                actor.__ray_call__.remote(
                    _apply, self._settings, (group, self._groups), MemberPlace(member, self._members, address)
                )
                for member, actor in enumerate(actors)
            ]
            self._first[group] = ray.get(told)[0]
        except ray.exceptions.RayError as error:
            self._fail(group, begin, error)
            return
        self._running |= {begin(actor): (group, member) for member, actor in enumerate(actors)}

    def _fail(self, group: int, begin: Callable[[Any], Any], error: Exception) -> None:
        """Ends a group of which one member has failed, and starts it again."""
        self._kill(group)
        self._report(group)
        again = self._restarts[group] < self._max_restarts
        log.warning(
            "group %d failed: %s; its %s are ended%s",
            *(group, _first_line(error), counted(self._members, "actor"), ", and started again" if again else ""),
        )
        if again:
            self._restarts[group] += 1
            self._start(group, begin)
        else:
            self._errors.append(error)

    def _kill(self, group: int) -> None:
        for actor in self._actors.pop(group, []):
            ray.kill(actor)
        self._running = {awaited: place for awaited, place in self._running.items() if place[0] != group}

    def _report(self, group: int) -> None:
        """Tells the coordinator. Without a report the lease ends the group, so an error here ends nothing."""
        first = self._first.pop(group, None)
        try:
            if first is not None:
                self._servers.report_end(first)
        except PSError as error:
            log.warning("the end of group %d is not reported: %s", group, error)


def _meeting(actor: object) -> str:
    """Runs in the first member: where the group meets."""
    return free_address()


def _apply(actor: object, settings: WorkerSettings, place: tuple[int, int], member: MemberPlace) -> WorkerProcess:
    """Runs in each member."""
    return settings.apply(*place, member=member)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
