"""A worker that lost its place takes it again and goes on; one that was replaced gives up.

Each worker pushes gradients of -1 with learning rate 1, every step into a cell of its own: what is in the cells says
which steps counted, and that none counted twice.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import Fenced, FinishedWithout, NotFound, TryLater
from ps_protocol.messages.workers import write_heartbeat
from ps_server.ops import requests
from ps_worker import Session
from ps_worker.cluster import coordinator_calls, heartbeat_child
from ps_worker.cluster.heartbeat_process import HeartbeatProcess
from tests.tools.cable import LEASE, Cable, live, lose, session_at
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel, scrape, until
from tests.tools.forkserver import Nursery
from tests.tools.raw_worker import RawWorker

pytestmark = pytest.mark.usefixtures("soon_sure")

CELLS = 64
BUCKET_BYTES = 64


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(lease=LEASE)


@pytest.fixture
def cable(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    found = Cable(cluster.address, monkeypatch)
    yield found
    found.close()


class Cells(nn.Module):
    """Two rows of cells, one for each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(2, CELLS))

    def forward(self, which: torch.Tensor) -> torch.Tensor:
        return -self.cells.view(-1)[which]


class Worker:
    """Marks one cell a step. `tried` counts steps that were begun, whether they counted or not."""

    def __init__(self, session: Session, **options: object) -> None:
        self.session = session
        self.tried = 0
        model = Cells()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.model, self.optimizer = session.prepare(model, optimizer, bucket_bytes=BUCKET_BYTES, **options)

    def step(self) -> None:
        self.model(torch.tensor(self.session.rank * CELLS + self.tried)).backward()
        self.tried += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    def mine(self) -> list[float]:
        """The cells of the steps begun so far: 0 for one that was lost, 1 (in a mean: 1/2) for one that counted."""
        return self.model.cells.detach()[self.session.rank, : self.tried].tolist()

    def metric(self, name: str) -> float:
        return scrape(self.session.metrics_address)[f"ps_worker_{name}_total"]


