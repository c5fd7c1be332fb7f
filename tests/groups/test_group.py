"""How the members of a group agree, and how each of them leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

from ps_protocol.errors import Fenced, InvalidRequest, PSError, UnknownWorker
from ps_protocol.identity import Identity
from ps_protocol.messages.workers import SavedState
from ps_protocol.v1 import membership_pb2, membership_pb2_grpc
from ps_runtime import signals
from ps_runtime.credentials import PLAINTEXT
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker.cluster.connection import Connection
from ps_worker.cluster.coordinator_calls import CoordinatorClient
from ps_worker.cluster.participation import Participation
from ps_worker.cluster.value_rounds import GroupRounds
from ps_worker.group import Group, PlaceLost, RaisedByAll, unlike_calls
from ps_worker.model.base import Base
from ps_worker.strategies.job_training import JobTraining
from tests.tools.cluster import Cluster, hear_of_a_lost_place, until
from tests.tools.forkserver import Nursery

DAY = 24 * 3600.0
WAIT_SECONDS = 60


@pytest.fixture
def alone(tmp_path: Path) -> Group:
    """The group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    return Group([0])


def test_members_wait_for_each_other_as_long_as_it_takes(alone: Group) -> None:
    """The first may be at the coordinator, in a round behind another worker's evaluation of hours."""
    options = alone._gloo._get_backend(torch.device("cpu")).options
    assert options._timeout.total_seconds() > DAY


def test_a_process_may_take_part_in_one_session_after_the_other(alone: Group) -> None:
    for _ in range(3):
        assert Group([0]).gather(b"own") == [b"own"]
    assert alone.gather(b"own") == [b"own"]


def test_members_may_be_in_unlike_numbers_of_process_groups(nursery: Nursery, tmp_path: Path) -> None:
    """As the stages with a tied embedding are in one more, where the group is a part of the torch world."""
    script = Path("tests/scripts/group_of_some.py").resolve()
    processes = [nursery.run(script, [tmp_path, rank], tmp_path / f"{rank}.log") for rank in range(3)]
    ended = [process.wait(WAIT_SECONDS) for process in processes]
    assert ended == [0] * 3, "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert [(tmp_path / f"told-{rank}").read_text() for rank in (0, 1)] == ["01", "01"]


def test_members_talk_whatever_the_scripts_default_device_is(alone: Group) -> None:
    torch.set_default_device("meta")
    try:
        assert alone.gather(b"") == [b""]
        assert alone.gather(b"own") == [b"own"]
        assert alone.from_first(lambda: b"") == b""
        assert alone.from_first(lambda: b"made") == b"made"
        assert alone.compare(None, True, -3) == (None, [1, -3])
    finally:
        torch.set_default_device(None)


def test_what_members_say_is_heard_where_the_place_is_lost(alone: Group) -> None:
    lost, highest = alone.compare(PlaceLost(), True)
    assert isinstance(lost, PlaceLost)
    assert highest == [1]
    with pytest.raises(InvalidRequest, match="not so"):
        alone.compare(InvalidRequest("not so"), True)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["1 optimizer.step", "1 session.mean"], "is in optimizer.step, and member 1 in session.mean"),
        (["1 optimizer.step", "0 "], "is in optimizer.step, and member 1 in another call"),
        (["1 optimizer.step", "2 optimizer.step"], "is in part 1 of optimizer.step, and member 1 in part 2 of opt"),
    ],
)
def test_members_at_different_places_are_told_of_both(told: list[str], said: str) -> None:
    assert said in str(unlike_calls([each.encode() + bytes(8) for each in told]))


class Failing:
    """The steps of a worker whose empty steps, and ways back, fail on all members."""

    stepped = False

    def empty_step(self) -> None:
        raise InvalidRequest("no step")

    def pause(self, seconds: float) -> None:
        pass

    def come_back(self) -> bool:
        raise InvalidRequest("no place")


