"""A step that does not end, and a script that goes on: interrupted while its pushes are on their way, as in a notebook,
or refused by a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker
from ps_server.core.limits import Limits
from ps_worker import LimitExceeded
from ps_worker.cluster.participation import Participation
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.small_models import weights_of

STEPS, DISTURBED = 6, 3
TRANSPORTS = ["grpc", "tcp", "shm"]


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "ssp:1", "async", "local:2"], TRANSPORTS))
def test_the_next_step_comes_behind_the_pushes_of_an_interrupted_one(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, mode: str, transport: str
) -> None:
    """So many buckets that most of them have not left when the interrupt comes; the first ones leave at once."""
    settle, number, interrupts = Participation.settle, 0, 0

    def interrupted(participation: Participation) -> None:
        nonlocal interrupts
        if number == DISTURBED and not interrupts:
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


class Net(nn.Module):
    """Buckets and rows on both shards."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ps_worker.Embedding(8, initial="uniform", scale=0.1, seed=1)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(ids))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "transport"), crossed(["sync", "ssp:1", "async"], TRANSPORTS))
def test_a_step_that_shards_refuse_is_left_out_and_the_next_ones_count(
    make_cluster: Callable[..., Cluster], mode: str, transport: str
) -> None:
    """One worker's gradients are too large once: it is told so, and neither it nor the other waits for that step."""
    cluster = make_cluster(shards=2, limits=Limits(push_norm=100.0))

    def work(rank: int) -> list[torch.Tensor]:
        errors: list[int] = []
        with cluster.connect(mode, rank, 2, transport=transport) as session:
            torch.manual_seed(0)
            own: Any = Net()
            model, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=0.01), bucket_bytes=256)
            for number in range(STEPS):
                optimizer.zero_grad()
                loss = model(torch.arange(20)).square().mean()
                (loss * 1e9 if rank == 1 and number == DISTURBED else loss).backward()
                try:
                    optimizer.step()
                except LimitExceeded:
                    errors.append(number)
            assert errors == [DISTURBED] * rank
            assert session.clock == STEPS
            return [*weights_of(own.layers), own.table.rows(torch.arange(20))]

    for weights in in_parallel(2, work):
        assert all(values.abs().lt(10).all() for values in weights), "nothing of the refused step has come in"
