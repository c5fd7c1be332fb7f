"""The public face: connect, prepare, and what a session is."""

from __future__ import annotations

import copy
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, WeightedRandomSampler

import ps_worker
from ps_protocol.errors import InvalidRequest, NotShared, Unsupported
from ps_protocol.modes import Consistency
from ps_worker import Session
from ps_worker.config import WorkerConfig, resolve
from ps_worker.data.loaders import PreparedLoader
from ps_worker.metrics import WorkerMetrics
from ps_worker.strategies.single import Single
from tests.tools.cluster import Cluster, scrape


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(params=["single", "sync"])
def session(request: pytest.FixtureRequest, shared: Cluster, job: str) -> Iterator[Session]:
    """A session with a server and one without: to a script they are the same."""
    with ps_worker.connect(shared.address, request.param, job) as found:
        yield found


# -- prepare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["mol", "lom", "oml", "molll"])
def test_prepare_returns_what_it_is_given_in_that_order(session: Session, order: str) -> None:
    model = nn.Linear(2, 2)
    given = {"m": model, "o": sgd(model)}
    things = [given.get(letter) or DataLoader([0, 1]) for letter in order]
    kinds = {"m": nn.Module, "o": torch.optim.Optimizer, "l": PreparedLoader}
    found = session.prepare(*things)
    assert isinstance(found, tuple)
    for letter, thing in zip(order, found, strict=True):
        assert isinstance(thing, kinds[letter])
    assert found[order.index("m")] is model


def test_a_loader_is_optional_and_may_come_later(session: Session) -> None:
    model = nn.Linear(2, 2)
    _, _ = session.prepare(model, sgd(model))
    loader = session.prepare(DataLoader([0, 1]))
    assert isinstance(loader, PreparedLoader), "one thing comes back as one thing"


def test_schedulers_and_what_else_has_a_state_come_back_as_they_are(session: Session) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    schedulers = torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 9)
    scaler = torch.amp.GradScaler("cpu")
    _, wrapped, *others = session.prepare(model, optimizer, *schedulers, scaler)
    assert others == [*schedulers, scaler]
    model(torch.ones(2)).sum().backward()
    wrapped.step()
    for scheduler in schedulers:
        scheduler.step()


@pytest.mark.parametrize("odd", [7, None, [1], object()])
def test_what_has_no_state_is_refused(session: Session, odd: object) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidRequest, match=f"schedulers.*, got {type(odd).__name__}"):
        session.prepare(model, sgd(model), odd)


def test_the_optimizer_stays_an_optimizer(session: Session) -> None:
    model = nn.Linear(2, 2)
    mine = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1, momentum=0.9)
    _, optimizer = session.prepare(model, mine)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is mine.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.defaults["momentum"] == 0.9
    assert optimizer.state_dict()["param_groups"][1]["lr"] == 0.5
    optimizer.param_groups[1]["lr"] = 0.25
    assert mine.param_groups[1]["lr"] == 0.25
    before = model.bias.detach().clone()
    model.bias.grad = torch.ones(2)
    optimizer.step()
    assert torch.allclose(model.bias, before - 0.25)
    optimizer.zero_grad()
    assert model.bias.grad is None


def test_step_hooks_run_as_they_do_in_torch(session: Session) -> None:
    model, seen = nn.Linear(2, 2), []
    mine = sgd(model)

    def note(name: str) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            assert optimizer is stepper
            assert args == (stepper,)
            assert kwargs == {}
            seen.append(name)

        return hook

    mine.register_step_pre_hook(note("pre, before"))
    mine.register_step_post_hook(note("post, before"))
    _, stepper = session.prepare(model, mine)
    stepper.register_step_pre_hook(note("pre, after"))
    removed = stepper.register_step_pre_hook(note("removed"))
    mine.register_step_post_hook(note("post, after"))
    hooks = [
        register_optimizer_step_pre_hook(note("pre, global")),
        register_optimizer_step_post_hook(note("post, global")),
    ]
    removed.remove()
    scheduler = torch.optim.lr_scheduler.StepLR(stepper, 1)  # which wraps `step` once more
    order = ["pre, global", "pre, before", "pre, after", "post, before", "post, after", "post, global"]
    try:
        for clock in range(1, 3):
            model(torch.ones(2)).sum().backward()
            stepper.step()
            scheduler.step()
            assert seen == order
            assert session.clock == clock
            copy.deepcopy(mine)  # torch looks at the class again
            seen.clear()
    finally:
        for hook in hooks:
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


