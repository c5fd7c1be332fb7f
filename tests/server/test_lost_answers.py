"""A join whose answer was lost with its coordinator: the next one says which shards have had the worker's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ps_protocol.messages.data import PushKind
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from tests.tools.one_process import DirectWorker, OneProcess
from tests.tools.raw_worker import vector_job


def comes_back(cluster: OneProcess, tmp_path: Path, is_killed: bool) -> tuple[DirectWorker, JoinRequest]:
    """Returns a worker that lost its place when one shard had had its second step, and what it has joined with since.

    is_killed: the coordinator died before the answer came, and the worker has asked the next one
    """
    worker = DirectWorker(cluster, vector_job("job", "async", 32, 1), 0)
    worker.initialise()
    worker.push()
    worker._push(0, 2, PushKind.GRADIENT, -torch.ones(worker.layout.buckets[0].numel))
    request = JoinRequest(
        pid=7, host="here", previous=worker.place.worker.incarnation, clock=1, attempt=77, run=worker.run
    )
    worker.join(request)
    if is_killed:
        cluster.start_coordinator(CheckpointPolicy(tmp_path, resume=True))
        worker.join(request)
    return worker, request


def test_a_coordinator_that_came_back_asks_the_shards_once_more(cluster: OneProcess, tmp_path: Path) -> None:
    worker, _ = comes_back(cluster, tmp_path, is_killed=True)
    pushed = {shard: counted.pushed for shard, counted in worker.place.worker.on_shards.items()}
    assert sorted(pushed.values()) == [1, 2]
    assert pushed[worker.place.placement[0]] == 2
    live = cluster.coordinator.job("job").workers.all()
    assert [member.incarnation for member in live] == [worker.place.worker.incarnation]
    worker._push(0, worker.clock + 1, PushKind.SKIP, torch.zeros(0))
    worker._push(1, worker.clock + 1, PushKind.GRADIENT, -torch.ones(worker.layout.buckets[1].numel))
    worker.clock += 1
    assert worker.pull().tolist() == [2.0] * 32


def test_a_repeated_call_has_the_state_of_the_first_answer_and_so_has_a_process_in_its_place(
    cluster: OneProcess,
) -> None:
    """The state that a worker leaves is newer than the last checkpoint's, and is kept until the next worker has it."""
    worker = DirectWorker(cluster, vector_job("job", "async", 32, 2), 0)
    DirectWorker(cluster, worker.spec, 1)
    worker.initialise()
    worker.clock = 1
    worker.save_state()
    worker.leave((100, b"left"))
    request = JoinRequest(pid=7, host="here", attempt=77, run=worker.run)
    assert worker.join(request).state == (100, b"left")
    assert worker.join(request).state == (100, b"left"), "the answer was lost"
    assert worker.join(replace(request, pid=8, attempt=78)).state == (100, b"left"), "so was the process"
    assert worker.join(replace(request, pid=8, attempt=78)).state == (100, b"left")


def test_a_repeated_call_takes_no_second_place_of_a_coordinator_that_lives(cluster: OneProcess, tmp_path: Path) -> None:
    worker, request = comes_back(cluster, tmp_path, is_killed=False)
    place = worker.place
    assert worker.join(request).worker.incarnation == place.worker.incarnation
    assert worker.place.worker.on_shards == place.worker.on_shards
