"""Ray Train on parameter servers, whole: the points of train.py, on a laptop with two cores or on a Ray cluster.

    pip install '.[ray]'
    python examples/ray_train.py
    RAY_ADDRESS=10.0.0.1:6379 python examples/ray_train.py --workers 8 --shards 4 --cpus-per-worker 1 --out /nfs/run

It starts a Ray of its own, unless RAY_ADDRESS names one. docs/ray.md explains it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_torch as ps
from ps_torch.ray import PsConfig


def make_points(count: int, seed: int) -> TensorDataset:
    """Returns points of a square, each with whether it is inside a circle."""
    points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.7).long())


def make_model() -> nn.Module:
    """Returns a small classifier of points."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))


def train(config: dict[str, Any]) -> None:
    """Runs in each worker: the ordinary script. `connect` finds the servers that PsConfig has started."""
    torch.manual_seed(0)
    loader = DataLoader(make_points(4096, seed=1), batch_size=64, shuffle=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = ps.connect()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    session.progress(total=config["epochs"] * len(loader))  # for those who watch: how much is left

    for epoch in range(config["epochs"]):
        losses = []  # stays empty in a pass that was over before this worker began
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            session.log(loss=losses[-1])  # for the page and `ps-server status --watch`
        mean = session.mean(sum(losses) / len(losses) if losses else 0.0, weight=len(losses))
        if session.is_main:
            print(f"epoch {epoch}: loss {mean:.3f}", flush=True)

    session.barrier()  # all workers have made their last step
    # report waits for all workers: once, at the end. The trained weights come from one of them.
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            save_file(session.global_weights(model), Path(folder) / "model.safetensors")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": mean}, checkpoint=checkpoint)


def accuracy(checkpoint: Checkpoint) -> float:
    """Returns the part of new points that a checkpoint's model puts on the right side."""
    model = make_model()
    with checkpoint.as_directory() as folder:
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    points, inside = make_points(1000, seed=2).tensors
    return (model(points).argmax(dim=1) == inside).float().mean().item()


def main() -> None:
    """Trains on Ray, and tests what has been learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--cpus-per-worker", type=float, default=0.5, help="what Ray reserves for each")
    parser.add_argument("--cpus-per-shard", type=float, default=0.1, help="what Ray reserves for each")
    parser.add_argument("--mode", default="ssp:4")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"), help="a directory that all nodes share")
    options = parser.parse_args()

    ray.init()
    result = DataParallelTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        backend_config=PsConfig(
            mode=options.mode,
            shards=options.shards,
            resources_per_shard={"CPU": options.cpus_per_shard},
            insecure=True,  # the network is trusted; certificates="certs" where it is not
        ),
        scaling_config=ScalingConfig(
            num_workers=options.workers, resources_per_worker={"CPU": options.cpus_per_worker}
        ),
        run_config=RunConfig(storage_path=str(options.out.resolve()), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(
        f"{result.metrics['loss']:.3f} is the last loss, {accuracy(result.checkpoint):.3f} the accuracy on new points"
    )


if __name__ == "__main__":
    main()
