"""The public face: connect, prepare, and what a session is."""

from __future__ import annotations

import copy
import gc
import logging
import os
import urllib.error
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, WeightedRandomSampler

import ps_worker
from ps_protocol.errors import InvalidRequest, NotShared, Unsupported
from ps_worker import Session
from ps_worker.config import WorkerConfig
from ps_worker.connecting import refuse_elastic
from ps_worker.data.loaders import PreparedLoader
from ps_worker.metrics import WorkerMetrics
from ps_worker.strategies.single import Single
from ps_worker.timeline.recording import Timeline
from tests.tools.cluster import Cluster, scrape
from tests.tools.said import said_by_workers


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_weight(session: Session) -> Any:
    """A model with one weight, of which each step takes 0.1, and its optimizer."""
    model = nn.Linear(1, 1, bias=False)
    return session.prepare(model, sgd(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for _ in range(steps):
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=["single", "sync"])
def session(request: pytest.FixtureRequest, shared: Cluster, job: str) -> Iterator[Session]:
    """A session with a server and one without: to a script they are the same."""
    with ps_worker.connect(shared.address, request.param, job) as running:
        yield running


# -- prepare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["mol", "lom", "oml", "molll", "mo"])
def test_prepare_returns_what_it_is_given_in_that_order(session: Session, order: str) -> None:
    model = nn.Linear(2, 2)
    given = {"m": model, "o": sgd(model)}
    kinds = {"m": nn.Module, "o": torch.optim.Optimizer, "l": PreparedLoader}
    found = session.prepare(*(given.get(letter) or DataLoader([0, 1]) for letter in order))
    assert isinstance(found, tuple)
    for letter, thing in zip(order, found, strict=True):
        assert isinstance(thing, kinds[letter])
    assert found[order.index("m")] is model
    later = session.prepare(DataLoader([0, 1]))
    assert isinstance(later, PreparedLoader), "one thing comes back as one thing"


def test_schedulers_and_what_else_has_a_state_come_back_as_they_are(session: Session) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    things = StepLR(optimizer, 1), OneCycleLR(optimizer, 1.0, 9), torch.amp.GradScaler("cpu")
    _, wrapped, *others = session.prepare(model, optimizer, *things)
    assert others == [*things]
    model(torch.ones(2)).sum().backward()
    wrapped.step()
    for scheduler in things[:2]:
        scheduler.step()


@pytest.mark.parametrize("stranger", [7, None, [1], object()])
def test_what_has_no_state_is_refused(session: Session, stranger: object) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidRequest, match=f"schedulers.*, got {type(stranger).__name__}"):
        session.prepare(model, sgd(model), stranger)


def test_the_optimizer_stays_an_optimizer(session: Session) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)

    def make(model: nn.Linear, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=lr, momentum=0.9)

    own = make(model, 0.1)
    _, optimizer = session.prepare(model, own)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is own.param_groups
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.defaults["momentum"] == 0.9
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.1, 0.5]
    optimizer.load_state_dict(make(other, 0.75).state_dict())
    assert own.param_groups[0]["lr"] == 0.75, "hyper-parameters of a state dict are taken over"
    assert optimizer.param_groups[0]["params"][0] is model.weight
    optimizer.param_groups[1]["lr"] = 0.25
    before = model.bias.detach().clone()
    model.bias.grad = torch.ones(2)
    optimizer.step()
    assert torch.allclose(model.bias, before - 0.25)
    optimizer.zero_grad()
    assert model.bias.grad is None


