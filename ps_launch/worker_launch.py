"""`ps-worker run`: starts workers on this machine and runs until all have ended.

In the parameter-server modes, once all declared workers have joined, a worker that dies does not stop the others: it is
restarted alone, up to --max-restarts times, and the others continue, unless --stop-on-failure was given. Before that
the others only wait for it, so the launcher stops them. In ddp the launcher always stops them, because they cannot
continue. Each failure is reported at once. The first one is reported again at the end, where it has not scrolled away.

A worker may be a group of processes (groups.py): the end of one of them is the end of its group, and of no other.

A launch may have servers of its own (own_servers.py): they are ready before the first worker starts, and end after the
last one.

When a worker fails, the launcher tells the coordinator (`ps-worker report`), so that the others do not wait until the
worker's lease expires.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from ps_launch.children import Children, Program, Stopped, stop_on_signals
from ps_launch.failures import Cause, Failure
from ps_launch.groups import WorkerProcesses, by_cause
from ps_launch.launch_folder import launch_folder
from ps_launch.output import Console, Dropped, WorkerOutput, rank_prefix
from ps_launch.own_servers import STOP_SECONDS as SERVERS_STOP_SECONDS
from ps_launch.own_servers import OwnServers, ServersPlan
from ps_launch.restarts import Restarts
from ps_launch.timelines import Timelines
from ps_protocol.errors import InvalidRequest
from ps_runtime.free_ports import free_port
from ps_runtime.launch_id import (
    FINISHED_WITHOUT_CODE,
    GROUP_SIZE,
    LAUNCH_ID,
    LAUNCH_RANKS,
    LAUNCHED,
    STARTED_FILE,
    awaited_ranks,
    is_launched,
    new_launch_id,
)
from ps_runtime.logs import TEXT
from ps_runtime.own_program import own_program
from ps_runtime.quantities import counted, ranges
from ps_runtime.rank import TORCHRUN
from ps_runtime.signals import on_further_signals, on_signals

STOP_SECONDS = 15.0
AWAIT_END = "await-end"  # the command of `ps-worker` that ends with the job
AGAIN_SECONDS = 5.0
LOOK_SECONDS = 0.5  # the pause between two checks for the file that appears once all workers have joined
SERVERS = -1  # the child that runs the servers; workers have the numbers from 0, requests those below this one
# The variables of torchrun's workers. Libraries take any of them for "torch.distributed was launched", so all are set,
# in ddp, or none.
TORCHRUN_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"}
)
_OF_ONE_WORKER = frozenset({"PS_RANK", "PS_WORLD_SIZE", "PS_LOCAL_RANK", GROUP_SIZE})


@dataclass(frozen=True)
class Launch:
    """What to start; see `ps-worker run --help`.

    command:  the arguments of the interpreter: a script, or -m and a module, and its arguments
    settings: as PS_* variables, empty where they are not given
    log_dir:  the directory for a file with each worker's output
    show_ranks: the workers whose output the console shows, of a group only its first member's; None: all processes
    stop_on_failure: whether a worker that fails for good ends the launch
    servers:  the servers to start before the workers, and to end after them; None: they are elsewhere, or there are
              none
    group_size: the number of processes in each worker's torch.distributed group; 0: a worker is one process without a
              group
    """

    command: tuple[str, ...]
    workers: int
    first_rank: int
    world_size: int
    elastic: bool
    mode: str
    settings: Mapping[str, str]
    max_restarts: int = 0
    log_dir: Path | None = None
    show_ranks: Collection[int] | None = None
    stop_on_failure: bool = False
    servers: ServersPlan | None = None
    group_size: int = 0

    @property
    def size(self) -> int:
        """How many processes a worker has."""
        return max(1, self.group_size)

    @property
    def processes(self) -> range:
        """The numbers of the workers' processes. The processes of a group have consecutive numbers."""
        return range(self.workers * self.size)

    @property
    def noun(self) -> str:
        """The launcher's word for a worker in its messages."""
        return "group" if self.size > 1 else "worker"

    def place(self, number: int) -> tuple[int, int | None]:
        """Returns the rank of a process's worker, and the number of the process in its group; None if the worker is one
        process.
        """
        local, member = divmod(number, self.size)
        return self.first_rank + local, member if self.size > 1 else None


