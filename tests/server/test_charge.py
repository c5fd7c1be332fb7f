"""A coordinator whose lease another one has taken over changes nothing, and shards refuse it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ps_protocol.errors import Deposed, TryLater
from ps_protocol.messages.workers import JoinRequest
from ps_server.coordinator.charge import Charge
from ps_server.coordinator.shards import Shards
from ps_server.rpc.shard_client import ShardClient
from ps_server.shard.terms import CoordinatorTerms
from ps_server.storage.disk import Disk
from tests.tools.cluster import Cluster
from tests.tools.one_process import OneProcess
from tests.tools.raw_worker import vector_job

LEASE = 10.0
WHO = "another process has taken .lock over: coordinator 2"


class LeasedDisk(Disk):
    """A disk whose lock another process has taken over, once `holder` says who."""

    number, holder = 3, ""

    def term(self) -> int:
        return self.number

    def taken_over(self) -> str:
        return self.holder


class Deposing(OneProcess):
    """A cluster with a job of two workers, whose coordinator may be deposed."""

    def __init__(self, directory: Path) -> None:
        self.leased = LeasedDisk()
        super().__init__(directory, lease=LEASE, disk=self.leased)
        self.job, _ = self.coordinator.register_job(vector_job("job", "sync", 64, 2))
        requests = [JoinRequest(pid=rank, host="there", launch="launch", attempt=7 + rank) for rank in range(2)]
        self.places = [self.coordinator.join("job", rank, request) for rank, request in enumerate(requests)]

    def held(self) -> dict[int, list[int]]:
        """The workers that each shard counts; of those that hold the job."""
        jobs = {index: shard.jobs() for index, shard in self.shards.items()}
        return {index: sorted(held["job"].partition.roster) for index, held in jobs.items() if "job" in held}

    def look(self) -> None:
        """Has the coordinator do all that it does by itself."""
        self.coordinator.expire_workers()
        self.coordinator.recover_jobs()
        for _ in range(2):  # what it finds counts at the second look
            self.coordinator.held_jobs.compare()


@pytest.fixture
def cluster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Deposing]:
    made = Deposing(tmp_path)
    yield made
    made.stop()


EVERYBODY = {0: [0, 1], 1: [0, 1]}


def test_it_takes_no_worker_off_whose_heartbeats_go_to_the_other_one(cluster: Deposing) -> None:
    cluster.leased.holder = WHO
    cluster.clock.seconds += LEASE + 1
    cluster.look()
    assert cluster.held() == EVERYBODY
    assert [member.rank for member in cluster.job.workers.all()] == [0, 1]


def test_it_ends_no_job_that_seems_deserted(cluster: Deposing) -> None:
    cluster.clock.seconds += LEASE + 1
    cluster.coordinator.expire_workers()
    assert cluster.held() == {0: [], 1: []}
    cluster.leased.holder = WHO
    for _ in range(3):
        cluster.clock.seconds += 3700.0
        cluster.look()
        cluster.job.desert()
    assert sorted(cluster.held()) == [0, 1]
    assert not cluster.job.life.has_ended


def test_it_drops_no_job_that_only_the_other_one_knows(cluster: Deposing) -> None:
    spec = vector_job("later", "sync", 64, 1)
    for shard in cluster.shards.values():
        shard.create_job(spec, [0], "f" * 16, 2)
    cluster.leased.holder = WHO
    cluster.look()
    assert all("later" in shard.jobs() for shard in cluster.shards.values())


def test_it_rolls_no_job_back(cluster: Deposing) -> None:
    cluster.start_shard(1)
    cluster.leased.holder = WHO
    cluster.look()
    assert cluster.held() == {0: [0, 1]}, "the part is the other one's to restore"
    assert not cluster.job.life.has_ended


@pytest.mark.parametrize(
    "call",
    [
        lambda cluster: cluster.coordinator.register_job(vector_job("new", "sync", 64, 1)),
        lambda cluster: cluster.coordinator.join("job", 0, JoinRequest(pid=9)),
        lambda cluster: cluster.coordinator.leave("job", 0, 1, cluster.places[0].worker.key),
    ],
    ids=["register", "join", "leave"],
)
def test_it_sends_those_away_who_want_a_change(cluster: Deposing, call: Callable[[Deposing], object]) -> None:
    cluster.leased.holder = WHO
    with pytest.raises(TryLater, match="another coordinator is in charge: another process has taken"):
        call(cluster)
    assert cluster.held() == EVERYBODY


def test_it_takes_no_new_process_of_a_shard(cluster: Deposing) -> None:
    """The process calls again, and finds the other one as workers do."""
    before = cluster.coordinator.shards()[1].process
    cluster.leased.holder = WHO
    with pytest.raises(TryLater, match="another coordinator is in charge: another process has taken"):
        cluster.start_shard(1)
    assert cluster.coordinator.shards()[1].process == before


def test_a_report_of_a_workers_end_takes_nobody_off_either(cluster: Deposing) -> None:
    cluster.leased.holder = WHO
    cluster.job.expire()
    assert cluster.held() == EVERYBODY


# -- what shards do --------------------------------------------------------------------------------------------------


def test_a_shard_obeys_the_highest_term_that_it_has_seen() -> None:
    terms = CoordinatorTerms()
    for term in (0, 0, 4, 4, 6):
        terms.check(term)
    for term in (0, 4, 5):
        with pytest.raises(Deposed, match="obeys the coordinator of term 6"):
            terms.check(term)
    terms.check(0, is_look=True)
    with pytest.raises(Deposed):
        terms.check(5, is_look=True)
    terms.check(7)


class Holder:
    """The lease of one coordinator."""

    def __init__(self, number: int) -> None:
        self._number = number

    def term(self) -> int:
        return self._number

    def taken_over(self) -> str:
        return ""


def test_a_coordinator_that_a_shard_refuses_is_not_in_charge_any_more(
    make_cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    address = make_cluster(shards=1).address
    charges = [Charge() for _ in range(3)]
    for term, charge in enumerate(charges):
        charge.begin(Holder(term))
    none, older, newer = (ShardClient(0, address, charge=charge) for charge in charges)
    for client in (none, older):
        client.drop_job("nobody's", "0" * 16)
    newer.process()
    assert [bool(charge.lost) for charge in charges] == [False, False, False]
    for client in (none, older):
        with pytest.raises(Deposed, match="obeys the coordinator of term 2"):
            client.remove_workers("nobody's", [(0, 1)], "0" * 16)
    assert [bool(charge.lost) for charge in charges] == [True, True, False]
    newer.drop_job("nobody's", "0" * 16)
    assert [charge.lost.count("term 2") for charge in charges] == [1, 1, 0]
    for client in (none, older, newer):
        client.close()


def test_a_shard_that_has_just_registered_refuses_an_older_coordinator(make_cluster: Callable[..., Cluster]) -> None:
    """The newer one has made no call for any job: it has verified the registration."""
    cluster = make_cluster(shards=1)
    older, newer = Charge(), Charge()
    older.begin(Holder(1))
    newer.begin(Holder(2))
    shards = Shards(1, partial(ShardClient, charge=newer), ThreadPoolExecutor, charge=newer)
    late = ShardClient(0, cluster.address, charge=older)
    shards.register(0, cluster.address, "", os.getpid(), cluster.servers[0].process)
    with pytest.raises(Deposed, match="obeys the coordinator of term 2"):
        late.drop_job("nobody's", "0" * 16)
    late.close()
    shards.close()