def test_step_hooks_run_as_they_do_in_torch(session: Session) -> None:
    model, seen = nn.Linear(2, 2), []
    own = sgd(model)

    def note(name: str) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            assert optimizer is stepper
            assert (args, kwargs) == ((stepper,), {})
            seen.append(name)

        return hook

    own.register_step_pre_hook(note("pre, before"))
    own.register_step_post_hook(note("post, before"))
    _, stepper = session.prepare(model, own)
    stepper.register_step_pre_hook(note("pre, after"))
    stepper.register_step_pre_hook(note("removed")).remove()
    own.register_step_post_hook(note("post, after"))
    of_all_optimizers = [
        register_optimizer_step_pre_hook(note("pre, global")),
        register_optimizer_step_post_hook(note("post, global")),
    ]
    scheduler = StepLR(stepper, 1)  # which wraps `step` once more
    try:
        for clock in range(1, 3):
            seen.clear()
            model(torch.ones(2)).sum().backward()
            stepper.step()
            scheduler.step()
            order = ["pre, global", "pre, before", "pre, after", "post, before", "post, after", "post, global"]
            assert seen == order
            assert session.clock == clock
            copy.deepcopy(own)  # torch looks at the class again
    finally:
        for hook in of_all_optimizers:
            hook.remove()


def test_a_step_hook_may_change_what_step_gets(session: Session) -> None:
    model = nn.Linear(2, 2)
    _, stepper = session.prepare(model, sgd(model))

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2)).sum()
        loss.backward()
        return loss

    stepper.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {"closure": closure}))
    assert stepper.step().item() == pytest.approx((model(torch.ones(2)).sum() + 0.6).item())
    stepper.register_step_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stepper.step()
    assert session.clock == 1


def test_the_model_keeps_its_names_and_its_tied_weights(session: Session) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    names = list(model.state_dict())
    model, _ = session.prepare(model, sgd(model))
    assert list(model.state_dict()) == names
    assert model[2].weight is model[0].weight
    assert session.unwrap(model) is ps_worker.Session.unwrap(model) is model


def test_no_sync_is_where_scripts_written_for_ddp_look_for_it(session: Session) -> None:
    model, optimizer = one_weight(session)
    before = model.weight.item()
    for where in (model, session):
        with where.no_sync():
            model(torch.ones(1)).backward()
    assert session.clock == 0
    train(model, optimizer, steps=1)
    assert session.clock == 1
    assert model.weight.item() == pytest.approx(before - 0.3)


def test_a_model_may_be_evaluated_and_saved_between_steps(session: Session) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    model, optimizer = session.prepare(model, sgd(model))
    train(model, optimizer, steps=1)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1)), model[0](torch.ones(1)))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.train()
    train(model, optimizer, steps=1)
    assert session.clock == 2


# -- what is refused -------------------------------------------------------------------------------------------------


class Unmade(torch.optim.Optimizer):
    """As Accelerate's and others' optimizers are: an Optimizer around one, which was never made as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.optimizer.param_groups


class Delegating:
    """As Lightning's: no Optimizer, but it answers as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> object:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("wrapper", [Unmade, Delegating])
def test_an_optimizer_that_a_framework_wrapped_is_refused(session: Session, wrapper: Any) -> None:
    model = nn.Linear(2, 2)
    said = f"{wrapper.__name__} is a framework's wrapper of the optimizer SGD: hand the plain optimizer to prepare"
    with pytest.raises(InvalidRequest, match=said):
        session.prepare(model, wrapper(sgd(model)))
    session.prepare(model, sgd(model))  # nothing has changed


