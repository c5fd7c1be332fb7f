"""Mode ddp is PyTorch's own DistributedDataParallel, and sync on the parameter server ends where it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ps_worker
from ps_protocol.errors import InvalidRequest
from tests.chaos.cluster import free_ports
from tests.tools.cluster import TEST_SECONDS, Cluster
from tests.tools.forkserver import ROOT, Nursery
from tests.tools.small_models import close, same

SCRIPT = ROOT / "tests" / "scripts" / "train_everything.py"
WORKERS = 2
# As in test_equivalence.py: float32 rounding of a sum taken in another order, handed on by Adam. Gloo's ring adds two
# gradients that were halved before; the shards add two and halve the sum.
TOLERANCE = 1e-5


def train(nursery: Nursery, mode: str, directory: Path, **where: str) -> list[dict[str, torch.Tensor]]:
    """Trains the script; the weights of each worker."""
    log, variables = directory / f"{mode}.log", {"PS_MODE": mode, "PS_WORLD_SIZE": str(WORKERS), **where}
    processes = [
        nursery.run(SCRIPT, [directory], log, PYTHONWARNINGS="error", PS_RANK=str(rank), **variables)
        for rank in range(WORKERS)
    ]
    assert [process.wait(TEST_SECONDS) for process in processes] == [0] * WORKERS, log.read_text()
    kinds = {"ddp": "DistributedDataParallel AdamW", "sync": "Everything AdamW"}
    assert sorted(line for line in log.read_text().splitlines() if line.startswith("worker")) == [
        f"worker {rank} of {WORKERS}: {mode} {kinds[mode]}" for rank in range(WORKERS)
    ]
    return [load_file(directory / f"{mode}-{rank}.safetensors") for rank in range(WORKERS)]


def test_sync_ends_at_the_weights_of_ddp(shared: Cluster, nursery: Nursery, job: str, tmp_path: Path) -> None:
    # With BatchNorm in the model: its weights are trained alike. (The running averages are each worker's own here,
    # and rank 0's in DDP.)
    ddp = train(nursery, "ddp", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)))
    sync = train(nursery, "sync", tmp_path, PS_SERVER=shared.address, PS_JOB=job)
    assert {"norm.weight", "conv.weight", "embed.weight", "frozen.weight"} <= ddp[0].keys() == sync[0].keys()
    assert same(ddp[0].values(), ddp[1].values())
    assert same(sync[0].values(), sync[1].values())
    assert close([sync[0][name] for name in ddp[0]], ddp[0].values(), rtol=0.0, atol=TOLERANCE)


@pytest.mark.usefixtures("alone")
def test_ddp_is_the_real_one_with_its_usual_settings() -> None:
    with ps_worker.connect(mode="ddp") as session:
        assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
        inner = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        loader = DataLoader([torch.ones(1)] * 6, batch_size=2)
        model, stepper, loader = session.prepare(inner, optimizer, loader)
        assert type(model) is DistributedDataParallel
        assert model.gradient_as_bucket_view
        assert model.broadcast_buffers
        assert model.bucket_bytes_cap == 25 * 2**20, "its usual bucketing"
        assert session.unwrap(model) is inner
        assert stepper is optimizer
        before = inner.weight.item()
        for x in loader:
            model(x).mean().backward()
            stepper.step()
            stepper.zero_grad()
        assert session.clock == 3
        assert inner.weight.item() == pytest.approx(before - 0.3)
    with ps_worker.connect(mode="ddp") as again:  # another session of this process, in the same group
        model, stepper = again.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        model(torch.ones(1, 1)).mean().backward()
        stepper.step()
        assert again.clock == 1


@pytest.mark.usefixtures("alone")
def test_a_process_group_of_the_script_is_used_if_it_is_the_sessions() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1)
    with ps_worker.connect(mode="ddp") as session:
        assert session.world_size == 1
    assert dist.is_initialized()
    with pytest.raises(InvalidRequest, match="process group has rank 0 of 1, and the session is rank 1 of 2"):
        ps_worker.connect(mode="ddp", rank=1, world_size=2)


@pytest.mark.usefixtures("alone")
def test_options_reach_ddp_and_no_sync_is_its_own() -> None:
    with ps_worker.connect(mode="ddp") as session:
        inner = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        model, _ = session.prepare(inner, optimizer, ddp_options={"find_unused_parameters": True})
        assert model.find_unused_parameters
        for where in (model, session):
            with where.no_sync():
                assert not model.require_backward_grad_sync
            assert model.require_backward_grad_sync


def test_a_session_that_cannot_begin_leaves_its_port_free() -> None:
    port = free_ports(1)
    with pytest.raises(InvalidRequest, match="DDP cannot start"):
        ps_worker.connect(mode="ddp", metrics_port=port)
    with ps_worker.connect(mode="single", metrics_port=port) as session:
        assert session.metrics_address is not None
        assert session.metrics_address.endswith(f":{port}")


def test_ddp_without_a_launcher_says_how_to_launch() -> None:
    said = r"DDP cannot start .*; launch with `ps-worker run --mode ddp`, or torchrun"
    with pytest.raises(InvalidRequest, match=said):
        ps_worker.connect(mode="ddp")
