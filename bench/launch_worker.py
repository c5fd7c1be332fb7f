"""One worker of `python -m bench launches`: an ordinary script that trains for a few steps, and comes to its end.

Arguments: the server's address, the job, rank, workers, transport, steps, KiB of weights, and how the script ends:

    close   it closes its session, then ends
    end     it ends, and leaves the session to the interpreter
    exit    it calls sys.exit(3)

The benchmark has to find these:

    abort   it calls os.abort()
    late    it comes to its end, and aborts while the interpreter is taken apart, after all exit handlers
    hang    it never ends
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import torch

import ps_worker

CODES = {"close": 0, "end": 0, "exit": 3, "abort": 0, "late": 0, "hang": 0}  # that each is to end with


class AbortsLate:
    """Aborts the process when it is freed."""

    def __del__(self, abort: Callable[[], NoReturn] = os.abort) -> None:
        abort()  # the name `os` may be gone by then


def main() -> None:
    """Trains, then ends in the way that the last argument names."""
    address, job, rank, workers, transport, steps, kib, how = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # by which the benchmark asks for all stacks
    session = ps_worker.connect(address, "sync", job, int(rank), int(workers), transport=transport)
    model = torch.nn.Linear(256, int(kib), bias=False)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(int(steps)):
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", flush=True)
    if how == "close":
        session.close()
    elif how == "exit":
        sys.exit(CODES["exit"])
    elif how == "abort":
        os.abort()
    elif how == "late":
        vars(sys)["aborts_late"] = AbortsLate()  # the interpreter empties this module, and not before its end
    elif how == "hang":
        threading.Event().wait()


if __name__ == "__main__":
    main()