def test_a_model_without_shapes_is_to_be_run_once_first(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    """Single trains it, and says that the other modes do not."""
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    said = "0.weight of a LazyLinear has no shape yet: run one batch through the model before prepare"
    if session.mode != "single":
        with pytest.raises(InvalidRequest) as caught:
            session.prepare(model, sgd(model))
        assert str(caught.value) == said
        model(torch.ones(2, 3))
    model, optimizer = session.prepare(model, sgd(model))
    if session.mode == "single":
        first, *_ = said_by_workers(caplog)
        assert first.getMessage() == f"in sync, ssp and async this is refused: {said}"
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert session.clock == 1


class Sparse(nn.Module):
    """All that servers refuse at once, but for what has no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.norm = nn.SyncBatchNorm(2)
        self.register_buffer("graph", torch.eye(2).to_sparse())


REFUSED = [
    "optimizer LBFGS cannot run on a parameter server: it evaluates the loss several times a step (known: SGD",
    "norm is a SyncBatchNorm, which needs a process group, and there is none: it would be a BatchNorm with each ",
    "table makes sparse gradients; use sparse=False",
    "graph is a sparse tensor (torch.sparse_coo): keep its indices and its values as two buffers",
    "the loader's WeightedRandomSampler cannot be divided among workers; use shuffle=True or False",
]


@pytest.mark.parametrize(("variable", "level"), [("single", logging.WARNING), ("", logging.INFO)])
def test_single_is_a_dry_run_of_the_other_modes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, variable: str, level: int
) -> None:
    """Where the mode was given these are warnings; otherwise single was meant, and they are for those who look."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PS_MODE", variable)
    model, fine = Sparse(), nn.Linear(2, 2)
    weighted = [DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 4)) for _ in range(2)]
    with ps_worker.connect() as session:
        session.prepare(fine, sgd(fine), DataLoader(range(4), shuffle=True), DataLoader(range(4)))
    assert said_by_workers(caplog) == []
    with ps_worker.connect() as session:
        session.prepare(model, torch.optim.LBFGS(model.parameters()), *weighted)
    said = said_by_workers(caplog)
    assert [record.levelno for record in said] == [level] * len(REFUSED)
    for record, text in zip(said, REFUSED, strict=True):
        assert record.getMessage().startswith(f"in sync, ssp and async this is refused: {text}")


def test_what_single_says_is_what_the_servers_modes_say(shared: Cluster, job: str) -> None:
    model = Sparse()
    for text, optimizer in zip(REFUSED, (torch.optim.LBFGS, torch.optim.SGD), strict=False):
        with shared.connect("sync", job=job) as session, pytest.raises(Unsupported) as refused:
            session.prepare(model, optimizer(model.parameters()))
        assert str(refused.value).startswith(text)


