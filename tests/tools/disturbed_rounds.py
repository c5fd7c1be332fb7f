"""A worker's rounds of local steps that are disturbed in the middle of one: a shard is lost, or all processes end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ps_server.storage.checkpoints import CheckpointStore
from ps_worker import Session
from ps_worker.cluster import coordinator_calls
from tests.tools.cluster import Cluster, scrape, until
from tests.tools.rollbacks import QUICK

WARM_UP = 2
FRESH = "ps_worker_fresh_inner_state_total"

MakeCluster = Callable[..., Cluster]
Run = Callable[[Session, Callable[[int], object]], list[torch.Tensor]]  # calls what it is given after each step


class Once:
    """Something that happens once in the middle of a round, as soon as there is a checkpoint.

    steps: of a round, after a warm-up of WARM_UP; at: after which of them; after: this step at the earliest
    """

    def __init__(self, directory: Path, what: Callable[[], object], steps: int, at: int, after: int) -> None:
        self.happened = False
        self._store, self._what = CheckpointStore(directory), what
        self._steps, self._at, self._after = steps, at, after

    def __call__(self, number: int) -> None:
        """After step `number`. A checkpoint may be of a round that has to be made first."""
        if self.happened or number < self._after or (number - WARM_UP) % self._steps != self._at:
            return
        with contextlib.suppress(AssertionError):
            until(lambda: self._store.names("default"), "a checkpoint", 1.0)
            self.happened = True
            self._what()


When = Callable[[Path, Callable[[], object]], Once]  # when what is to happen does: Once but for the last three


def after_a_lost_shard(
    make_cluster: MakeCluster, directory: Path, mode: str, run: Run, when: When, transport: str = "tcp"
) -> list[torch.Tensor]:
    """What a worker's run ends with that goes on, from what it has in memory, when a shard was lost and restored."""
    cluster = make_cluster(checkpoint_dir=directory, checkpoint_every="2steps", timing=QUICK)
    lost = when(directory, lambda: cluster.start_again(1))
    with cluster.connect(mode, transport=transport) as session:
        found = run(session, lost)
        assert lost.happened
        metrics = scrape(session.metrics_address)
        assert metrics["ps_worker_rejoins_total"] >= 1
        assert metrics[FRESH] == 0
    return found


def after_all_have_ended(
    make_cluster: MakeCluster, directory: Path, mode: str, run: Run, when: When
) -> tuple[list[torch.Tensor], float]:
    """What a worker's run ends with that a new session makes once more, when servers and worker were gone; and how
    often the state of its own optimizer has begun anew."""
    first = make_cluster(checkpoint_dir=directory, checkpoint_every="2steps", timing=QUICK)

    class Killed(Exception):
        pass

    def end() -> None:
        first.stop()
        raise Killed

    session = first.connect(mode, transport="tcp")
    with pytest.raises(Killed):
        run(session, when(directory, end))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_calls, "LEAVE_SECONDS", 0.0)
        session.close()  # ends its threads; its servers have stopped, so no call of it arrives
    second = make_cluster(checkpoint_dir=directory, restore=True, timing=QUICK)
    with second.connect(mode, transport="tcp") as again:
        return run(again, lambda number: None), scrape(again.metrics_address)[FRESH]
