"""A worker that joins a job under way continues the job's learning-rate schedule, whoever has the job by then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_server.coordinator.job_script import JobScript
from ps_server.coordinator.timing import Timing
from ps_worker.cluster import participation
from ps_worker.state.state_sender import StateSender
from tests.tools.cases import cases
from tests.tools.cluster import TEST_SECONDS, Cluster, in_parallel, until

GAMMA = 0.97
LOCAL = {"outer": {"warm_up": 2}}
MODES = cases(["sync", "local:4"], ["async", "ssp:2", "quorum", "local:4/2"])


def exponential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, GAMMA)


class Trainer:
    """A worker in a thread of its own, which steps a schedule once a step until it is told to stop.

    rates: of its steps, by the clock that each led to
    others: what is handed over besides
    evaluates_at: the clock at which it is in code outside of the session, until `goes_on` is set; 0: none
    """

    def __init__(
        self,
        cluster: Cluster,
        job: str,
        mode: str,
        make: Callable[[torch.optim.Optimizer], Any] = exponential,
        is_handed: bool = True,
        others: tuple[Any, ...] = (),
        evaluates_at: int = 0,
        **more: Any,
    ) -> None:
        self.evaluates_at, self.evaluates, self.goes_on = evaluates_at, threading.Event(), threading.Event()
        quorum: dict[str, Any] = {"quorum": "all-1"} if mode == "quorum" else {}
        self.rates: dict[int, float] = {}
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._model = nn.Linear(1, 1)
        own = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self.scheduler = make(own)
        where = {"elastic": True, **more}
        self.session = ps_worker.connect(cluster.address, mode.replace("quorum", "sync"), job=job, **quorum, **where)
        outer: dict[str, Any] = LOCAL if mode.startswith("local") else {}
        things = [*others, *([self.scheduler] if is_handed else [])]
        _, self._optimizer, *_ = self.session.prepare(self._model, own, *things, **outer)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._model(torch.ones(1, 1)).sum().backward()
                self._optimizer.step()
                self.rates[self.session.clock] = self._optimizer.param_groups[0]["lr"]
                self._optimizer.zero_grad()
                if isinstance(self.scheduler, ReduceLROnPlateau):
                    self.scheduler.step(1.0)
                else:
                    self.scheduler.step()
                if self.evaluates_at and self.session.clock >= self.evaluates_at and not self.evaluates.is_set():
                    self.evaluates.set()
                    assert self.goes_on.wait(TEST_SECONDS)
        except BaseException as error:
            self.error = error

    def reaches(self, clock: int) -> None:
        """Waits until it has made the step to this clock."""
        until(lambda: self.error is not None or self.session.clock >= clock, f"clock {clock}")
        assert self.error is None, self.error

    def leaves(self) -> None:
        """Leaves the job, after its step."""
        self._stopping.set()
        self.goes_on.set()
        self._thread.join(TEST_SECONDS)
        self.session.close()
        assert self.error is None, self.error


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer waits for the job's schedule for as long as a busy machine needs."""
    monkeypatch.setattr(participation, "SCRIPT_SECONDS", 60.0)


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Those that are still there at the end leave."""
    made: list[Trainer] = []
    yield made
    for trainer in made:
        trainer.leaves()


def begins_at(late: Trainer, steps: int = 3) -> int:
    """The clock that its first step has led to."""
    until(lambda: late.error is not None or len(late.rates) >= steps, "steps of the newcomer")
    assert late.error is None, late.error
    return min(late.rates)


def assert_follows(late: Trainer, others: list[Trainer], mode: str) -> None:
    """The newcomer's first steps are made at the rates of its clocks; where clocks differ, at one that was in use."""
    first = begins_at(late)
    assert first > 10
    if mode in ("sync", "local:4", "local:4/2"):
        assert late.rates[first] == pytest.approx(GAMMA ** (first - 1), rel=1e-6)
    else:  # the one that it has the schedule from may be in the middle of the step that it makes at that rate

        def is_in_use() -> bool:
            rates = [rate for other in others for rate in list(other.rates.values())[10:]]
            return late.rates[first] in [pytest.approx(rate, rel=1e-6) for rate in rates]

        until(is_in_use, "that rate of another worker")


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_joins_late_continues_the_jobs_schedule(
    shared: Cluster, job: str, trainers: list[Trainer], mode: str
) -> None:
    """And so does one that joins when the first one has left: the schedule passes from worker to worker."""
    first = Trainer(shared, job, mode)
    trainers.append(first)
    first.reaches(20)
    second = Trainer(shared, job, mode)
    trainers.append(second)
    assert_follows(second, [first], mode)
    trainers.remove(first)
    first.leaves()
    second.reaches(second.session.clock + 8)
    third = Trainer(shared, job, mode)
    trainers.append(third)
    assert_follows(third, [first, second], mode)


