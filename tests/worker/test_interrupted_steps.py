"""A step that is interrupted while its pushes are on their way, as in a notebook, and a script that goes on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from ps_worker.cluster.participation import Participation
from tests.tools.cluster import Cluster

STEPS, INTERRUPTED = 8, 3


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async", "local:2"])
def test_the_next_step_comes_behind_the_pushes_of_the_interrupted_one(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str
) -> None:
    """So many buckets that most of them have not left when the interrupt comes; the first ones leave at once."""
    settle, number, interrupts = Participation.settle, 0, 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        if number == INTERRUPTED and not interrupts:
            interrupts += 1
            raise KeyboardInterrupt
        settle(participation)

    monkeypatch.setattr(Participation, "settle", interrupted)
    with shared.connect(mode, job=job, transport=transport) as session:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = session.prepare(model, plain, bucket_bytes=1024, outer={"warm_up": 0})
        for number in range(STEPS):  # noqa: B007 (`interrupted` looks at it)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.zero_grad()
                model(torch.ones(3, 64)).square().mean().backward()
                optimizer.step()
        assert interrupts == 1
        # A round of local steps ends early with the step after the interrupt; the one that is missing counts.
        assert session.clock == STEPS + (mode == "local:2")
