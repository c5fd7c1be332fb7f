"""A script as users write it: validation over all workers, ReduceLROnPlateau, early stopping. A line each epoch."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker

EPOCHS, PATIENCE = 60, 4


def main() -> None:
    """Trains until the loss on all validation data has not become better for some epochs."""
    torch.manual_seed(0)
    x = torch.randn(96, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(96, 1)
    with ps_worker.connect() as session:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
        model, optimizer, batches = session.prepare(model, optimizer, loader)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=1e-3)
        # Shares of unequal length: rank 0 has 20 samples and the other 12.
        mine = slice(64, 84) if session.rank == 0 else slice(84, 96)
        best, waited = float("inf"), 0
        for epoch in range(EPOCHS):
            for inputs, targets in batches:
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                own = nn.functional.mse_loss(model(x[mine]), y[mine])
            loss = session.mean(own.item(), weight=len(x[mine]))
            scheduler.step(loss)
            best, waited = (loss, 0) if loss < best - 1e-3 else (best, waited + 1)
            rate = optimizer.param_groups[0]["lr"]
            # One write: workers share one output, and nothing may come between a line and its end.
            sys.stdout.write(f"rank {session.rank} epoch {epoch} loss {loss!r} lr {rate!r}\n")
            sys.stdout.flush()
            if waited == PATIENCE:
                break
        session.barrier()
        ends = session.gather(epoch)
        if session.is_main:
            print("ended", ends, session.broadcast("said"), flush=True)
        else:
            session.broadcast(None)


if __name__ == "__main__":
    main()
