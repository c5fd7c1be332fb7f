"""`ps-server up`: a cluster on this machine, one process a shard.

A shard prints on its standard output when it is ready, as one line of JSON. Its standard input tells it where the
coordinator is, and is its lifeline: when it closes, the parent is gone, and the shard stops. So nothing is left behind
even if the parent is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO

from ps_launch.children import Children, Program, Stopped, on_signals, stop_on_signals
from ps_launch.restarts import RECENT_SECONDS, RareRestarts
from ps_protocol.errors import PSError

START_SECONDS = 60.0
STOP_SECONDS = 30.0
COORDINATOR = 0  # the shard that is the coordinator too


def up(environment: Mapping[str, str]) -> int:
    """Runs the cluster until SIGTERM or SIGINT, and starts shards that end again. Returns the exit code.

    environment: of the shards, with every setting of theirs as a variable. Ports of shard i are PS_PORT + i and
    PS_METRICS_PORT + i, unless 0.
    """
    code = 0
    with contextlib.ExitStack() as stack:
        shards = _Shards(environment, stack)

        def stop_now(number: int, frame: object) -> None:
            shards.children.kill()
            os._exit(128 + number)

        stop_on_signals()
        try:
            shards.start()
            shards.keep_up()
        except Stopped:
            pass
        except PSError as error:
            print(f"ps-server: {error}", file=sys.stderr)
            code = 1
        finally:
            on_signals(stop_now)  # a second signal ends all at once
            shards.stop()
    return code


class _Ready:
    """Takes a shard's first line, which says that it is ready, from its standard output."""

    def __init__(self, tell: Callable[[dict[str, str]], None]) -> None:
        self._tell = tell
        self._told = False

    def take(self, data: bytes, lines: list[bytes]) -> None:
        """Takes the first line."""
        if lines and not self._told:
            self._told = True
            self._tell(json.loads(lines[0]))


class _Shards:
    """The shards of one cluster, by index."""

    def __init__(self, environment: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        self.children = Children(self._program, stack)
        self._environment = environment
        self._count = int(environment["PS_SHARDS"])
        self._restarts = [RareRestarts() for _ in range(self._count)]
        self._ready: dict[int, dict[str, str]] = {}  # the addresses of those that are ready
        self._before: dict[int, dict[str, str]] = {}  # where each was when it was ready for the first time
        self._ended: deque[tuple[int, int]] = deque()  # indices and codes of those that are to be started again

    def start(self) -> None:
        """Starts all shards, and prints where they are. Raises PSError if one does not start."""
        for index in range(self._count):
            self.children.start(index)
        for index in range(self._count):
            code = self._await_ready(index)
            if code is not None:
                raise PSError(f"shard {index} did not start (exit code {code})")
            if index == COORDINATOR:
                for other in range(1, self._count):
                    self.children.tell(other, self._ready[COORDINATOR]["address"])
        self._before = dict(self._ready)
        shards = "1 shard" if self._count == 1 else f"{self._count} shards"
        print(f"ps-server: ready at {self._ready[COORDINATOR]['address']} ({shards})", flush=True)
        scheme = "https" if self._environment.get("PS_TLS_CERT") else "http"
        for index in range(self._count):
            print(f"ps-server: metrics at {scheme}://{self._ready[index]['metrics']}/metrics", flush=True)

    def keep_up(self) -> None:
        """Starts shards that end again, at the same ports. Raises PSError for one that ends again and again."""
        while True:
            while not self._ended:
                self._ended += self.children.wait()
            self._bring_back(*self._ended.popleft())

    def stop(self) -> None:
        """Stops the coordinator, and when it has made its last checkpoints with the shards' help, the shards."""
        self.children.stop(STOP_SECONDS, [COORDINATOR])
        self.children.stop(STOP_SECONDS)

    def _bring_back(self, index: int, code: int | None) -> None:
        while code is not None:
            restarts = self._restarts[index]
            text = f"shard {index} ended with code {code}"
            if not restarts.is_allowed():
                raise PSError(f"{text} for the {restarts.recent_ends}th time in {RECENT_SECONDS:g} s; stopping")
            print(f"ps-server: {text}; starting it again", file=sys.stderr, flush=True)
            self.children.start(index)
            self.children.tell(index, self._before[COORDINATOR]["address"])
            # It may end before it is ready: if another process' outgoing connection has its port for a moment, say.
            code = self._await_ready(index)
        if self._ready[index] != self._before[index]:
            raise PSError(f"shard {index} came back at another address")
        print(f"ps-server: shard {index} is back", file=sys.stderr, flush=True)

    def _await_ready(self, index: int) -> int | None:
        """Waits until a shard is ready; returns its exit code if it ends first, or takes too long and is killed."""
        deadline = time.monotonic() + START_SECONDS
        while index not in self._ready:
            for number, code in self._ended:
                if number == index:
                    self._ended.remove((number, code))
                    return code
            if time.monotonic() >= deadline:
                self.children.kill(index)
            self._ended += self.children.wait(None if time.monotonic() >= deadline else deadline)
        return None

    def _program(self, index: int) -> Program:
        """Returns what a shard runs. One that comes back has the ports that it had."""
        self._ready.pop(index, None)

        def ready(addresses: dict[str, str]) -> None:
            self._ready[index] = addresses

        # The index is a flag, so that a list of processes shows which shard is which.
        arguments = ["-m", "ps_server", "shard", "--supervised", "--index", str(index)]
        arguments += ["--with-coordinator"] * (index == COORDINATOR)
        environment = dict(self._environment)
        before = self._before.get(index)
        for variable, address in (("PS_PORT", "address"), ("PS_METRICS_PORT", "metrics")):
            port = int(environment[variable])
            environment[variable] = before[address].rpartition(":")[2] if before else str(port and port + index)
        if before is not None:
            # A coordinator that comes back resumes what ran, if there are checkpoints: in the place of one that died.
            environment["PS_RESUME"] = "1" if environment.get("PS_CHECKPOINT_DIR") else environment["PS_RESUME"]
            environment["PS_FAILPOINTS"] = ""
        return Program(arguments, environment, out=_Ready(ready), is_told=True)


# -- in a shard ------------------------------------------------------------------------------------------------------


def await_coordinator(stdin: IO[str]) -> str:
    """Returns the coordinator's address, which the parent tells this shard."""
    return stdin.readline().strip()


def watch_lifeline(stdin: IO[str], stop: threading.Event) -> None:
    """Sets `stop` when the parent of this shard is gone."""

    def watch() -> None:
        while stdin.read(1):
            pass
        stop.set()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