def test_hyper_parameters_of_a_state_dict_are_taken_over(session: Session) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    _, optimizer = session.prepare(model, sgd(model))
    optimizer.load_state_dict(torch.optim.SGD(other.parameters(), lr=0.75).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.75
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_the_model_keeps_its_names_and_its_tied_weights(session: Session) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    names = list(model.state_dict())
    model, _ = session.prepare(model, sgd(model))
    assert list(model.state_dict()) == names
    assert model[2].weight is model[0].weight
    assert session.unwrap(model) is model
    assert ps_worker.Session.unwrap(model) is model


def test_no_sync_is_where_scripts_written_for_ddp_look_for_it(session: Session) -> None:
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = session.prepare(model, sgd(model))
    before = model.weight.item()
    for where in (model, session):
        with where.no_sync():
            model(torch.ones(1)).backward()
    assert session.clock == 0
    model(torch.ones(1)).backward()
    optimizer.step()
    assert session.clock == 1
    assert model.weight.item() == pytest.approx(before - 0.3)


def test_the_clock_counts_steps(session: Session) -> None:
    model = nn.Linear(1, 1)
    model, optimizer = session.prepare(model, sgd(model))
    for clock in range(4):
        assert session.clock == clock
        model(torch.ones(1)).backward()
        optimizer.step()
    assert session.clock == 4


def test_a_model_may_be_evaluated_and_saved_between_steps(session: Session) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    model, optimizer = session.prepare(model, sgd(model))
    model(torch.ones(1)).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1)), model[0](torch.ones(1)))
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(saved)
    model.train()
    model(torch.ones(1)).backward()
    optimizer.step()
    assert session.clock == 2


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_model_without_shapes_is_to_be_run_once_first(shared: Cluster, job: str) -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with shared.connect("sync", job=job) as session:
        with pytest.raises(InvalidRequest, match=r"0\.weight of a LazyLinear has no shape yet: run one batch through"):
            session.prepare(model, sgd(model))
        model(torch.ones(2, 3))
        model, optimizer = session.prepare(model, sgd(model))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert session.clock == 1


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
def test_an_optimizer_that_a_framework_wrapped_is_refused(
    session: Session, wrapper: Callable[[torch.optim.Optimizer], object]
) -> None:
    model = nn.Linear(2, 2)
    said = f"{wrapper.__name__} is a framework's wrapper of the optimizer SGD: hand the plain optimizer to prepare"  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match=said):
        session.prepare(model, wrapper(sgd(model)))
    session.prepare(model, sgd(model))  # nothing has changed


class Sparse(nn.Module):
    """All that servers refuse at once, but for what has no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))


REFUSED = [
    "optimizer LBFGS cannot run on a parameter server: it evaluates the loss several times a step (known: SGD",
    "table makes sparse gradients; use sparse=False",
    "phases has dtype torch.complex64; known are ",
    "the loader's WeightedRandomSampler cannot be divided among workers; use shuffle=True or False",
]


@pytest.mark.parametrize(("variable", "level"), [("single", logging.WARNING), ("", logging.INFO)])
def test_single_is_a_dry_run_of_the_other_modes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, variable: str, level: int
) -> None:
    """Where the mode was said these are warnings; else single was meant, and they are for those who look for them."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PS_MODE", variable)
    model = Sparse()
    odd = [DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 4)) for _ in range(2)]
    with ps_worker.connect() as session:
        session.prepare(model, torch.optim.LBFGS(model.parameters()), *odd)
    assert [record.levelno for record in caplog.records] == [level] * len(REFUSED)
    for said, text in zip(caplog.messages, REFUSED, strict=True):
        assert said.startswith(f"in sync, ssp and async this is refused: {text}")


def test_what_single_says_is_what_the_servers_modes_say(shared: Cluster, job: str) -> None:
    model = Sparse()
    for text, optimizer in zip(REFUSED, (torch.optim.LBFGS, torch.optim.SGD), strict=False):
        with shared.connect("sync", job=job) as session, pytest.raises(Unsupported) as refused:
            session.prepare(model, optimizer(model.parameters()))
        assert refused.value.message.startswith(text)


