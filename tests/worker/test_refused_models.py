"""Models that servers cannot train are refused before the worker joins, and named in a dry run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import ps_worker
from ps_worker import Unsupported
from tests.tools.cluster import Cluster
from tests.tools.said import said_by_workers

MODES = ["sync", "async", "local:2"]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def in_ddp() -> nn.Module:
    return DistributedDataParallel(layers())


def in_fsdp() -> nn.Module:
    return FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))


def fully_sharded() -> nn.Module:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    model = layers()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def with_dtensors() -> nn.Module:
    tensor = pytest.importorskip("torch.distributed.tensor")
    model, mesh = layers(), init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(tensor.distribute_tensor(model[0].weight.data, mesh))  # type: ignore[index]
    return model


def in_deepspeed() -> nn.Module:
    class DeepSpeedEngine(nn.Module):  # the package's, which is not installed here, has this name
        def __init__(self) -> None:
            super().__init__()
            self.module = layers()

    return DeepSpeedEngine()


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (in_ddp, "the model is wrapped in DistributedDataParallel; hand the plain model to prepare"),
    (in_fsdp, "the model is sharded by FullyShardedDataParallel; hand the plain model to prepare. Each worker holds"),
    (
        fully_sharded,
        r"the model is sharded by fully_shard \(FSDP2\); hand the plain model to prepare",
    ),
    (with_dtensors, r"0\.weight is a DTensor, of which each process has a piece; hand the plain model to prepare"),
    (in_deepspeed, "the model is a DeepSpeedEngine, which steps an optimizer of its own; hand the plain model"),
]


@pytest.fixture
def group(alone: None) -> None:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.parametrize(("make", "said"), REFUSED)
@pytest.mark.parametrize("mode", [*MODES, "single"])
def test_a_model_that_another_way_to_train_has_taken_over(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture, mode: str, make: Callable[[], nn.Module], said: str
) -> None:
    model = make()
    with shared.connect(mode, job=job) as session:
        if mode == "single":
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            [record] = said_by_workers(caplog)
            assert pytest.raises(match=f"is refused: {said}").matches(Unsupported(record.getMessage()))
            return
        with pytest.raises(Unsupported, match=said):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert shared.coordinator.jobs().get(job) is None


def test_synchronised_statistics_are_refused_and_not_left_out(
    shared: Cluster, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(layers())  # type: ignore[no-any-return]

    said = r"1 is a SyncBatchNorm, which needs a process group, and there is none: it would be a BatchNorm with each"
    for mode in MODES:
        net = model()
        with shared.connect(mode, job=job) as session, pytest.raises(Unsupported, match=said):
            session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with ps_worker.connect(mode="single") as session:
        net = model()
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert "this is refused: 1 is a SyncBatchNorm, which needs a process group" in caplog.text
