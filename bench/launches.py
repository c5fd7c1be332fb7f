"""Whether a process that has trained ends with its own code: short launches by the thousand, over each transport.

A worker is an ordinary script. It is a fork of a process that has imported torch and has no thread, and comes to the
normal end of its interpreter, which is taken apart: a launch of two workers costs a second of CPU, and would cost three
or more with the imports. The launches share one cluster, each with a job of its own. The scripts close their session,
leave it open, or call `sys.exit(3)`, in turn. Every other code is a violation, a signal as well; so is a process
without a code after `--bound` seconds, whose stacks are then in the result. `ms` is the median of a launch, from its
start to the last code; the peak is that of the shard that has come to take the most memory. The page's results are of a
machine that ran the project's tests at the same time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import options
from bench.cluster import HERE, servers
from bench.launch_worker import CODES
from bench.machine import cpu_seconds, memory
from bench.pictures import Bar, bars
from bench.results import MIB, Result, median_ms, result
from tests.tools.forkserver import Forked, Nursery

SHORT = {"count": 10, "transport": "tcp"}
SCRIPT = Path(__file__).with_name("launch_worker.py")
LOOK_SECONDS = 2.0  # in which a process that does not end shows whether it computes
STACKS_SECONDS = 60.0  # gdb reads what torch has for debuggers
SHOWN = 10  # violations
OUTPUT_CHARACTERS = 8000  # the last ones of a worker's output


def flags(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m bench launches`."""
    options.add(parser, mib=4, workers=2, shards=2, steps=14, transport="tcp,shm,grpc")
    parser.add_argument("--count", type=int, default=1000, help="launches of each transport (%(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="launches that run at a time (%(default)s)")
    parser.add_argument("--bound", type=float, default=60.0, help="seconds until a process must end (%(default)s)")
    ends = f"of scripts, in turn: {', '.join(CODES)} (%(default)s)"
    parser.add_argument("--ends", default="close,end,exit", help=ends)
    parser.add_argument("--say-every", type=int, default=100, help="launches between two lines on stderr (%(default)s)")


@dataclass(frozen=True)
class Launched:
    """What a launch came to.

    codes:      of its workers, by rank; negative for a signal; None: no code came
    violations: what each wrong worker has left
    """

    seconds: float
    codes: list[int | None]
    violations: list[dict[str, Any]]


def run(arguments: argparse.Namespace) -> list[Result]:
    """Starts the launches; one result for each transport."""
    return [_of_transport(arguments, transport) for transport in arguments.transport.split(",")]


def _of_transport(arguments: argparse.Namespace, transport: str) -> Result:
    found: list[Launched] = []
    begun, peak = time.monotonic(), 0
    with (
        tempfile.TemporaryDirectory() as folder,
        servers([HERE] * arguments.shards) as cluster,
        Nursery() as nursery,
        ThreadPoolExecutor(arguments.at_once) as pool,
    ):
        launcher = Launcher(arguments, transport, cluster.address, Path(folder), nursery)
        for launched in pool.map(launcher.launch, range(arguments.count)):
            found.append(launched)
            if len(found) % arguments.say_every == 0 or launched.violations:
                seconds = time.monotonic() - begun
                text = f"{transport}: {len(found)} launches in {seconds:.0f} s, codes {_counted(found)}"
                print(text, file=sys.stderr, flush=True)
        peak = max(memory(pid)["peak"] for pid in cluster.pids)
    violations = [each for launched in found for each in launched.violations]
    return result(
        "launches",
        "ours",
        transport=transport,
        wire="float32",
        workers=arguments.workers,
        shards=arguments.shards,
        size=arguments.mib * MIB,
        ms=median_ms([launched.seconds for launched in found]),
        worst_ms=round(1e3 * max(launched.seconds for launched in found), 1),
        launches=len(found),
        peak_bytes=peak,
        steps=arguments.steps,
        codes=_counted(found),
        violations=len(violations),
        violation_details=violations[:SHOWN],
        nice=os.nice(0),
    )


def _counted(found: list[Launched]) -> dict[str, int]:
    """How many processes ended with each code; of signals the name, "none" for those without."""
    return dict(Counter(_name(code) for launched in found for code in launched.codes))


def _name(code: int | None) -> str:
    if code is None:
        return "none"
    return str(code) if code >= 0 else signal.Signals(-code).name


class Launcher:
    """Starts the launches of one transport.

    address: of the servers
    folder:  where workers write what they say
    """

    def __init__(
        self, arguments: argparse.Namespace, transport: str, address: str, folder: Path, nursery: Nursery
    ) -> None:
        self._arguments, self._transport, self._address = arguments, transport, address
        self._folder, self._nursery = folder, nursery
        self._ends = arguments.ends.split(",")

    def launch(self, number: int) -> Launched:
        """Starts one, and waits until all of its workers have ended, or should have."""
        how, of = self._ends[number % len(self._ends)], self._arguments.workers
        logs = [self._folder / f"{number}-{rank}" for rank in range(of)]
        size = (self._arguments.steps, self._arguments.mib * MIB // 1024)
        workers = [
            self._start([self._address, f"launch-{number}", rank, of, self._transport, *size, how], log)
            for rank, log in enumerate(logs)
        ]
        begun = time.monotonic()  # the first ones wait for the imports before
        for worker in workers:
            worker.ends_within(begun + self._arguments.bound - time.monotonic())
        seconds, codes = time.monotonic() - begun, [worker.poll() for worker in workers]
        violations = []
        for rank, (worker, log) in enumerate(zip(workers, logs, strict=True)):
            code = codes[rank]
            if code != CODES[how]:
                stacks = _looked_at(worker) if code is None else {}
                said = {"launch": number, "rank": rank, "ends_by": how, "code": _name(code), **stacks}
                violations.append({**said, "output": log.read_text(errors="replace")[-OUTPUT_CHARACTERS:]})
            log.unlink()
        return Launched(seconds, codes, violations)

    def _start(self, words: list[object], log: Path) -> Forked:
        """Starts one worker. Its interpreter is taken apart at its end, as in a process of its own: what the benchmark
        looks for happens then.
        """
        return self._nursery.run(SCRIPT, words, log, finalizes=True)


def _looked_at(worker: Forked) -> dict[str, Any]:
    """What a process that does not end does, and where; then it is killed.

    cpu_seconds:  that it has used in all, and in the last LOOK_SECONDS. One that gets no processor is starved, and a
                  thread of it is runnable (R) all the time; one that hangs has none
    """
    try:
        before = cpu_seconds([worker.pid])
        states = [_states(worker.pid)]
        worker.ends_within(LOOK_SECONDS)
        states.append(_states(worker.pid))
        used = [round(before, 2), round(cpu_seconds([worker.pid]) - before, 2)]
        return {"cpu_seconds": used, "load": os.getloadavg()[0], "threads": states, "stacks": _stacks(worker)}
    except OSError as error:
        return {"stacks": f"it has ended meanwhile: {error}"}
    finally:
        worker.kill()


def _states(pid: int) -> list[str]:
    """Each thread's name, its state, and the kernel's function that it waits in."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        found.append(f"{name}: {rest.split()[0]} {(task / 'wchan').read_text()}")
    return found


def _stacks(worker: Forked) -> str:
    """The stacks of all threads, if py-spy or gdb is there; the worker writes Python's into its own output, too."""
    worker.send_signal(signal.SIGUSR1)
    for command in (["py-spy", "dump", "--pid"], ["gdb", "--batch", "-ex", "thread apply all backtrace", "-p"]):
        if shutil.which(command[0]):
            asked = [*command, str(worker.pid)]
            try:
                return subprocess.run(asked, capture_output=True, text=True, timeout=STACKS_SECONDS, check=False).stdout
            except subprocess.TimeoutExpired as error:
                return str(error)
    worker.ends_within(LOOK_SECONDS)
    return ""


def draw(found: list[Result], path: Path) -> None:
    """How long a launch takes over each transport."""
    title = f"A launch of {found[0]['workers']} workers, {found[0]['steps']} steps of {found[0]['bytes'] // MIB} MiB"
    bars(path, "milliseconds", {title: [Bar(line["transport"], line["ms"], True) for line in found]})
