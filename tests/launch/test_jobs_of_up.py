"""What `ps-server up` promises the jobs on it, with real processes: it stops, and it brings a shard back slowly."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import ps_worker
from ps_protocol.errors import PSError
from tests.tools.cases import cases
from tests.tools.launching import END_SECONDS, START_SECONDS, Command, Commands
from tests.tools.raw_worker import RawWorker, vector_job

CELLS = 64  # four buckets of 16, on two shards
CONNECT_SECONDS = 8.0  # less than it takes to read a file in at least three pieces
PIECE_SECONDS = 4.0

Up = Callable[..., tuple[Command, str]]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Starts two shards with one directory for checkpoints; returns the command and the cluster's address."""
    flags = ["--shards=2", "--port=0", "--metrics-port=0", f"--checkpoint-dir={tmp_path}/checkpoints"]
    with closing(Commands(tmp_path)) as commands:

        def start(*more: str, **variables: str) -> tuple[Command, str]:
            command = commands.start("-m", "ps_server", "up", *flags, *more, **variables)
            [address] = command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
            return command, address

        yield start


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["async"], ["ssp:4"]))
def test_sigterm_keeps_every_update_that_was_acknowledged(up: Up, mode: str) -> None:
    """Workers push until the servers take no more; a cluster that is started with --restore has each of their steps."""
    command, address = up("--drain-seconds=0.5")
    spec = vector_job("job", mode, CELLS, 2)
    taken, trained = [0, 0], threading.Barrier(3)

    def train(worker: RawWorker) -> None:
        try:
            while True:
                worker.step(torch.full((CELLS,), -1.0))
                taken[worker.rank] += 1
                worker.pull()
                if taken[worker.rank] == 5:
                    trained.wait(START_SECONDS)
        except PSError:
            pass

    with RawWorker(address, spec, 0) as zero, RawWorker(address, spec, 1) as one:
        zero.initialise()
        threads = [threading.Thread(target=train, args=(worker,)) for worker in (zero, one)]
        for thread in threads:
            thread.start()
        trained.wait(START_SECONDS)
        assert command.end(signal.SIGTERM) == 0
        for thread in threads:
            thread.join(END_SECONDS)
    _, address = up("--restore")
    with RawWorker(address, spec, 0) as zero, RawWorker(address, spec, 1):
        weights = zero.pull()
        # A step may be on one shard when the other takes no more: a part of it counts, and no acknowledged one is lost.
        assert sum(taken) >= 10
        assert bool((weights >= sum(taken)).all())
        assert bool((weights <= sum(taken) + 2).all())


@pytest.mark.long
def test_a_worker_waits_for_a_slow_restore_as_long_as_it_makes_progress(up: Up) -> None:
    """Reading the checkpoint takes longer than the worker tries for a server that does not answer."""

    def job(address: str) -> tuple[ps_worker.Session, torch.nn.ParameterList, torch.optim.Optimizer]:
        session = ps_worker.connect(address, "sync", "job", 0, 1, connect_timeout=CONNECT_SECONDS)
        model = torch.nn.ParameterList([torch.zeros(CELLS)])
        return session, *session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    command, address = up()
    session, model, optimizer = job(address)
    (-model[0]).sum().backward()
    optimizer.step()
    session.close()  # the last worker: a checkpoint is made
    assert command.end(signal.SIGTERM) == 0
    _, address = up("--restore", PS_FAILPOINTS=f"restore-half-read=delay:{PIECE_SECONDS}")
    begun = time.monotonic()
    session, model, optimizer = job(address)
    assert time.monotonic() - begun > CONNECT_SECONDS
    assert torch.equal(model[0].detach(), torch.ones(CELLS))
    session.close()
