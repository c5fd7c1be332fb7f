"""Whatever a script zeroes gradients with, and whenever: rows are trained as those of torch's sparse embedding."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ps_worker
from ps_worker.tables.lookups import HandleGradient
from tests.tools.cases import cases

IDS = 6
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def drop(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[0].weight.grad = None


def set_to_zeros(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    if model[0].weight.grad is not None:
        model[0].weight.grad.detach_().zero_()


WAYS: dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model[0].zero_grad(),
    "module to zeros": lambda model, optimizer: model[0].zero_grad(set_to_none=False),
    "by hand": drop,
    "by hand to zeros": set_to_zeros,
}


class Pair:
    """A table and torch's sparse embedding, which are trained alike. knows: the optimizer is known before backward"""

    def __init__(self, knows: bool) -> None:
        table = ps_worker.Embedding(2)
        plain = nn.Embedding(IDS, 2, sparse=True)
        plain.weight.data = table.rows(torch.arange(IDS))
        self.models = nn.Sequential(table), nn.Sequential(plain)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in self.models]
        if knows:
            for optimizer in self.optimizers:
                optimizer.step()
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look_up(self, ids: list[int], factor: float) -> None:
        first, second = (model(torch.tensor(ids)).sum() * factor for model in self.models)
        self.losses.append((first, second))

    def backward(self, *numbers: int) -> None:
        for each in zip(*(self.losses[number] for number in numbers), strict=True):
            torch.stack(each).sum().backward(retain_graph=True)

    def zero(self, way: str) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            WAYS[way](model, optimizer)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def assert_alike(self) -> None:
        table, plain = self.models[0][0], self.models[1][0]
        assert isinstance(table, ps_worker.Embedding)
        assert isinstance(plain, nn.Embedding)
        assert torch.allclose(table.rows(torch.arange(IDS)), plain.weight.detach(), atol=1e-5)


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_kept_has_only_the_gradients_since_zero_grad(way: str, knows: bool) -> None:
    pair = Pair(knows)
    pair.look_up([1, 2], 1.0)
    pair.look_up([2, 3], 10.0)
    for before, after in [([0], [0]), ([0, 1], [0, 1]), ([0, 1], [1]), ([0], [1, 0]), ([0], [])]:
        pair.backward(*before)
        pair.zero(way)
        if after:
            pair.backward(*after)
            pair.backward(*after)
        pair.step()
        pair.assert_alike()
        pair.zero(way)


@pytest.mark.parametrize(
    ("seed", "knows"),
    cases([(seed, seed % 2 == 0) for seed in range(10)], [(seed, seed % 2 == 1) for seed in range(40)]),
)
def test_any_order_of_lookups_backwards_and_zeroing_trains_alike(seed: int, knows: bool) -> None:
    chance, pair = random.Random(seed), Pair(knows)
    for _ in range(40):
        match chance.choice(["look up", "backward", "backward", "zero", "step"]):
            case "look up":
                pair.look_up(chance.choices(range(IDS), k=3), chance.choice([1.0, -2.0, 0.5]))
            case "backward" if pair.losses:
                numbers = range(len(pair.losses))
                pair.backward(*chance.sample(numbers, chance.randint(1, min(3, len(numbers)))))
            case "zero":
                pair.zero(chance.choice(list(WAYS)))
            case "step":  # a table has used up its gradients then
                pair.step()
                pair.assert_alike()
                pair.zero(chance.choice(list(WAYS)))
    pair.step()
    pair.assert_alike()


def test_what_else_changes_the_gradient_of_the_handle_takes_no_gradient_away() -> None:
    model = nn.Sequential(ps_worker.Embedding(2, initial="constant", scale=0.0), nn.Linear(2, 1))
    model[1].weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([1])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    nn.utils.clip_grad_value_(model.parameters(), 1e-9)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
        parameter.grad.mul_(2.0)
    assert type(model[0].weight.grad * 1) is torch.Tensor
    optimizer.step()
    assert model[0].rows(torch.tensor([1]))[0].tolist() == [-1.0, -1.0]


def test_the_gradient_of_the_handle_is_a_tensor_as_any_other() -> None:
    table = ps_worker.Embedding(2)
    table(torch.tensor([1])).sum().backward()
    gradient = table.weight.grad
    assert isinstance(gradient, HandleGradient)
    assert (gradient.shape, float(gradient.norm()), gradient.is_zeroed) == ((0, 2), 0.0, False)
    torch._foreach_mul_([gradient, torch.ones(3)], 0.5)
    assert not gradient.is_zeroed
    torch._foreach_zero_([torch.ones(3), gradient])
    assert gradient.is_zeroed
