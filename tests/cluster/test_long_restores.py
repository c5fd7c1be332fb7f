"""A shard that was started again reads for longer than workers wait for silent servers: they wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import PSError
from ps_runtime.retry import Retry
from ps_server.coordinator.timing import Timing
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker import Session
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, until

CONNECT_TIMEOUT = 2.0
PIECES, PIECE_SECONDS = (
    5,
    1.5,
)  # of the slow read: more than three times as long, on the clock of those that repeat calls
CELLS = 64


class RetryClock:
    """The clock of calls that are repeated. The slow read alone takes time on it, and none that the machine needs.

    told: what the coordinator has answered to one that joins again: how far the read is
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.told = 0.0, set[str]()
        self._wait_after = Retry.wait_after
        patch.setattr("ps_runtime.retry.time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(Retry, "wait_after", lambda retry, error: self._waits(retry, error))

    def _waits(self, retry: Retry, error: PSError) -> None:
        if error.progress is not None and retry._peer.role == "coordinator":
            self.told.add(error.progress)
        self._wait_after(retry, error)


def steps(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, stop: threading.Event) -> int:
    """Trains until it is told to stop; returns the clock then."""
    while not stop.is_set():
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()
    return session.clock


@pytest.mark.long
@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_workers_wait_as_long_as_a_restore_gets_on(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Their calls come to the new process before it has heard of the job."""
    cluster = make_cluster(checkpoint_dir=tmp_path, timing=Timing(recovery_look=1.0, shard_lost=0.1))
    stop, over, piece = threading.Event(), threading.Event(), threading.Lock()
    clock, reads, read = RetryClock(monkeypatch), [], CheckpointStore.read_files

    def slowly(store: CheckpointStore, *arguments: Any) -> Any:
        for _ in range(PIECES):
            with piece:  # both shards read in sync
                before = len(clock.told)
                arguments[2](1)
                until(lambda before=before: len(clock.told) > before or over.is_set(), "a worker hears of it")  # type: ignore[misc]
                clock.now += PIECE_SECONDS
        reads.append(1)
        return read(store, *arguments)

    monkeypatch.setattr(CheckpointStore, "read_files", slowly)
    with ThreadPoolExecutor() as pool, cluster.connect(mode, connect_timeout=CONNECT_TIMEOUT) as session:
        model = nn.Linear(1, CELLS, bias=False)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=64)
        training = pool.submit(steps, session, model, optimizer, stop)
        try:
            until(lambda: session.clock > 3 or training.done())
            cluster.coordinator.job("default").checkpoint()
            cluster.start_again(1)
            until(lambda: reads or training.done(), "the restore")
            before = session.clock
            until(lambda: session.clock > before + 3 or training.done(), "more steps")
        finally:
            stop.set()
            over.set()
        assert training.result(TEST_SECONDS) > before
