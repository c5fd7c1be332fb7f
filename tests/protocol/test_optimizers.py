"""Which optimizers run on slices of tensors, and that those that are let in compute the same there."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest, Unsupported
from ps_protocol.hyper_parameters import HyperParameters
from ps_protocol.optimizers import (
    ELEMENTWISE,
    check_hyper_parameters,
    hyper_parameter_names,
    hyper_parameters,
    optimizer_name,
)
from tests.tools.optimizers import UNUSUAL, make


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_that_is_let_in_steps_slices_as_it_steps_the_whole(name: str) -> None:
    """To the bit here, where both run the same kernels; that is what makes it fit for shards."""
    whole = torch.randn(96)
    slices = [piece.clone() for piece in whole.split([32, 64])]
    one, many = make(name, [whole], UNUSUAL[name]), make(name, slices, UNUSUAL[name])
    for _ in range(5):
        gradient = torch.randn(96)
        whole.grad = gradient.clone()
        for piece, part in zip(slices, gradient.split([32, 64]), strict=True):
            piece.grad = part.clone()
        one.step()
        many.step()
    assert torch.equal(torch.cat(slices), whole)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_all_its_hyper_parameters_can_be_read_from_it_and_make_it_anew(name: str) -> None:
    optimizer = make(name, [torch.zeros(1)], UNUSUAL[name])
    values = hyper_parameters(optimizer_name(optimizer), optimizer.param_groups[0])
    check_hyper_parameters(name, values)
    again = make(name, [torch.zeros(1)], values)
    assert hyper_parameters(name, again.param_groups[0]) == values
    assert {key: values[key] for key in UNUSUAL[name]} == UNUSUAL[name]
    execution = {"foreach", "fused", "capturable", "differentiable"}
    every = set(inspect.signature(ELEMENTWISE[name]).parameters) - {"params"} - execution
    assert set(hyper_parameter_names(name)) == set(values) == every


def test_a_learning_rate_may_be_a_tensor() -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=torch.tensor(0.5))
    assert hyper_parameters("Adam", optimizer.param_groups[0])["lr"] == 0.5


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_hyper_parameters_may_be_numbers_of_numpy(number: Any) -> None:
    values: dict[str, Any] = {"lr": number, "momentum": np.int64(1), "nesterov": np.True_}
    optimizer = torch.optim.SGD([torch.zeros(1)], **values)
    found = hyper_parameters("SGD", optimizer.param_groups[0])
    assert (found["lr"], found["momentum"], found["nesterov"]) == (0.5, 1.0, True)
    assert {type(value) for value in found.values()} == {float, bool}


def every_optimizer_of_torch() -> list[type[torch.optim.Optimizer]]:
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    return [cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer]


@pytest.mark.parametrize("cls", every_optimizer_of_torch(), ids=lambda cls: cls.__name__)
def test_every_optimizer_of_torch_is_let_in_or_refused_by_name_with_the_reason(
    cls: type[torch.optim.Optimizer],
) -> None:
    optimizer = cls([torch.zeros(2, 2)])  # type: ignore[call-arg]
    if cls.__name__ in ELEMENTWISE:
        assert optimizer_name(optimizer) == cls.__name__
        return
    with pytest.raises(Unsupported) as refused:
        optimizer_name(optimizer)
    message = str(refused.value)
    assert message.startswith(f"optimizer {cls.__name__} cannot run on a parameter server: ")
    assert "run torch.optim's own classes" not in message, "a reason of its own"
    assert "known: SGD, Adam, AdamW" in message


def test_an_optimizer_of_ones_own_is_refused_even_under_a_known_name() -> None:
    own = type("SGD", (torch.optim.SGD,), {})
    with pytest.raises(Unsupported, match=r"optimizer SGD cannot run .* torch.optim's own classes"):
        optimizer_name(own([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize("value", ["0.1", torch.zeros(2), object(), {"a": 1}])
def test_a_hyper_parameter_that_is_no_plain_value_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match="hyper-parameter 'lr' must be a number, a switch, or a tuple"):
        hyper_parameters("SGD", {"lr": value})


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("Lion", {"lr": 0.1}, "expected an optimizer out of SGD, Adam.*, got 'Lion'"),
        ("SGD", {"lr": 0.1, "rho": 0.9}, "SGD takes lr, momentum.*, got 'rho'"),
        ("SGD", {"lr": -0.1}, "lr"),
        ("SGD", {"lr": 0.1, "nesterov": True}, "omentum"),
        ("SGD", {"lr": float("nan")}, "finite"),
        ("Adam", {"lr": 0.1, "betas": (0.9, 1.5)}, "beta"),
        ("Adam", {"lr": None}, "lr"),
        ("Adam", {"betas": ()}, "betas"),
        ("Adam", {"betas": (0.9,)}, "betas"),
        ("Adam", {"betas": (0.9, 0.99, 0.999)}, "betas"),
        ("Adam", {"betas": 0.9}, "betas"),
        ("Adam", {"betas": True}, "betas"),
        ("Adam", {"amsgrad": 0.5}, "amsgrad"),
        ("Adam", {"amsgrad": None}, "amsgrad"),
        ("Adam", {"eps": (1e-8,)}, "eps"),
        ("Adam", {"eps": True}, "eps"),
        ("SGD", {"momentum": None}, "momentum"),
        ("SGD", {"maximize": (1.0,)}, "maximize"),
        ("Adadelta", {"maximize": 1.0}, "maximize"),
    ],
)
def test_hyper_parameters_that_the_optimizer_cannot_run_with_are_refused(
    name: str, values: HyperParameters, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_hyper_parameters(name, values)


VALUES = st.none() | st.booleans() | st.floats(width=32) | st.lists(st.floats(-2, 2), max_size=3).map(tuple)


@st.composite
def some_hyper_parameters(draw: st.DrawFn) -> tuple[str, HyperParameters]:
    name = draw(st.sampled_from(sorted(ELEMENTWISE)))
    return name, draw(st.dictionaries(st.sampled_from(hyper_parameter_names(name)), VALUES, max_size=3))


@settings(max_examples=300)
@given(some_hyper_parameters())
def test_whatever_a_worker_sends_is_refused_or_can_be_stepped_with(found: tuple[str, HyperParameters]) -> None:
    """What passes the check must not fail later, on the thread that applies updates for everyone."""
    name, values = found
    try:
        check_hyper_parameters(name, values)
    except InvalidRequest:
        return
    for fused in (False, True):
        if fused and "fused" not in inspect.signature(ELEMENTWISE[name]).parameters:
            continue
        tensor = torch.zeros(2)
        optimizer = make(name, [tensor], {**values, "fused": fused} if fused else values)
        for _ in range(2):
            tensor.grad = torch.ones(2)
            optimizer.step()