def test_a_worker_whose_prepare_failed_has_left_and_may_prepare_again(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise NotShared("none today")

    with shared.connect("sync", job=job) as session:
        model = nn.Linear(1, 1, bias=False)
        optimizer, before = sgd(model), model.weight.item()
        with monkeypatch.context() as patched:
            patched.setattr("ps_worker.cluster.connection.share_memory", no_memory)
            with pytest.raises(NotShared, match="none today"):
                session.prepare(model, optimizer)
        assert job not in shared.coordinator.jobs(), "it was the only worker"
        assert type(model.weight) is nn.Parameter, "nothing watches it"
        model, optimizer = session.prepare(model, optimizer)
        assert model.weight.item() == before
        train(model, optimizer, steps=1)
        assert session.clock == 1


def test_a_prepare_that_fails_at_its_end_leaves_the_optimizer_its_state(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise InvalidRequest("the state that an earlier worker has left cannot be read")

    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr("ps_worker.strategies.job_training.JobTraining.begin", unreadable)
    with shared.connect("sync", job=job) as session, pytest.raises(InvalidRequest, match="an earlier worker has left"):
        session.prepare(model, optimizer)
    assert repr(optimizer.state_dict()) == repr(before)


# -- what a session is -----------------------------------------------------------------------------------------------


def test_a_session_says_what_it_is(shared: Cluster, job: str) -> None:
    with shared.connect("ssp:3", 0, 1, job=job) as session:
        assert (session.rank, session.world_size, session.mode, session.clock) == (0, 1, "ssp:3", 0)
        assert session.device == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        assert scrape(session.metrics_address)["ps_worker_steps_total"] == 0
        train(*one_weight(session), steps=2)
        where = f"job='{job}' server='{shared.address}'"
        assert repr(session) == f"<Session mode='ssp:3' rank=0 world_size=1 {where} clock=2>"
    with ps_worker.connect() as session:
        assert (session.rank, session.world_size, session.mode, session.clock) == (0, 1, "single", 0)
        assert "ps_worker_steps_total" in scrape(session.metrics_address)
        assert repr(session) == "<Session mode='single' rank=0 world_size=1 clock=0>"


def test_leaving_a_with_leaves_the_job_whatever_happened(shared: Cluster, job: str) -> None:
    def fail() -> None:
        with shared.connect("sync", job=job) as session:
            one_weight(session)
            assert job in shared.coordinator.jobs()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert job not in shared.coordinator.jobs()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_close_may_be_called_more_than_once(session: Session, is_prepared: bool) -> None:
    if is_prepared:
        one_weight(session)
    scrape(session.metrics_address)
    session.close()
    session.close()
    with pytest.raises(urllib.error.URLError):
        scrape(session.metrics_address)


def test_a_model_outlives_its_session_and_may_be_prepared_by_a_later_one(shared: Cluster, job: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    for mode in ("sync", "async", "single", "sync"):
        with ps_worker.connect(shared.address, mode, job) as session:
            model, optimizer = session.prepare(model, sgd(model))
            train(model, optimizer)
            assert session.clock == 5
            with model.no_sync():
                model(torch.ones(1)).backward()
            model.zero_grad()
    train(model, sgd(model))  # no server is called any more
    assert model.weight.item() == pytest.approx(before - 2.5)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_closed_session_keeps_no_model_though_a_gradient_was_left_in_it(
    shared: Cluster, job: str, transport: str
) -> None:
    def trained() -> weakref.ref[torch.Tensor]:
        with shared.connect("sync", job=job, transport=transport) as session:
            model, optimizer = one_weight(session)
            train(model, optimizer)
            model(torch.ones(1)).backward()
            return weakref.ref(model.weight)

    weight = trained()
    gc.collect()
    assert weight() is None


def test_a_session_belongs_to_the_process_that_made_it(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        model, optimizer = one_weight(session)
        child = os.fork()
        if child == 0:
            try:
                session.close()  # as atexit would: the child must not take its parent off the job
                session.prepare(DataLoader([0]))
            except InvalidRequest as error:
                os._exit(7 if "belongs to the parent process; call connect after the fork" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert job in shared.coordinator.jobs()
        train(model, optimizer, steps=1)
        assert session.clock == 1


# -- strategies ------------------------------------------------------------------------------------------------------


class Recorded(Single):
    """A further way to train, which notes what it is asked."""

    def __init__(self, config: WorkerConfig, metrics: WorkerMetrics, device: torch.device, timeline: Timeline) -> None:
        super().__init__(metrics, device, wanted=False)
        self.called: list[str] = []

    def keep(self, things: Sequence[Any], own: Sequence[Any] = ()) -> None:
        self.called.append(f"keep {len(things)}")

    def no_sync(self) -> AbstractContextManager[None]:
        self.called.append("no_sync")
        return nullcontext()

    def exchange(self, value: bytes, what: str) -> dict[int, bytes]:
        self.called.append(what)
        return {0: value, 1: value}

    def close(self) -> None:
        self.called.append("close")


def test_a_further_way_to_train_is_one_entry_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorded] = []

    def make(*given: Any) -> Recorded:
        made.append(Recorded(*given))
        return made[-1]

    monkeypatch.setattr("ps_worker.session.STRATEGIES", {"single": make})
    with ps_worker.connect(mode="single") as session:
        model, optimizer = one_weight(session)
        with session.no_sync():
            model(torch.ones(1)).backward()
        optimizer.step()
        assert session.clock == made[0].clock == 1
        assert session.gather(7) == [7, 7]
    assert made[0].called == ["keep 0", "no_sync", "gather", "close"]


def test_a_framework_refuses_an_elastic_job_before_it_joins(shared: Cluster, job: str) -> None:
    """Each of its workers would be rank 0 to the framework."""
    session = ps_worker.connect(shared.address, "sync", job, elastic=True)
    with pytest.raises(Unsupported, match="Accelerate asks for this worker's before"):
        refuse_elastic(session, "Accelerate")
    assert job not in shared.coordinator.jobs()
    with shared.connect("sync", job=job) as session:
        refuse_elastic(session, "Accelerate")