def launch(plan: Launch) -> int:
    """Runs the workers to their end. Returns 0, or the first code other than 0, or 128 + the signal that stopped the
    launch.

    If the launch has servers of its own, they may have checkpoints to write after a signal. A second signal ends all at
    once, unless it is a SIGTERM within TOGETHER_SECONDS.

    Raises InvalidRequest if the log directory cannot be written, or ddp's processes could not meet.
    """
    with contextlib.ExitStack() as stack:
        workers = _Workers(plan, stack)

        def stop_now(number: int, frame: object) -> None:
            workers.kill()
            os._exit(128 + number)

        def stop_later() -> None:
            if plan.servers is None:
                on_signals(signal.SIG_IGN)
            else:
                on_further_signals(stop_now)

        def first(number: int, frame: object) -> None:
            """Handles the first signal that comes while all are stopped anyway: it changes nothing."""
            stop_later()

        stop_on_signals(then=signal.SIG_IGN)  # until the stop begins
        try:
            try:
                workers.run()
            finally:
                on_signals(first)
        except Stopped as stopped:
            workers.code = 128 + stopped.number
            stop_later()
        finally:
            workers.stop()
        workers.sum_up()
    return workers.code


class _Workers:
    """The workers of one launch, by their number on this host. `code`: the exit code of the launch."""

    def __init__(self, plan: Launch, stack: contextlib.ExitStack) -> None:
        self.code = 0
        self._plan = plan
        self._meeting = rendezvous(plan)
        # The launch of this process, if it is a worker itself, is not that of our workers.
        self._launch_id = (not is_launched() and os.environ.get(LAUNCH_ID)) or new_launch_id()
        self._console = Console("ps-worker", plan.settings.get("PS_LOG_FORMAT") or TEXT)
        self._restarts = {local: Restarts(plan.max_restarts) for local in range(plan.workers)}
        self._logs = _open_logs(plan, stack)
        folder = stack.enter_context(launch_folder())
        self._started = folder / "started"
        self._timelines = Timelines(plan.settings, folder)
        self._children = Children(self._program, stack)
        self._processes = WorkerProcesses(plan.size, self._children)
        self._servers = OwnServers(plan.servers, self._console) if plan.servers is not None else None
        self._failures: list[Failure] = []  # for good, in the order in which they were seen
        self._survived: dict[int, Failure] = {}  # by worker, the last failure after which it was started again
        # By process, the cause of its last failure, if its stderr passes through the launcher
        self._causes: dict[int, Cause] = {}
        self._hidden: dict[int, WorkerOutput] = {}  # the stderr of each that the console does not show
        self._awaits_joins = plan.mode not in ("single", "ddp")
        self._have_joined = False  # all workers have; the file that says so may be removed later
        self._is_of_fixed_size = self._awaits_joins and not plan.elastic
        # Requests under way: by the child's number, the words of its command
        self._errands: dict[int, tuple[str, ...]] = {}
        self._sent = 0
        self._says_waiting = True  # whether it says so if it cannot learn when the job ends

    def run(self) -> None:
        """Starts all workers, and runs until all have ended, or one has failed whose end is that of the launch."""
        if self._servers is not None and not self._start_servers(self._servers):
            return
        if self._awaits_joins:
            size = f" of {self._plan.size} processes" if self._plan.size > 1 else ""
            self._console.say(f"starting {counted(self._plan.workers, self._plan.noun)}{size}")
        for local in range(self._plan.workers):
            self._processes.start(local)
        if self._attend() and self._plan.servers is not None and self._plan.servers.shared:
            self._send(AWAIT_END)
            self._attend()

    def _attend(self) -> bool:
        """Runs until all workers, reports and requests have ended. Returns False if the launch ends before that."""
        while not self._processes.is_over() or self._errands:
            self._look_for_joins()
            gone = self._processes.gone(range(self._plan.workers)) if self._is_of_fixed_size else set()
            if self._waits_in_vain(gone):
                return False
            look = time.monotonic() + LOOK_SECONDS if self._awaits_joins or gone else None
            until = min((when for when in (look, self._processes.turn()) if when is not None), default=None)
            for number, code in by_cause(self._children.wait(until)):
                if number == SERVERS:
                    self._console.say(f"the servers ended with code {code}, so the workers are stopped")
                    self.code = self.code or 1
                    return False
                words = self._errands.pop(number, None)
                if words is not None:
                    if code and words[0] == AWAIT_END:
                        self._await_end_again(number)
                    continue
                expected = self._processes.ended(number)
                if code and not expected and self._failure_ends_launch(number, code):
                    return False
                if not code and not expected:
                    self._say_earlier_failure(number)
        return True

    def _look_for_joins(self) -> None:
        """Reports once that all workers have joined: until then the user sees only their imports."""
        if self._awaits_joins and self._started.exists():
            self._awaits_joins, self._have_joined = False, True
            plan = self._plan
            joined = "the first worker has" if plan.elastic else f"{counted(plan.world_size, plan.noun)} have"
            self._console.say(f"{joined if plan.world_size > 1 else f'the {plan.noun} has'} joined, training begins")

    def _waits_in_vain(self, gone: Collection[int]) -> bool:
        """Reports if a worker waits for one that has ended for good. That ends the launch.

        When all workers of a job have left and some were not done, the job has ended. A worker that is started again
        begins it anew, and waits for all ranks; one that has used its restarts, or was done, never comes.
        """
        if not gone or len(gone) == self._plan.workers:
            return False
        if self._have_joined and not self._started.exists():
            return False  # something has cleaned the folder: a worker cannot tell a run that has begun from a new one
        plan = self._plan
        missing = sorted(awaited_ranks(self._started) & {plan.first_rank + worker for worker in gone})
        if not missing:
            return False
        self._failures += [failure for worker, failure in self._survived.items() if worker not in gone]
        self.code = self.code or (self._failures[0].exit_code if self._failures else 1)
        who = f"{plan.noun}{'s' if len(missing) > 1 else ''} {ranges(missing)}"
        self._console.say(f"the job begins anew, and {who} will not join it again, so the others are stopped")
        return True

    def stop(self) -> None:
        """Ends all children that still run, servers last: asks them first, and passes on their output meanwhile."""
        self._console.until = time.monotonic() + STOP_SECONDS
        late = self._children.stop(STOP_SECONDS, self._plan.processes)
        if late:
            self._say_killed({self._plan.place(number)[0] for number in late})
        self._children.stop(0.0, self._errands)
        said = self._timelines.join()
        if said:
            self._console.say(said)
        if self._servers is not None:
            self._console.until = time.monotonic() + STOP_SECONDS
            late = self._children.stop(SERVERS_STOP_SECONDS, [SERVERS])
            code = self._children.code(SERVERS)
            if late:
                self._console.say("the servers did not end in time and were killed: last checkpoints may be missing")
            elif code and not self.code:  # they have said why
                self._console.say(f"the servers ended with code {code}")
            if late or code:
                self.code = self.code or 1

    def _say_killed(self, ranks: Collection[int]) -> None:
        """Reports the workers that were killed, as they did not end in time."""
        self._console.until = time.monotonic() + STOP_SECONDS
        several = len(ranks) > 1
        self._console.say(
            f"{self._plan.noun}{'s' if several else ''} {ranges(sorted(ranks))} did not end within {STOP_SECONDS:g} s "
            f"and {'were' if several else 'was'} killed: what {'they' if several else 'it'} would have left for the "
            "job is missing"
        )

    def sum_up(self) -> None:
        """Reports again which worker failed first, if several processes have written since."""
        if not self._failures or len(self._plan.processes) == 1:
            return
        first = self._failures[0]
        text = f"{len(self._failures)} of {counted(self._plan.workers, self._plan.noun)} failed"
        text += f"; the first: {first}" if len(self._failures) > 1 else f": {first}"
        log = self._logs.get((first.rank - self._plan.first_rank) * self._plan.size + (first.member or 0))
        self._console.say(text + (f"; see {log.name}" if log is not None else ""))

    def kill(self) -> None:
        """Kills all workers that still run."""
        self._children.kill()

    def _start_servers(self, servers: OwnServers) -> bool:
        """Starts the servers, and gives their address to the workers. Returns False if they did not start; they have
        reported why.
        """
        self._children.start(SERVERS)
        while not servers.address:
            if self._children.wait():
                self._console.say("the servers did not start, so no worker is started")
                self.code = 1
                return False
        self._plan = replace(self._plan, settings={**self._plan.settings, "PS_SERVER": servers.address})
        return True

    def _program(self, number: int) -> Program:
        if number == SERVERS:
            assert self._servers is not None
            return self._servers.program()
        return self._errand_program(number) if number in self._errands else self._worker_program(number)

    def _report(self, local: int) -> None:
        """Tells the coordinator that a worker has ended. A group joins with the process id of its first member, so the
        report names that one: it has ended, or will soon.
        """
        if self._plan.mode not in ("single", "ddp") and self._plan.settings.get("PS_SERVER"):
            first = self._children.pid(local * self._plan.size)
            self._send("report", "--launch", self._launch_id, "--pid", str(first))

    def _send(self, *words: str) -> None:
        """Starts a command of `ps-worker` beside the workers, which sends a request to the coordinator."""
        self._sent += 1
        number = SERVERS - self._sent
        self._errands[number] = words
        try:
            self._children.start(number)
        except OSError:
            if words[0] == AWAIT_END:
                self._await_end_again(number)
            else:  # the coordinator finds out by itself
                del self._errands[number]

    def _await_end_again(self, number: int) -> None:
        """Repeats the request that waits for the end of the job: workers of other nodes may still need our servers."""
        if self._says_waiting:
            self._says_waiting = False
            self._console.say(
                "cannot learn when the job ends: the servers go on, and this launcher asks again every "
                f"{AGAIN_SECONDS:g} s; a signal ends it"
            )
        self._errands[number] = (AWAIT_END,)
        self._children.start(number, after=AGAIN_SECONDS)

    def _errand_program(self, number: int) -> Program:
        words = own_program("ps_worker", *self._errands[number])
        return Program(words, {**os.environ, **self._plan.settings}, Dropped(), Dropped())

    def _worker_program(self, number: int) -> Program:
        plan, local = self._plan, number // self._plan.size
        meeting = self._processes.meeting(local) if plan.group_size else self._meeting
        environment = worker_environment(plan, number, meeting)
        environment |= {"PS_RESTART_COUNT": str(self._restarts[local].count), STARTED_FILE: str(self._started)}
        environment |= self._timelines.variables(number, self._restarts[local].count)
        # A restarted worker claims only its own rank: the others are running.
        ranks = f"{plan.first_rank}-{plan.first_rank + plan.workers - 1}" if not self._restarts[local].count else ""
        environment |= {LAUNCH_ID: self._launch_id, LAUNCH_RANKS: ranks}
        rank, member = plan.place(number)
        shown = plan.show_ranks is None or (rank in plan.show_ranks and not member)
        is_alone = len(plan.processes) == 1
        if is_alone and not self._logs and shown:  # a single process keeps the terminal, if there is one
            return Program(plan.command, environment)
        cause = self._causes[number] = Cause()
        out, err = (
            WorkerOutput(
                self._console,
                target.fileno(),
                None if is_alone else rank_prefix(rank, target.fileno(), member),
                self._logs.get(number),
                shown,
                read,
            )
            for target, read in ((sys.stdout, None), (sys.stderr, cause.read))
        )
        if not shown:
            self._hidden[number] = err
        return Program(plan.command, environment, out, err)

    def _failure_ends_launch(self, number: int, code: int) -> bool:
        """Reports a worker's failure, and starts it again if it may be. Returns whether the launch is over for all."""
        plan, local = self._plan, number // self._plan.size
        if number in self._hidden:
            self._hidden[number].reveal()
        rank, member = plan.place(number)
        failure = Failure(rank, code, self._causes[number].text if number in self._causes else "", member)
        self._report(local)
        # A restarted process would only learn that the job is done, and end with code 0
        if code == FINISHED_WITHOUT_CODE:
            self._processes.end(local, None)
            self._failures.append(failure)
            self.code = self.code or code
            self._console.say(f"{failure}; it is not started again")
            return False
        restarts = self._restarts[local]
        pause = restarts.after(self._children.seconds_run(number))
        self._processes.end(local, pause)
        if pause is not None:
            self._survived[local] = failure
            what = "it" if member is None else "its group ends, and"
            count = f"{restarts.count} of {plan.max_restarts}"
            self._console.say(f"{failure}; {what} is started again in {pause:g} s (restart {count})")
            return False
        self._failures.append(failure)
        self.code = self.code or failure.exit_code
        ending, left = self._why_all_end(), self._processes.left()
        its_group = "" if member is None else "its group ends; "
        rest = ending or f"the launch goes on with {left} of {counted(plan.workers, plan.noun)}"
        self._console.say(f"{failure}; {its_group}{rest}" if left else str(failure))
        return bool(ending)

    def _say_earlier_failure(self, number: int) -> None:
        """Repeats the last failure of a worker that now ends with code 0.

        A worker that is started again may find its job finished. It then ends well without training, which hides the
        failure.
        """
        local, member = divmod(number, self._plan.size)
        if local in self._survived and not member:
            rank, _ = self._plan.place(number)
            who, failure = f"{self._plan.noun} {rank}", self._survived[local]
            self._console.say(f"{who} ended with code 0, and had failed before: {failure}")

    def _why_all_end(self) -> str:
        """Returns the reason why a worker's failure ends the whole launch; empty if the others continue."""
        plan = self._plan
        if plan.mode == "ddp":
            return "in ddp the others cannot go on, so they are stopped"
        if plan.stop_on_failure:
            return "the others are stopped, as --stop-on-failure says"
        if not plan.elastic and not (self._have_joined or self._started.exists()):
            return "not all workers of the job had joined, so the others are stopped"
        return ""