def test_a_heartbeat_of_an_older_place_that_comes_after_the_next_join_ends_nobody(
    make_cluster: Callable[..., Cluster], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was under way for longer than its own time, or the process beside the worker sends it. Only the thread that
    beats joins again, so that thread never hears the answer. A member of a group may: tests/groups/test_group.py.
    """
    cluster = make_cluster(lease=30.0)
    with cluster.connect("sync", job=job) as session:
        worker = Worker(session)
        worker.step()
        members: Any = session._strategy._training.participation.membership  # type: ignore[attr-defined]
        lost, usual, is_under_way = members.place, members._coordinator.heartbeat, threading.Event()

        def heartbeat(identity: Any, *given: Any) -> Any:
            if identity == lost.identity and not is_under_way.is_set():
                is_under_way.set()
                raise TryLater("no answer within its time")
            return usual(identity, *given)

        monkeypatch.setattr(members._coordinator, "heartbeat", heartbeat)
        members._doubt.raise_it()
        assert is_under_way.wait(60)
        cluster.lose_place(0, job)
        worker.step()
        place = members.place
        assert place.identity.incarnation > lost.identity.incarnation
        with pytest.raises(Fenced):
            usual(lost.identity, session.clock, 30.0)
        plan = heartbeat_child.Plan(HeartbeatProcess(members._options, 30.0)._plan())  # type: ignore[arg-type]
        heartbeat_child.call(plan, write_heartbeat(lost.identity, session.clock).SerializeToString())
        worker.step()
        [live_one] = cluster.coordinator.job(job).workers.all()
        assert live_one.incarnation == place.identity.incarnation
        assert (members.place, members.error) == (place, None)
        assert set(worker.mine()) == {1.0}


# -- partitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "transport"),
    cases([("sync", "tcp"), ("async", "shm")], [("sync", "grpc"), ("sync", "shm"), ("ssp:2", "tcp")]),
)
def test_a_worker_that_was_cut_off_takes_its_place_again_and_goes_on(
    cluster: Cluster, cable: Cable, mode: str, transport: str
) -> None:
    back = threading.Event()
    trained: list[torch.Tensor] = []

    def work(rank: int) -> None:
        address = cable.address if rank == 0 else cluster.address
        with session_at(address, mode, rank, transport) as session:
            worker = Worker(session)
            while session.clock < 20:
                if rank == 0 and worker.tried == 5:
                    lose(cluster, cable)
                    before = session.clock
                    cable.heal()
                    until(lambda: 0 in live(cluster), "its heartbeat joins again")
                    back.set()  # in sync its next step may be the one for which the other is to come
                    worker.step()
                    assert session.clock >= before - 1
                elif rank == 1 and session.clock == 10:
                    back.wait(60)  # alone for some steps, then both
                    worker.step()
                else:
                    worker.step()
            found = worker.mine()
            if rank == 0:
                assert worker.metric("rejoins") >= 1
            assert worker.metric("lost_steps") == 0
            whole = {1.0} if mode != "sync" else {0.5, 1.0}
            assert set(found) <= whole, "a step counted other than once"
            trained.append(session.unwrap(worker.model).cells.detach().clone())

    in_parallel(2, work)
    if mode == "sync":
        assert torch.equal(*trained), "after the same step all have the same weights"


@pytest.mark.parametrize(("mode", "transport"), cases([("sync", "tcp"), ("ssp:0", "shm")], [("sync", "grpc")]))
def test_a_step_whose_gradient_was_staged_before_the_cut_is_not_lost(
    cluster: Cluster, cable: Cable, mode: str, transport: str
) -> None:
    """Rank 0 waits for rank 1 when it is cut off: its gradient is in, only the answer is missing."""

    sessions: list[Session] = []

    def acknowledged() -> bool:
        """However many calls its eight buckets travel in."""
        sent = sessions[0]._strategy._training.sent  # type: ignore[attr-defined]
        return sent is not None and sent.clock == 2 and all(push.done() for push in sent.pushed)

    def work(which: int) -> None:
        if which == 0:
            with session_at(cable.address, mode, 0, transport) as session:
                worker = Worker(session)
                sessions.append(session)
                worker.step()
                worker.step()  # is cut off in this one
                assert worker.metric("rejoins") >= 1
                assert worker.metric("lost_steps") == 0
                assert 0.0 not in worker.mine()
                worker.step()
                assert 0.0 not in worker.mine()
        else:
            spec = until(lambda: cluster.coordinator.jobs().get("default")).spec
            with RawWorker(cluster.address, spec, 1) as peer:
                for clock in (1, 2):
                    until(lambda clock=clock: cluster.waits("default").get(0) == (clock, [1]))
                    if clock == 1:
                        peer.step(torch.zeros(2 * CELLS))
                until(acknowledged, "the acknowledgement", LEASE / 2)  # while the lease of this peer holds
                lose(cluster, cable)
                before = live(cluster)
                peer.step(torch.zeros(2 * CELLS))
                cable.heal()
                until(lambda: live(cluster).get(0, 0) > before[1])
                peer.step(torch.zeros(2 * CELLS))
                cluster.end_lease(1)  # it gives no sign of life, for which the one that came back waits
                until(lambda: 0 not in live(cluster))

    in_parallel(2, work)
    requests.end_job(cluster.address, "default")


def test_buckets_that_leave_during_backward_count_once_though_the_place_is_lost(cluster: Cluster, cable: Cable) -> None:
    with session_at(cable.address, "async", 0, world_size=1) as session:
        worker = Worker(session, overlap=True)
        for _ in range(3):
            worker.step()
        lose(cluster, cable)
        cable.heal()
        until(lambda: 0 in live(cluster), "the heartbeat joins again, without a step")
        for _ in range(3):
            worker.step()
        assert worker.mine() == [1.0] * 6
        assert (worker.metric("rejoins"), worker.metric("lost_steps")) == (1, 0)


def test_gradients_that_add_up_over_several_passes_go_on_adding_up(cluster: Cluster, cable: Cable) -> None:
    """What backward adds to after the memory of gradients was exchanged is what the next step sends."""
    with session_at(cable.address, "async", 0, "shm", world_size=1) as session:
        worker = Worker(session)
        worker.step()
        lose(cluster, cable)
        worker.model(torch.tensor(10)).backward()
        cable.heal()
        until(lambda: 0 in live(cluster), "the heartbeat joins again")
        worker.optimizer.step()  # finds its place lost, and counts from the next one
        worker.model(torch.tensor(10)).backward()  # on top of what is there: the script has not zeroed it
        worker.optimizer.step()
        assert worker.model.cells.detach()[0, 10] == 3.0


def test_a_worker_that_waits_for_the_others_to_start_may_lose_its_place(cluster: Cluster, cable: Cable) -> None:
    def work(rank: int) -> list[float]:
        if rank == 1:
            until(lambda: 0 in live(cluster))
            first = live(cluster)[0]
            lose(cluster, cable)
            cable.heal()
            until(lambda: live(cluster).get(0, 0) > first)
        with session_at(cable.address if rank == 0 else cluster.address, "sync", rank) as session:
            worker = Worker(session)
            for _ in range(3):
                worker.step()
            return worker.mine()

    assert in_parallel(2, work) == [[0.5] * 3] * 2


@pytest.mark.parametrize(("mode", "absence"), [("sync", 300.0), ("async", 300.0), ("sync", 0.0)])
def test_a_worker_that_was_cut_off_until_the_others_had_ended_comes_to_its_own_end(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, mode: str, absence: float
) -> None:
    """With all that the others have trained, so that rank 0 saves it; or with an error, where the job did not wait."""
    cluster = make_cluster(lease=LEASE, absence_seconds=absence)
    cable = Cable(cluster.address, monkeypatch)
    sessions = [session_at(cable.address if rank == 0 else cluster.address, mode, rank) for rank in range(2)]
    with closing(cable), closing(sessions[0]) as session:
        away, other = in_parallel(2, lambda rank: Worker(sessions[rank]))
        in_parallel(2, lambda rank: (away, other)[rank].step())
        lose(cluster, cable)
        other.step()
        other.session.close()
        assert live(cluster) == {}
        cable.heal()
        if not absence:
            with pytest.raises(FinishedWithout, match="while this worker was away"):
                away.step()
            return
        away.step()
        saved = session.global_weights()["cells"]
        mean = 0.5 if mode == "sync" else 1.0  # of both in the first step; alone each has made the second
        assert saved[:, :2].tolist() == [[mean, 1.0]] * 2


def test_in_an_elastic_job_a_worker_asks_for_the_rank_it_had(cluster: Cluster, cable: Cable) -> None:
    with (
        ps_worker.connect(cluster.address, "async", elastic=True) as first,
        ps_worker.connect(cable.address, "async", elastic=True) as second,
    ):
        peer, worker = Worker(first), Worker(second)
        assert (first.rank, second.rank) == (0, 1)
        lose(cluster, cable, rank=1)
        peer.step()
        cable.heal()
        until(lambda: 1 in live(cluster))
        worker.step()
        assert second.rank == 1
        assert second.clock == 2, "where the job is, and a step further"
        worker.step()
        assert worker.mine() == [1.0, 1.0]


# -- who gives up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", cases(["ssp:2"], ["sync", "async"]))
def test_a_worker_that_one_shard_does_not_count_any_more_joins_again(
    make_cluster: Callable[..., Cluster], mode: str
) -> None:
    """The coordinator died between telling a shard and writing that down: its successor takes the worker for live."""
    cluster = make_cluster()
    with cluster.connect(mode) as session:
        worker = Worker(session)
        worker.step()
        incarnation = cluster.coordinator.job("default").workers.all()[0].incarnation
        cluster.shards[1].remove_worker("default", 0, incarnation)
        for _ in range(3):
            worker.step()
        assert cluster.coordinator.job("default").workers.all()[0].incarnation > incarnation


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_whose_rank_another_process_took_gives_up(cluster: Cluster, cable: Cable, mode: str) -> None:
    with session_at(cable.address, mode, 0, world_size=1) as session:
        worker = Worker(session)
        worker.step()
        lose(cluster, cable)
        spec = cluster.coordinator.jobs()["default"].spec
        with RawWorker(cluster.address, spec, 0) as new:
            before = cluster.state("default")
            cable.heal()
            for _ in range(2):
                with pytest.raises(Fenced, match="worker 0 was replaced"):
                    worker.step()
            session.close()  # says goodbye to nobody: the new one stays
            assert live(cluster) == {0: new.incarnation}
            assert cluster.state("default") == before


def test_a_worker_whose_job_is_gone_says_so(cluster: Cluster, cable: Cable) -> None:
    with session_at(cable.address, "async", 0, world_size=1) as session:
        worker = Worker(session)
        lose(cluster, cable)
        requests.end_job(cluster.address, "default")
        cable.heal()
        with pytest.raises(NotFound, match="job 'default' ended: `ps-server end` ended it"):
            worker.step()


def test_a_session_may_be_closed_while_it_is_cut_off(
    cluster: Cluster, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_calls, "LEAVE_SECONDS", 0.1)
    session = session_at(cable.address, "async", 0, world_size=1)
    Worker(session)
    lose(cluster, cable)
    session.close()
    cable.heal()
    until(lambda: not any(thread.name in ("heartbeat", "watch") for thread in threading.enumerate()))
    assert live(cluster) == {}


# -- a process that is stopped ---------------------------------------------------------------------------------------

SCRIPT = """
import pathlib, sys, threading, torch, ps_worker

stop = pathlib.Path(sys.argv[1])
session = ps_worker.connect()
model = torch.nn.Linear(64, 64)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), bucket_bytes=4096)
while not stop.exists():
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("clock", session.clock, session.metrics_address, flush=True)
    threading.Event().wait(0.02)