def test_single_trains_what_has_no_shape_yet_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.LazyLinear(1))
    with ps_worker.connect(mode="single") as session:
        model, optimizer = session.prepare(model, sgd(model))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert session.clock == 1
    assert caplog.messages == [
        "in sync, ssp and async this is refused: 0.weight of a LazyLinear has no shape yet: run one batch through the "
        "model before prepare"
    ]


def test_single_says_nothing_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Linear(2, 2)
    with ps_worker.connect(mode="single") as session:
        session.prepare(model, sgd(model), DataLoader(range(4), shuffle=True), DataLoader(range(4)))
    assert caplog.messages == []


# -- what a session says ---------------------------------------------------------------------------------------------


def test_a_session_says_what_it_is(shared: Cluster, job: str) -> None:
    with shared.connect("ssp:3", 0, 1, job=job) as session:
        assert (session.rank, session.world_size, session.mode, session.clock) == (0, 1, "ssp:3", 0)
        assert session.device == torch.device("cpu") or torch.cuda.is_available()
        assert scrape(session.metrics_address)["ps_worker_steps_total"] == 0
    with ps_worker.connect() as session:
        assert (session.rank, session.world_size, session.mode, session.clock) == (0, 1, "single", 0)
        assert "ps_worker_steps_total" in scrape(session.metrics_address)


def test_a_session_shows_where_it_is(shared: Cluster, job: str) -> None:
    with shared.connect("ssp:3", 0, 1, job=job) as session:
        train(*session.prepare(model := nn.Linear(1, 1), sgd(model)), steps=2)
        assert repr(session) == (
            f"<Session mode='ssp:3' rank=0 world_size=1 job='{job}' server='{shared.address}' clock=2>"
        )
    with ps_worker.connect() as session:
        assert repr(session) == "<Session mode='single' rank=0 world_size=1 clock=0>"


def test_leaving_a_with_leaves_the_job_whatever_happened(shared: Cluster, job: str) -> None:
    model = nn.Linear(1, 1)

    def fail() -> None:
        with shared.connect("sync", job=job) as session:
            session.prepare(model, sgd(model))
            assert job in shared.coordinator.jobs()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert job not in shared.coordinator.jobs()


@pytest.mark.parametrize("prepared", [False, True])
def test_close_may_be_called_more_than_once(session: Session, prepared: bool) -> None:
    if prepared:
        model = nn.Linear(1, 1)
        session.prepare(model, sgd(model))
    address = session.metrics_address
    scrape(address)
    session.close()
    session.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    """Every step takes 0.1 off the one weight."""
    for _ in range(steps):
        model(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_outlives_its_session(shared: Cluster, job: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    with shared.connect("sync", job=job) as session:
        train(*session.prepare(model, sgd(model)))
    train(model, sgd(model))  # nobody is called any more
    assert model.weight.item() == pytest.approx(before - 1.0)


def test_a_model_may_be_prepared_again_by_a_later_session(shared: Cluster, job: str) -> None:
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
    assert model.weight.item() == pytest.approx(before - 2.0)


def test_a_session_belongs_to_the_process_that_made_it(shared: Cluster, job: str) -> None:
    model = nn.Linear(1, 1)
    with shared.connect("sync", job=job) as session:
        model, optimizer = session.prepare(model, sgd(model))
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
        model(torch.ones(1)).backward()
        optimizer.step()
        assert session.clock == 1


# -- settings --------------------------------------------------------------------------------------------------------


def told(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **arguments: object) -> WorkerConfig:
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return resolve(**arguments)


TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
PS = {"PS_SERVER": "ps:1", "PS_MODE": "ssp:2", "PS_JOB": "mine", "PS_RANK": "3", "PS_WORLD_SIZE": "5"}


def test_arguments_come_before_variables_of_ours_before_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, {**TORCHRUN, **PS})
    assert (found.server, found.mode, found.job, found.rank, found.world_size) == ("ps:1", "ssp:2", "mine", 3, 5)
    assert found.consistency == Consistency(2)
    found = told(monkeypatch, {**TORCHRUN, **PS}, server="h:2", mode="async", job="other", rank=0, world_size=1)
    assert (found.server, found.mode, found.job, found.rank, found.world_size) == ("h:2", "async", "other", 0, 1)
    found = told(monkeypatch, {**TORCHRUN, "PS_SERVER": "ps:1"})
    assert (found.mode, found.job, found.rank, found.world_size, found.local_rank) == ("sync", "default", 2, 4, 1)


def test_the_mode_follows_from_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, {}).mode == "single"
    assert told(monkeypatch, TORCHRUN).mode == "ddp"
    assert told(monkeypatch, {"WORLD_SIZE": "1", "RANK": "0"}).mode == "single"
    assert told(monkeypatch, {**TORCHRUN, "PS_SERVER": "ps:1"}).mode == "sync"
    assert told(monkeypatch, {"PS_SERVER": "ps:1"}, mode="single").mode == "single"


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, dict.fromkeys([*TORCHRUN, *PS, "PS_ELASTIC", "PS_CONNECT_TIMEOUT"], ""))
    assert found == told(monkeypatch, {})


