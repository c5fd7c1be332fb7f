"""The hyper-parameters that a script's optimizers have at a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ps_protocol.errors import InvalidRequest
from ps_worker.model import step
from ps_worker.model.script_stages import ScriptStage
from ps_worker.model.step import LiveGroups
from tests.tools.partitions import job_spec


def live(optimizer: torch.optim.Optimizer) -> LiveGroups:
    groups = [(0, index) for index, _ in enumerate(optimizer.param_groups)]
    return LiveGroups(ScriptStage(0, job_spec(), {0: optimizer}, groups, {}, {}, {}))


def adam(**settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], **settings)


def set_lr(group: dict[str, Any]) -> None:
    group["lr"] = 0.25


def set_betas(group: dict[str, Any]) -> None:
    group["betas"] = (0.5, 0.25)


def replace_all(group: dict[str, Any]) -> None:
    group.update({**group, "weight_decay": 0.125})


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [(set_lr, "lr", 0.25), (set_betas, "betas", (0.5, 0.25)), (replace_all, "weight_decay", 0.125)],
)
def test_what_a_script_sets_counts_from_the_next_step_on(
    change: Callable[[dict[str, Any]], None], name: str, value: object
) -> None:
    optimizer = adam(lr=0.5)
    groups = live(optimizer)
    [before] = groups.read()
    change(optimizer.param_groups[0])
    [after] = groups.read()
    assert after == {**before, name: value}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"lr": torch.tensor(0.5), "capturable": True}, "lr"),
        ({"betas": (torch.tensor(0.5), torch.tensor(0.5)), "lr": torch.tensor(0.5), "capturable": True}, "betas"),
    ],
)
def test_a_tensor_that_a_script_changes_in_place_is_read_anew(given: dict[str, Any], name: str) -> None:
    optimizer = adam(**given)
    groups = live(optimizer)
    groups.read()
    value = optimizer.param_groups[0][name]
    for tensor in value if isinstance(value, tuple) else (value,):
        tensor.fill_(0.25)
    [after] = groups.read()
    assert after[name] == (0.25 if name == "lr" else (0.25, 0.25))


def test_a_group_that_the_script_leaves_alone_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hyper_parameters(name: str, group: dict[str, Any]) -> Any:
        asked.append(name)
        return converted(name, group)

    converted = step.hyper_parameters
    monkeypatch.setattr(step, "hyper_parameters", hyper_parameters)
    groups = live(adam(lr=0.5))
    assert groups.read() == groups.read()
    assert asked == ["Adam"]


def test_a_value_that_the_optimizer_refuses_is_refused_in_each_step() -> None:
    optimizer = adam(lr=0.5)
    groups = live(optimizer)
    groups.read()
    optimizer.param_groups[0]["lr"] = -1.0
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="lr"):
            groups.read()