@pytest.mark.parametrize("call", ["empty_step", "come_back"])
def test_nobody_is_told_of_an_error_that_all_members_raise(
    alone: Group, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The others are out of the round by then, and listen no more."""
    told: list[bytes] = []
    broadcast = alone._broadcast
    monkeypatch.setattr(alone, "_broadcast", lambda made: told.append(made) or broadcast(made))
    participation: Any = None
    rounds = GroupRounds(alone, participation, Failing())
    stepper: Any = rounds._rounds._stepper
    monkeypatch.setattr(rounds._rounds, "exchange", lambda value, what: getattr(stepper, call)())
    with pytest.raises(InvalidRequest, match=r"^no (step|place)$"):
        rounds.exchange(b"", "mean")
    assert told == [b"+s" if call == "empty_step" else b"+b"]
    with pytest.raises(RaisedByAll):
        getattr(stepper, call)()


@pytest.mark.parametrize("error", [UnknownWorker, Fenced])
def test_a_late_answer_about_a_lost_place_ends_nothing_in_the_next(
    make_cluster: Callable[..., Cluster],
    job: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[UnknownWorker],
) -> None:
    """The training thread hears of the loss by a shard, and has the next place before the heartbeat is answered.

    error: of the heartbeat. It is Fenced if it comes to the coordinator behind the next join: by that, not by another
           process
    """
    cluster = make_cluster(lease=30.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model: Any = fully_shard(nn.Sequential(nn.Linear(3, 2)), mesh=mesh)
    with cluster.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), group=mesh)
        participation = session._strategy._training.participation  # type: ignore[attr-defined]
        members = participation.membership
        lost, usual, join_again = members.place, members._coordinator.heartbeat, members._join_again
        lost_for_good = members._lost_for_good
        begun, is_lost, may_answer, answered = (threading.Event() for _ in range(4))

        def heartbeat(identity: Identity, *given: Any) -> Any:
            if identity != lost.identity:
                return usual(identity, *given)
            begun.set()
            assert (may_answer if error is Fenced else is_lost).wait(WAIT_SECONDS)
            with pytest.raises(UnknownWorker) as raised:
                usual(identity, *given)
            assert type(raised.value) is error
            assert may_answer.wait(WAIT_SECONDS)
            raise raised.value

        def joining(place: Any) -> None:
            join_again(place)
            answered.set()

        def losing(place: Any, found: PSError) -> None:
            lost_for_good(place, found)
            answered.set()

        monkeypatch.setattr(members._coordinator, "heartbeat", heartbeat)
        monkeypatch.setattr(members, "_join_again", joining)
        monkeypatch.setattr(members, "_lost_for_good", losing)
        members._doubt.raise_it()
        assert begun.wait(WAIT_SECONDS)
        cluster.lose_place(0, job)
        is_lost.set()

        def step() -> Any:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            return participation.connection

        connection = step()
        assert connection.place is members.place is not lost
        may_answer.set()
        assert answered.wait(WAIT_SECONDS)
        assert step() is connection
        assert session.clock == 2


@pytest.mark.parametrize("mode", ["sync", "local:2", "local:2/1"])
def test_no_member_waits_for_the_others_where_signals_are_held(
    make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Nor where the job is rolled back: another member may hang."""
    cluster = make_cluster(lease=30.0, checkpoint_dir=tmp_path / "checkpoints", checkpoint_every="2steps")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model: Any = fully_shard(nn.Sequential(nn.Linear(3, 2)), mesh=mesh)
    held: list[bool] = []
    wait = Group._await
    monkeypatch.setattr(Group, "_await", lambda *given: (held.append(signals._ending._held), wait(*given))[1])
    with cluster.connect(mode, job=job) as session:
        outer = {"outer": {"warm_up": 0}} if mode != "sync" else {}
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), group=mesh, **outer)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        coordinated, store = cluster.coordinator.job(job), CheckpointStore(tmp_path / "checkpoints")
        until(lambda: (step(), store.names(job))[1] != [], "a checkpoint")
        cluster.start_again(1)
        until(lambda: (step(), coordinated.workers.restore_count)[1] > 0, "the rollback")
    assert held
    assert not any(held)