def worker_environment(plan: Launch, number: int, meeting: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a worker's process. meeting: the address at which the processes of ddp, or of a group,
    meet
    """
    rank, world_size = str(plan.first_rank + number // plan.size), str(plan.world_size)
    hidden = TORCHRUN_VARIABLES | _OF_ONE_WORKER
    environment = {name: os.environ[name] for name in os.environ if name not in hidden and "TORCHELASTIC" not in name}
    environment |= {**plan.settings, LAUNCHED: "1", "PS_LOCAL_RANK": str(number), "PYTHONUNBUFFERED": "1"}
    # Workers that share a machine share its cores; without this each would start a thread a core.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // len(plan.processes))))
    if not plan.elastic:
        environment |= {"PS_RANK": rank, "PS_WORLD_SIZE": world_size}
    if plan.group_size:
        environment |= {GROUP_SIZE: str(plan.group_size)}
        rank, world_size = str(number % plan.size), str(plan.group_size)
    if plan.mode == "ddp" or plan.group_size:
        assert TORCHRUN.world_size is not None
        assert TORCHRUN.local_rank is not None
        # The number among all processes of the launch: scripts, and torch itself, use the GPU of that number.
        environment |= {TORCHRUN.rank: rank, TORCHRUN.world_size: world_size, TORCHRUN.local_rank: str(number)}
        environment |= {"LOCAL_WORLD_SIZE": str(len(plan.processes)), **meeting}
    return environment


def rendezvous(plan: Launch) -> dict[str, str]:
    """Returns the address at which DDP's processes meet: from the environment, or with a free port of this machine.

    Raises InvalidRequest if there are processes on other machines, which cannot know that port.
    """
    if plan.mode != "ddp":
        return {}
    given = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    if all(given.values()):
        return given
    if plan.world_size > plan.workers:
        raise InvalidRequest(
            "ddp on several machines needs MASTER_ADDR and MASTER_PORT: "
            "an address on the machine of rank 0, the same for all"
        )
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_logs(plan: Launch, stack: contextlib.ExitStack) -> dict[int, BinaryIO]:
    """Opens a file for each process, to append: an earlier run's lines stay."""
    if plan.log_dir is None:
        return {}
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        paths = {number: plan.log_dir / _log_name(*plan.place(number)) for number in plan.processes}
        return {number: stack.enter_context(path.open("ab")) for number, path in paths.items()}
    except OSError as error:
        raise InvalidRequest(f"--log-dir {plan.log_dir} cannot be written ({error.strerror})") from None


def _log_name(rank: int, member: int | None) -> str:
    return f"worker-{rank}.log" if member is None else f"worker-{rank}.{member}.log"
