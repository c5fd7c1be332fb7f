"""The script of train.py, which also tells TensorBoard or Weights & Biases how far it is.

    pip install '.[trackers]'
    ps-server up --shards 2 & ps-worker run --server 127.0.0.1:50051 --workers 2 --mode sync examples/trackers.py
    tensorboard --logdir runs/trackers

`--tracker wandb` takes Weights & Biases. Without an account, or without a network, WANDB_MODE=offline keeps the runs in
--out; `wandb sync` sends them later. docs/watching.md explains both recipes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_torch as ps

EVERY = 10  # steps between two points of a curve

Track = Callable[[int, float, float], None]  # takes a clock, this worker's loss, and the mean over all workers


def tensorboard(session: ps.Session, folder: Path) -> tuple[Track, Callable[[], None]]:
    """Returns what tracks, and what ends it. One process writes for the job: rank 0, if it is still there."""
    if not session.is_main:
        return lambda clock, own, mean: None, lambda: None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    return lambda clock, own, mean: writer.add_scalar("loss", mean, clock), writer.close


def wandb(session: ps.Session, folder: Path) -> tuple[Track, Callable[[], None]]:
    """Returns what tracks, and what ends it. Each worker is a run, and the job is their group."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    job = os.environ.get("PS_JOB", "default")
    run = wandb.init(project="ps-torch", group=job, name=f"{job}-rank-{session.rank}", dir=str(folder))
    return lambda clock, own, mean: run.log({"loss": own, "mean loss": mean}, step=clock), run.finish


def main() -> None:
    """Trains, and tells a tracker of every EVERY-th step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tracker", choices=("tensorboard", "wandb"), default="tensorboard")
    parser.add_argument("--out", type=Path, default=Path("runs/trackers"), help="where the files of the tracker go")
    options = parser.parse_args()

    torch.manual_seed(0)
    points = 2 * torch.rand(4096, 2) - 1
    inside = (points.norm(dim=1) < 0.7).long()
    loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = ps.connect()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    session.progress(total=3 * len(loader))  # for those who watch: how much is left
    track, finish = {"tensorboard": tensorboard, "wandb": wandb}[options.tracker](session, options.out)

    steps = 0
    for _ in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss)  # for the page, `ps-server status --watch` and Prometheus
            steps += 1
            if steps % EVERY == 0:
                # All workers call it, whatever their rank: it waits for the slowest.
                track(session.clock, loss.item(), session.mean(loss.item()))
    finish()


if __name__ == "__main__":
    main()
