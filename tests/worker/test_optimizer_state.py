"""Optimizer state goes to the shards and comes back in torch's own layout: scripts resume in every mode, from each."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.optimizer_state import is_scalar_state, required_state
from ps_protocol.optimizers import ELEMENTWISE
from ps_worker import InvalidRequest, PSError, Session, Unsupported
from tests.tools.cases import cases, crossed
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import close, drawn, filled, same, step, weights_of

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
}


def alone(name: str) -> Any:
    """A model and its optimizer."""
    model = filled(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)))
    return model, ELEMENTWISE[name](model.parameters(), **SETTINGS[name])  # type: ignore[arg-type]


def prepared(session: Session, name: str = "AdamW") -> Any:
    return session.prepare(*alone(name), bucket_bytes=256)


@pytest.fixture
def session(shared: Cluster, job: str) -> Iterator[Session]:
    """One worker in sync."""
    with shared.connect("sync", job=job) as running:
        yield running


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for number in range(first, first + count):
        step(model, optimizer, drawn(number, 8, 6))


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What a file would hold."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file)


def load(saved: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(saved)  # which torch would step in place
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


# -- saved and resumed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_the_state_is_what_torch_would_have(session: Session, name: str) -> None:
    model, optimizer = alone(name)
    train(model, optimizer, 0, 4)
    wanted = optimizer.state_dict()
    for parameter, state in optimizer.state.items():
        assert required_state(name, SETTINGS[name]) <= tensors(state).keys()
        assert all(is_scalar_state(name, k) == (v.shape != parameter.shape) for k, v in tensors(state).items())
    model, optimizer = prepared(session, name)
    train(model, optimizer, 0, 4)
    found = optimizer.state_dict()
    assert found["param_groups"][0].keys() >= wanted["param_groups"][0].keys()
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        expected = tensors(state)
        assert found["state"][index].keys() == expected.keys()
        assert close([found["state"][index][key] for key in expected], expected.values())


def run(cluster: Cluster, mode: str, job: str, name: str, saved: Any, when: str, first: int, count: int) -> Any:
    """Some steps in one mode, from what was saved, loaded before or after `prepare`; returns what is saved then."""
    with cluster.connect(mode, job=job) as session:
        model, optimizer = alone(name)
        if saved is not None and when == "before":
            load(saved, model, optimizer)
        model, optimizer = session.prepare(model, optimizer, bucket_bytes=256)
        if saved is not None and when == "after":
            load(saved, model, optimizer)
            again = optimizer.state_dict()  # asked for before any step
            assert again["state"].keys() == saved["optimizer"]["state"].keys()
        train(model, optimizer, first, count)
        return save(model, optimizer)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    cases(
        [("AdamW", "sync", "single"), ("SGD", "ssp:2", "async"), ("Adagrad", "single", "sync")],
        [
            *[("AdamW", *modes) for modes in (("single", "sync"), ("sync", "async"), ("ssp:2", "sync"))],
            *[("SGD", *modes) for modes in (("single", "sync"), ("sync", "async"))],
            ("Adagrad", "sync", "async"),
            *[("NAdam", *modes) for modes in (("single", "sync"), ("sync", "async"))],
        ],
    ),
)
def test_a_run_resumes_in_another_mode(shared: Cluster, job: str, name: str, first: str, second: str) -> None:
    whole = run(shared, "single", job, name, None, "", 0, 8)
    half = run(shared, first, job, name, None, "", 0, 4)
    for when in ("before", "after"):
        found = run(shared, second, job, name, half, when, 4, 4)
        assert close(found["model"].values(), whole["model"].values())


@pytest.mark.parametrize("name", cases(["AdamW"], ["SGD", "RMSprop"]))
def test_a_sync_run_resumes_to_the_last_digit(shared: Cluster, job: str, name: str) -> None:
    whole = run(shared, "sync", job, name, None, "", 0, 8)
    half = run(shared, "sync", job, name, None, "", 0, 4)
    for when in ("before", "after"):
        found = run(shared, "sync", job, name, half, when, 4, 4)
        assert same(found["model"].values(), whole["model"].values())


def test_two_workers_resume_as_they_would_have_gone_on(shared: Cluster, job: str) -> None:
    def together(saved: Any, first: int, count: int) -> Any:
        def work(rank: int) -> Any:
            with shared.connect("sync", rank, 2, job=job) as session:
                model, optimizer = alone("AdamW")
                if saved is not None:
                    load(saved, model, optimizer)
                model, optimizer = session.prepare(model, optimizer, bucket_bytes=256)
                train(model, optimizer, first, count)
                return save(model, optimizer) if rank == 0 else None  # one worker may ask alone

        return in_parallel(2, work)[0]

    whole, half = together(None, 0, 8), together(None, 0, 4)
    assert same(together(half, 4, 4)["model"].values(), whole["model"].values())


# -- what a script does with it --------------------------------------------------------------------------------------


def test_the_pieces_of_schedulers_and_groups_survive(session: Session) -> None:
    model, _ = alone("AdamW")
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.02}]
    plain = torch.optim.AdamW(groups)
    model, optimizer = session.prepare(model, plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 0, 1)
    scheduler.step()
    saved = save(model, optimizer)
    assert [group["lr"] for group in saved["optimizer"]["param_groups"]] == [0.005, 0.01]
    scheduler.step()
    optimizer.load_state_dict(saved["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]
    assert plain.param_groups[0]["lr"] == 0.005  # what a scheduler made before `prepare` looks at


def test_state_without_momentum_takes_momentum_away(session: Session) -> None:
    model, optimizer = prepared(session, "SGD")
    fresh = optimizer.state_dict()
    assert fresh["state"] == {}
    train(model, optimizer, 0, 3)
    optimizer.load_state_dict(fresh)
    before = weights_of(model)
    train(model, optimizer, 3, 1)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert close(model.parameters(), [old - 0.05 * grad for old, grad in zip(before, gradients, strict=True)])


@pytest.mark.parametrize(("how", "name"), crossed(["load", "clear", "assign"], ["Adagrad", "AdamW"]))
def test_an_emptied_state_begins_anew(session: Session, how: str, name: str) -> None:
    model, optimizer = prepared(session, name)
    train(model, optimizer, 0, 3)
    if how == "load":
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    elif how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3, 3)
    plain, fresh = alone(name)
    plain.load_state_dict(before)
    train(plain, fresh, 3, 3)
    assert close(model.parameters(), plain.parameters())


def test_what_the_shards_hold_is_not_changed_in_place(session: Session) -> None:
    model, optimizer = prepared(session)
    train(model, optimizer, 0, 1)
    with pytest.raises(Unsupported, match="state_dict"):
        optimizer.state[next(model.parameters())]["exp_avg"].zero_()
    assert isinstance(copy.deepcopy(optimizer), torch.optim.Optimizer)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_groups_that_are_taken_away_are_refused_in_words(session: Session) -> None:
    model, optimizer = prepared(session)
    optimizer.param_groups.pop()
    with pytest.raises(InvalidRequest, match="had 1 parameter groups at prepare and has 0 now"):
        train(model, optimizer, 0, 1)


def test_bad_state_is_refused_and_changes_nothing(session: Session) -> None:
    model, optimizer = prepared(session)
    train(model, optimizer, 0, 2)
    good = optimizer.state_dict()
    first = good["state"][0]

    def refused(error: type[Exception], said: str, **changes: Any) -> None:
        with pytest.raises(error, match=said):
            optimizer.load_state_dict({**good, **changes})

    shape = {0: {**first, "exp_avg": torch.zeros(3)}}
    refused(InvalidRequest, r"'exp_avg' of 0\.weight: expected shape \(40, 6\), got \(3,\)", state=shape)
    unknown = {0: {**first, "momentum_buffer": torch.zeros(40, 6)}}
    refused(InvalidRequest, "the state of AdamW is step, exp_avg", state=unknown)
    half = {0: {key: first[key] for key in ("step", "exp_avg")}}
    refused(Unsupported, r"lacks exp_avg_sq, which AdamW needs", state=half)
    refused(ValueError, "different number of parameter groups", param_groups=good["param_groups"] * 2)
    again = optimizer.state_dict()["state"][0]
    assert same([again[key] for key in first], first.values())


def test_after_close_there_is_no_half_checkpoint(session: Session) -> None:
    model, optimizer = prepared(session)
    train(model, optimizer, 0, 1)
    session.close()
    with pytest.raises(PSError, match="save it before"):
        optimizer.state_dict()