def test_numbers_and_switches_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PS_SERVER": "h:1", "PS_CONNECT_TIMEOUT": "2.5", "PS_METRICS_PORT": "9200", "PS_METRICS_HOST": "::1"}
    found = told(monkeypatch, variables)
    assert (found.connect_timeout, found.metrics_port, found.metrics_host) == (2.5, 9200, "::1")
    for text, elastic in (("1", True), ("true", True), ("0", False), ("false", False)):
        found = told(monkeypatch, {"PS_SERVER": "h:1", "PS_ELASTIC": text, "PS_RANK": "1", "PS_WORLD_SIZE": "2"})
        assert (found.rank, found.world_size) == ((None, 0) if elastic else (1, 2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "sync"}, "mode sync needs a server: connect.server='HOST:PORT'., PS_SERVER, or --server"),
        ({"mode": "ssp:1"}, "mode ssp:1 needs a server"),
        ({"server": "localhost"}, "server: expected HOST:PORT, got 'localhost'"),
        ({"server": "h:1", "world_size": 2}, "world_size is 2, but no rank was given"),
        ({"server": "h:1", "world_size": 2, "rank": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"server": "h:1", "world_size": 2, "rank": -1}, "rank: expected a whole number from 0 .*, got '-1'"),
        ({"server": "h:1", "rank": 1}, "rank must be from 0 to world_size - 1 = 0, got 1"),
        ({"server": "h:1", "rank": 0, "world_size": 0}, "world_size"),
        ({"mode": "ddp", "elastic": True}, "an elastic job needs a server; mode ddp has a fixed world size"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        ps_worker.connect(**arguments)  # type: ignore[arg-type]


def test_the_public_face_is_what_all_lists() -> None:
    assert sorted(ps_worker.__all__) == ps_worker.__all__
    for name in ps_worker.__all__:
        assert getattr(ps_worker, name).__module__.startswith(("ps_worker", "ps_protocol"))


# -- strategies ------------------------------------------------------------------------------------------------------


class Recorded(Single):
    """A further way to train, which notes what it is asked."""

    def __init__(self, metrics: WorkerMetrics, device: torch.device) -> None:
        super().__init__(metrics, device, wanted=False)
        self.called: list[str] = []

    def keep(self, things: Sequence[Any]) -> None:
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

    def make(config: WorkerConfig, metrics: WorkerMetrics, device: torch.device) -> Recorded:
        made.append(Recorded(metrics, device))
        return made[-1]

    monkeypatch.setattr("ps_worker.session.STRATEGIES", {"single": make})
    with ps_worker.connect(mode="single") as session:
        model = nn.Linear(2, 2)
        model, optimizer = session.prepare(model, sgd(model))
        with session.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert session.clock == made[0].clock == 1
        assert session.gather(7) == [7, 7]
    assert made[0].called == ["keep 0", "no_sync", "gather", "close"]


def test_a_worker_whose_prepare_failed_has_left_and_may_prepare_again(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.connect("sync", job=job) as session:
        model = nn.Linear(2, 2)
        optimizer, before = sgd(model), model.weight.detach().clone()
        with monkeypatch.context() as patched:
            patched.setattr("ps_worker.cluster.connection.share_memory", _no_memory)
            with pytest.raises(NotShared, match="none today"):
                session.prepare(model, optimizer)
        assert job not in shared.coordinator.jobs(), "it was the only worker"
        assert type(model.weight) is nn.Parameter, "nothing watches it"
        model, optimizer = session.prepare(model, optimizer)
        assert torch.equal(model.weight, before)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert session.clock == 1


def _no_memory(*_: object) -> None:
    raise NotShared("none today")
