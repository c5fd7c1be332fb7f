"""A model on a GPU follows a job: each edition is copied on a stream of its own. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ps_torch as ps
from tests.tools.cluster import Cluster
from tests.tools.remembering_trainer import RememberingTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDTH = 512
BUSY_CYCLES = 200_000_000  # of a GPU, some 0.1 s: longer than two steps, after which a freed copy's memory is reused


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_each_block_reads_one_version_on_a_gpu(shared: Cluster, job: str, dtype: torch.dtype, wire: str) -> None:
    """What a block has queued still waits on the GPU when the next editions are copied, and reads its own version."""
    with shared.connect("sync", job=job) as session:
        trainer = RememberingTrainer(session, make_model(), lambda model: model(torch.randn(4, WIDTH)).square().mean())
        with ps.subscribe(shared.address, job, wire=wire) as feed:
            model = feed.load(make_model().to("cuda", dtype))
            kept = []
            for _ in range(20):
                clock = trainer.step()
                feed.wait_for(clock)
                with feed.reading(model, max_behind=0) as version:
                    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
                    seen = [each.detach().clone() for each in model.parameters()]  # is queued behind it
                kept.append((version, clock, seen))  # in this loop only the feed waits for the GPU
            for version, clock, seen in kept:
                assert version == clock
                rounded = torch.bfloat16 if wire == "bfloat16" else torch.float32
                wanted = [each.to(rounded).to(dtype) for each in trainer.past[clock].values()]
                assert all(torch.equal(one.cpu(), other) for one, other in zip(seen, wanted, strict=True))


def test_copies_are_made_on_another_stream_than_the_readers(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        trainer = RememberingTrainer(session, make_model(), lambda model: model(torch.randn(4, WIDTH)).square().mean())
        with ps.subscribe(shared.address, job) as feed:
            model = feed.load(make_model().cuda())
            [copies] = feed._models[model]._tensors._copies.values()
            assert copies._stream != torch.cuda.current_stream()
            feed.wait_for(trainer.step())
            with feed.reading(model, max_behind=0) as version:
                assert version == 1
            assert copies._used, "the work of a block is noted"


def test_a_script_whose_default_device_is_a_gpu_loads_a_model(shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        RememberingTrainer(session, make_model(), lambda model: model(torch.randn(4, WIDTH)).square().mean())
        with ps.subscribe(shared.address, job) as feed:
            with torch.device("cuda"):
                model = feed.load(make_model())
            assert all(each.is_cuda for each in model.parameters())
