"""How a benchmark talks with its processes: lines of JSON, orders on standard input and answers on standard output.

The end of its input ends a process: so none is left behind, on whatever host it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

STOP_SECONDS = 30.0


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Writes a line to a process. Raises RuntimeError if it has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise RuntimeError(f"a process ended with code {process.wait()}") from None


def answer(process: subprocess.Popen[str], seconds: float) -> Any:
    """The next line of JSON of a process. Raises RuntimeError if it ends first, or takes too long and is ended."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        raise RuntimeError(f"a process ended with code {process.wait()} instead of answering within {seconds:.0f} s")
    return json.loads(line)


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ends processes by the end of their input, or else by force."""
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def own_output() -> Callable[[Any], None]:
    """In a process: a function that answers. What others print, as gloo does, goes to standard error from here on."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(what: Any) -> None:
        output.write(json.dumps(what) + "\n")

    return say