@pytest.mark.parametrize("mode", ["sync", "local:2", "local:2/1"])
def test_a_member_that_is_interrupted_while_the_group_goes_back_goes_back_first(
    make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """It waits there for the others, where signals act. Its schedule shows whether it has gone back."""
    cluster = make_cluster(lease=600.0, checkpoint_dir=tmp_path / "checkpoints")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model: Any = fully_shard(nn.Sequential(nn.Linear(3, 2)), mesh=mesh)
    roll_back, wait, waits = JobTraining._roll_back, Group._await, list[str]()
    share, shared = Base.share_alike, list[str]()

    def goes_back(loop: JobTraining, *given: Any) -> None:
        waits.append("it goes back")
        roll_back(loop, *given)

    def waits_for_others(*given: Any) -> None:
        if waits == ["it goes back"]:
            waits.append("interrupted")
            raise KeyboardInterrupt
        wait(*given)

    def shares(base: Base, *given: Any, **more: Any) -> None:
        shared.append(waits[-1] if waits else "before")
        share(base, *given, **more)

    monkeypatch.setattr(Base, "share_alike", shares)
    monkeypatch.setattr(JobTraining, "_roll_back", goes_back)
    monkeypatch.setattr(Group, "_await", waits_for_others)
    with cluster.connect(mode, job=job) as session:
        outer = {"outer": {"warm_up": 0}} if mode != "sync" else {}
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule: Any
        model, optimizer, schedule = session.prepare(model, plain, StepLR(plain, 1), group=mesh, **outer)
        coordinated, steps = cluster.coordinator.job(job), 0

        def step() -> None:
            nonlocal steps
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            schedule.step()
            steps += 1

        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(coordinated.checkpoint)
            until(lambda: (step(), made.done())[1], "the checkpoint")
        while session.clock < made.result().clock + 2:  # a step that is lost with the shard is pushed again
            step()
        cluster.start_again(1)
        with pytest.raises(KeyboardInterrupt):
            until(lambda: (step(), coordinated.workers.restore_count)[1] > 1, "the interrupt")
        assert waits == ["it goes back", "interrupted"]
        assert shared[-1] == "interrupted"  # the others wait for it there
        before, undone = session.clock, steps
        optimizer.step()  # the schedule goes back where this begins
        assert session.clock == before + 1
        assert schedule.last_epoch < undone


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("loses", [True, False])
def test_an_interrupted_step_that_counts_keeps_its_residual_and_is_not_set_back(
    make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    """Its weights have landed, and not in the parameters, which have memory of their own.

    loses: the place is lost before the next step, which is pushed from the next place
    """
    cluster = make_cluster(lease=600.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model: Any = fully_shard(nn.Sequential(nn.Linear(16, 1, bias=False)), mesh=mesh)
    nn.init.zeros_(model[0].weight)
    settle, number, interrupts = Participation.settle, -1, 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        settle(participation)
        if number == 2 and not interrupts:
            interrupts += 1
            raise KeyboardInterrupt

    monkeypatch.setattr(Participation, "settle", interrupted)
    rows = [torch.linspace(0.1, 1.7, 16).roll(number) for number in range(5)]
    with cluster.connect("sync", job=job, transport="tcp") as session:
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = session.prepare(model, plain, group=mesh, gradient_wire="int8")
        training = session._strategy._training  # type: ignore[attr-defined]
        for number, row in enumerate(rows):
            if number == 3 and loses:
                hear_of_a_lost_place(session, cluster, job)
            with suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                model(row[None]).sum().backward()
                optimizer.step()
        assert (interrupts, session.clock) == (1, len(rows))
        [left] = training.model.residuals.copy().values()
        torch.testing.assert_close(-model[0].weight.full_tensor().detach()[0] + left, sum(rows))


class Layers(nn.Module):
    """Layers side by side, whose gradient is 1 in each element for an input of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 1, bias=False) for _ in range(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return sum(layer(given).sum() for layer in self.layers)  # type: ignore[return-value]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("comes", ["before it is pushed", "after that"])
def test_a_group_goes_on_after_an_interrupt_while_the_rest_of_a_round_is_on_its_way_from_a_new_place(
    make_cluster: Callable[..., Cluster], job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """In local:H/F. The step after the interrupt begins a round with the servers' weights."""
    cluster = make_cluster(lease=600.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    net = Layers()
    for layer in net.layers:
        nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
    model: Any = fully_shard(net, mesh=mesh)
    number, interrupts, loops = -1, 0, list[JobTraining]()
    owner, name = (Participation, "settle") if comes == "after that" else (Connection, "push_pull")
    method = getattr(owner, name)

    def interrupted(*given: Any, **more: Any) -> Any:
        nonlocal interrupts
        made = method(*given, **more) if comes == "after that" else None
        is_early = bool(loops) and loops[0].unfinished is not None and loops[0].unfinished.is_early
        if number == 7 and not interrupts and is_early and (loops[0].sent is not None) == (comes == "after that"):
            interrupts += 1
            raise KeyboardInterrupt
        return made if comes == "after that" else method(*given, **more)

    monkeypatch.setattr(owner, name, interrupted)
    outer = {"warm_up": 0, "lr": 1.0, "momentum": 0.0, "nesterov": False, "delay": 0}
    with cluster.connect("local:4/2", job=job, transport="tcp") as session:
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = session.prepare(model, plain, group=mesh, outer=outer, bucket_bytes=64)
        loops.append(session._strategy._training)  # type: ignore[attr-defined]
        for number in range(17):
            if number == 6:
                hear_of_a_lost_place(session, cluster, job)
            if number == 8:
                with pytest.raises(InvalidRequest, match=r"are gone, as calls have failed, or were interrupted"):
                    session.global_weights()
            with suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                (2.0**number * model(torch.ones(1, 16))).backward()
                optimizer.step()
        assert interrupts == 1
        before, others = 2.0**4 - 1, 2.0**17 - 2.0**9
        first, second = before + 2.0**4 + 2.0**5 + others, before + others
        if comes == "after that":
            second += 2.0**4 + 2.0**5 + 2.0**6 + 2.0**7
        weights = [-layer.weight.full_tensor()[0, 0].item() for layer in model.layers]
        assert sorted(weights) == sorted([first, first, second, second])


def test_a_signal_acts_in_a_wait_of_an_undisturbed_block_and_not_beside_it() -> None:
    done: list[str] = []

    def act(*, before: bool = False, within: bool = False, after: bool = False) -> None:
        with signals.undisturbed():
            _interrupt_if(before)
            done.append("before")
            with signals.interruptible():
                _interrupt_if(within)
                done.append("within")
            _interrupt_if(after)
            done.append("after")

    for when, reached in (("before", 1), ("within", 1), ("after", 3)):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            act(**{when: True})
        assert done == ["before", "within", "after"][:reached]
    done.clear()
    act()
    assert len(done) == 3


def _interrupt_if(wanted: bool) -> None:
    if wanted:
        signal.raise_signal(signal.SIGINT)


class Losing(membership_pb2_grpc.MembershipServiceServicer):  # type: ignore[misc,unused-ignore]
    """A coordinator that does not answer the first calls."""

    def __init__(self, silent: int) -> None:
        self.silent, self.heard = silent, list[Any]()

    def Leave(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.heard.append(request)
        if len(self.heard) <= self.silent:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it starts")
        return membership_pb2.LeaveResponse()


@pytest.mark.parametrize(("seconds", "silent", "heard"), [(0.0, 2, 1), (60.0, 2, 3), (60.0, 0, 1)])
def test_a_leave_is_repeated_where_the_coordinator_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, silent: int, heard: int
) -> None:
    monkeypatch.setattr("ps_worker.cluster.coordinator_calls.LEAVE_SECONDS", seconds)
    monkeypatch.setattr("ps_worker.cluster.coordinator_calls.LEAVE_PAUSE_SECONDS", 0.0)
    service = Losing(silent)
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        membership_pb2_grpc.add_MembershipServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = CoordinatorClient(f"127.0.0.1:{port}", 10.0, PLAINTEXT)
        client.leave(Identity("job", 0, 1), SavedState(4, b"own"), True, None)
        client.close()
        server.stop(None).wait()
    assert [(each.done, each.state.content) for each in service.heard] == [(True, b"own")] * heard
    assert ("could not be told that this worker leaves with its state" in caplog.text) == (heard <= silent)
