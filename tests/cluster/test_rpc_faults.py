"""Training while half of all calls fail and a quarter is made twice: the weights are those of a run without faults.

The weights are the counting oracle's: what was lost, doubled or torn would be read from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ps_protocol.errors import TryLater, UnknownWorker
from ps_protocol.messages.workers import JoinRequest
from ps_server.storage.checkpoints import CheckpointStore
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.oracle_run import WORKERS, Run
from tests.tools.raw_worker import joined, vector_job
from tests.tools.rollbacks import QUICK
from tests.tools.rpc_faults import KINDS, RpcFaults, break_calls

SEED = 3  # with it each kind of fault happens to the few calls of a join, and the one for the status gets through


@pytest.mark.parametrize(
    ("mode", "transport"),
    cases(
        [("sync", "tcp"), ("sync quorum 1", "shm")],
        [("sync", "shm"), ("ssp:2", "grpc"), ("async", "grpc"), ("sync quorum 1", "tcp")],
    ),
)
def test_with_calls_lost_unheard_and_repeated_every_push_counts_once(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, mode: str, transport: str
) -> None:
    faults = RpcFaults(SEED)
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0)
    ended = Run(cluster.address, mode, transports=(transport,), steps=12).to_the_end()
    faults.finish()
    assert (ended.found, ended.lost) == ([], 0)
    methods = ("Exchange",) if transport == "shm" else ("Push", "Pull")
    for method in (*methods, "AddWorker", "Join"):
        assert all(faults.counts[method, kind] for kind in KINDS), f"{method}: {faults.counts}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "transport"),
    cases([("sync", "tcp"), ("async", "shm")], [("sync", "grpc"), ("sync quorum 1", "tcp")]),
)
def test_with_calls_broken_a_job_is_set_back_to_a_checkpoint_and_every_push_counts_once(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, transport: str
) -> None:
    faults = RpcFaults(seed=11, chance=0.12)  # a join is eight calls, all of which have to get through
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0, checkpoint_dir=tmp_path, checkpoint_every="4steps", timing=QUICK)
    store, happened = CheckpointStore(tmp_path), threading.Event()
    run = Run(cluster.address, mode, happened, store, transports=(transport,))

    def stepped(rank: int, clock: int) -> None:
        if rank == 0 and clock >= 12 and store.names("default") and not happened.is_set():
            cluster.start_again(1)
            happened.set()

    run.stepped = stepped
    ended = run.to_the_end()
    faults.finish()
    assert ended.found == []
    [job] = ended.status["jobs"]
    if mode == "sync":
        assert job["restore_count"] == 1
        # None are made again where the checkpoint is of the clock at which both stand. A step that all shards have but
        # that did not end counts, too.
        redone = sum(reached - restored for reached, restored in run.joined_again.values())
        assert redone <= job["redone_step_count"] <= redone + len(run.joined_again) == redone + WORKERS
    else:
        assert (job["restore_count"], job["redone_step_count"]) == (0, 0)
    assert ended.lost <= job["lost_step_count"] <= ended.missing
    for method in ("SaveWorkerState", "BeginSnapshot", "AwaitSnapshot"):
        assert sum(faults.counts[method, kind] for kind in KINDS), f"{method}: {faults.counts}"
    assert sum(faults.counts["RestoreJob", kind] for kind in ("none", *KINDS)), faults.counts


def test_who_lost_its_place_to_a_join_that_failed_half_way_is_told_so(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards count it no more: were it live to the coordinator alone, it would never learn why they refuse it."""
    faults = RpcFaults(seed=0, chance=0.0, only={"AddWorker"})
    break_calls(monkeypatch, faults)
    cluster = make_cluster(lease=60.0)
    with joined(cluster.address, vector_job("default", "async", cells=16, world_size=1)) as [old]:
        faults.chance = 1.0
        with pytest.raises(TryLater, match="broke this call"):
            cluster.coordinator.join("default", 0, JoinRequest(pid=1))
        faults.chance = 0.0

        def is_unknown() -> bool:
            with suppress(UnknownWorker):
                old.send(old.message(0, 1))
                return False
            return True

        until(is_unknown, "the removal on its shard")  # which a thread of that shard's own asks for
        with pytest.raises(UnknownWorker):
            old.heartbeat()
