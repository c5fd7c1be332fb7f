"""The whole thing on one machine: a server of two shards, two workers, and examples/char_gpt.py.

    python examples/demo.py                                   # or: make demo
    python examples/demo.py --mode ssp:4 --workers 3
    python examples/demo.py --steps 400 --width 384           # what is not a flag here goes to char_gpt.py

In order: start the server, say where its page is, run the workers to their end, stop the server, say what came of it.
Nothing that was started outlives this script, however it ends. Exit code 0 means that the model learned.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

SCRIPT = Path(__file__).with_name("char_gpt.py")
START_SECONDS = 60.0
STOP_SECONDS = 30.0  # more than the commands give their own children


def main() -> None:
    """Runs the demo; see the top of this file."""
    arguments, for_script = parse_arguments()
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGHUP, terminate)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    result_file = out / "result.json"
    result_file.unlink(missing_ok=True)  # an old result must not pass for this one
    started = time.monotonic()

    server_log = out / "server.log"
    server = ["ps-server", "up", "--shards", str(arguments.shards), "--port", "0", "--metrics-port", "0"]
    with server_log.open("w") as log, running(server, stdout=log, stderr=subprocess.STDOUT) as process:
        print("the servers start: each imports torch, which takes some seconds ...", flush=True)
        address, page = await_server(process, server_log)
        print(f"the servers are ready; watch the job in a browser, while it trains: {page}", flush=True)
        workers = ["ps-worker", "run", "--server", address, "--workers", str(arguments.workers)]
        workers += ["--mode", arguments.mode, str(SCRIPT), "--out", str(out), *for_script]
        with running(workers, env=os.environ | {"OMP_NUM_THREADS": threads(arguments.workers)}) as process:
            process.wait()
    if process.returncode != 0 or not result_file.exists():
        sys.exit(f"demo: the workers ended with code {process.returncode}; the server's log is {server_log}")

    result = json.loads(result_file.read_text())
    result["shards"] = arguments.shards
    result_file.write_text(json.dumps(result, indent=2) + "\n")
    report(result, out, time.monotonic() - started)
    check(result["last_loss"], arguments.goal)


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program of this project, until the block ends. It gets SIGTERM, then time to end in order, then SIGKILL."""
    print("$", shlex.join(command), flush=True)
    program = Path(sysconfig.get_path("scripts")) / command[0]  # of this interpreter's environment, activated or not
    # A session of its own: Ctrl-C on a terminal reaches this script alone, which then stops workers before servers.
    process = subprocess.Popen([program, *command[1:]], start_new_session=True, **options)
    try:
        yield process
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second Ctrl-C must not cut this short
            signal.signal(number, signal.SIG_IGN)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()


def await_server(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """Waits until the server is ready; returns the coordinator's HOST:PORT and the page's URL."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        ready = re.search(r"ready at (\S+:\d+) .*the page, [^\n]*: (\S+)\n", log.read_text(), re.DOTALL)
        if ready:
            return ready[1], ready[2]
        time.sleep(0.1)
    print(log.read_text(), file=sys.stderr, end="")
    sys.exit("demo: the server did not start")


def report(result: dict[str, Any], out: Path, seconds: float) -> None:
    """The last lines of the demo."""
    print(
        "",
        f"loss     {result['first_loss']:.3f} in the first step, {result['last_loss']:.3f} at the end",
        f"steps    {result['steps']} of each worker; {result['samples_per_second']:.1f} samples per second of all",
        f"cluster  {result['shards']} shards, {result['workers']} workers, mode {result['mode']}",
        f"time     {seconds:.0f} s, starting and stopping included",
        f"left in  {out}/: " + ", ".join(sorted(file.name for file in out.iterdir())),
        "next     the same with --mode async; a script to begin with: examples/train.py; your own: docs/training.md",
        sep="\n",
        flush=True,
    )


def check(loss: float, goal: float) -> None:
    """Ends the demo with an error if the model did not learn."""
    if not loss < goal:
        sys.exit(f"demo: the loss should have fallen below {goal}, but is {loss:.3f}")


def threads(workers: int) -> str:
    """Threads of one worker: a share of the cores this process may use.

    At most 4, because a container's limit on CPU time does not show in the number of cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(min(4, max(1, cores // workers)))


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """On a signal: out through every `finally`."""
    sys.exit(128 + number)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The demo's own flags, and the rest."""
    parser = argparse.ArgumentParser(
        description="Start a server and workers on this machine and train a small GPT.",
        epilog="All other flags go to char_gpt.py; see there.",
        allow_abbrev=False,
    )
    parser.add_argument("--shards", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--mode", default="sync", help="sync, ssp:K or async (%(default)s)")
    parser.add_argument("--goal", type=float, default=2.6, help="the loss to end below (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where to leave results (%(default)s)")
    return parser.parse_known_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
