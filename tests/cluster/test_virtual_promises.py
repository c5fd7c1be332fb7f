"""The simulator asks no more of a cluster than the cluster promises. Each fault comes at a moment that seeds seldom
meet.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ps_server.coordinator.checkpoint_policy import CheckpointPolicy
from tests.simulation.cluster import Cluster
from tests.simulation.network import Weather
from tests.simulation.runs import Run, job_beside
from tests.simulation.saving import Saver
from tests.simulation.supervision import DIRECTORY
from tests.simulation.worker import Place, Worker

SINCE_SECONDS = 1005.0  # on the clock of the world: by then, both jobs have checkpoints
JUST_NOW_SECONDS = 0.5
ELSEWHERE_SECONDS = 0.01  # after its death, within which a shard is started again
SHARD = 0  # that the job beside is on
HUNG_SECONDS = 9.0


def test_a_job_waits_for_its_own_shard_also_when_its_last_step_is_seen_after_the_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shard comes back at another address, so that its index is free after ten seconds of silence."""
    cluster = Cluster("sync", 0, faults=())
    every_steps = CheckpointPolicy(DIRECTORY, 5, None, keep=2, resume=True, full_every=4)
    servers, died = cluster.servers, list[float]()
    servers.setup = replace(servers.setup, together=False, policy=every_steps)

    def begin_beside() -> None:
        cluster.beside = Run(0, job_beside("sync"))
        cluster._launch(cluster.beside)

    def move() -> None:
        host = servers.shards[SHARD].host
        host.on_death.pop()  # what starts it again at some moment
        host.kill()
        cluster._server_died(host, SHARD)
        cluster.world.at(ELSEWHERE_SECONDS, partial(servers._start, False, SHARD))

    usual = Worker.acknowledge

    def acknowledge(self: Worker, place: Place, number: int, clock: int) -> None:
        usual(self, place, number, clock)
        coordinator, now = servers.coordinator.coordinator, cluster.world.now
        assert coordinator is not None
        is_heard = now < coordinator.shards()[SHARD].seen + JUST_NOW_SECONDS
        if self.run.is_beside and not self.rank and not died and now > SINCE_SECONDS and is_heard:
            died.append(now)
            cluster.world.at(0.0, move)

    monkeypatch.setattr(cluster, "_begin_beside", begin_beside)
    monkeypatch.setattr(cluster.faults, "weather", Weather)  # good: only then every job is to go on
    monkeypatch.setattr(Worker, "acknowledge", acknowledge)
    assert cluster.run() == []
    assert died


def hang(cluster: Cluster, worker: Worker) -> None:
    """Has a worker's first process hang, in the thread that calls."""
    cluster.faults._disturb(worker.host, HUNG_SECONDS)
    worker.host.stop(HUNG_SECONDS)
    cluster.world.let_pass(JUST_NOW_SECONDS)


def test_a_worker_that_is_moved_to_where_the_others_hold_makes_no_further_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ssp:0 it would wait for theirs, and give up. It hangs after it has looked how far it is to train."""
    cluster, hung = Cluster("ssp:0", 0, faults=()), list[Worker]()
    usual = Saver.between_steps

    def between_steps(self: Saver) -> None:
        worker = self._worker
        if worker.rank or worker.run.is_beside or worker.run.target is None or hung:
            usual(self)
        else:
            hung.append(worker)
            hang(cluster, worker)
            self.save()

    monkeypatch.setattr(Saver, "between_steps", between_steps)
    assert cluster.run() == []
    assert [len(worker.places) for worker in hung] == [2]


def test_a_worker_that_is_cut_off_when_all_have_finished_is_counted_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is one member of a group that is cut off, so that the group is back at once, and loses that place, too."""
    cluster, cut = Cluster("sync", 0, faults=(), members=2), list[Worker]()
    usual = Saver.save

    def save(self: Saver) -> None:
        if self.is_due and not cut and not self._run.is_beside:
            worker, coordinator = self._run.workers[1], cluster.servers.coordinator
            cut.append(worker)
            for host in (worker.host, worker.members.hosts[1]):
                cluster.faults._disturb(host, HUNG_SECONDS)
            cluster.network.cut(worker.members.hosts[1], coordinator.host, HUNG_SECONDS)
            while len(cluster.promises._members(self._run)) == len(self._run.workers):
                cluster.world.let_pass(0.01)
        usual(self)

    monkeypatch.setattr(Saver, "save", save)
    assert cluster.run() == []
    assert [len(worker.places) > 1 for worker in cut] == [True]
