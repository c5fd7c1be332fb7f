"""`ActorGroups`: groups of actors. Each group is one worker, started as a whole and started again as a whole.

    groups = ActorGroups(servers, servers.settings(elastic=False), lambda group, member: Trainer.remote(), 2, 2)
    losses = groups.run(lambda trainer: trainer.train.remote())

The members of a group meet in collectives of torch. When the actor of one ends, the others wait for it or fail, so all
actors of its group are ended, the coordinator is told, and the group is started anew: it joins with the job's weights.
The other groups go on meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from ps_launch.restarts import Restarts
from ps_protocol.errors import FinishedWithout, InvalidRequest, JobFinished, PSError
from ps_runtime.quantities import counted, ranges
from ps_worker.ray.deployment import GroupRank, WorkerProcess, WorkerSettings
from ps_worker.ray.server_actors import ParameterServer, asked_status, error_text, free_address

log = logging.getLogger("ps_worker")

NOTICE_SECONDS = 60.0  # the pause between two log lines about a group that waits for room
# For which the end of an actor is awaited after an error of a neighbour: Ray tells of it when its node says so.
CAUSE_SECONDS = 1.0
LOOK_SECONDS = 5.0  # the pause between two looks at the job while a group may wait for an ended one


@dataclass(frozen=True)
class _ActorAnswer:
    """An answer that is awaited of an actor. then: takes the answer"""

    group: int
    then: Callable[[Any], object]


class ActorGroups:
    """Groups of actors on a Ray cluster. Each group is one worker of a job; see docs/groups.md.

    A group that Ray has no room for waits, and the log says so every minute. The other groups train or wait meanwhile,
    and are watched.

    A job whose last group fails has ended. That group begins the job anew, and waits for all groups. If one of these
    will not join, because it has come to its end or has used its restarts, the groups that wait for it are ended.

    Args:
        servers: The job's servers.
        settings: Those of the job, from `servers.settings(elastic=False)`.
        start: Returns a new actor for a member: start(group, member). Its class and where it runs are the script's own.
            Without a name: a killed actor's name may still be taken when its group is started again.
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
        self._begin_anew(lambda actor: None)

    def run(self, begin: Callable[[Any], Any]) -> list[list[Any]]:
        """Starts all groups, and waits until all have ended. Their actors end with it.

        Args:
            begin: Calls the method of an actor that trains: `lambda actor: actor.train.remote()`.

        Returns:
            What the method returned, by group and member. None for all members of a group that was started again when
            the others had finished the job (`JobFinished`).

        Raises:
            RayError: A group failed more often than `max_restarts`. The others have come to their end by then. Or the
                job had finished before all groups.
            PSError: A group was started again when all others had ended and the job with them, so that it would wait
                for one that does not join again.
        """
        self._begin_anew(begin)
        try:
            for group in range(self._groups):
                self._start(group)
            while self._running or self._due:
                self._attend()
        finally:
            for group in list(self._actors):
                self._kill(group)
        if len(self._late) == self._groups:
            self._errors += self._late.values()
        if self._errors:
            raise self._errors[0]
        members = range(self._members)
        return [[self._found.get((group, member)) for member in members] for group in range(self._groups)]

    def _begin_anew(self, begin: Callable[[Any], Any]) -> None:
        """Forgets an earlier run."""
        self._train = begin
        self._restarts = {group: Restarts(self._max_restarts) for group in range(self._groups)}
        self._begun: dict[int, float] = {}  # when each group was started last
        self._due: dict[int, float] = {}  # by group, when one that failed is started again
        self._notice_at: dict[int, float] = {}  # by group that Ray has no room for yet, when the log says so
        self._first: dict[int, WorkerProcess] = {}  # by group, its first process, by which the group's end is reported
        self._running: dict[Any, _ActorAnswer] = {}
        self._found: dict[tuple[int, int], Any] = {}
        self._late: dict[int, Exception] = {}  # the groups that were started again when the job had finished
        self._errors: list[Exception] = []
        self._survived: dict[int, Exception] = {}  # by group, its last failure after which it is started again
        self._unseen: set[int] = set()  # the groups that have begun, and that no look at the job has found training
        # The answer with the servers' status that is awaited, and the groups that had ended when it was asked for
        self._looks: dict[Any, set[int]] = {}
        self._look_at = 0.0  # when the next one is asked for
        self._said = ""  # the last message about groups that wait for others

    def _attend(self) -> None:
        """Waits for the next answer of any actor, and goes on with its group. Starts the groups that are due."""
        now = time.monotonic()
        for group in [group for group, when in self._due.items() if when <= now]:
            del self._due[group]
            self._start(group)
        for group in [group for group, when in self._notice_at.items() if when <= now]:
            self._notice_at[group] = now + NOTICE_SECONDS
            text = "group %d has waited for %.0f s until all of its %s run: Ray may have no room for them"
            log.warning(text, group, now - self._begun[group], counted(self._members, "actor"))
        looks = self._look_if_due(now)
        turn = min((*self._due.values(), *self._notice_at.values(), *looks), default=None)
        left = None if turn is None else max(0.0, turn - time.monotonic())
        awaits = [*self._running, *self._looks]
        if not awaits:
            threading.Event().wait(left)
            return
        answered, _ = ray.wait(awaits, num_returns=1, timeout=left)
        for answer in answered:
            if answer in self._looks:
                self._judge(answer, self._looks.pop(answer))
                continue
            awaited = self._running.pop(answer)
            try:
                awaited.then(ray.get(answer))
            except ray.exceptions.RayError as error:
                self._fail(awaited.group, error)

    def _start(self, group: int) -> None:
        """Starts the actors of a group. All that follows is done as they answer, so that no group waits for another."""
        self._begun[group] = time.monotonic()
        self._notice_at[group] = self._begun[group] + NOTICE_SECONDS
        actors = self._actors[group] = [self._make(group, member) for member in range(self._members)]
        self._await(group, actors[0].__ray_call__.remote(_meeting), lambda address: self._tell(group, address))

    def _tell(self, group: int, address: str) -> None:
        """Gives the members their settings, once the first one says where they meet. When all have them, they begin."""
        processes: dict[int, WorkerProcess] = {}

        def has(member: int, process: WorkerProcess) -> None:
            processes[member] = process
            if member == 0:
                self._first[group] = process
            if len(processes) == self._members:
                self._notice_at.pop(group, None)
                self._unseen.add(group)
                for each, actor in enumerate(self._actors[group]):
                    self._await(group, self._train(actor), partial(self._found.__setitem__, (group, each)))

        for member, actor in enumerate(self._actors[group]):
            place = GroupRank(member, self._members, address)
            answer = actor.__ray_call__.remote(_apply, self._settings, (group, self._groups), place)
            self._await(group, answer, partial(has, member))

    def _await(self, group: int, answer: Any, then: Callable[[Any], object]) -> None:
        self._running[answer] = _ActorAnswer(group, then)

    def _fail(self, group: int, error: Exception) -> None:
        """Ends a group of which one member has failed, and starts it again unless its job has finished."""
        error = self._cause(group, error)
        self._kill(group)
        own = getattr(error, "cause", None)
        if isinstance(own, JobFinished):
            log.info("group %d ends: %s", group, own)
            self._late[group] = error
            return
        self._report(group)
        # A group that is started again would only learn that the job has finished.
        is_over = isinstance(own, FinishedWithout)
        pause = None if is_over else self._restarts[group].after(time.monotonic() - self._begun[group])
        again = "" if pause is None else f", and started again in {pause:g} s"
        log.warning("group %d failed: %s; it is ended%s", group, _first_line(error), again)
        if pause is None:
            self._errors.append(error)
        else:
            self._survived[group] = error
            self._due[group] = time.monotonic() + pause

    # -- groups that wait for others -----------------------------------------------------------------------------------

    def _gone(self) -> set[int]:
        """Returns the groups that have ended for good."""
        there = {awaited.group for awaited in self._running.values()}
        return set(range(self._groups)) - there - self._due.keys()

    def _look_if_due(self, now: float) -> list[float]:
        """Asks for the servers' status if a group may wait for one that has ended. Returns when to look next; empty: no
        group may.
        """
        gone = self._gone()
        if not gone or not self._unseen - gone or self._looks:
            return []
        if self._look_at <= now:
            self._look_at = now + LOOK_SECONDS
            with contextlib.suppress(PSError):  # the servers were stopped: the groups learn that by themselves
                self._looks[asked_status(self._servers)] = gone
                return []
        return [self._look_at]

    def _judge(self, answer: Any, gone: set[int]) -> None:
        """Looks in the servers' status whether groups wait for one that has ended for good, and ends them. gone: the
        groups that had ended before the status was made
        """
        try:
            jobs = ray.get(answer)["jobs"]
        except ray.exceptions.RayError as error:
            log.debug("no look at the job: %s", _first_line(error))
            return
        job = next((each for each in jobs if each["name"] == self._settings.job), None)
        if job is None:
            return
        processes = {each["rank"]: (each["host"], each["pid"]) for each in job["workers"]}
        # Of an earlier process nothing follows for the present one.
        here = {group for group, each in self._first.items() if processes.get(group) == (each.host, each.pid)}
        if job["started"]:
            self._unseen -= here
            return
        missing = set(range(self._groups)) - processes.keys()
        waiting = self._unseen & here
        if not waiting or not missing or job["rejoining_ranks"]:  # for those that come back it waits six leases
            return
        never = missing & gone
        if never:
            self._give_up(never, waiting)
            return
        text = f"{_named(waiting)} of job {self._settings.job!r} for {_named(missing)} to join"
        if text != self._said:
            self._said = text
            log.warning("waiting: %s", text)

    def _give_up(self, never: set[int], waiting: set[int]) -> None:
        """Ends the groups that wait for some that will never join their job."""
        said = f"{_named(never)} will not join job {self._settings.job!r}"
        log.warning("%s, so %s, which would wait in vain, will be ended", said, _named(waiting))
        error = PSError(f"{said}: {_named(waiting)} would wait until the start timeout")
        error.__cause__ = next((self._survived[group] for group in sorted(waiting & self._survived.keys())), None)
        self._errors.append(error)
        # Groups that have left the job are not killed: they may still evaluate or save. A group that is still
        # starting is not killed now; a later look finds it waiting.
        for group in sorted(waiting | self._due.keys()):
            self._due.pop(group, None)
            self._kill(group)
            self._report(group)

    def _cause(self, group: int, error: Exception) -> Exception:
        """Returns the error of an actor that has died, if there is one. The collectives of its neighbours fail then,
        and their errors may come first.
        """
        death: type[Exception] = ray.exceptions.RayActorError
        if isinstance(error, death):
            return error
        others = [answer for answer, awaited in self._running.items() if awaited.group == group]
        answered, _ = ray.wait(others, num_returns=len(others), timeout=CAUSE_SECONDS) if others else ([], [])
        for answer in answered:
            try:
                ray.get(answer)
            except death as cause:
                return cause
            except ray.exceptions.RayError:
                continue
        return error

    def _kill(self, group: int) -> None:
        for actor in self._actors.pop(group, []):
            ray.kill(actor)
        self._notice_at.pop(group, None)
        self._unseen.discard(group)
        self._running = {answer: awaited for answer, awaited in self._running.items() if awaited.group != group}

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


def _apply(actor: object, settings: WorkerSettings, place: tuple[int, int], member: GroupRank) -> WorkerProcess:
    """Runs in each member."""
    return settings.apply(*place, member=member)


def _named(groups: set[int]) -> str:
    return f"group{'s' if len(groups) > 1 else ''} {ranges(sorted(groups))}"


def _first_line(error: Exception) -> str:
    return error_text(error).splitlines()[0]
