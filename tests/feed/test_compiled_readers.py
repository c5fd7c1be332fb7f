"""A model that torch.compile has compiled follows a job: it is the model's parameters that change, not the code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ps_torch as ps
from tests.tools.cluster import Cluster
from tests.tools.remembering_trainer import RememberingTrainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["views", "copies"])
@pytest.mark.parametrize("is_compiled_first", [True, False], ids=["compiled first", "loaded first"])
def test_a_compiled_model_follows_without_another_compilation(
    shared: Cluster, job: str, is_compiled_first: bool, dtype: torch.dtype
) -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    batch = torch.randn(4, 6, dtype=dtype)
    with shared.connect("sync", job=job) as session, ps.subscribe(shared.address, job) as feed:
        torch.manual_seed(2)
        own = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        trainer = RememberingTrainer(session, own, lambda model: model(torch.randn(4, 6)).square().mean())
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        if is_compiled_first:
            compiled = torch.compile(model, backend=backend)
            compiled(batch)
        feed.load(model)
        if not is_compiled_first:
            compiled = torch.compile(model, backend=backend)
        expected = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        for _ in range(3):
            clock = trainer.step()
            feed.wait_for(clock)
            with feed.reading(model, max_behind=0), torch.no_grad():
                answer = compiled(batch)
            expected.load_state_dict(trainer.past[clock])
            assert torch.equal(answer, expected(batch))
        # Once with and once without gradients, where the first call was made with them.
        assert len(compilations) == 1 + is_compiled_first