"""


def test_a_process_that_was_stopped_goes_on_when_it_is_continued(
    cluster: Cluster, nursery: Nursery, tmp_path: Path
) -> None:
    script, stop, log = tmp_path / "script.py", tmp_path / "stop", tmp_path / "log"
    script.write_text(SCRIPT)
    variables = {"PS_SERVER": cluster.address, "PS_MODE": "sync", "PS_RANK": "0", "PS_WORLD_SIZE": "1"}
    process = nursery.run(script, [stop], log, PS_TRANSPORT="shm", **variables)

    def steps() -> list[tuple[str, str]]:
        """The clock after each step, and where the process' metrics are."""
        return re.findall(r"^clock (\d+) (\S+)$", log.read_text(), re.MULTILINE) if log.exists() else []

    until(lambda: len(steps()) >= 3, "the first steps")
    process.send_signal(signal.SIGSTOP)
    until(lambda: cluster.end_lease(0) or live(cluster) == {}, "the end of the lease")
    before = len(steps())
    process.send_signal(signal.SIGCONT)
    until(lambda: len(steps()) > before + 2, "more steps")
    clock, address = steps()[-1]
    assert int(clock) >= 4
    assert scrape(address)["ps_worker_rejoins_total"] == 1
    stop.touch()
    assert process.wait(60) == 0
    assert cluster.coordinator.jobs() == {}


@pytest.mark.parametrize("mode", ["async", "local:2"])
def test_an_elastic_worker_whose_lease_ran_out_while_another_joins_comes_back_to_its_rank(
    cluster: Cluster, mode: str
) -> None:
    """The newcomer gets another one: otherwise the first would be told that a process has replaced it, and end."""
    outer: dict[str, Any] = {"outer": {"warm_up": 0}} if mode != "async" else {}
    sessions = [ps_worker.connect(cluster.address, mode, elastic=True) for _ in range(2)]
    workers = [Worker(sessions[0], **outer)]
    workers[0].step()  # in local:2 it is in the middle of a round then
    cluster.end_lease(0)
    workers.append(Worker(sessions[1], **outer))

    def trained(index: int) -> tuple[int, list[float]]:
        with sessions[index] as session:
            for _ in range(3):
                workers[index].step()
            return session.rank, workers[index].mine()

    (first, marks), (newcomer, _) = in_parallel(2, trained)
    assert (first, newcomer) == (0, 1)
    assert marks == [1.0] * 4 or mode != "async"
