"""`ps-server up`: a cluster on this machine, with one process for each shard.

A shard that is ready prints one line of JSON on its standard output. Its standard input brings it the coordinator's
address, and is its lifeline: when it closes, the parent is gone, and the shard stops. So no process is left behind even
if the parent is killed.

One parent waits for the ready lines and the ends of all shards. A shard that ends, or is not ready in time, is started
again; the others go on meanwhile. The parent reports each end to the coordinator (`ps-server report`), so that it does
not wait for a process that is gone.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType

from ps_launch.children import CANNOT_START, Children, Program, Stopped, stop_on_signals
from ps_launch.lifeline import OTHERS_END_SECONDS, WRITE_SECONDS
from ps_launch.output import Console, Dropped
from ps_launch.ready import addresses_in
from ps_launch.restarts import ShardRestarts
from ps_protocol.errors import PSError
from ps_runtime.logs import TEXT
from ps_runtime.own_program import own_program
from ps_runtime.quantities import counted
from ps_runtime.signals import exit_at_once, on_further_signals

# The time limit for the shards to end. They also have what the coordinator leaves of its own time.
SHARDS_STOP_SECONDS = 8.0
STOP_UNREADY_SECONDS = 2.0  # the time to stop a cluster that was never ready: it has nothing to finish
MOST_DOUBLINGS = 4  # how often the time limit of a start is doubled
SAY_SECONDS = 1.0  # the longest that a line of the log waits to be read
COORDINATOR = 0  # the shard that is the coordinator too
# Exit codes of a shard that another process ended. Any other code, of a shard that was never ready, means that the
# shard refused to start.
FROM_OUTSIDE = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
NEVER = math.inf


@dataclass(frozen=True)
class Supervision:
    """How a cluster is kept running.

    shards:        the number of shards
    start_timeout: seconds after which a shard that is not ready is killed and started again; doubled each time, so that
                   a cluster on a slower machine starts, too
    drain_seconds: the time for workers to reach the last checkpoints, once the cluster is told to stop
    most_restarts: how often in a row a shard is restarted without having run well in between; None: unlimited
    only:          the one shard on this machine; None: all
    coordinator:   the address of the coordinator; empty: it is shard 0, on this machine
    """

    shards: int
    start_timeout: float
    drain_seconds: float
    most_restarts: int | None = None
    only: int | None = None
    coordinator: str = ""


def up(supervision: Supervision, environment: Mapping[str, str]) -> int:
    """Runs the cluster until SIGTERM or SIGINT, and restarts each shard that exits. Returns the exit code.

    environment: the environment of the shards, with all of their settings as variables. Shard i gets the ports
                 PS_PORT + i and PS_METRICS_PORT + i; a port of 0 stays 0
    """
    code = 0
    with contextlib.ExitStack() as stack:
        shards = _Shards(supervision, environment, stack)

        def stop_now(number: int, frame: FrameType | None) -> None:
            shards.children.kill()
            exit_at_once(number, frame)

        stop_on_signals(then=signal.SIG_IGN)  # until the stop begins
        try:
            shards.run()
        except Stopped:
            pass
        except PSError as error:
            on_further_signals(stop_now)  # `say` may wait for its reader
            shards.say(str(error))
            code = 1
        finally:
            on_further_signals(stop_now)
            code = code if shards.stop() else 1
    return code


@dataclass
class _Shard:
    """One shard of the cluster.

    addresses: its addresses when it was first ready; it is restarted there
    started: when its process was started; NEVER: it has none, or one that was killed
    ready:   since when it is ready; NEVER: it is not
    late:    how often in a row it was not ready in time
    process: the number of its process, by which its end is reported; empty: there is none
    """

    restarts: ShardRestarts
    addresses: Mapping[str, str] = field(default_factory=dict)
    started: float = NEVER
    ready: float = NEVER
    late: int = 0
    process: str = ""


class _Ready:
    """Reads a shard's standard output: finds the ready line, and passes on all others."""

    def __init__(self, tell: Callable[[dict[str, str]], None], console: Console) -> None:
        self._tell = tell
        self._console = console
        self._has_addresses = False

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Processes whole lines of output."""
        for line in lines:
            addresses = addresses_in(line.decode(errors="replace")) if not self._has_addresses else None
            if addresses is not None:
                self._has_addresses = True
                self._tell(addresses)
            else:
                self._console.write(sys.stderr.fileno(), line + b"\n")


class _Shards:
    """The shards of one cluster, by index."""

    def __init__(self, supervision: Supervision, environment: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        self.children = Children(self._program, stack)
        self._environment = environment
        self._console = Console("ps-server", environment.get("PS_LOG_FORMAT") or TEXT)
        self._supervision = supervision
        here = range(supervision.shards) if supervision.only is None else [supervision.only]
        self._shards = {index: _Shard(ShardRestarts(supervision.most_restarts)) for index in here}
        self._reports: dict[int, list[str]] = {}  # reports under way: by the child's number, the words of its command
        self._reported = 0
        self._was_ready = False  # all of them, at one time

    def run(self) -> None:
        """Starts all shards, prints their addresses, and restarts those that end, at the same ports.

        Raises PSError if a shard cannot start, or has ended more often than allowed.
        """
        if self._environment.get("PS_LOG_LEVEL") in ("debug", "info"):
            self.say(f"starting {counted(len(self._shards), 'shard')}")
        for index in self._shards:
            self.children.start(index, after=0.0)
        while True:
            next_late = min(map(self._late_at, self._shards))
            for index, code in self.children.wait(None if next_late == NEVER else next_late):
                if self._reports.pop(index, None) is None:
                    self._has_ended(index, code)
                elif code:
                    self.say("the coordinator could not be told that a shard ended; it finds out by itself")
            self._kill_late()
            if not self._was_ready and all(shard.ready < NEVER for shard in self._shards.values()):
                self._was_ready = True
                self._announce()

    def stop(self) -> bool:
        """Stops the coordinator first, which makes the last checkpoints with the shards' help; then the shards. Returns
        False if the coordinator had to be killed or has failed, or the only shard, which asks for last checkpoints
        itself.
        """
        if not self._was_ready:
            self.children.stop(STOP_UNREADY_SECONDS)
            return True
        only = self._supervision.only
        seconds = self._supervision.drain_seconds + WRITE_SECONDS
        if only == COORDINATOR:
            seconds += OTHERS_END_SECONDS
        deadline = time.monotonic() + seconds + SHARDS_STOP_SECONDS
        late = self.children.stop(seconds, [COORDINATOR])
        has_made = only is not None and only != COORDINATOR
        has_made = has_made or self._has_made_last(COORDINATOR, "the coordinator", seconds, bool(late))
        left = max(SHARDS_STOP_SECONDS, deadline - time.monotonic())
        killed = self.children.stop(left)
        if only is not None and only != COORDINATOR:
            has_made = self._has_made_last(only, f"shard {only}", left, only in killed)
        return has_made

    def _has_made_last(self, index: int, who: str, seconds: float, was_killed: bool) -> bool:
        """Returns whether a process that makes last checkpoints has ended in order; otherwise it says so."""
        code = self.children.code(index)
        how = f"did not end within {seconds:g} s and was killed" if was_killed else f"ended with code {code}"
        if was_killed or (code and self._environment.get("PS_CHECKPOINT_DIR")):
            self.say(f"{who} {how}: last checkpoints may be missing")
            return False
        return True

    def say(self, text: str) -> None:
        """Writes a log line. Waits at most SAY_SECONDS for a reader that does not read."""
        self._console.until = time.monotonic() + SAY_SECONDS
        self._console.say(text)

    def _announce(self) -> None:
        self._console.until = time.monotonic() + SAY_SECONDS
        self._console.tell(self._what_is_ready())
        scheme = "https" if self._environment.get("PS_TLS_CERT") else "http"
        for shard in self._shards.values():
            self._console.tell(f"metrics at {scheme}://{shard.addresses['metrics']}/metrics")
        page = self._shards[COORDINATOR].addresses.get("page") if COORDINATOR in self._shards else None
        if page:
            self._console.tell(f"the page, for a browser on this machine: {page}")

    def _what_is_ready(self) -> str:
        count, only, coordinator = self._supervision.shards, self._supervision.only, self._coordinator()
        if only is None:
            return f"ready at {coordinator} ({counted(count, 'shard')})"
        if only == COORDINATOR:
            return f"ready at {coordinator} (the coordinator, and shard {only} of {count})"
        own = self._shards[only].addresses["address"]
        return f"shard {only} of {count} ready at {own}; the coordinator is at {coordinator}"

    # -- events of a shard ---------------------------------------------------------------------------------------------

    def _is_ready(self, index: int, addresses: Mapping[str, str]) -> None:
        shard = self._shards[index]
        shard.ready, shard.late, shard.process = time.monotonic(), 0, addresses["process"]
        if shard.restarts.count:
            self.say(f"shard {index} is back (restart {shard.restarts.count})")
        if shard.addresses:
            return
        shard.addresses = addresses
        if index == COORDINATOR:  # shards that are started from now on get the address by their environment
            for other in self._shards.keys() - {COORDINATOR}:
                self.children.tell(other, addresses["address"])

    def _coordinator(self) -> str:
        """Returns where the coordinator is; empty while that is not known."""
        return self._supervision.coordinator or self._shards[COORDINATOR].addresses.get("address", "")

    def _has_ended(self, index: int, code: int) -> None:
        """Schedules the restart of a shard that ended, after a pause. Raises PSError if it may not be restarted."""
        shard = self._shards[index]
        if not shard.addresses and code not in FROM_OUTSIDE:
            raise PSError(f"shard {index} did not start (exit code {code})")
        self._report(index)
        text = f"shard {index} " + ("could not be started" if code == CANNOT_START else f"ended with code {code}")
        pause = shard.restarts.after(max(0.0, time.monotonic() - shard.ready))
        shard.started = shard.ready = NEVER
        if pause is None:
            times = f"{shard.restarts.in_a_row} restarts in a row"
            raise PSError(f"{text} after {times}, which is all that --max-shard-restarts allows; stopping")
        when = f" in {pause:g} s" if pause else ""
        self.say(f"{text}; starting it again{when} (restart {shard.restarts.count})")
        self.children.start(index, after=pause)

    def _report(self, index: int) -> None:
        """Starts a child that reports to the coordinator that a shard's process has ended. Does nothing if it was the
        coordinator's own process.
        """
        shard, coordinator = self._shards[index], self._coordinator()
        process, shard.process = shard.process, ""
        if index == COORDINATOR or not process or not coordinator:
            return
        self._reported += 1
        self._reports[-self._reported] = ["--server", coordinator, "--index", str(index), "--process", process]
        try:
            self.children.start(-self._reported)
        except OSError:  # the coordinator finds out by itself
            del self._reports[-self._reported]

    def _late_at(self, index: int) -> float:
        """Returns the time at which a starting shard counts as too late; NEVER if it is not starting.

        A shard is ready once the coordinator knows it, so its time begins again when the coordinator is back.
        """
        shard, coordinator = self._shards[index], self._shards.get(COORDINATOR)
        if shard.ready < NEVER or coordinator is None:  # one elsewhere may not be there yet
            return NEVER
        begun = shard.started if index == COORDINATOR else max(shard.started, coordinator.ready)
        return begun + self._patience(shard)

    def _patience(self, shard: _Shard) -> float:
        return self._supervision.start_timeout * 2.0 ** min(shard.late, MOST_DOUBLINGS)

    def _kill_late(self) -> None:
        for index, shard in self._shards.items():
            if self._late_at(index) <= time.monotonic():
                self.say(f"shard {index} is not ready after {self._patience(shard):g} s: killing it")
                self.children.kill(index)
                shard.started = NEVER
                shard.late += 1

    # -- programs of shards --------------------------------------------------------------------------------------------

    def _program(self, index: int) -> Program:
        """Returns what a child runs: a shard, or the command of a report. A restarted shard keeps its ports."""
        if index in self._reports:
            words = own_program("ps_server", "report", *self._reports[index])
            return Program(words, self._environment, out=Dropped(), err=Dropped())
        shard = self._shards[index]
        shard.started = time.monotonic()
        # The index is a flag, so that a list of processes shows which shard is which.
        arguments = own_program("ps_server", "shard", "--supervised", "--index", str(index))
        arguments += ["--restart-count", str(shard.restarts.count)]
        arguments += ["--with-coordinator"] * (index == COORDINATOR)
        if self._supervision.only is not None:
            # The coordinator ends last. A shard without a coordinator on this host requests its own last checkpoints.
            arguments += ["--ends-last" if index == COORDINATOR else "--drains"]
        out = _Ready(lambda addresses: self._is_ready(index, addresses), self._console)
        return Program(arguments, self._shard_environment(index), out=out, has_stdin=True)

    def _shard_environment(self, index: int) -> dict[str, str]:
        shard, environment = self._shards[index], dict(self._environment)
        for variable, address in (("PS_PORT", "address"), ("PS_METRICS_PORT", "metrics")):
            port = int(environment[variable])
            environment[variable] = (
                shard.addresses[address].rpartition(":")[2] if shard.addresses else str(port and port + index)
            )
        data_port = int(environment["PS_DATA_PORT"])
        environment["PS_DATA_PORT"] = str(data_port and data_port + index)
        if index != COORDINATOR:
            environment["PS_COORDINATOR"] = self._coordinator()
        if shard.addresses:
            # A restarted coordinator resumes the jobs that ran, if there are checkpoints.
            environment["PS_RESUME"] = "1" if environment.get("PS_CHECKPOINT_DIR") else environment["PS_RESUME"]
        if shard.restarts.count:
            environment["PS_FAILPOINTS"] = _delays(environment.get("PS_FAILPOINTS", ""))
        return environment


def _delays(failpoints: str) -> str:
    """Returns the failpoints that only delay. A restarted shard does not crash again, but its disk is as slow as
    before.
    """
    return ",".join(entry for entry in failpoints.split(",") if "=delay:" in entry)