@pytest.mark.parametrize("mode", cases(["async"], ["sync"]))
def test_a_process_started_again_without_a_checkpoint_continues_the_jobs_schedule(
    shared: Cluster, job: str, trainers: list[Trainer], mode: str
) -> None:
    """In a job with a world size, too."""
    fixed = {"elastic": False, "world_size": 2}
    both: list[Trainer] = []
    threads = [
        threading.Thread(target=lambda rank=rank: both.append(Trainer(shared, job, mode, **fixed, rank=rank)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TEST_SECONDS)
    zero, one = sorted(both, key=lambda trainer: trainer.session.rank)
    trainers += both
    zero.reaches(20)
    one.reaches(20)
    trainers.remove(zero)
    zero.leaves()
    one.reaches(one.session.clock + 3)
    again = Trainer(shared, job, mode, **fixed, rank=0)
    trainers.append(again)
    assert_follows(again, [zero, one], mode)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_joins_while_all_others_evaluate_has_their_schedule_once_they_go_on(
    shared: Cluster,
    job: str,
    trainers: list[Trainer],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(participation, "SCRIPT_SECONDS", 0.1)
    first = Trainer(shared, job, mode, evaluates_at=20)
    trainers.append(first)
    assert first.evaluates.wait(TEST_SECONDS)
    late = Trainer(shared, job, mode)
    trainers.append(late)
    until(lambda: "asks again with later steps" in caplog.text, "a first step without an answer")
    monkeypatch.setattr(participation, "SCRIPT_SECONDS", 60.0)
    first.goes_on.set()
    if mode == "sync":
        assert begins_at(late) == 21
        assert late.rates[22] == pytest.approx(GAMMA**21, rel=1e-6)
    else:
        until(lambda: late.scheduler.last_epoch > len(late.rates) + 10, "the schedule of the first")
    assert caplog.text.count("asks again with later steps") == 1


@pytest.mark.parametrize("saves", [(), (0,)])
def test_a_worker_that_went_back_without_a_state_takes_over_no_schedule_of_before_the_rollback(
    make_cluster: Callable[..., Cluster],
    trainers: list[Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    saves: tuple[int, ...],
) -> None:
    """It asks while the other has not gone back. saves: the ranks of which the checkpoint has a state"""
    asked, ask, send = threading.Event(), JobScript.ask, StateSender.send

    def save(sender: StateSender, clock: int, state: bytes) -> None:
        assert sender._membership.place is not None
        if sender._membership.place.identity.rank in saves:
            send(sender, clock, state)

    monkeypatch.setattr(StateSender, "send", save)
    monkeypatch.setattr(JobScript, "ask", lambda *given: (ask(*given), asked.set())[0])
    cluster = make_cluster(checkpoint_dir=tmp_path, timing=Timing(asked_checkpoint=2.0 if saves else 0.1))
    trainers += [Trainer(cluster, "default", "sync") for _ in range(2)]
    first, second = trainers
    second.reaches(20)
    clock = cluster.coordinator.job("default").checkpoint().clock
    first.evaluates_at = first.session.clock + 50
    assert first.evaluates.wait(TEST_SECONDS)
    asked.clear()
    cluster.start_again(1)
    assert asked.wait(TEST_SECONDS)
    second.rates.clear()
    first.goes_on.set()
    assert begins_at(second) == clock + 1
    if saves:  # it may be from before the last step of the schedule
        assert second.rates[clock + 1] in [pytest.approx(GAMMA ** (clock - late), rel=1e-6) for late in (0, 1)]
    else:
        assert "begin anew at clock" in caplog.text


def test_a_new_process_that_asks_first_after_a_rollback_without_states_has_the_schedule_of_those_that_went_back(
    make_cluster: Callable[..., Cluster],
    trainers: list[Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It begins anew for now, and asks again with later steps. The other one goes back later, and adopts nothing."""
    monkeypatch.setattr(StateSender, "send", lambda *_: None)
    cluster = make_cluster(checkpoint_dir=tmp_path, timing=Timing(asked_checkpoint=0.1, fallback=60.0))
    first = Trainer(cluster, "default", "sync")
    trainers.append(first)
    first.reaches(20)
    job = cluster.coordinator.job("default")
    job.checkpoint()
    first.evaluates_at = first.session.clock + 50
    assert first.evaluates.wait(TEST_SECONDS)
    epochs = first.scheduler.last_epoch
    cluster.start_again(1)
    until(lambda: job.workers.restore_count > 0, "the rollback")
    late = Trainer(cluster, "default", "sync")
    trainers.append(late)
    until(lambda: "no live worker and no checkpoint has their state" in caplog.text, "a first step without an answer")
    first.rates.clear()
    first.goes_on.set()

    def has_the_same() -> bool:
        steps = late.rates.copy()
        return any(steps.get(clock) == rate for clock, rate in first.rates.copy().items())

    until(has_the_same, "the schedule of the first in the newcomer")
    begins_at(late, len(late.rates) + 5)
    its, others = late.rates.copy(), first.rates.copy()
    both = sorted(its.keys() & others.keys())
    follows = [clock for clock in both if its[clock] == others[clock]]
    assert follows == both[-len(follows) :]
    assert max(others.values()) <= 1.001 * GAMMA**epochs


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, 3, 0.9),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "chained": lambda optimizer: ChainedScheduler([StepLR(optimizer, 3, 0.9), ExponentialLR(optimizer, GAMMA)]),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.9, patience=2),
}


@pytest.mark.parametrize("name", cases(["chained", "plateau"], ["step", "lambda"]))
def test_every_kind_of_schedule_continues(shared: Cluster, job: str, trainers: list[Trainer], name: str) -> None:
    first = Trainer(shared, job, "sync", SCHEDULES[name])
    trainers.append(first)
    first.reaches(20)
    late = Trainer(shared, job, "sync", SCHEDULES[name])
    trainers.append(late)
    clock = begins_at(late, 8)
    until(lambda: clock + 7 in first.rates, "the same steps of the first")
    steps = range(clock, clock + 8)
    assert [late.rates[step] for step in steps] == [first.rates[step] for step in steps]
    assert late.rates[clock] < 0.9


@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_schedule_that_was_not_handed_over_begins_anew_with_a_warning(
    shared: Cluster, job: str, trainers: list[Trainer], caplog: pytest.LogCaptureFixture, has_scaler: bool
) -> None:
    """Also where something else was handed over."""

    def trainer() -> Trainer:
        others = (torch.amp.GradScaler("cpu"),) if has_scaler else ()
        trainers.append(Trainer(shared, job, "async", is_handed=False, others=others))
        return trainers[-1]

    trainer().reaches(20)
    late = trainer()
    begins_at(late)
    assert caplog.text.count("its learning-rate schedule begins anew: hand the scheduler to prepare") == 1
    assert late.scheduler.last_epoch <= len(late.rates)


class Holder:
    """What a framework wraps around a scheduler, two objects deep."""

    def __init__(self, scheduler: Any) -> None:
        self.loop = SimpleNamespace(config=SimpleNamespace(scheduler=scheduler))

    def step(self) -> None:
        self.loop.config.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"loops": [{"state": self.loop.config.scheduler.state_dict()}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.config.scheduler.load_state_dict(state["loops"][0]["state"])


def test_a_wrapper_of_a_schedule_that_was_handed_over_continues_without_a_warning(
    shared: Cluster, job: str, trainers: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    first = Trainer(shared, job, "async", lambda optimizer: Holder(exponential(optimizer)))
    trainers.append(first)
    first.reaches(20)
    late = Trainer(shared, job, "async", lambda optimizer: Holder(exponential(optimizer)))
    trainers.append(late)
    assert_follows(late, [first], "async")
    assert "begins anew" not in caplog.text


def test_a_schedule_that_nobody_has_begins_anew_with_a_warning(
    shared: Cluster, job: str, trainers: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    first = Trainer(shared, job, "async", is_handed=False)
    trainers.append(first)
    first.reaches(20)
    late = Trainer(shared, job, "async")
    trainers.append(late)
    begins_at(late)
    assert "begin anew at clock" in caplog.text
    assert "no live worker and no checkpoint has their state" in caplog.text


def test_a_late_worker_of_another_script_keeps_its_schedule_and_says_so(
    shared: Cluster, job: str, trainers: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    first = Trainer(shared, job, "async")
    trainers.append(first)
    first.reaches(20)
    late = Trainer(shared, job, "async", lambda optimizer: StepLR(optimizer, 1000))
    trainers.append(late)
    begins_at(late)
    assert "it is of ['ExponentialLR'], and here prepare was given ['StepLR']" in caplog.text
    assert late.rates[min(late.rates)] == 1.0


class Tally:
    """Something with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_is_a_workers_own_is_not_brought_to_another(shared: Cluster, job: str) -> None:
    """With the size of what travels, and a reason where it is too large."""

    def begun(count: int) -> tuple[Any, Callable[[], None], Tally, Tally]:
        model, theirs, own = nn.Linear(1, 1), Tally(count), Tally(count)
        session = ps_worker.connect(shared.address, "async", job=job, elastic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        _, optimizer, *_ = session.prepare(model, optimizer, theirs, own, own=[own])

        def step() -> None:
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        return session, step, theirs, own

    first, step, *_ = begun(7)
    step()
    late, first_step, theirs, own = begun(1)
    asks = threading.Thread(target=first_step)
    asks.start()
    while asks.is_alive():
        step()
    assert (theirs.count, own.count) == (7, 1)
    first.close()
    late.close()


def test_a_scaler_of_gradients_continues_in_a_worker_that_joins_late(shared: Cluster, job: str) -> None:
    """With the job's scale, and the number of steps since that has changed."""

    def begun(scale: float) -> tuple[Any, Callable[[], None], torch.amp.GradScaler]:
        model, scaler = nn.Linear(1, 1), torch.amp.GradScaler("cpu", init_scale=scale)
        session = ps_worker.connect(shared.address, "async", job=job, elastic=True)
        _, optimizer, *_ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler)

        def step() -> None:
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return session, step, scaler

    first, step, _ = begun(4.0)
    for _ in range(3):
        step()
    late, first_step, scaler = begun(65536.0)
    asks = threading.Thread(target=first_step)
    asks.start()
    while asks.is_alive():
        step()
    assert scaler.get_scale() == 4.0
    assert scaler.state_dict()["_growth_tracker"] > 3
    first.close()
    late.close()


def test_only_what_is_handed_over_can_be_a_workers_own(shared: Cluster, job: str) -> None:
    model = nn.Linear(1, 1)
    with ps_worker.connect(shared.address, "async", job=job, elastic=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(InvalidRequest, match=r"names things with a state_dict .* got SGD"):
            session.prepare(model, optimizer, own=[optimizer])


def test_a_state_that_is_too_large_stays_where_it_is(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Large(Tally):
        def state_dict(self) -> dict[str, Any]:
            return {"count": torch.zeros(2**15)}

    model = nn.Linear(1, 1)
    with ps_worker.connect(shared.address, "async", job=job, elastic=True) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), Large(1))
    assert "of which Large has the most, and at most 65536 travel to workers that join later" in caplog.text


PASSES, SAMPLES = 8, 12


@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_a_schedule_stepped_once_a_pass_is_not_stepped_twice(shared: Cluster, job: str, mode: str) -> None:
    """A late worker's loops over past passes are empty, and its script steps the schedule behind each."""
    found: list[tuple[int, int, float]] = []
    joins = threading.Event()

    def run(index: int) -> None:
        if index:
            assert joins.wait(TEST_SECONDS)
        model = nn.Linear(1, 1)
        own = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = StepLR(own, 1, 0.5)
        session = ps_worker.connect(shared.address, mode, job=job, elastic=True)
        _, optimizer, scheduler, loader = session.prepare(
            model,
            own,
            scheduler,
            DataLoader(torch.ones(SAMPLES, 1), batch_size=1),  # type: ignore[arg-type]
        )
        for number in range(PASSES):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
                found.append((index, number, optimizer.param_groups[0]["lr"]))
                if number == 3:
                    joins.set()
                    until(lambda: index or session.world_size == 2, "the newcomer")
                if number == 5:  # in async it may have had all batches so far; in calls it answers the newcomer
                    until(lambda: session.global_weights() and any(other for other, *_ in found), "its first batch")
            scheduler.step()
        session.close()

    in_parallel(2, run)
    assert any(index == 1 for index, *_ in found), "the newcomer has had a batch"
    assert all(rate == 0.5**number for _, number, rate in found), found
