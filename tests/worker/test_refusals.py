"""Models that the modes with servers refuse: by name, with what to do instead, and before the worker joins a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import ps_worker
from ps_worker import InvalidRequest, Unsupported
from tests.tools.cluster import Cluster

Made = tuple[nn.Module, torch.optim.Optimizer]
MODES = ["sync", "ssp:1", "async", "local:2", "local:4/2"]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, which DTensors need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(model: nn.Module) -> Made:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def synchronised() -> Made:
    return sgd(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))


def sharded() -> Made:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
    return sgd(model)


def with_a_loss_of_its_own() -> Made:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (synchronised, Unsupported, r"1 is a SyncBatchNorm.*Leave convert_sync_batchnorm out.*or train in mode ddp"),
        (sharded, Unsupported, r"sharded over a process group \(weight is a DTensor\).*hand the plain model"),
        (with_a_loss_of_its_own, InvalidRequest, "1 parameters of no model .*into a module"),
    ],
)
def test_a_model_is_refused_before_it_joins(
    shared: Cluster, job: str, mode: str, make: Callable[[], Made], error: type[Exception], says: str
) -> None:
    model, optimizer = make()
    with shared.connect(mode, job=job) as session, pytest.raises(error, match=says):
        session.prepare(model, optimizer)
    assert shared.state(job) == {"known": False}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("make", "says"), [(synchronised, "SyncBatchNorm"), (sharded, "DTensor")])
def test_a_dry_run_says_so(make: Callable[[], Made], says: str, caplog: pytest.LogCaptureFixture) -> None:
    with ps_worker.connect(mode="single") as session:
        session.prepare(*make())
    assert "in sync, ssp and async this is refused" in caplog.text
    assert says in caplog.text
