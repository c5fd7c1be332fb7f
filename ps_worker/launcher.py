"""Starts worker processes on this machine and stays until all have ended.

In the parameter-server modes a worker that dies takes nobody with it: it is started again as often as was asked for,
alone, and the others go on; the exit code tells at the end. In ddp the rest cannot go on, so they are stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ps_worker.launch_id import new_launch_id
from ps_worker.restarts import Restarts

STOP_SECONDS = 15.0
LOOK_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """What to start; see `ps-worker run --help`."""

    script: str
    arguments: tuple[str, ...]
    workers: int
    first_rank: int
    world_size: int
    elastic: bool
    mode: str
    server: str | None
    job: str
    connect_timeout: float
    metrics_host: str | None
    metrics_port: int
    transport: str
    shared_directory: str
    access: Mapping[str, str]
    max_restarts: int = 0
    take_over: bool = False


class _Stopped(Exception):
    """A signal asked to stop."""

    def __init__(self, number: int) -> None:
        self.number = number


def launch(what: Launch) -> int:
    """Runs the workers to their end. Returns 0, or the first code other than 0, or 128 + the signal that stopped us."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    restarts = {local: Restarts(what.max_restarts) for local in range(what.workers)}
    begun: dict[int, float] = {}  # by local rank, when it was started last
    due: dict[int, float] = {}  # by local rank, when a worker that ended is started again
    code = 0

    def stop(number: int, frame: object) -> None:
        raise _Stopped(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        # The one that a launcher has given to this process, if it is a worker itself, is not that of our workers.
        given = os.environ.get("PS_LAUNCH_ID") if os.environ.get("PS_LAUNCHED") != "1" else None
        extra = {"PS_LAUNCH_ID": given or new_launch_id()}
        extra |= _rendezvous() if what.mode == "ddp" else {}
        guard = _die_with_parent()

        def start(local: int) -> None:
            command = [sys.executable, what.script, *what.arguments]
            environment = _environment(what, local, extra) | {"PS_RESTART_COUNT": str(restarts[local].count)}
            if restarts[local].count:
                del environment["PS_LAUNCH_RANKS"]  # the others are under way: it asks for its own place alone
            begun[local] = time.monotonic()
            # A session of its own: Ctrl-C on a terminal reaches this process alone, which stops the workers once.
            running[local] = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=guard)

        for local in range(what.workers):
            start(local)
        while running or due:
            for local in [local for local, when in due.items() if when <= time.monotonic()]:
                del due[local]
                start(local)
            found = _wait_any(running, min(due.values(), default=None))
            if found is None or not found[1]:
                continue
            local, ended = found
            print(f"ps-worker: worker {what.first_rank + local} ended with code {ended}", file=sys.stderr)
            pause = restarts[local].after(time.monotonic() - begun[local])
            if pause is not None:
                due[local] = time.monotonic() + pause
                rank, count = what.first_rank + local, f"{restarts[local].count} of {what.max_restarts}"
                print(f"ps-worker: worker {rank} is started again in {pause:g} s (restart {count})", file=sys.stderr)
                continue
            code = code or (128 - ended if ended < 0 else ended)
            if what.mode == "ddp":
                _stop(list(running.values()))
                break
    except _Stopped as stopped:
        code = 128 + stopped.number
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _stop(list(running.values()))
    return code


def _environment(what: Launch, local: int, extra: dict[str, str]) -> dict[str, str]:
    rank, world_size = what.first_rank + local, what.world_size
    found = {
        **os.environ,
        **extra,
        "PS_LAUNCHED": "1",
        "PS_MODE": what.mode,
        "PS_JOB": what.job,
        "PS_CONNECT_TIMEOUT": str(what.connect_timeout),
        "PS_LAUNCH_RANKS": f"{what.first_rank}-{what.first_rank + what.workers - 1}",
        "PS_TAKE_OVER": "1" if what.take_over else "0",
        "LOCAL_RANK": str(local),
        "PYTHONUNBUFFERED": "1",
    }
    # Workers that share a machine share its cores; without this each would start a thread a core.
    found.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // what.workers)))
    if what.elastic:
        found["PS_ELASTIC"] = "1"
    else:
        found |= {"PS_RANK": str(rank), "PS_WORLD_SIZE": str(world_size), "PS_ELASTIC": "0"}
        if what.mode == "ddp":
            found |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(what.workers)}
    if what.server:
        found["PS_SERVER"] = what.server
    if what.metrics_host:
        found["PS_METRICS_HOST"] = what.metrics_host
    found["PS_METRICS_PORT"] = str(what.metrics_port)
    found["PS_TRANSPORT"] = what.transport
    found["PS_SHARED_DIRECTORY"] = what.shared_directory
    found |= what.access
    return found


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rendezvous() -> dict[str, str]:
    """Where DDP's processes meet: what the environment says, or a free port of this machine."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _die_with_parent() -> Callable[[], None] | None:
    """What a worker does before it runs: have the kernel end it if this process is killed. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_any(running: dict[int, subprocess.Popen[bytes]], until: float | None) -> tuple[int, int] | None:
    """Waits for any worker to end; takes it off `running` and returns its local rank and code. None at `until`."""
    while until is None or time.monotonic() < until:
        pid, status = os.waitpid(-1, 0 if until is None else os.WNOHANG) if running else (0, 0)
        for local, process in running.items():
            if process.pid == pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                del running[local]
                return local, process.returncode
        if pid == 0:
            time.sleep(LOOK_SECONDS)
    return None


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
